"""Paired measurement of arms: the same prompts, the arms taking turns, one repeat after another."""

from collections.abc import Callable, Mapping, Sequence

from outrider.bench.closed_loop import SteppingEngine, TokenisedPrompt, run_pass
from outrider.bench.records import PHASES, PassRecord
from outrider.bench.summary import CellSummary, summarise_cell
from outrider.request import SamplingParams

__all__ = ["merge_passes", "run_cell", "warm_up"]

NUM_WARM_UP_TOKENS = 16


def warm_up(engine: SteppingEngine, prompts: Sequence[TokenisedPrompt], concurrency: int) -> None:
    """One short pass that is thrown away: caches, thread pools and code paths are warm after it."""
    sampling = SamplingParams(max_tokens=NUM_WARM_UP_TOKENS)
    run_pass(engine, prompts[: max(1, concurrency)], concurrency=concurrency, sampling=sampling)


def run_cell(
    engines: Mapping[str, SteppingEngine],
    prompts: Sequence[TokenisedPrompt],
    *,
    tier: str,
    concurrency: int,
    prompt_set: str,
    sampling: SamplingParams,
    repeats: int,
    progress: Callable[[str], None],
) -> CellSummary:
    """Measure one cell with every arm.

    At concurrency 1 the arms take turns after each prompt, else after each pass over all prompts, and the
    arm that goes first changes every turn: a drift of the machine then falls on both arms alike.

    Args:
        engines: arm name to engine, in the order of the report.
        prompts: what every arm runs, in this order.
        tier: name of the cell's tier.
        concurrency: requests in flight.
        prompt_set: name of the prompt file.
        sampling: the same for every prompt.
        repeats: passes per arm, at least 1.
        progress: gets a line now and then.
    """
    groups = [[prompt] for prompt in prompts] if concurrency == 1 else [list(prompts)]
    for engine in engines.values():
        warm_up(engine, prompts, concurrency)
    passes: dict[str, list[PassRecord]] = {name: [] for name in engines}
    for repeat in range(repeats):
        parts: dict[str, list[PassRecord]] = {name: [] for name in engines}
        for index, group in enumerate(groups):
            progress(f"c{concurrency} {tier}: repeat {repeat + 1}/{repeats}, turn {index + 1}/{len(groups)}")
            order = list(engines) if (repeat + index) % 2 == 0 else list(engines)[::-1]
            for name in order:
                parts[name].append(run_pass(engines[name], group, concurrency=concurrency, sampling=sampling))
        for name, arm_parts in parts.items():
            passes[name].append(merge_passes(arm_parts))
    return summarise_cell(tier, concurrency, prompt_set, passes)


def merge_passes(parts: Sequence[PassRecord]) -> PassRecord:
    """Passes over consecutive groups of prompts as one pass over all of them."""
    return PassRecord(
        prompts=tuple(record for part in parts for record in part.prompts),
        prefill_s=sum(part.prefill_s for part in parts),
        decode_s=sum(part.decode_s for part in parts),
        window_s=sum(part.window_s for part in parts),
        window_tokens=sum(part.window_tokens for part in parts),
        num_decode_steps=sum(part.num_decode_steps for part in parts),
        phase_s={name: sum(part.phase_s[name] for part in parts) for name in PHASES},
    )
