"""Field reports against other engines, tried on a real toy target with a real toy drafter.

Numbers are those of docs/reference/hazards.md, which says where the other entries are tested.
"""

import random
from pathlib import Path

import pytest

from outrider.engine.build import EngineLimits
from outrider.engine.llm import LLM, RequestOutput
from outrider.errors import UserError
from outrider.request import FinishReason, SamplingParams
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


def load(paths: tuple[Path, Path], speculation: str | int = "auto", max_num_seqs: int = 4) -> LLM:
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


def greedy(max_tokens: int | None = 12, *, speculation: bool = True) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, speculation=speculation)


def ids(outputs: list[RequestOutput]) -> list[tuple[int, ...]]:
    return [output.token_ids for output in outputs]


def rounds(output: RequestOutput) -> tuple[int, int, int]:
    return output.usage.num_rounds, output.usage.num_drafted, output.usage.num_accepted


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
    sampling = [greedy(1 + 3 * index, speculation=index % 3 != 1) for index in range(len(asked))]
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


def test_b76_the_same_whole_pages_twice(spec: LLM, plain: LLM) -> None:
    asked = prompt(3 * PAGE)
    expected = ids(plain.generate([asked], greedy()))
    assert [ids(spec.generate([asked], greedy())) for _ in range(2)] == [expected, expected]


@pytest.mark.parametrize(
    ("model", "drafter", "named"), [(1, None, "model_type"), (0, 0, "drafter"), (1, 1, "model_type")]
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
