"""Accounting of a measured pass, on an engine whose clock and answers are scripted."""

import json
import math
from dataclasses import dataclass, field

import pytest

from outrider.bench.ab import merge_passes, run_cell
from outrider.bench.closed_loop import TokenisedPrompt, run_pass
from outrider.bench.report import cell_table, cells_to_json, round_table, summary_line
from outrider.bench.summary import speed_ratio, summarise_arm
from outrider.engine.metrics import EngineMetrics
from outrider.errors import EngineFault
from outrider.request import FinishReason, Request, RequestUpdate, RequestUsage, SamplingParams

ANSWER = tuple(range(100, 113))  # one token from the prompt, twelve from rounds


@dataclass
class ScriptedEngine:
    """Takes one step of 1 s per prompt, then rounds of `round_s` that emit `per_round` tokens per request."""

    per_round: int
    round_s: float
    answer: tuple[int, ...] = ANSWER
    reason: FinishReason = FinishReason.LENGTH
    now_s: float = 0.0
    emitted: dict[str, int] = field(default_factory=dict)
    waiting: list[str] = field(default_factory=list)
    max_in_flight: int = 0
    metrics: EngineMetrics = field(default_factory=EngineMetrics)

    def clock(self) -> float:
        return self.now_s

    def submit(self, request: Request) -> None:
        self.waiting.append(request.request_id)
        self.max_in_flight = max(self.max_in_flight, len(self.waiting) + len(self.emitted))

    def step(self) -> list[RequestUpdate]:
        if self.waiting:  # prompts first, alone in their step
            self.now_s += 1.0
            name = self.waiting.pop(0)
            self.emitted[name] = 1
            return [RequestUpdate(request_id=name, new_token_ids=self.answer[:1], new_text="")]
        self.now_s += self.round_s
        self.metrics.propose_s += 0.25 * self.round_s
        self.metrics.forward_s += 0.5 * self.round_s
        return [self._decode(name) for name in list(self.emitted)]

    def _decode(self, name: str) -> RequestUpdate:
        start = self.emitted[name]
        new = self.answer[start : start + self.per_round]
        self.emitted[name] = start + len(new)
        usage = reason = None
        if self.emitted[name] == len(self.answer):
            rounds = math.ceil((len(self.answer) - 1) / self.per_round)
            usage = RequestUsage(
                num_prompt_tokens=3,
                num_output_tokens=len(self.answer),
                num_rounds=rounds,
                num_drafted=7,
                num_accepted=5,
            )
            reason = self.reason
            del self.emitted[name]
        return RequestUpdate(request_id=name, new_token_ids=new, new_text="", finish_reason=reason, usage=usage)


SAMPLING = SamplingParams(max_tokens=len(ANSWER))
PROMPTS = [TokenisedPrompt(question_id=f"q{index}", token_ids=(1, 2, 3)) for index in range(4)]


def pass_of(engine: ScriptedEngine, concurrency: int, num_prompts: int = 4):
    return run_pass(engine, PROMPTS[:num_prompts], concurrency=concurrency, sampling=SAMPLING, clock=engine.clock)


def test_a_lone_request_splits_into_prefill_and_decode() -> None:
    record = pass_of(ScriptedEngine(per_round=4, round_s=0.5), concurrency=1, num_prompts=1)
    (prompt,) = record.prompts
    assert (record.prefill_s, record.decode_s, record.num_decode_steps) == (1.0, 1.5, 3)
    assert (record.window_s, record.window_tokens) == (2.5, 13)
    assert (prompt.ttft_s, prompt.tpot_s) == (1.0, 1.5 / 12)
    assert (prompt.num_decode_tokens, prompt.num_rounds, prompt.token_ids) == (12, 3, ANSWER)
    assert record.phase_s["propose"] == 0.375
    assert record.phase_s["host"] == 0.375  # what the named parts leave over
    assert sum(record.phase_s.values()) == record.decode_s


def test_host_time_of_a_round_is_what_the_models_do_not_take() -> None:
    arm = summarise_arm([pass_of(ScriptedEngine(per_round=4, round_s=0.5), concurrency=1, num_prompts=1)])
    models_s = sum(arm.phase_s[name] for name in ("propose", "forward", "observe"))
    assert arm.host_ms == pytest.approx(1000 * (arm.decode_s - models_s) / arm.num_decode_steps)
    assert arm.host_ms > 0


