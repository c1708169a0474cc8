"""Sampling through the whole engine, on tables whose every probability is known.

What a request asks for is judged row by row inside a verify span as by plain decoding, so that one seed
gives one text: with any drafter, any number of drafts, in any company.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch

from outrider.batch import DraftBlock
from outrider.config import CacheConfig, EngineConfig, SchedulerConfig
from outrider.engine.build import build_engine
from outrider.engine.engine import Engine
from outrider.errors import RequestError
from outrider.request import Request, SamplingParams, TokenLogprobs
from outrider.speculative.drafter import Anchors, Drafter
from outrider.speculative.lookup_drafter import LookupDrafter
from outrider.testing.scripted import ScriptedDrafter, oracle, random_drafts, wrong_at
from outrider.testing.statistics import chi_square_p_value, counts_of
from outrider.testing.tables import TableDrafter, TableTarget

VOCAB, EOS, MAX_LEN = 13, 4, 40
LIKELY, IMPOSSIBLE = 1e-4, 1e-9


@dataclass(frozen=True, kw_only=True)
class Outcome:
    token_ids: tuple[int, ...]
    reason: str
    stop_reason: int | str | None
    logprobs: tuple[TokenLogprobs, ...]


def engine_for(target: TableTarget, drafter: Drafter | None, *, seqs: int, max_len: int = MAX_LEN) -> Engine:
    drafts = drafter.num_draft_tokens if drafter else 0
    config = EngineConfig(
        cache=CacheConfig(page_size=4, num_pages=seqs * -(-max_len // 4)),
        scheduler=SchedulerConfig(
            max_num_seqs=seqs,
            max_model_len=max_len,
            max_step_rows=seqs * (1 + drafts) + 64,
            max_prefill_tokens=64,
            chunk_multiple=1,
        ),
        num_draft_tokens=drafts,
    )
    return build_engine(target, drafter, config, device=torch.device("cpu"), eos_token_ids=frozenset((EOS,)))


def drive(engine: Engine, asked: Sequence[Request], late: int = 0) -> dict[str, Outcome]:
    waiting = list(asked)
    tokens: dict[str, tuple[int, ...]] = {request.request_id: () for request in asked}
    logprobs: dict[str, tuple[TokenLogprobs, ...]] = {request.request_id: () for request in asked}
    done = {}
    for _ in range(len(waiting) - late):
        engine.submit(waiting.pop(0))
    while engine.has_work or waiting:
        if waiting:
            engine.submit(waiting.pop(0))
        for update in engine.step():
            tokens[update.request_id] += update.new_token_ids
            logprobs[update.request_id] += update.logprobs or ()
            assert update.logprobs is None or len(update.logprobs) == len(update.new_token_ids)
            if update.finish_reason is not None:
                assert update.error is None
                done[update.request_id] = Outcome(
                    token_ids=tokens[update.request_id],
                    reason=update.finish_reason.value,
                    stop_reason=update.stop_reason,
                    logprobs=logprobs[update.request_id],
                )
    return done


# Every control alone and in company; temperature 0 too, where penalties and masks move the argmax.
SETTINGS: list[dict[str, object]] = [
    {},
    {"temperature": 1.0},
    {"temperature": 0.7, "logprobs": 3},
    {"temperature": 3.0, "top_k": 5},
    {"temperature": 1.0, "top_p": 0.8, "logprobs": 0},
    {"temperature": 2.0, "min_p": 0.1},
    {"temperature": 1.0, "top_k": 9, "top_p": 0.9, "min_p": 0.02},
    {"temperature": 1.0, "repetition_penalty": 1.4},
    {"temperature": 1.0, "presence_penalty": 0.8, "frequency_penalty": 0.6, "logprobs": 2},
    {"repetition_penalty": 1.7, "frequency_penalty": 1.1},
    {"frequency_penalty": -0.7, "presence_penalty": 0.2, "logprobs": 20},
    {"temperature": 1.0, "logit_bias": {2: -100.0, 7: 1.5}},
    {"logit_bias": {5: 2.0, EOS: 3.0}, "logprobs": 1},
    {"temperature": 1.5, "min_tokens": 9, "logit_bias": {EOS: 2.5}},
    {"min_tokens": 7, "stop_token_ids": (1, 2, 3), "logit_bias": {1: 2.0}},
    {"temperature": 1.0, "ignore_eos": True, "stop_token_ids": (6,)},
    {"temperature": 0.9, "repetition_penalty": 0.8, "frequency_penalty": 0.9, "top_p": 0.95, "min_tokens": 4},
]


def requests(seed: int = 0) -> list[Request]:
    dice = random.Random(seed)
    asked = []
    for index, setting in enumerate(SETTINGS * 2):
        params = SamplingParams(seed=dice.choice([0, 5, 2**63 - 1]), **setting)  # type: ignore[arg-type]
        asked.append(
            Request(
                request_id=f"r{index}",
                prompt_token_ids=tuple(dice.randrange(VOCAB) for _ in range(dice.randint(1, 9))),
                sampling=replace(params, max_tokens=max(dice.choice([2, 21, 29]), params.min_tokens)),
                sample_index=dice.choice([0, 0, 3]),
            )
        )
    return asked


@pytest.fixture(scope="module", params=[torch.float64, torch.bfloat16], ids=["float64", "bfloat16"])
def target(request: pytest.FixtureRequest) -> TableTarget:
    target = TableTarget(VOCAB, seed=3, sharpness=1.5, dtype=request.param)
    target.table[..., EOS] -= 2  # outputs long enough to compare
    return target


@pytest.fixture(scope="module")
def plain(target: TableTarget) -> dict[str, Outcome]:
    return drive(engine_for(target, None, seqs=1), requests())


def near(target: TableTarget) -> torch.Tensor:
    """A drafter's table that knows the mean over the token before the last."""
    return target.table.double().mean(0)


