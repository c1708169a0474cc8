"""Ratios of paired times with their intervals, and the word that may be said of them.

Dims: P prompts (or one, where only whole passes can be paired), R repeats, B resamples.
"""

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

__all__ = [
    "INTERVAL_PERCENT",
    "MAX_HALF_WIDTH",
    "NUM_RESAMPLES",
    "UNMEASURED",
    "Ratio",
    "Verdict",
    "paired_ratio",
    "student_quantile",
    "verdict_of",
]

NUM_RESAMPLES = 2000
INTERVAL_PERCENT = (2.5, 97.5)
MAX_HALF_WIDTH = 0.02  # of the interval, relative to the ratio: a wider one resolves nothing
NORMAL_QUANTILE = NormalDist().inv_cdf(INTERVAL_PERCENT[1] / 100)

Verdict = str  # "faster", "slower", "no difference shown", "not resolved"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """A ratio of times and its 95 % interval; NaN where there was too little to measure.

    `low` and `high` are about these prompts on this machine: what more repeats would narrow. `prompts_low` and
    `prompts_high` are about other prompts of the kind: what more prompts would narrow.
    """

    value: float
    low: float
    high: float
    prompts_low: float
    prompts_high: float

    @property
    def half_width(self) -> float:
        """Half of the interval, relative to the ratio."""
        return (self.high - self.low) / (2 * self.value) if self.value > 0 else math.nan


UNMEASURED = Ratio(value=math.nan, low=math.nan, high=math.nan, prompts_low=math.nan, prompts_high=math.nan)


def verdict_of(ratio: Ratio, max_half_width: float = MAX_HALF_WIDTH) -> Verdict:
    """What may be said of a ratio of speeds: a wide interval says nothing, whatever its ends are."""
    if not ratio.half_width <= max_half_width:  # NaN as well
        return "not resolved"
    if ratio.low > 1:
        return "faster"
    return "slower" if ratio.high < 1 else "no difference shown"


def paired_ratio(numerator_PR: np.ndarray, denominator_PR: np.ndarray) -> Ratio:
    """Ratio of total seconds, numerator over denominator, from pairs taken next to each other in time.

    Of each prompt the median of the ratios of its pairs counts, so a drift of the machine cancels and a
    disturbed repeat is outvoted; prompts are weighted by their median seconds, which makes it the ratio of
    totals. The bootstrap draws the repeats of each prompt with replacement. A few repeats spread too little in
    it, by sqrt((R - 1) / R), and their tails are Student's: the percentiles are moved away from the ratio, on a
    log scale, by both factors (Hesterberg, "What teachers should know about the bootstrap", 2015). Its generator
    has a fixed seed: the interval is a function of the times.

    Args:
        numerator_PR: seconds, float64.
        denominator_PR: seconds of the other arm in the same repeat.
    """
    usable = np.isfinite(numerator_PR).all(1) & np.isfinite(denominator_PR).all(1)
    usable &= (numerator_PR > 0).all(1) & (denominator_PR > 0).all(1)
    numerator_PR, denominator_PR = numerator_PR[usable], denominator_PR[usable]
    num_prompts, num_repeats = numerator_PR.shape
    if not num_prompts or not num_repeats:
        return UNMEASURED
    ratios_PR = numerator_PR / denominator_PR
    ratios_P, weights_P = np.median(ratios_PR, 1), np.median(denominator_PR, 1)
    value = float(np.average(ratios_P, weights=weights_P))
    generator = np.random.default_rng(0)
    low, high = _repeats_interval(value, ratios_PR, denominator_PR, generator)
    prompts_low = prompts_high = math.nan
    if num_prompts > 1:
        draws_BP = generator.integers(num_prompts, size=(NUM_RESAMPLES, num_prompts))
        resamples_B = np.average(ratios_P[draws_BP], axis=1, weights=weights_P[draws_BP])
        prompts_low, prompts_high = map(float, np.percentile(resamples_B, INTERVAL_PERCENT))
    return Ratio(value=value, low=low, high=high, prompts_low=prompts_low, prompts_high=prompts_high)


def _repeats_interval(
    value: float, ratios_PR: np.ndarray, weights_PR: np.ndarray, generator: np.random.Generator
) -> tuple[float, float]:
    num_prompts, num_repeats = ratios_PR.shape
    if num_repeats < 2:
        return math.nan, math.nan
    total_B, weight_B = np.zeros(NUM_RESAMPLES), np.zeros(NUM_RESAMPLES)
    for ratios_R, weights_R in zip(ratios_PR, weights_PR, strict=True):
        draws_BR = generator.integers(num_repeats, size=(NUM_RESAMPLES, num_repeats))
        weight_of_B = np.median(weights_R[draws_BR], 1)
        total_B += np.median(ratios_R[draws_BR], 1) * weight_of_B
        weight_B += weight_of_B
    ends = np.percentile(total_B / weight_B, INTERVAL_PERCENT)
    widening = math.sqrt(num_repeats / (num_repeats - 1))
    widening *= student_quantile(num_prompts * (num_repeats - 1)) / NORMAL_QUANTILE
    low, high = (value * (float(end) / value) ** widening for end in ends)
    return low, high


def student_quantile(num_degrees: int) -> float:
    """The 97.5 % quantile of Student's t distribution.

    One and two degrees have closed forms; from three on the expansion in 1 / degrees of Abramowitz and Stegun
    26.7.5, whose error is below 0.2 %.
    """
    p = INTERVAL_PERCENT[1] / 100
    if num_degrees == 1:
        return math.tan(math.pi * (p - 0.5))
    if num_degrees == 2:
        return (2 * p - 1) * math.sqrt(1 / (2 * p * (1 - p)))
    z, n = NORMAL_QUANTILE, float(num_degrees)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / n**power for power, term in enumerate(terms, 1))
