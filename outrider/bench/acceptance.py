"""How many drafts stand under each rule of acceptance: sampled answers to the same prompts, and no clock."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from rich.table import Table

from outrider.bench.closed_loop import SteppingEngine, TokenisedPrompt
from outrider.bench.ratios import INTERVAL_PERCENT, NUM_RESAMPLES
from outrider.engine.metrics import EngineMetrics
from outrider.errors import EngineFault, RequestError
from outrider.request import FinishReason, Request, RequestUsage, SamplingParams

__all__ = ["AcceptanceCell", "acceptance_table", "answer_prompts", "measure_cell"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptanceCell:
    """One tier, temperature and rule.

    ``tokens_per_round`` counts what was emitted, like that of `bench ab`: committed tokens per sequence and
    round, the token from the prompt excluded, after every cut. Drafts are counted as judged, before a cut.
    """

    tier: str
    temperature: float
    rule: str
    num_prompts: int
    num_output_tokens: int
    num_rounds: int  # (sequence, round) pairs
    num_drafted: int
    num_accepted: int
    tokens_per_round: float
    tokens_per_round_low: float  # 95 % bootstrap over the prompts
    tokens_per_round_high: float
    drafted_at: tuple[int, ...]  # drafts judged, by position in the block
    accepted_at: tuple[int, ...]  # of these, how many stood, with all before them


def measure_cell(
    engine: SteppingEngine,
    prompts: Sequence[TokenisedPrompt],
    *,
    tier: str,
    sampling: SamplingParams,
    num_drafts: int,
    progress: Callable[[str], None],
) -> AcceptanceCell:
    """Answer all prompts; the i-th one draws with the seed of ``sampling`` plus i, so that none share their noise.

    Args:
        engine: idle; it queues what it has no seats for.
        prompts: at least one.
        tier: name of their tier.
        sampling: with a seed; its temperature and rule name the cell.
        num_drafts: drafts per round at most.
        progress: gets a line now and then.

    Raises:
        EngineFault: a request was aborted or failed.
        RequestError: no answer was long enough for a draft.
    """
    label = f"{tier}, T={sampling.temperature:g}, {sampling.acceptance}"
    before = _draft_counts(engine.metrics)
    in_order = answer_prompts(engine, prompts, sampling, label=label, progress=progress)
    drafted, accepted = (now - then for now, then in zip(_draft_counts(engine.metrics), before, strict=True))
    if not drafted.total():
        raise RequestError(f"{label}: no draft was judged, so there is nothing to measure; raise --max-tokens")
    ratio, low, high = _tokens_per_round(in_order)
    return AcceptanceCell(
        tier=tier,
        temperature=sampling.temperature,
        rule=sampling.acceptance,
        num_prompts=len(prompts),
        num_output_tokens=sum(usage.num_output_tokens for usage in in_order),
        num_rounds=sum(usage.num_rounds for usage in in_order),
        num_drafted=drafted.total(),
        num_accepted=accepted.total(),
        tokens_per_round=ratio,
        tokens_per_round_low=low,
        tokens_per_round_high=high,
        drafted_at=tuple(drafted[position] for position in range(num_drafts)),
        accepted_at=tuple(accepted[position] for position in range(num_drafts)),
    )


def answer_prompts(
    engine: SteppingEngine,
    prompts: Sequence[TokenisedPrompt],
    sampling: SamplingParams,
    *,
    label: str,
    progress: Callable[[str], None],
) -> list[RequestUsage]:
    """Answer all prompts; the i-th one draws with the seed of ``sampling`` plus i, so that none share their noise.

    Raises:
        EngineFault: a request was aborted or failed.
    """
    assert sampling.seed is not None, "a measurement that cannot be repeated is none"
    for index, prompt in enumerate(prompts):
        seeded = replace(sampling, seed=sampling.seed + index)
        engine.submit(Request(request_id=str(index), prompt_token_ids=prompt.token_ids, sampling=seeded))
    usages: dict[str, RequestUsage] = {}
    while len(usages) < len(prompts):
        for update in engine.step():
            if update.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
                raise EngineFault(f"request {update.request_id} ended as {update.finish_reason} ({update.error})")
            if update.usage is not None:
                usages[update.request_id] = update.usage
                progress(f"{label}: {len(usages)}/{len(prompts)} answers")
    return [usages[str(index)] for index in range(len(prompts))]


def _draft_counts(metrics: EngineMetrics) -> tuple[Counter[int], Counter[int]]:
    """Copies of the running counts by position: judged, accepted."""
    return Counter(metrics.drafted_at), Counter(metrics.accepted_at)


def _tokens_per_round(usages: Sequence[RequestUsage]) -> tuple[float, float, float]:
    """Mean and 95 % bootstrap interval over prompts, whose generator has a fixed seed."""
    # The first token of an answer comes from the prompt; an answer that is empty has not even that.
    tokens = np.array([max(usage.num_output_tokens - 1, 0) for usage in usages], dtype=np.float64)
    rounds = np.array([usage.num_rounds for usage in usages], dtype=np.float64)
    draws = np.random.default_rng(0).integers(len(usages), size=(NUM_RESAMPLES, len(usages)))
    sums = tokens[draws].sum(1), rounds[draws].sum(1)
    resamples = [total / count for total, count in zip(*sums, strict=True) if count > 0]
    low, high = np.percentile(resamples, INTERVAL_PERCENT)
    return float(tokens.sum() / rounds.sum()), float(low), float(high)


def acceptance_table(cells: Sequence[AcceptanceCell]) -> Table:
    """One row per cell, the rules of a tier and temperature side by side."""
    table = Table(title="Drafts that stand, by rule of acceptance", title_justify="left")
    for heading in ("tier", "T", "rule"):
        table.add_column(heading, no_wrap=True)
    table.add_column("tokens/round\n(95 %)", justify="right", no_wrap=True)
    table.add_column("accepted/\ndrafted", justify="right", no_wrap=True)
    table.add_column("accepted at draft 1, 2, ..., %", justify="right", no_wrap=True)
    for index, cell in enumerate(cells):
        shares = (_percent(*pair) for pair in zip(cell.accepted_at, cell.drafted_at, strict=True))
        following = cells[index + 1] if index + 1 < len(cells) else None
        table.add_row(
            cell.tier,
            f"{cell.temperature:g}",
            cell.rule,
            f"{cell.tokens_per_round:.2f} ({cell.tokens_per_round_low:.2f}-{cell.tokens_per_round_high:.2f})",
            f"{cell.num_accepted}/{cell.num_drafted}",
            " ".join(shares),
            end_section=following is None or _group(following) != _group(cell),
        )
    return table


def _group(cell: AcceptanceCell) -> tuple[str, float]:
    return cell.tier, cell.temperature


def _percent(accepted: int, drafted: int) -> str:
    return f"{100 * accepted / drafted:3.0f}" if drafted else "  -"
