"""Field reports against other engines, tried on a real toy target with a real toy drafter.

Numbers are those of docs/reference/hazards.md, which says where the other entries are tested.
"""

import random
from dataclasses import replace
from pathlib import Path

import pytest

from outrider.engine.build import EngineLimits
from outrider.engine.llm import LLM, RequestOutput
from outrider.errors import UserError
from outrider.request import FinishReason, Request, RequestUsage, SamplingParams, Speculation, samples_of
from outrider.testing.toy import ToyOptions, write_toy_checkpoint
from outrider.testing.toy_dspark import ToyDrafterOptions, write_toy_drafter

# A vocabulary so small that a random drafter is right now and then: acceptance is neither none nor all.
TOY = ToyOptions(num_layers=4, mla_layers=(2, 3), num_experts=4, num_shards=1, vocab_size=5)
NUM_DRAFTS, MAX_LEN, PAGE = 4, 96, 16


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("hazards")
    options = ToyDrafterOptions(
        hidden_size=64, num_target_layers=4, aux_layer_ids=(0, 1, 2), vocab_size=TOY.vocab_size, mask_token_id=4
    )
    write_toy_drafter(folder / "drafter", options)
    return write_toy_checkpoint(folder / "target", TOY, seed=2), folder / "drafter"


def load(paths: tuple[Path, Path], speculation: str | int = NUM_DRAFTS, max_num_seqs: int = 4) -> LLM:
    return LLM(
        paths[0],
        paths[1],
        speculation=speculation,
        dtype="float32",
        max_model_len=MAX_LEN,
        max_num_seqs=max_num_seqs,
        limits=EngineLimits(page_size=PAGE, max_prefill_tokens=32),
    )


@pytest.fixture(scope="module")
def plain(paths: tuple[Path, Path]) -> LLM:
    return load(paths, "off", 1)


@pytest.fixture(scope="module")
def spec(paths: tuple[Path, Path]) -> LLM:
    return load(paths)


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(f"{length} {seed}").choices(range(TOY.vocab_size), k=length)


def greedy(max_tokens: int | None = 12, *, speculation: Speculation = "auto") -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, speculation=speculation)


def ids(outputs: list[RequestOutput]) -> list[tuple[int, ...]]:
    return [output.token_ids for output in outputs]


def rounds(output: RequestOutput) -> tuple[int, int, int]:
    return output.usage.num_rounds, output.usage.num_drafted, output.usage.num_accepted


def test_b04_more_drafts_than_the_block_are_refused(paths: tuple[Path, Path], plain: LLM) -> None:
    """Up to the block's NUM_DRAFTS change nothing; one more, or twice as many, are refused."""
    asked = [prompt(20, seed) for seed in range(3)]
    expected = [plain.generate([one], greedy())[0].token_ids for one in asked]
    for drafts in (1, NUM_DRAFTS - 1, NUM_DRAFTS):
        assert ids(load(paths, drafts).generate(asked, greedy())) == expected
    for drafts in (NUM_DRAFTS + 1, 2 * NUM_DRAFTS):
        with pytest.raises(UserError, match=f"speculation={drafts} exceeds the {NUM_DRAFTS}"):
            load(paths, drafts)


def test_b08_samples_that_take_over_a_prompt_have_its_drafter_context(spec: LLM) -> None:
    """Acceptance of every sample is that of a cold run; there is no other way to skip a prompt."""
    sampling = replace(greedy(), n=3, temperature=1.5, seed=4)
    request = Request(request_id="warm", prompt_token_ids=tuple(prompt(50)), sampling=sampling)
    usages: list[dict[int, RequestUsage | None]] = []
    before = spec.metrics.num_prompt_tokens
    for prompt_id in ("warm", None):
        for sample in samples_of(request):
            spec.engine.submit(replace(sample, prompt_id=prompt_id))
        usages.append({})
        while spec.engine.has_work:
            usages[-1] |= {update.sample_index: update.usage for update in spec.engine.step()}
    assert spec.metrics.num_prompt_tokens - before == (50 + 2 + 2) + 3 * 50
    assert usages[0] == usages[1] and len(usages[0]) == 3
    assert all(usage is not None and usage.num_accepted > 0 for usage in usages[0].values())


