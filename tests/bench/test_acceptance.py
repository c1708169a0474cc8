"""Counting of drafts by rule, on an engine whose rounds are scripted."""

from dataclasses import dataclass, field

import pytest

from outrider.bench.acceptance import acceptance_table, measure_cell
from outrider.bench.closed_loop import TokenisedPrompt
from outrider.engine.metrics import EngineMetrics
from outrider.errors import EngineFault, RequestError
from outrider.request import FinishReason, Request, RequestUpdate, RequestUsage, SamplingParams

Round = tuple[int, int, int]  # drafted, accepted, emitted
LONG: list[Round] = [(3, 3, 4), (3, 0, 1), (2, 1, 2)]
CUT: list[Round] = [(3, 2, 1)]  # a stop id right behind the first accepted draft
SAMPLING = SamplingParams(temperature=0.7, acceptance="block", seed=40, max_tokens=9, stop_token_ids=(5,))


@dataclass
class ScriptedEngine:
    """One round per step; a request emits one token from its prompt and then what its rounds say."""

    rounds: dict[tuple[int, ...], list[Round]]
    reason: FinishReason = FinishReason.LENGTH
    metrics: EngineMetrics = field(default_factory=EngineMetrics)
    asked: list[Request] = field(default_factory=list)
    left: dict[str, list[Round]] = field(default_factory=dict)

    def submit(self, request: Request) -> None:
        self.asked.append(request)
        self.left[request.request_id] = list(self.rounds[request.prompt_token_ids])

    def step(self) -> list[RequestUpdate]:
        return [self._round(request) for request in self.asked if request.request_id in self.left]

    def _round(self, request: Request) -> RequestUpdate:
        left = self.left[request.request_id]
        rounds = self.rounds[request.prompt_token_ids]
        if left:
            drafted, accepted, _ = left.pop(0)
            self.metrics.drafted_at.update(range(drafted))
            self.metrics.accepted_at.update(range(accepted))
        if left:
            return RequestUpdate(request_id=request.request_id, new_token_ids=(7,), new_text="")
        del self.left[request.request_id]
        usage = RequestUsage(
            num_prompt_tokens=1,
            num_output_tokens=1 + sum(emitted for _, _, emitted in rounds),
            num_rounds=len(rounds),
            num_drafted=sum(drafted for drafted, _, _ in rounds),
            num_accepted=0,
        )
        return RequestUpdate(
            request_id=request.request_id, new_token_ids=(7,), new_text="", finish_reason=self.reason, usage=usage
        )


def measure(engine: ScriptedEngine, sampling: SamplingParams = SAMPLING):  # type: ignore[no-untyped-def]
    prompts = [TokenisedPrompt(question_id=str(index), token_ids=ids) for index, ids in enumerate(engine.rounds)]
    lines: list[str] = []
    cell = measure_cell(engine, prompts, tier="mixed", sampling=sampling, num_drafts=3, progress=lines.append)
    assert len(lines) == len(prompts)
    return cell


def test_drafts_are_counted_by_position_and_tokens_after_the_cut() -> None:
    cell = measure(ScriptedEngine({(1,): LONG, (2,): CUT}))
    assert (cell.tier, cell.temperature, cell.rule, cell.num_prompts) == ("mixed", 0.7, "block", 2)
    assert (cell.num_drafted, cell.num_accepted) == (11, 6)
    assert (cell.drafted_at, cell.accepted_at) == ((4, 4, 3), (3, 2, 1))
    assert (cell.num_rounds, cell.num_output_tokens) == (4, 10)
    assert cell.tokens_per_round == (7 + 1) / 4, "the tokens of the two prompts come from no round"
    assert cell.tokens_per_round_low == pytest.approx(1.0) and cell.tokens_per_round_high == pytest.approx(7 / 3)


def test_every_prompt_draws_with_a_seed_of_its_own_under_the_same_rule() -> None:
    engine = ScriptedEngine({(1,): LONG, (2,): CUT})
    measure(engine)
    assert [request.sampling.seed for request in engine.asked] == [40, 41]
    for request in engine.asked:
        params = request.sampling
        assert (params.acceptance, params.temperature, params.stop_token_ids) == ("block", 0.7, (5,))


def test_a_cell_counts_its_own_rounds_only() -> None:
    engine = ScriptedEngine({(1,): LONG, (2,): CUT})
    first, second = measure(engine), measure(engine)
    assert first == second
    assert engine.metrics.drafted_at[0] == 2 * first.drafted_at[0]


def test_a_single_prompt_has_no_spread() -> None:
    cell = measure(ScriptedEngine({(1,): LONG}))
    assert cell.tokens_per_round_low == cell.tokens_per_round == cell.tokens_per_round_high == 7 / 3


def test_without_a_draft_or_with_a_failed_request_nothing_is_measured() -> None:
    with pytest.raises(RequestError, match=r"mixed, T=0.7, block: no draft .* raise --max-tokens"):
        measure(ScriptedEngine({(1,): [(0, 0, 1)]}))
    with pytest.raises(EngineFault, match="request 0 ended as error"):
        measure(ScriptedEngine({(1,): LONG}, reason=FinishReason.ERROR))


def test_the_table_has_a_row_per_cell() -> None:
    cells = [measure(ScriptedEngine({(1,): LONG})), measure(ScriptedEngine({(1,): CUT}))]
    assert acceptance_table(cells).row_count == 2
