"""Passes to the numbers of a cell: ratios with intervals and verdicts, speeds, and what drafting did."""

import hashlib
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

import numpy as np

from outrider.bench.arm import AUTO, PLAIN, main_arm
from outrider.bench.ratios import Ratio, Verdict, paired_ratio, verdict_of
from outrider.bench.records import MODEL_PHASES, PHASES, PassRecord, PromptRecord
from outrider.engine.loops import ends_in_loop

__all__ = [
    "ArmSummary",
    "CellKey",
    "CellSummary",
    "Comparison",
    "compare",
    "compare_all",
    "differing_prompts",
    "summarise_arm",
    "summarise_cell",
]

Passes = Sequence[PassRecord]  # of one arm, a repeat each


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmSummary:
    """One arm of one cell, all repeats together. NaN stands for what could not be measured."""

    tpot_mean_ms: float
    tpot_median_ms: float
    steady_tokens_per_s: float
    ttft_mean_ms: float
    decode_tokens_per_s: float
    tokens_per_round: float
    drafts_per_round: float
    accepted_share_at: tuple[float, ...]
    propose_share: float
    paused_share: float
    window_s: float
    window_rounds: int
    decode_s: float
    mixed_s: float
    prefill_s: float
    num_decode_steps: int
    num_proposing_rounds: int
    num_drafted: int
    num_accepted: int
    phase_s: Mapping[str, float]
    host_ms: float  # per decode step, outside MODEL_PHASES
    output_sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Speed of one arm over another (above 1 = faster), and its time to first token over the other's."""

    ratio: Ratio
    verdict: Verdict
    ttft_ratio: Ratio


@dataclass(frozen=True, slots=True, kw_only=True)
class CellKey:
    """What is run: prompts of a tier, at a length (None = as they are), so many in flight."""

    tier: str
    concurrency: int
    prompt_length: int | None
    prompt_set: str

    @property
    def label(self) -> str:
        """Such as `c4 mixed 1k`."""
        length = self.prompt_length
        if length is None:
            return f"c{self.concurrency} {self.tier}"
        return f"c{self.concurrency} {self.tier} {length if length % 1024 else f'{length // 1024}k'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CellSummary:
    """One cell. `comparisons` holds each arm over `plain` by its name, and `auto_over_X` for each other arm X.

    `window_s` is the time in which every seat decoded, of the arm that had least of it, over all repeats.
    """

    key: CellKey
    num_prompts: int
    num_output_tokens: int
    num_repeats: int
    seconds: float
    main: str | None  # the arm whose comparison is that of the cell
    comparisons: Mapping[str, Comparison]
    tokens_per_round: float
    loop_share: float
    differing: tuple[str, ...]  # prompts
    window_s: float
    arms: Mapping[str, ArmSummary]
    question_ids: tuple[str, ...]
    outputs: Mapping[str, Mapping[str, str]]  # arm -> prompt -> hash of its token ids, first repeat

    @property
    def identical(self) -> bool:
        """Whether each prompt had the same tokens in all arms and repeats."""
        return not self.differing

    @property
    def main_comparison(self) -> Comparison | None:
        """That of the main arm over `plain`."""
        return None if self.main is None else self.comparisons[self.main]


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator > 0 else math.nan


def summarise_arm(passes: Passes) -> ArmSummary:
    """Totals and means of one arm over its repeats.

    TPOT is taken per request and then averaged over requests. The steady speed is output tokens inside the
    windows over the length of the windows. `accepted_share_at` is, of the drafts verified at a position, the
    share that stood, with all before them; paused rounds are those without a proposal.
    """
    records = [record for one in passes for record in one.prompts]
    tpots_ms = [1e3 * record.tpot_s for record in records if record.tpot_s is not None]
    drafted_at, accepted_at = Counter[int](), Counter[int]()
    for one in passes:
        drafted_at.update(one.drafted_at)
        accepted_at.update(one.accepted_at)
    decode_s, window_s = sum(one.decode_s for one in passes), sum(one.window_s for one in passes)
    num_decode_steps = sum(one.num_decode_steps for one in passes)
    phase_s = {name: sum(one.phase_s[name] for one in passes) for name in PHASES}
    host_s = sum(seconds for name, seconds in phase_s.items() if name not in MODEL_PHASES)
    num_rounds = sum(one.num_rounds for one in passes)
    num_proposing = sum(one.num_proposing_rounds for one in passes)
    num_slot_rounds = sum(record.num_rounds for record in records)
    num_drafted, num_accepted = sum(r.num_drafted for r in records), sum(r.num_accepted for r in records)
    return ArmSummary(
        tpot_mean_ms=fmean(tpots_ms) if tpots_ms else math.nan,
        tpot_median_ms=median(tpots_ms) if tpots_ms else math.nan,
        steady_tokens_per_s=_ratio(sum(one.window_tokens for one in passes), window_s),
        ttft_mean_ms=1e3 * fmean(record.ttft_s for record in records),
        decode_tokens_per_s=_ratio(sum(one.decode_tokens for one in passes), decode_s),
        tokens_per_round=_ratio(sum(record.num_decode_tokens for record in records), num_slot_rounds),
        drafts_per_round=_ratio(drafted_at.total(), sum(one.num_decode_spans for one in passes)),
        accepted_share_at=tuple(_ratio(accepted_at[at], drafted_at[at]) for at in range(len(drafted_at))),
        propose_share=_ratio(sum(one.phase_s["propose"] for one in passes), decode_s),
        paused_share=_ratio(num_rounds - num_proposing, num_rounds),
        window_s=window_s,
        window_rounds=sum(one.window_rounds for one in passes),
        decode_s=decode_s,
        mixed_s=sum(one.mixed_s for one in passes),
        prefill_s=sum(one.prefill_s for one in passes),
        num_decode_steps=num_decode_steps,
        num_proposing_rounds=num_proposing,
        num_drafted=num_drafted,
        num_accepted=num_accepted,
        phase_s=phase_s,
        host_ms=1e3 * _ratio(host_s, num_decode_steps),
        output_sha256=_hash_of_all(passes[0].prompts),
    )


