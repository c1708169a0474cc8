"""The sampler: distributions against their definitions, and rows that do not see each other."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outrider.ops.draws import draw_keys
from outrider.ops.sampling import (
    draw,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    log_softmax,
    penalise,
    row_cumsum,
    row_sum,
    softmax,
    tempered,
    top_values,
    truncate,
)
from outrider.testing.statistics import chi_square_p_value, counts_of

LIKELY = 1e-4
DTYPES = [torch.float32, torch.float64]
WIDTHS = [1, 2, 3, 63, 64, 65, 97, 257, 4097]


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("width", WIDTHS)
def test_sums_are_sums(width: int) -> None:
    x = randn(3, width, dtype=torch.float64)
    exact = [[math.fsum(row[: i + 1]) for i in range(width)] for row in x.tolist()]
    torch.testing.assert_close(row_sum(x), torch.tensor(exact, dtype=torch.float64)[:, -1], rtol=1e-13, atol=1e-12)
    torch.testing.assert_close(row_cumsum(x), torch.tensor(exact, dtype=torch.float64), rtol=1e-13, atol=1e-12)


def everything(logits: torch.Tensor, temperature: torch.Tensor, keys: torch.Tensor) -> dict[str, torch.Tensor]:
    """Every function of the sampler on the same rows, with parameters that belong to the row."""
    num_rows, width = logits.shape
    scores = tempered(logits, temperature)
    cuts = {
        "top_k_N": (keys % width + 1).abs(),
        "largest_k": max(1, width - 1),
        "top_p_N": 0.5 + (keys % 5).abs() / 10,
        "min_p_N": (keys % 3).abs() / 100,
    }
    cut = truncate(scores, **cuts)
    counts = torch.arange(width) % 3
    return {
        "sum": row_sum(logits),
        "cumsum": row_cumsum(logits),
        "scores": scores,
        "cut": cut,
        "softmax": softmax(cut),
        "log_softmax": log_softmax(logits),
        "draw": draw(cut, keys, torch.arange(width)),
        "penalised": penalise(
            logits,
            counts.expand(num_rows, -1),
            (counts > 0).expand(num_rows, -1),
            repetition_N=temperature + 0.5,
            presence_N=temperature,
            frequency_N=temperature / 3,
        ),
        "top": top_values(logits, min(width, 4))[1],
    }


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 5, 97, 257, 8192])
@pytest.mark.parametrize("threads", [1, 2])
def test_no_row_depends_on_the_number_of_rows(dtype: torch.dtype, width: int, threads: int) -> None:
    num_rows = 19
    logits = 4 * randn(num_rows, width, seed=width).to(torch.bfloat16).to(dtype)  # ties, as bfloat16 models give
    temperature = 0.3 + randn(num_rows, seed=1, dtype=dtype).abs()
    keys = draw_keys(torch.arange(num_rows), 3)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        together = everything(logits, temperature, keys)
        for begin, end in ((0, 1), (7, 8), (18, 19), (3, 5), (2, 10)):
            alone = everything(logits[begin:end].clone(), temperature[begin:end], keys[begin:end])
            for name, expected in together.items():
                assert torch.equal(alone[name], expected[begin:end]), (name, begin, end)
    finally:
        torch.set_num_threads(before)


ROW = st.lists(st.sampled_from([-3.0, -1.0, 0.0, 0.5, 2.0]), min_size=1, max_size=12)


def ranked(row: list[float]) -> list[int]:
    return sorted(range(len(row)), key=lambda i: (-row[i], i))


def kept_of(scores: torch.Tensor) -> set[int]:
    return {i for i, value in enumerate(scores[0].tolist()) if value > -math.inf}


@given(ROW, st.integers(1, 13))
def test_top_k_keeps_the_k_best_with_ties_to_the_lowest_ids(row: list[float], k: int) -> None:
    scores = torch.tensor([row, row])
    top_k = torch.tensor([k, len(row)])  # the second row has it off
    kept = keep_top_k(scores, top_k.clamp(max=len(row)), min(k, len(row)))
    assert kept_of(kept[:1]) == set(ranked(row)[:k])
    assert torch.equal(kept[1], scores[1])


@given(ROW, st.floats(0.01, 1.0))
def test_top_p_keeps_the_smallest_set_that_reaches_p(row: list[float], top_p: float) -> None:
    scores = torch.tensor([row], dtype=torch.float64)
    scores = scores - scores.max()
    kept = kept_of(keep_top_p(scores, torch.tensor([top_p], dtype=torch.float64)))
    order, weights = ranked(row), scores[0].exp()
    assert kept == set(order[: len(kept)])
    if top_p < 1:
        total = float(weights.sum())
        mass = float(weights[order[: len(kept)]].sum()) / total
        without_last = float(weights[order[: len(kept) - 1]].sum()) / total
        assert mass >= top_p - 1e-12 and without_last < top_p + 1e-12
    else:
        assert len(kept) == len(row)


@given(ROW, st.sampled_from([0.0, 0.01, 0.2, 0.999, 1.0]))
def test_min_p_compares_with_the_best(row: list[float], min_p: float) -> None:
    scores = torch.tensor([row], dtype=torch.float64)
    scores = scores - scores.max()
    expected = {i for i, score in enumerate(scores[0].tolist()) if math.exp(score) >= min_p}
    assert kept_of(keep_min_p(scores, torch.tensor([min_p], dtype=torch.float64))) == expected


def test_cuts_act_in_order_each_on_what_is_left() -> None:
    """top_p of what top_k left: 0.4 + 0.3 renormalised is 0.57 + 0.43, so 0.5 needs one token, 0.6 two."""
    scores = torch.tensor([[0.4, 0.3, 0.2, 0.1]], dtype=torch.float64).log() - math.log(0.4)
    for top_p, expected in ((0.5, {0}), (0.6, {0, 1})):
        cut = truncate(
            scores,
            top_k_N=torch.tensor([2]),
            largest_k=2,
            top_p_N=torch.tensor([top_p], dtype=torch.float64),
            min_p_N=None,
        )
        assert kept_of(cut) == expected


SETTINGS = [
    {"temperature": 1.0},
    {"temperature": 0.7},
    {"temperature": 2.5},
    {"temperature": 1.0, "top_k": 4},
    {"temperature": 1.0, "top_p": 0.8},
    {"temperature": 1.3, "min_p": 0.2},
    {"temperature": 1.5, "top_k": 6, "top_p": 0.9, "min_p": 0.05},
]


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_draws_follow_the_distribution(setting: dict[str, float], dtype: torch.dtype) -> None:
    num_draws = 40000
    logits = 0.8 * randn(11, seed=5, dtype=dtype)
    weights = (logits.double() / setting["temperature"]).exp()
    order = weights.argsort(descending=True)
    kept = order[: int(setting.get("top_k", 11))]
    shares = weights[kept] / weights[kept].sum()
    if "top_p" in setting:
        kept = kept[: int((shares.cumsum(0) < setting["top_p"]).sum()) + 1]
    if "min_p" in setting:
        kept = kept[weights[kept] >= setting["min_p"] * weights.max()]
    expected = torch.zeros(11, dtype=torch.float64).index_copy(0, kept, weights[kept])
    one = torch.ones(num_draws, dtype=torch.float64)
    scores = truncate(
        tempered(logits.expand(num_draws, -1), one * setting["temperature"]),
        top_k_N=torch.full((num_draws,), int(setting["top_k"])) if "top_k" in setting else None,
        largest_k=int(setting.get("top_k", 0)),
        top_p_N=one * setting["top_p"] if "top_p" in setting else None,
        min_p_N=one * setting["min_p"] if "min_p" in setting else None,
    )
    torch.testing.assert_close(softmax(scores[0]).double(), expected / expected.sum(), rtol=1e-5, atol=1e-7)
    drawn = draw(scores, draw_keys(torch.full((num_draws,), 77), 0, torch.arange(num_draws)), torch.arange(11))
    counts = counts_of(drawn, 11)
    assert chi_square_p_value(counts, expected) > LIKELY
    # The test has power: the same counts do not fit a temperature that is off by a fifth.
    assert chi_square_p_value(counts, expected.pow(1.2)) < 1e-6


def test_neighbouring_positions_are_drawn_independently() -> None:
    scores = torch.tensor([0.5, 0.3, 0.2]).log().expand(40000, -1)
    keys = draw_keys(torch.full((40000,), 5), 0, torch.arange(40000))
    drawn = draw(scores, keys, torch.arange(3))
    pair = drawn[:-1] * 3 + drawn[1:]
    single = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    assert chi_square_p_value(counts_of(pair, 9), torch.outer(single, single)) > LIKELY


def test_close_distributions_mostly_draw_the_same_token() -> None:
    """What lets a drafter guess: P(same) >= (1 - tv) / (1 + tv) with shared noise, 1 - tv at best."""
    ours, theirs = randn(50, seed=1), randn(50, seed=1) + 0.3 * randn(50, seed=2)
    apart = 0.5 * (ours.softmax(0) - theirs.softmax(0)).abs().sum()
    keys, ids = draw_keys(torch.arange(20000), 1), torch.arange(50)
    same = draw(ours.expand(20000, -1), keys, ids) == draw(theirs.expand(20000, -1), keys, ids)
    assert float((1 - apart) / (1 + apart)) - 0.02 < float(same.double().mean()) < float(1 - apart) + 0.02


def test_rows_that_cannot_be_drawn_from_are_marked() -> None:
    logits = torch.zeros(5, 4)
    logits[0, 2], logits[1, 1], logits[2] = math.nan, math.inf, -math.inf
    logits[3, 0] = -math.inf
    one = torch.ones(5, dtype=torch.float64)
    keys = draw_keys(torch.arange(5), 1)
    scores = tempered(logits, one)
    assert draw(scores, keys, torch.arange(4)).tolist()[:3] == [4, 4, 4]
    assert max(draw(scores, keys, torch.arange(4)).tolist()[3:]) < 4
    cut = truncate(scores, top_k_N=torch.full((5,), 2), largest_k=2, top_p_N=0.9 * one, min_p_N=0.1 * one)
    assert draw(cut, keys, torch.arange(4)).tolist()[:3] == [4, 4, 4]


def test_penalties_follow_their_definitions() -> None:
    logits = torch.tensor([[2.0, -2.0, 3.0, 1.0], [2.0, -2.0, 3.0, 1.0]])
    counts = torch.tensor([[0, 1, 3, 0], [0, 1, 3, 0]])
    seen = torch.tensor([[True, True, True, False]] * 2)
    penalised = penalise(
        logits,
        counts,
        seen,
        repetition_N=torch.tensor([2.0, 1.0]),
        presence_N=torch.tensor([0.5, 0.0]),
        frequency_N=torch.tensor([0.25, 0.0]),
    )
    assert penalised.tolist() == [[1.0, -4 - 0.5 - 0.25, 1.5 - 0.5 - 0.75, 1.0], logits[1].tolist()]


def test_log_probabilities_and_the_best_tokens() -> None:
    logits = randn(6, 97, seed=3, dtype=torch.float64)
    torch.testing.assert_close(log_softmax(logits), logits.log_softmax(-1), rtol=1e-13, atol=1e-13)
    values, ids = top_values(torch.tensor([[1.0, 3.0, 2.0, 3.0], [0.0, 0.0, 0.0, 0.0]]), 3)
    assert ids.tolist() == [[1, 3, 2], [0, 1, 2]]
    assert values.tolist() == [[3.0, 3.0, 2.0], [0.0, 0.0, 0.0]]