def test_b10_acceptance_does_not_depend_on_the_batch(spec: LLM, paths: tuple[Path, Path]) -> None:
    asked = [prompt(length) for length in (1, 7, 16, 33)]
    alone = [spec.generate([one], greedy())[0] for one in asked]
    assert 0 < sum(rounds(one)[2] for one in alone) < sum(rounds(one)[1] for one in alone)
    together = spec.generate(asked, greedy())
    assert [rounds(one) for one in together] == [rounds(one) for one in alone]
    wide = load(paths, max_num_seqs=8)
    for count in (2, 8):
        copies = wide.generate([asked[2]] * count, greedy())
        assert {(one.token_ids, rounds(one)) for one in copies} == {(alone[2].token_ids, rounds(alone[2]))}


def test_b12_a_slot_carries_nothing_to_its_next_request(paths: tuple[Path, Path], plain: LLM) -> None:
    one_slot = load(paths, max_num_seqs=1)
    stream = one_slot.stream(prompt(60), greedy(30))
    for _ in range(4):
        next(stream)
    stream.close()  # aborted in the middle, with drafter context of some sixty positions
    for length in (9, 1, 60, 1):
        assert ids(one_slot.generate([prompt(length)], greedy())) == ids(plain.generate([prompt(length)], greedy()))


def test_b20_b66_spans_of_all_kinds_share_steps(spec: LLM, plain: LLM) -> None:
    """Full, clipped and no drafts beside prompt chunks, filling up to all seats and draining to one, twice."""
    asked = [prompt(length, seed) for seed, length in enumerate((50, 3, 17, 1, 40, 20, 2, 33))]
    sampling = [greedy(1 + 3 * index, speculation="auto" if index % 3 != 1 else "off") for index in range(len(asked))]
    expected = [plain.generate([one], how)[0].token_ids for one, how in zip(asked, sampling, strict=True)]
    for _ in range(2):
        outputs = spec.generate(asked, sampling)
        assert ids(outputs) == expected
        assert all(outputs[index].usage.num_drafted == 0 for index in (1, 4, 7))
        assert all(outputs[index].usage.num_drafted > 0 for index in (2, 3, 5, 6))


def test_b22_b30_b32_the_context_is_filled_to_the_last_token(spec: LLM, plain: LLM) -> None:
    """Prompts that leave 1 up to K + 2 tokens, on all seats at once, with and without max_tokens."""
    room = range(1, NUM_DRAFTS + 3)
    asked = [prompt(MAX_LEN - left) for left in room]
    for max_tokens in (None, 1):
        outputs = spec.generate(asked, greedy(max_tokens))
        assert ids(outputs) == [plain.generate([one], greedy(max_tokens))[0].token_ids for one in asked]
        assert [len(output.token_ids) for output in outputs] == [max_tokens or left for left in room]
        assert {output.finish_reason for output in outputs} == {FinishReason.LENGTH}


def test_b42_log_probabilities_come_for_every_token_streamed_or_not(spec: LLM) -> None:
    sampling = replace(greedy(), logprobs=3)
    (whole,) = spec.generate([prompt(20)], sampling)
    assert whole.usage.num_accepted > 0, "no token came from inside an accepted span"
    assert whole.logprobs is not None and len(whole.logprobs) == len(whole.token_ids) == 12
    assert all(entry.token_id == entry.top[0][0] and len(entry.top) == 3 for entry in whole.logprobs)
    updates = list(spec.stream(prompt(20), sampling))
    assert tuple(entry for update in updates for entry in update.logprobs or ()) == whole.logprobs
    assert all(len(update.logprobs or ()) == len(update.new_token_ids) for update in updates)


def test_b44_requests_without_a_seed_differ(spec: LLM) -> None:
    sampling = replace(greedy(16), temperature=3.0)
    texts = [spec.generate([prompt(8)], sampling)[0].token_ids for _ in range(50)]
    assert len(set(texts)) == 50
    (eight,) = spec.generate([prompt(8)], replace(sampling, n=8))
    assert len({sample.token_ids for sample in eight.samples}) == 8


