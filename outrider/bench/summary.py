"""Passes to the numbers of a cell: speed ratio with its interval, TPOT, steady speed, tokens per round."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

import numpy as np

from outrider.bench.loops import ends_in_loop
from outrider.bench.records import MODEL_PHASES, PHASES, PassRecord, PromptRecord

__all__ = [
    "INTERVAL_PERCENT",
    "NUM_RESAMPLES",
    "ArmSummary",
    "CellSummary",
    "identical_outputs",
    "speed_ratio",
    "summarise_arm",
    "summarise_cell",
]

NUM_RESAMPLES = 2000
INTERVAL_PERCENT = (2.5, 97.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmSummary:
    """One arm of one cell, all repeats together. NaN stands for what could not be measured."""

    tpot_mean_ms: float
    tpot_median_ms: float
    steady_tokens_per_s: float
    ttft_mean_ms: float
    decode_tokens_per_s: float
    tokens_per_round: float
    window_s: float
    decode_s: float
    prefill_s: float
    num_decode_steps: int
    num_drafted: int
    num_accepted: int
    phase_s: Mapping[str, float]
    host_ms: float  # per decode step, outside MODEL_PHASES


@dataclass(frozen=True, slots=True, kw_only=True)
class CellSummary:
    """One (tier, concurrency) cell.

    `ratio` is output tokens over decode wall time, spec over plain, with a 95 % bootstrap interval.
    `window_s` is the full-concurrency time of the arm that had least of it, over all repeats.
    """

    tier: str
    concurrency: int
    prompt_set: str
    num_prompts: int
    num_output_tokens: int
    ratio: float
    ratio_low: float
    ratio_high: float
    tokens_per_round: float
    loop_share: float
    identical: bool
    window_s: float
    arms: Mapping[str, ArmSummary]
    question_ids: tuple[str, ...]


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator > 0 else float("nan")


def summarise_arm(passes: Sequence[PassRecord]) -> ArmSummary:
    """Totals and means of one arm over its repeats.

    TPOT is taken per request and then averaged over requests; the steady speed is output tokens inside the
    windows over the length of the windows.
    """
    records = [record for one in passes for record in one.prompts]
    tpots_ms = [1e3 * record.tpot_s for record in records if record.tpot_s is not None]
    window_s = sum(one.window_s for one in passes)
    decode_s = sum(one.decode_s for one in passes)
    num_decode_steps = sum(one.num_decode_steps for one in passes)
    phase_s = {name: sum(one.phase_s.get(name, 0.0) for one in passes) for name in PHASES}
    host_s = sum(seconds for name, seconds in phase_s.items() if name not in MODEL_PHASES)
    return ArmSummary(
        tpot_mean_ms=fmean(tpots_ms) if tpots_ms else float("nan"),
        tpot_median_ms=median(tpots_ms) if tpots_ms else float("nan"),
        steady_tokens_per_s=_ratio(sum(one.window_tokens for one in passes), window_s),
        ttft_mean_ms=1e3 * fmean(record.ttft_s for record in records),
        decode_tokens_per_s=_ratio(sum(len(record.token_ids) for record in records), decode_s),
        tokens_per_round=_ratio(
            sum(record.num_decode_tokens for record in records), sum(record.num_rounds for record in records)
        ),
        window_s=window_s,
        decode_s=decode_s,
        prefill_s=sum(one.prefill_s for one in passes),
        num_decode_steps=num_decode_steps,
        num_drafted=sum(record.num_drafted for record in records),
        num_accepted=sum(record.num_accepted for record in records),
        phase_s=phase_s,
        host_ms=1e3 * _ratio(host_s, num_decode_steps),
    )


def _tokens_and_seconds(passes: Sequence[PassRecord]) -> tuple[np.ndarray, np.ndarray]:
    """[repeats, prompts] output tokens and decode seconds, both float64."""
    tokens = [[len(record.token_ids) for record in one.prompts] for one in passes]
    seconds = [[record.decode_s for record in one.prompts] for one in passes]
    return np.array(tokens, dtype=np.float64), np.array(seconds, dtype=np.float64)


def speed_ratio(
    plain: Sequence[PassRecord], spec: Sequence[PassRecord], num_resamples: int = NUM_RESAMPLES
) -> tuple[float, float, float]:
    """Output tokens per decode second, spec over plain: (ratio, low, high) of the 95 % interval.

    The bootstrap draws repeats and prompts with replacement, and takes the same draw in both arms, since
    they are paired. Its generator has a fixed seed: the interval is a function of the records.
    """
    tokens_plain, seconds_plain = _tokens_and_seconds(plain)
    tokens_spec, seconds_spec = _tokens_and_seconds(spec)

    def ratio_of(repeats: np.ndarray, prompts: np.ndarray) -> float:
        chosen = np.ix_(repeats, prompts)
        speed_spec = _ratio(float(tokens_spec[chosen].sum()), float(seconds_spec[chosen].sum()))
        speed_plain = _ratio(float(tokens_plain[chosen].sum()), float(seconds_plain[chosen].sum()))
        return _ratio(speed_spec, speed_plain)

    num_repeats, num_prompts = tokens_plain.shape
    generator = np.random.default_rng(0)
    repeat_draws = generator.integers(num_repeats, size=(num_resamples, num_repeats))
    prompt_draws = generator.integers(num_prompts, size=(num_resamples, num_prompts))
    resamples = [ratio_of(*draws) for draws in zip(repeat_draws, prompt_draws, strict=True)]
    usable = [value for value in resamples if math.isfinite(value)]
    low, high = np.percentile(usable, INTERVAL_PERCENT) if usable else (float("nan"), float("nan"))
    return ratio_of(np.arange(num_repeats), np.arange(num_prompts)), float(low), float(high)


def identical_outputs(passes: Sequence[PassRecord]) -> bool:
    """Whether each prompt has the same token ids in every pass, of whatever arm and repeat."""
    first = [record.token_ids for record in passes[0].prompts]
    return all([record.token_ids for record in one.prompts] == first for one in passes)


def _loop_share(records: Sequence[PromptRecord]) -> float:
    return fmean(ends_in_loop(record.token_ids) for record in records)


def summarise_cell(
    tier: str, concurrency: int, prompt_set: str, passes_by_arm: Mapping[str, Sequence[PassRecord]]
) -> CellSummary:
    """All numbers of a cell. With a single arm the ratio is NaN; text statistics come from the last arm."""
    arms = {name: summarise_arm(passes) for name, passes in passes_by_arm.items()}
    last = list(passes_by_arm)[-1]
    records = passes_by_arm[last][0].prompts
    ratio = low = high = float("nan")
    if {"plain", "spec"} <= passes_by_arm.keys():
        ratio, low, high = speed_ratio(passes_by_arm["plain"], passes_by_arm["spec"])
    return CellSummary(
        tier=tier,
        concurrency=concurrency,
        prompt_set=prompt_set,
        num_prompts=len(records),
        num_output_tokens=sum(len(record.token_ids) for record in records),
        ratio=ratio,
        ratio_low=low,
        ratio_high=high,
        tokens_per_round=arms[last].tokens_per_round,
        loop_share=_loop_share(records),
        identical=identical_outputs([one for passes in passes_by_arm.values() for one in passes]),
        window_s=min(arm.window_s for arm in arms.values()),
        arms=arms,
        question_ids=tuple(record.question_id for record in records),
    )