def test_plain_outputs_are_worth_comparing(plain: dict[str, Outcome]) -> None:
    lengths = [len(outcome.token_ids) for outcome in plain.values()]
    assert sum(lengths) > 300 and {outcome.reason for outcome in plain.values()} == {"stop", "length"}
    by_setting: dict[int, set[tuple[int, ...]]] = {}
    for index in range(len(SETTINGS)):
        by_setting[index] = {plain[f"r{index}"].token_ids, plain[f"r{index + len(SETTINGS)}"].token_ids}
    assert all(len(pair) == 2 for pair in by_setting.values())


@pytest.mark.parametrize(
    ("kind", "num_drafts", "seqs", "late"),
    [
        ("none", 0, 8, 5),
        ("table", 1, 3, 9),
        ("table", 3, 1, 0),
        ("table", 7, 8, 4),
        ("oracle", 7, 5, 2),
        ("oracle", 4, 2, 20),
        ("wrong-at-2", 5, 8, 0),
        ("random", 2, 4, 30),
        ("random", 6, 7, 3),
        ("lookup", 7, 1, 0),
        ("lookup", 4, 6, 12),
    ],
)
def test_speculation_and_company_change_nothing(  # type: ignore[no-untyped-def]
    target, plain, kind: str, num_drafts: int, seqs: int, late: int
) -> None:
    """Tokens, reasons and log probabilities, bit for bit."""
    asked = requests()
    streams = [request.prompt_token_ids + plain[request.request_id].token_ids for request in asked]
    right = oracle(streams)

    def script(token_ids: tuple[int, ...], count: int) -> Sequence[int]:
        try:
            return right(token_ids, count)
        except AssertionError:  # two requests with one prompt may part
            return (0,) * count

    drafter: Drafter | None = {
        "none": lambda: None,
        "table": lambda: TableDrafter(near(target), num_drafts),
        "oracle": lambda: ScriptedDrafter(num_drafts, script),
        "wrong-at-2": lambda: ScriptedDrafter(num_drafts, wrong_at(2, script, VOCAB)),
        "random": lambda: ScriptedDrafter(num_drafts, random_drafts(script, VOCAB, 0.8, seed=1)),
        "lookup": lambda: LookupDrafter(TableDrafter(near(target), num_drafts)),
    }[kind]()
    random.Random(seqs).shuffle(asked)
    engine = engine_for(target, drafter, seqs=seqs)
    done = drive(engine, asked, late)
    for name, expected in plain.items():
        assert done[name] == expected, name
    if drafter is not None:
        assert engine.metrics.num_accepted > num_drafts
    if kind == "oracle":
        assert engine.metrics.num_accepted > 0.6 * engine.metrics.num_drafted


def literal(target: TableTarget, request: Request) -> tuple[int, ...]:
    """Greedy decoding by the definitions, in Python numbers, without caches or batches."""
    sampling, tokens = request.sampling, list(request.prompt_token_ids)
    output: list[int] = []
    stops = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else (EOS,))}
    while len(output) < (sampling.max_tokens or 0):
        previous = tokens[-2] + 1 if len(tokens) > 1 else 0
        logits = target.table[previous, tokens[-1]].double().tolist()
        for token_id, bias in sampling.logit_bias.items():
            logits[token_id] += bias
        for token_id in range(VOCAB):
            if token_id in tokens:
                factor = sampling.repetition_penalty
                logits[token_id] = logits[token_id] / factor if logits[token_id] > 0 else logits[token_id] * factor
            logits[token_id] -= sampling.presence_penalty * (token_id in output)
            logits[token_id] -= sampling.frequency_penalty * output.count(token_id)
            if len(output) < sampling.min_tokens and token_id in stops:
                logits[token_id] = -math.inf
        best = logits.index(max(logits))
        if best in stops:
            break
        tokens.append(best)
        output.append(best)
    return tuple(output)