def test_concurrency_is_kept_and_decode_time_is_shared() -> None:
    engine = ScriptedEngine(per_round=4, round_s=0.5)
    record = pass_of(engine, concurrency=2)
    assert engine.max_in_flight == 2
    assert [prompt.question_id for prompt in record.prompts] == ["q0", "q1", "q2", "q3"]
    assert sum(prompt.decode_s for prompt in record.prompts) == pytest.approx(record.decode_s)
    assert record.decode_s == 3.0  # two pairs of requests, three rounds each
    assert record.prefill_s == 4.0
    assert record.window_s == 7.0


def test_the_window_closes_when_requests_run_out() -> None:
    record = pass_of(ScriptedEngine(per_round=12, round_s=0.5), concurrency=2, num_prompts=3)
    assert record.prefill_s + record.decode_s == 4.0
    assert record.window_s == 2.5  # two prompts and their round; the third request is alone


def test_a_failed_request_stops_the_benchmark() -> None:
    with pytest.raises(EngineFault, match="ended as error"):
        pass_of(ScriptedEngine(per_round=4, round_s=0.5, reason=FinishReason.ERROR), concurrency=1)


def test_ratio_is_exact_for_constant_arms_and_its_interval_holds_the_spread() -> None:
    plain = [pass_of(ScriptedEngine(per_round=1, round_s=0.5), concurrency=1)]
    spec = [pass_of(ScriptedEngine(per_round=4, round_s=0.75), concurrency=1)]
    assert speed_ratio(plain, spec) == pytest.approx((8 / 3,) * 3)
    slow = [pass_of(ScriptedEngine(per_round=4, round_s=1.5), concurrency=1)]
    ratio, low, high = speed_ratio(plain * 2, spec + slow)
    assert low == pytest.approx(4 / 3)
    assert high == pytest.approx(8 / 3)
    assert low < ratio < high


def cell_of(spec_answer: tuple[int, ...] = ANSWER):
    engines = {
        "plain": ScriptedEngine(per_round=1, round_s=0.5),
        "spec": ScriptedEngine(per_round=4, round_s=0.75, answer=spec_answer),
    }
    lines: list[str] = []
    cell = run_cell(
        engines,
        PROMPTS,
        tier="mixed",
        concurrency=1,
        prompt_set="set",
        sampling=SAMPLING,
        repeats=2,
        progress=lines.append,
    )
    assert len(lines) == 2 * len(PROMPTS)
    return cell


def test_a_cell_has_every_field_that_outside_checks_read() -> None:
    (cell,) = cells_to_json([cell_of()])
    wanted = {
        "tier", "concurrency", "prompt_set", "num_prompts", "num_output_tokens", "ratio", "ratio_low",
        "ratio_high", "tokens_per_round", "loop_share", "identical", "window_s", "arms",
    }  # fmt: skip
    assert wanted <= cell.keys()
    for arm in ("plain", "spec"):
        assert {"tpot_mean_ms", "tpot_median_ms", "steady_tokens_per_s", "host_ms"} <= cell["arms"][arm].keys()
    assert (cell["num_prompts"], cell["num_output_tokens"]) == (4, 52)
    assert (cell["tokens_per_round"], cell["arms"]["plain"]["tokens_per_round"]) == (4.0, 1.0)
    assert (cell["identical"], cell["loop_share"]) == (True, 0.0)
    json.dumps(cell, allow_nan=False)


def test_one_differing_token_is_reported() -> None:
    cell = cell_of(spec_answer=(*ANSWER[:-1], 0))
    assert cell.identical is False
    assert json.loads(summary_line([cell]))["cells"][0]["identical"] is False


def test_tables_show_both_arms_and_every_part_of_a_round() -> None:
    cell = cell_of()
    assert cell_table([cell]).row_count == 2
    assert round_table([cell]).row_count == 9


def test_merged_passes_add_up() -> None:
    whole = pass_of(ScriptedEngine(per_round=4, round_s=0.5), concurrency=1, num_prompts=2)
    part = pass_of(ScriptedEngine(per_round=4, round_s=0.5), concurrency=1, num_prompts=1)
    merged = merge_passes([part, part])
    assert (merged.decode_s, merged.window_tokens) == (whole.decode_s, whole.window_tokens)
    assert len(merged.prompts) == 2
