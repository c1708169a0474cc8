"""Paired measurement of arms: the same prompts, the arms taking turns, repeats until the ratio is known."""

import dataclasses
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from outrider.bench.arm import OFF, PLAIN, main_arm
from outrider.bench.closed_loop import SteppingEngine, TokenisedPrompt, run_pass
from outrider.bench.ratios import MAX_HALF_WIDTH
from outrider.bench.records import PHASES, PassRecord
from outrider.bench.summary import CellKey, CellSummary, compare, summarise_cell
from outrider.request import SamplingParams

__all__ = ["RepeatRule", "Workload", "merge_passes", "run_cell", "turn_order", "warm_up"]

NUM_WARM_UP_TOKENS = 16
NUM_WARM_UP_PROMPT_TOKENS = 128  # long prompts would only take time


@dataclass(frozen=True, slots=True, kw_only=True)
class RepeatRule:
    """How often a cell is run: until its ratio is known to `half_width`, within bounds."""

    min_repeats: int
    max_repeats: int
    half_width: float = MAX_HALF_WIDTH
    budget_s: float = math.inf  # of a cell, but for its first `min_repeats`

    def wants_more(self, num_repeats: int, half_width: float, elapsed_s: float) -> bool:
        """Whether another repeat follows after `num_repeats`, whose ratio has an interval of `half_width`."""
        if num_repeats < self.min_repeats:
            return True
        if num_repeats >= self.max_repeats or elapsed_s * (1 + 1 / num_repeats) > self.budget_s:
            return False
        return not half_width <= self.half_width  # NaN wants more


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What every arm of a cell runs."""

    key: CellKey
    prompts: Sequence[TokenisedPrompt]
    sampling: SamplingParams


def warm_up(engine: SteppingEngine, workload: Workload, sampling: SamplingParams) -> None:
    """One short pass that is thrown away: caches, thread pools and code paths are warm after it."""
    concurrency = workload.key.concurrency
    prompts = [
        dataclasses.replace(prompt, token_ids=prompt.token_ids[-NUM_WARM_UP_PROMPT_TOKENS:])
        for prompt in workload.prompts[:concurrency]
    ]
    sampling = dataclasses.replace(sampling, max_tokens=NUM_WARM_UP_TOKENS)
    run_pass(engine, prompts, concurrency=concurrency, sampling=sampling)


def turn_order(names: Sequence[str], turn: int) -> list[str]:
    """The arms in the order of a turn: every arm goes first equally often, and before and after each other one."""
    shift, mirrored = turn % len(names), turn // len(names) % 2
    order = [*names[shift:], *names[:shift]]
    return order[::-1] if mirrored else order


def run_cell(
    engines: Mapping[str, SteppingEngine],
    workload: Workload,
    *,
    rule: RepeatRule,
    progress: Callable[[str], None],
    before: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
) -> CellSummary:
    """Measure one cell with every arm.

    At concurrency 1 the arms take turns after each prompt, else after each pass over all prompts, and their
    order changes every turn: a drift of the machine then falls on all arms alike.

    Args:
        engines: arm name to engine, in the order of the report.
        workload: prompts, and how they are answered.
        rule: number of repeats.
        progress: gets a line now and then.
        before: called between the warm-up and the first repeat.
        clock: seconds.
    """
    key, sampling = workload.key, workload.sampling
    # An engine with a drafter whose requests want no drafts: what taps and context cost alone.
    sampling_of = {n: dataclasses.replace(sampling, speculation="off") if n == OFF else sampling for n in engines}
    groups = [[prompt] for prompt in workload.prompts] if key.concurrency == 1 else [list(workload.prompts)]
    for name, engine in engines.items():
        warm_up(engine, workload, sampling_of[name])
    before()
    passes: dict[str, list[PassRecord]] = {name: [] for name in engines}
    begin_s, num_repeats, half_width = clock(), 0, math.nan
    while rule.wants_more(num_repeats, half_width, clock() - begin_s):
        parts: dict[str, list[PassRecord]] = {name: [] for name in engines}
        for index, group in enumerate(groups):
            known = "" if math.isnan(half_width) else f", ratio known to {100 * half_width:.1f} %"
            progress(f"{key.label}: repeat {num_repeats + 1}, turn {index + 1} of {len(groups)}{known}")
            for name in turn_order(list(engines), num_repeats + index):
                parts[name].append(
                    run_pass(engines[name], group, concurrency=key.concurrency, sampling=sampling_of[name], clock=clock)
                )
        for name, arm_parts in parts.items():
            passes[name].append(merge_passes(arm_parts))
        num_repeats += 1
        half_width = _half_width(passes, key.concurrency)
    return summarise_cell(key, passes, clock() - begin_s)


def _half_width(passes: Mapping[str, Sequence[PassRecord]], concurrency: int) -> float:
    """Of the ratio of the cell, else of that of its last arm; 0 where nothing is compared."""
    names = [name for name in passes if name != PLAIN]
    if PLAIN not in passes or not names:
        return 0.0
    return compare(passes[main_arm(passes) or names[-1]], passes[PLAIN], concurrency).ratio.half_width


def merge_passes(parts: Sequence[PassRecord]) -> PassRecord:
    """Passes over consecutive groups of prompts as one pass over all of them."""
    return PassRecord(
        prompts=tuple(record for part in parts for record in part.prompts),
        refills_agree=all(part.refills_agree for part in parts),
        prefill_s=sum(part.prefill_s for part in parts),
        mixed_s=sum(part.mixed_s for part in parts),
        decode_s=sum(part.decode_s for part in parts),
        decode_tokens=sum(part.decode_tokens for part in parts),
        num_decode_steps=sum(part.num_decode_steps for part in parts),
        window_s=sum(part.window_s for part in parts),
        window_tokens=sum(part.window_tokens for part in parts),
        window_rounds=sum(part.window_rounds for part in parts),
        num_rounds=sum(part.num_rounds for part in parts),
        num_proposing_rounds=sum(part.num_proposing_rounds for part in parts),
        num_decode_spans=sum(part.num_decode_spans for part in parts),
        drafted_at=_summed(part.drafted_at for part in parts),
        accepted_at=_summed(part.accepted_at for part in parts),
        phase_s={name: sum(part.phase_s[name] for part in parts) for name in PHASES},
    )


def _summed(counts: Iterable[Mapping[int, int]]) -> dict[int, int]:
    total = Counter[int]()
    for each in counts:
        total.update(each)
    return dict(total)