def test_b46_one_seed_is_one_text_whatever_the_engine_did_before(paths: tuple[Path, Path], plain: LLM) -> None:
    """Alone, after a hundred other requests, in a batch, with any number of drafts, after a preemption."""
    sampling = replace(greedy(), temperature=1.2, seed=42)
    others = replace(greedy(3), temperature=1.0)
    expected = plain.generate([prompt(20)], sampling)[0].token_ids
    for drafts in (1, NUM_DRAFTS):
        llm = load(paths, drafts)
        llm.generate([prompt(5, seed) for seed in range(100 if drafts == 1 else 0)], others)
        assert ids(llm.generate([prompt(20)], sampling)) == [expected]
        batch = llm.generate([prompt(9), prompt(20), prompt(30)], [others, sampling, greedy()])
        assert batch[1].token_ids == expected
    stream = llm.stream(prompt(20), sampling)
    updates = [next(stream)]
    for request_id in llm.engine._scheduler.request_ids:
        assert llm.engine.preempt(request_id)
    updates.extend(stream)
    assert tuple(token for update in updates for token in update.new_token_ids) == expected
    assert llm.metrics.num_preempted == 1


def test_b72_one_request_switches_drafts_off_for_nobody_else(spec: LLM) -> None:
    """Neither several samples, nor a switch, nor log probabilities, nor sampling."""
    asked = [
        replace(greedy(), n=3, temperature=1.0),
        greedy(speculation="off"),
        replace(greedy(), logprobs=1),
        greedy(),
    ]
    outputs = spec.generate([prompt(12, seed) for seed in range(4)], asked)
    drafted = [[sample.usage.num_drafted > 0 for sample in output.samples] for output in outputs]
    assert drafted == [[True] * 3, [False], [True], [True]]


OUT_OF_RANGE: list[tuple[str, object]] = [
    *(("logit_bias", {token_id: 1.0}) for token_id in (-1, 5, 2**31, "AI", 1.5)),
    ("logit_bias", dict.fromkeys(range(5000), 1.0)),
    *(("stop_token_ids", (token_id,)) for token_id in (-1, 5, 2**31, "AI", 1.5)),
    *(("seed", value) for value in (-1, 2**63, "x", 1.5)),
    *(("n", value) for value in (0, 10**6)),
    *(("temperature", value) for value in (-1, float("nan"), 1e9)),
    *(("top_p", value) for value in (0, 2)),
    *(("max_tokens", value) for value in (-1, 10**12)),
    ("logprobs", 10**6),
]


@pytest.mark.parametrize(("name", "value"), OUT_OF_RANGE)
def test_b74_a_value_out_of_range_is_named_and_the_engine_goes_on(spec: LLM, name: str, value: object) -> None:
    running = spec.stream(prompt(7), greedy())
    next(running)
    with pytest.raises(UserError, match=name):
        spec.generate([prompt(3)], SamplingParams(**{"max_tokens": 4, name: value}))  # type: ignore[arg-type]
    assert len([token for update in running for token in update.new_token_ids]) == 11
    assert not spec.engine.has_work


def test_b74_values_at_the_edge_are_served(spec: LLM) -> None:
    for changes in ({"max_tokens": 0}, {"max_tokens": None}, {"seed": 2**63 - 1}, {"logprobs": 20}, {"top_k": 2**62}):
        (output,) = spec.generate([prompt(MAX_LEN - 5)], replace(greedy(5), **changes))  # type: ignore[arg-type]
        assert len(output.token_ids) == (0 if changes == {"max_tokens": 0} else 5)


def test_b76_the_same_whole_pages_twice(spec: LLM, plain: LLM) -> None:
    asked = prompt(3 * PAGE)
    expected = ids(plain.generate([asked], greedy()))
    assert [ids(spec.generate([asked], greedy())) for _ in range(2)] == [expected, expected]


@pytest.mark.parametrize(
    ("model", "drafter", "named"), [(1, None, "holds a drafter"), (0, 0, "drafter"), (1, 1, "holds a drafter")]
)
def test_b78_a_checkpoint_in_the_wrong_place_is_named(
    paths: tuple[Path, Path], model: int, drafter: int | None, named: str
) -> None:
    with pytest.raises(UserError, match=named) as raised:
        LLM(paths[model], None if drafter is None else paths[drafter])
    assert "\n" not in str(raised.value)


def test_b94_accepted_length_is_one_plus_the_rates_by_position(paths: tuple[Path, Path]) -> None:
    llm = load(paths)
    llm.generate([prompt(20, seed) for seed in range(4)], greedy(20))
    metrics = llm.metrics
    rates = [metrics.accepted_at[position] / metrics.num_decode_spans for position in range(NUM_DRAFTS)]
    assert metrics.num_accepted > 0
    assert metrics.accepted_length == pytest.approx(1 + sum(rates), abs=1e-12)
    assert all(metrics.accepted_at[position] <= metrics.drafted_at[position] for position in range(NUM_DRAFTS))