def test_greedy_with_penalties_bias_and_masks_equals_the_definition(plain: dict[str, Outcome], target) -> None:  # type: ignore[no-untyped-def]
    if target.table.dtype != torch.float64:
        pytest.skip("the definition is computed in float64")
    greedy = [request for request in requests() if request.sampling.temperature == 0]
    assert len(greedy) >= 10
    for request in greedy:
        assert plain[request.request_id].token_ids == literal(target, request), request.sampling


def test_log_probabilities_are_those_of_the_model(target: TableTarget, plain: dict[str, Outcome]) -> None:
    num_checked = 0
    for request in requests():
        outcome, asked = plain[request.request_id], request.sampling.logprobs
        assert len(outcome.logprobs) == (0 if asked is None else len(outcome.token_ids))
        tokens = list(request.prompt_token_ids)
        for token_id, entry in zip(outcome.token_ids, outcome.logprobs, strict=False):
            previous = tokens[-2] + 1 if len(tokens) > 1 else 0
            expected = target.table[previous, tokens[-1]].double().log_softmax(0)
            assert entry.token_id == token_id
            assert entry.logprob == pytest.approx(float(expected[token_id]), abs=1e-5)
            best = sorted(range(VOCAB), key=lambda i: (-float(expected[i]), i))[:asked]
            assert [i for i, _ in entry.top] == best
            assert [value for _, value in entry.top] == pytest.approx([float(expected[i]) for i in best], abs=1e-5)
            tokens.append(token_id)
            num_checked += 1
    assert num_checked > 100


def test_a_greedy_request_is_what_it_was_whatever_its_neighbours_ask(target: TableTarget) -> None:
    asked = [replace(request, sampling=SamplingParams(max_tokens=20)) for request in requests()[:4]]
    alone = drive(engine_for(target, None, seqs=1), asked)
    mixed = drive(engine_for(target, TableDrafter(near(target), 5), seqs=8), [*asked, *requests(seed=9)[4:]])
    assert {name: mixed[name] for name in alone} == alone


def test_min_tokens_holds_in_a_span_that_starts_below_it() -> None:
    """EOS is by far the most likely token; drafts of EOS must not stand while it is masked."""
    target = TableTarget(VOCAB, seed=1, sharpness=1.0)
    target.table[..., EOS] += 30
    for temperature in (0.0, 1.0):
        for min_tokens in (0, 1, 3, 6, 11):
            sampling = SamplingParams(temperature=temperature, seed=1, min_tokens=min_tokens, max_tokens=12)
            request = Request(request_id="a", prompt_token_ids=(1, 2), sampling=sampling)
            outcomes = [
                drive(engine_for(target, drafter, seqs=1), [request])["a"]
                for drafter in (None, TableDrafter(near(target), 7), ScriptedDrafter(5, lambda tokens, n: (EOS,) * n))
            ]
            assert outcomes[0] == outcomes[1] == outcomes[2]
            assert len(outcomes[0].token_ids) == min_tokens and outcomes[0].stop_reason == EOS


def test_noise_shared_with_the_target_makes_better_drafts() -> None:
    target = TableTarget(VOCAB, seed=5, sharpness=1.0)
    target.table[:] = near(target)  # the drafter knows the target: every draw is guessed
    sampling = SamplingParams(temperature=1.0, max_tokens=30, ignore_eos=True)
    asked = [Request(request_id=f"r{i}", prompt_token_ids=(1,), sampling=replace(sampling, seed=i)) for i in range(10)]
    engine = engine_for(target, TableDrafter(near(target), 5), seqs=4)
    shared = drive(engine, asked)
    assert engine.metrics.num_accepted == engine.metrics.num_drafted

    class Greedy(TableDrafter):
        def propose(self, anchors: Anchors) -> DraftBlock:
            return super().propose(replace(anchors, sampling=None))

    greedy = engine_for(target, Greedy(near(target), 5), seqs=4)
    assert drive(greedy, asked) == shared
    assert greedy.metrics.accepted_length < 2 < engine.metrics.accepted_length


