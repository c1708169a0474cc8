"""Ratios of paired times: exact where times are, honest about noise, and the word that follows."""

import math

import numpy as np
import pytest

from outrider.bench.ratios import UNMEASURED, Ratio, paired_ratio, student_quantile, verdict_of


def times(rows) -> np.ndarray:
    return np.array(rows, dtype=np.float64)


def test_constant_arms_have_an_exact_ratio_of_totals() -> None:
    slow, fast = times([[2.0] * 3, [9.0] * 3]), times([[1.0] * 3, [6.0] * 3])
    ratio = paired_ratio(slow, fast)
    assert (ratio.value, ratio.low, ratio.high) == pytest.approx((11 / 7,) * 3)
    assert ratio.half_width == pytest.approx(0.0)
    assert ratio.prompts_low == pytest.approx(1.5) and ratio.prompts_high == pytest.approx(2.0)


def test_a_drift_of_the_machine_cancels() -> None:
    drift = times([[1.0, 2.0, 4.0, 8.0]])
    ratio = paired_ratio(1.5 * drift, drift)
    assert (ratio.value, ratio.low, ratio.high) == pytest.approx((1.5,) * 3)


def test_a_disturbed_repeat_is_outvoted() -> None:
    assert paired_ratio(times([[1.5, 150.0, 1.5]]), times([[1.0, 1.0, 1.0]])).value == pytest.approx(1.5)


def test_one_repeat_has_no_interval_and_nothing_measured_has_no_ratio() -> None:
    one = paired_ratio(times([[3.0], [4.0]]), times([[2.0], [2.0]]))
    assert one.value == pytest.approx(1.75)
    assert math.isnan(one.low) and math.isnan(one.high) and math.isnan(one.half_width)
    for missing in (0.0, math.nan, math.inf):
        nothing = paired_ratio(times([[3.0, missing]]), times([[2.0, 2.0]]))
        assert math.isnan(nothing.value) and math.isnan(nothing.half_width)
    # A prompt without decode tokens drops out; the others stay.
    assert paired_ratio(times([[math.nan] * 2, [3.0] * 2]), times([[1.0] * 2, [2.0] * 2])).value == pytest.approx(1.5)


def test_the_interval_is_a_function_of_the_times() -> None:
    dice = np.random.default_rng(3)
    slow, fast = dice.lognormal(0.2, 0.1, (4, 5)), dice.lognormal(0, 0.1, (4, 5))
    assert paired_ratio(slow, fast) == paired_ratio(slow, fast)


@pytest.mark.parametrize(("num_prompts", "num_repeats"), [(1, 3), (1, 6), (1, 12), (8, 2), (8, 5)])
def test_the_interval_holds_the_true_ratio_as_often_as_it_says(num_prompts: int, num_repeats: int) -> None:
    """On noise of 5 % a pair: at least nine times in ten, where the bare percentiles fail with few repeats."""
    dice = np.random.default_rng(7)
    num_trials, truth, held = 100, 1.3, 0
    for _ in range(num_trials):
        seconds = dice.uniform(0.5, 2.0, (num_prompts, 1)) * np.ones((1, num_repeats))
        slow = truth * seconds * dice.lognormal(0, 0.035, seconds.shape)
        ratio = paired_ratio(slow, seconds * dice.lognormal(0, 0.035, seconds.shape))
        held += ratio.low <= truth <= ratio.high
    assert held >= 0.9 * num_trials


def test_more_repeats_narrow_the_interval() -> None:
    dice = np.random.default_rng(5)
    slow, fast = dice.lognormal(0.2, 0.05, (1, 40)), dice.lognormal(0, 0.05, (1, 40))
    widths = [paired_ratio(slow[:, :n], fast[:, :n]).half_width for n in (3, 10, 40)]
    assert widths == sorted(widths, reverse=True)


@pytest.mark.parametrize(
    ("degrees", "quantile"),
    [(1, 12.7062), (2, 4.3027), (3, 3.1824), (4, 2.7764), (5, 2.5706), (9, 2.2622), (30, 2.0423), (1000, 1.9623)],
)
def test_student_quantiles_are_those_of_the_tables(degrees: int, quantile: float) -> None:
    assert student_quantile(degrees) == pytest.approx(quantile, rel=2e-3)


def ratio_of(value: float, low: float, high: float) -> Ratio:
    return Ratio(value=value, low=low, high=high, prompts_low=math.nan, prompts_high=math.nan)


@pytest.mark.parametrize(
    ("ratio", "word"),
    [
        (ratio_of(1.30, 1.28, 1.32), "faster"),
        (ratio_of(0.90, 0.89, 0.91), "slower"),
        (ratio_of(1.00, 0.99, 1.01), "no difference shown"),
        (ratio_of(1.01, 1.00, 1.02), "no difference shown"),
        (ratio_of(1.30, 1.20, 1.40), "not resolved"),
        (ratio_of(1.30, math.nan, math.nan), "not resolved"),
        (UNMEASURED, "not resolved"),
    ],
)
def test_the_word_for_a_ratio(ratio: Ratio, word: str) -> None:
    assert verdict_of(ratio) == word