def _hash_of_all(records: Sequence[PromptRecord]) -> str:
    return hashlib.sha256(" ".join(record.output_hash for record in records).encode()).hexdigest()


def _decode_seconds(passes: Passes, concurrency: int) -> tuple[np.ndarray, np.ndarray]:
    """Seconds and tokens ``[P, R]``: of every prompt when it runs alone, else of the windows, as one prompt."""
    if concurrency > 1:
        return np.array([[p.window_s for p in passes]]), np.array([[p.window_tokens for p in passes]], dtype=float)
    seconds = [[record.decode_s for record in one.prompts] for one in passes]
    tokens = [[record.num_decode_tokens for record in one.prompts] for one in passes]
    return np.array(seconds).T, np.array(tokens, dtype=float).T


def _first_token_seconds(passes: Passes, concurrency: int) -> np.ndarray:
    """``[P, R]`` of every prompt when it runs alone, else the mean of a pass, as one prompt."""
    seconds = np.array([[record.ttft_s for record in one.prompts] for one in passes]).T
    return seconds.mean(0, keepdims=True) if concurrency > 1 else seconds


def compare(arm: Passes, over: Passes, concurrency: int) -> Comparison:
    """Decode time per token of `over` over that of `arm`, and the ratio of times to first token the other way round.

    At concurrency 1 every prompt is a pair, above it every pass is.
    """
    seconds_arm, tokens_arm = _decode_seconds(arm, concurrency)
    seconds_over, tokens_over = _decode_seconds(over, concurrency)
    with np.errstate(divide="ignore", invalid="ignore"):
        same_tokens = seconds_over * (tokens_arm / tokens_over)  # time that `over` takes for the tokens of `arm`
    ratio = paired_ratio(same_tokens, seconds_arm)
    ttft = paired_ratio(_first_token_seconds(arm, concurrency), _first_token_seconds(over, concurrency))
    return Comparison(ratio=ratio, verdict=verdict_of(ratio), ttft_ratio=ttft)


def compare_all(passes_by_arm: Mapping[str, Passes], concurrency: int) -> dict[str, Comparison]:
    """Each arm over `plain`, and the main arm, as `auto`, over each other one."""
    plain, main = passes_by_arm.get(PLAIN), main_arm(passes_by_arm)
    others = {name: passes for name, passes in passes_by_arm.items() if name != PLAIN}
    comparisons = {} if plain is None else {n: compare(passes, plain, concurrency) for n, passes in others.items()}
    if main is not None:
        over = {f"{AUTO}_over_{name}": passes for name, passes in others.items() if name != main}
        comparisons |= {n: compare(passes_by_arm[main], passes, concurrency) for n, passes in over.items()}
    return comparisons


def differing_prompts(passes: Passes) -> tuple[str, ...]:
    """Prompts whose token ids are not the same in every pass, of whatever arm and repeat.

    The word `refills` among them stands for requests that only kept seats busy.
    """
    first = passes[0].prompts
    names = [
        record.question_id
        for index, record in enumerate(first)
        if any(one.prompts[index].token_ids != record.token_ids for one in passes)
    ]
    return (*names, *(["refills"] if not all(one.refills_agree for one in passes) else []))


def summarise_cell(key: CellKey, passes_by_arm: Mapping[str, Passes], seconds: float = 0.0) -> CellSummary:
    """All numbers of a cell. Text statistics come from the main arm, else from the last one."""
    arms = {name: summarise_arm(passes) for name, passes in passes_by_arm.items()}
    main = main_arm(passes_by_arm)
    shown = main or list(passes_by_arm)[-1]
    records = passes_by_arm[shown][0].prompts
    return CellSummary(
        key=key,
        num_prompts=len(records),
        num_output_tokens=sum(len(record.token_ids) for record in records),
        num_repeats=len(passes_by_arm[shown]),
        seconds=seconds,
        main=main,
        comparisons=compare_all(passes_by_arm, key.concurrency),
        tokens_per_round=arms[shown].tokens_per_round,
        loop_share=fmean(ends_in_loop(record.token_ids) for record in records),
        differing=differing_prompts([one for passes in passes_by_arm.values() for one in passes]),
        window_s=min(arm.window_s for arm in arms.values()),
        arms=arms,
        question_ids=tuple(record.question_id for record in records),
        outputs={
            name: {record.question_id: record.output_hash for record in passes[0].prompts}
            for name, passes in passes_by_arm.items()
        },
    )