def test_seeds_and_sample_indices_are_different_texts_and_repeat(target: TableTarget) -> None:
    def texts(**changes: int) -> list[tuple[int, ...]]:
        sampling = SamplingParams(temperature=1.0, max_tokens=20, ignore_eos=True, seed=changes.get("seed", 1))
        request = Request(
            request_id="a", prompt_token_ids=(3,), sampling=sampling, sample_index=changes.get("sample", 0)
        )
        return [drive(engine_for(target, None, seqs=1), [request])["a"].token_ids for _ in range(2)]

    runs = [texts(), texts(seed=2), texts(sample=1), texts(seed=2, sample=1)]
    assert all(first == second for first, second in runs)
    assert len({first for first, _ in runs}) == 4


def test_a_request_without_a_seed_gets_a_fresh_one_that_replays_it(target: TableTarget) -> None:
    engine = engine_for(target, None, seqs=4)
    sampling = SamplingParams(temperature=1.0, max_tokens=15, ignore_eos=True)
    asked = [Request(request_id=f"r{i}", prompt_token_ids=(1, 2), sampling=sampling) for i in range(20)]
    for request in asked:
        engine.submit(request)
    tokens: dict[str, tuple[int, ...]] = {request.request_id: () for request in asked}
    seeds: dict[str, int] = {}
    while engine.has_work:
        for update in engine.step():
            tokens[update.request_id] += update.new_token_ids
            if update.finish_reason is None:
                assert update.seed is None
            else:
                assert update.seed is not None
                seeds[update.request_id] = update.seed
    assert len(set(seeds.values())) == len(set(tokens.values())) == 20
    again = [replace(request, sampling=replace(sampling, seed=seeds[request.request_id])) for request in asked]
    assert {name: one.token_ids for name, one in drive(engine_for(target, None, seqs=1), again).items()} == tokens


NUM_REQUESTS, NUM_OUTPUT = 2400, 4


def small_target() -> TableTarget:
    return TableTarget(3, seed=7, sharpness=1.2)


def counts_from(
    drafter: Drafter | None, *, prompt: tuple[int, ...] = (0, 1), **sampling: object
) -> tuple[torch.Tensor, Engine]:
    """How often each continuation of NUM_OUTPUT tokens of a prompt that ends in (0, 1) comes up over many seeds."""
    engine = engine_for(small_target(), drafter, seqs=200, max_len=len(prompt) + 6)
    params = SamplingParams(temperature=1.0, max_tokens=NUM_OUTPUT, ignore_eos=True, **sampling)  # type: ignore[arg-type]
    asked = [
        Request(request_id=str(i), prompt_token_ids=prompt, sampling=replace(params, seed=i))
        for i in range(NUM_REQUESTS)
    ]
    done = drive(engine, asked)
    codes = torch.tensor([one.token_ids for one in done.values()]) @ torch.tensor([27, 9, 3, 1])
    return counts_of(codes, 81), engine


def joint() -> torch.Tensor:
    """Probability of every continuation of NUM_OUTPUT tokens of the prompt (0, 1)."""
    probs = small_target().table.softmax(-1)
    result = torch.ones(81, dtype=torch.float64)
    for code in range(81):
        previous, last = 0, 1
        for place in (27, 9, 3, 1):
            token = code // place % 3
            result[code] *= probs[previous + 1, last, token]
            previous, last = last, token
    return result


DRAFT_TABLE = torch.tensor([[0.5, 0.4, -1.0], [-0.7, 0.9, 0.0], [0.3, -0.2, 0.8]], dtype=torch.float64)


@pytest.mark.parametrize(
    ("acceptance", "num_drafts"), [("match", 0), ("match", 3), ("rejection", 3), ("rejection", 1), ("block", 3)]
)
def test_outputs_have_the_distribution_of_the_target(acceptance: str, num_drafts: int) -> None:
    """Over several rounds, with lengths clipped at the end of the request."""
    drafter = TableDrafter(DRAFT_TABLE, num_drafts) if num_drafts else None
    counts, engine = counts_from(drafter, acceptance=acceptance)
    assert chi_square_p_value(counts, joint()) > LIKELY
    assert (engine.metrics.num_accepted > 500) == (num_drafts > 0)


@pytest.mark.parametrize("acceptance", ["rejection", "block"])
def test_a_drafter_that_hands_over_something_else_is_caught(acceptance: str) -> None:
    class Uncorrected(TableDrafter):
        """Hands over the rows of its anchor instead of those of the drafts before."""

        def propose(self, anchors: Anchors) -> DraftBlock:
            block = super().propose(anchors)
            assert block.probs_SGV is not None
            first_S1V = block.probs_SGV[:, :1]
            return replace(block, probs_SGV=first_S1V.expand_as(block.probs_SGV))

    counts, _ = counts_from(Uncorrected(DRAFT_TABLE, 3), acceptance=acceptance)
    assert chi_square_p_value(counts, joint()) < IMPOSSIBLE


@pytest.mark.parametrize("acceptance", ["match", "rejection", "block"])
def test_drafts_read_from_the_text_leave_the_distribution(acceptance: str) -> None:
    """The prompt has the end of the other tests' prompt twice, so first drafts are read; later ones by chance."""
    drafter = LookupDrafter(TableDrafter(DRAFT_TABLE, 3))
    counts, engine = counts_from(drafter, prompt=(0, 1, 2, 0, 1), acceptance=acceptance)
    assert chi_square_p_value(counts, joint()) > LIKELY
    assert engine.metrics.num_accepted > 500


@pytest.mark.parametrize("acceptance", ["rejection", "block"])
def test_read_drafts_that_pass_for_drawn_ones_are_caught(acceptance: str) -> None:
    class Unmarked(LookupDrafter):
        """Hands over what the inner drafter would have drawn from."""

        def propose(self, anchors: Anchors) -> DraftBlock | None:
            block, drawn = super().propose(anchors), self.inner.propose(anchors)
            assert block is not None and drawn is not None
            return replace(block, probs_SGV=drawn.probs_SGV)

    drafter = Unmarked(TableDrafter(DRAFT_TABLE, 3))
    counts, _ = counts_from(drafter, prompt=(0, 1, 2, 0, 1), acceptance=acceptance)
    assert chi_square_p_value(counts, joint()) < IMPOSSIBLE


@pytest.mark.parametrize("with_lookup", [False, True])
@pytest.mark.parametrize("acceptance", ["rejection", "block"])
def test_coins_repeat_with_the_seed_in_any_company(target: TableTarget, acceptance: str, with_lookup: bool) -> None:
    asked = [
        replace(request, sampling=replace(request.sampling, acceptance=acceptance))  # type: ignore[arg-type]
        for request in requests()
    ]
    drafter: Drafter = TableDrafter(near(target), 4)
    if with_lookup:
        drafter = LookupDrafter(drafter)
    alone = {}
    for request in asked[:17]:
        alone |= drive(engine_for(target, drafter, seqs=1), [request])
    mixed = drive(engine_for(target, drafter, seqs=8), [*asked[:17], *requests(seed=3)[17:]], late=6)
    assert {name: mixed[name] for name in alone} == alone
    greedy = [request for request in asked[:17] if request.sampling.temperature == 0]
    matched = drive(
        engine_for(target, None, seqs=1),
        [replace(request, sampling=replace(request.sampling, acceptance="match")) for request in greedy],
    )
    assert {name: alone[name] for name in matched} == matched


@pytest.mark.parametrize("acceptance", ["rejection", "block"])
def test_masks_bind_under_coins(acceptance: str) -> None:
    """Banned tokens never appear, drafts of them never stand, and min_tokens holds."""
    target = TableTarget(VOCAB, seed=2, sharpness=1.0)
    table = near(target)
    table[:, (2, EOS)] += 3
    sampling = SamplingParams(
        temperature=1.0,
        max_tokens=12,
        min_tokens=8,
        logit_bias={2: -100.0, EOS: 4.0},
        acceptance=acceptance,  # type: ignore[arg-type]
    )
    asked = [Request(request_id=str(i), prompt_token_ids=(1,), sampling=replace(sampling, seed=i)) for i in range(40)]
    done = drive(engine_for(target, TableDrafter(table, 5), seqs=8), asked)
    assert not any(2 in one.token_ids for one in done.values())
    assert min(len(one.token_ids) for one in done.values()) == 8


def test_foreign_ids_and_empty_vocabularies_are_refused(target: TableTarget) -> None:
    engine = engine_for(target, None, seqs=1)
    for sampling, words in (
        (SamplingParams(logit_bias={VOCAB: 1.0}), f"logit_bias contains {VOCAB}"),
        (SamplingParams(logit_bias={-1: 1.0}), "logit_bias contains -1"),
        (SamplingParams(logit_bias={"5": 1.0}), "logit_bias contains '5'"),  # type: ignore[dict-item]
        (SamplingParams(min_tokens=2, stop_token_ids=tuple(range(VOCAB))), "leaves none"),
    ):
        with pytest.raises(RequestError, match=words):
            engine.submit(Request(request_id="a", prompt_token_ids=(1,), sampling=sampling))
        assert not engine.has_work
