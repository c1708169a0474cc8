"""What `outrider verify` varies: drafts, company, cuts of prompts and steps, preemption, and how tokens are chosen."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from outrider.engine.build import EngineLimits
from outrider.request import SamplingParams
from outrider.scheduling.admission import num_pages_for

__all__ = [
    "CONCURRENCIES",
    "DECODINGS",
    "DISTURBANCES",
    "GREEDY",
    "SPLITS",
    "Cell",
    "Decoding",
    "Preemption",
    "PrefillSplit",
    "Speculating",
    "default_grid",
    "full_grid",
]

Preemption = Literal["none", "oversubscribed", "forced"]  # why sequences lose their seats
Speculating = Literal["all", "half"]  # half: every other prompt asks for no drafts
Disturbance = tuple[Preemption, Speculating]


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoding:
    """How tokens are chosen. Each one has plain runs of its own."""

    temperature: float = 0.0
    seed: int | None = None  # exactly where tokens are drawn: without one, no two runs could be compared

    def __post_init__(self) -> None:
        assert (self.seed is None) == (self.temperature == 0), f"{self}: a draw needs a seed, greedy has no use for one"

    @property
    def label(self) -> str:
        """For tables."""
        return "greedy" if self.temperature == 0 else f"T={self.temperature:g} seed={self.seed}"

    def sampling(self, *, max_tokens: int, stop_token_ids: tuple[int, ...], speculation: bool = True) -> SamplingParams:
        """The parameters of one request."""
        return SamplingParams(
            temperature=self.temperature,
            seed=self.seed,
            max_tokens=max_tokens,
            stop_token_ids=stop_token_ids,
            speculation="auto" if speculation else "off",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillSplit:
    """How prompts and rounds are cut into steps. Counts are chunks of the target, so that any cut is legal."""

    name: str
    prefill_chunks: int | None  # prompt rows per round, in chunks; None = a whole prompt at once
    step_chunks: int | None  # rows of a target step, in chunks; None = one step holds every round
    page_size: int  # tokens per cache page

    def limits(self, *, chunk_multiple: int, max_model_len: int, num_drafts: int) -> EngineLimits:
        """The budgets of an engine."""
        prefill = None if self.prefill_chunks is None else self.prefill_chunks * chunk_multiple
        step = None if self.step_chunks is None else max(self.step_chunks * chunk_multiple, 1 + num_drafts)
        return EngineLimits(page_size=self.page_size, max_prefill_tokens=prefill or max_model_len, max_step_rows=step)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """All prompts once through one engine."""

    num_drafts: int  # drafts per round; 0 = an engine without a drafter
    concurrency: int  # sequences that run at once
    split: PrefillSplit
    decoding: Decoding
    order_seed: int  # of the order in which the prompts are admitted
    preemption: Preemption = "none"
    speculating: Speculating = "all"

    @property
    def label(self) -> str:
        """One line that names the cell."""
        words = [f"{self.num_drafts} drafts", f"concurrency {self.concurrency}", self.split.name, self.decoding.label]
        return ", ".join(words + ([self.disturbance] if self.disturbance else []))

    @property
    def disturbance(self) -> str:
        """What is unusual about seats and drafts; "" if nothing is."""
        seats = {"none": [], "oversubscribed": ["oversubscribed"], "forced": ["forced preemption"]}[self.preemption]
        return ", ".join(seats + (["half without drafts"] if self.speculating == "half" else []))

    def limits(self, *, chunk_multiple: int, max_model_len: int, prompt_lengths: Sequence[int]) -> EngineLimits:
        """The budgets of the engine; when oversubscribed, half of its seats can be taken, and not grow for long.

        Args:
            chunk_multiple: the target's.
            max_model_len: prompt and output tokens of one sequence.
            prompt_lengths: tokens of each prompt.
        """
        limits = self.split.limits(
            chunk_multiple=chunk_multiple, max_model_len=max_model_len, num_drafts=self.num_drafts
        )
        if self.preemption != "oversubscribed":
            return limits
        # Prompts of half the company, and a page more each, which the scheduler wants free when it admits them.
        entry_pages = [num_pages_for(length, limits.page_size) + 1 for length in prompt_lengths]
        num_seated = max(min(self.concurrency, len(entry_pages)) // 2, 1)
        num_pages = max(
            num_seated * sum(entry_pages) // len(entry_pages), num_pages_for(max_model_len, limits.page_size)
        )
        return replace(limits, num_pages=num_pages, oversubscribe=True)

    def speculates(self, prompt_index: int) -> bool:
        """Whether the prompt at this index asks for drafts."""
        return self.speculating == "all" or prompt_index % 2 == 0


GREEDY = Decoding()
# What the command runs; each further one adds its plain runs and cells.
DECODINGS = (GREEDY, Decoding(temperature=0.7, seed=1), Decoding(temperature=1.0, seed=2))
CONCURRENCIES = (1, 2, 4, 8)
SPLITS = (
    PrefillSplit(name="whole prompts", prefill_chunks=None, step_chunks=None, page_size=64),
    PrefillSplit(name="single chunks", prefill_chunks=1, step_chunks=None, page_size=16),
    PrefillSplit(name="narrow steps", prefill_chunks=3, step_chunks=2, page_size=8),
)
# Everything but a lasting seat and drafts for everybody. The first three meet every value.
DISTURBANCES: tuple[Disturbance, ...] = (
    ("oversubscribed", "all"),
    ("forced", "all"),
    ("none", "half"),
    ("oversubscribed", "half"),
    ("forced", "half"),
)
NUM_DEFAULT_DISTURBANCES = 3


def default_grid(num_block_drafts: int, decodings: Sequence[Decoding] = DECODINGS) -> tuple[Cell, ...]:
    """A selection that meets every value, made to end soon.

    The first way of decoding gets every draft length once and the whole block at every concurrency, with
    the splits taking turns. Each further one gets two cells: it shares the arithmetic of the first and
    differs in what it makes of the logits. Each disturbance gets the whole block in the largest company,
    with ways of decoding and splits taking turns; the smallest pages go to the first, which lives off
    their number.

    Args:
        num_block_drafts: drafts that the drafter proposes at most, at least 1.
        decodings: at least one.
    """
    first, *others = decodings
    concurrencies, splits = itertools.cycle(CONCURRENCIES), itertools.cycle(SPLITS)
    chosen = [(num_drafts, next(concurrencies), next(splits)) for num_drafts in range(num_block_drafts + 1)]
    met = chosen[-1][1]
    chosen += [(num_block_drafts, other, next(splits)) for other in CONCURRENCIES if other != met]
    cells = _cells(chosen, first)
    for decoding in others:
        half = (num_block_drafts + 1) // 2
        pair = [(half, CONCURRENCIES[1], next(splits)), (num_block_drafts, CONCURRENCIES[-1], next(splits))]
        cells += _cells(pair, decoding)
    return cells + tuple(
        _disturbed(
            disturbance,
            num_drafts=num_block_drafts,
            concurrency=CONCURRENCIES[-1],
            split=SPLITS[-1 - index % len(SPLITS)],
            decoding=decodings[index % len(decodings)],
            order_seed=index,
        )
        for index, disturbance in enumerate(DISTURBANCES[:NUM_DEFAULT_DISTURBANCES])
    )


def full_grid(num_block_drafts: int, decodings: Sequence[Decoding] = DECODINGS) -> tuple[Cell, ...]:
    """Every draft length at every concurrency, with every split and way of decoding, and with every disturbance.

    For the disturbances, splits and ways of decoding take turns. Arguments as in ``default_grid``.
    """
    counts = range(num_block_drafts + 1)
    chosen = list(itertools.product(counts, CONCURRENCIES, SPLITS))
    calm = tuple(cell for decoding in decodings for cell in _cells(chosen, decoding))
    disturbances = filter(_disturbs, itertools.product(DISTURBANCES, counts, CONCURRENCIES))
    return calm + tuple(
        _disturbed(
            disturbance,
            num_drafts=num_drafts,
            concurrency=concurrency,
            split=SPLITS[index % len(SPLITS)],
            decoding=decodings[index // len(SPLITS) % len(decodings)],  # so that each meets every split
            order_seed=index,
        )
        for index, (disturbance, num_drafts, concurrency) in enumerate(disturbances)
    )


def _cells(chosen: Sequence[tuple[int, int, PrefillSplit]], decoding: Decoding) -> tuple[Cell, ...]:
    return tuple(
        Cell(num_drafts=num_drafts, concurrency=concurrency, split=split, decoding=decoding, order_seed=index)
        for index, (num_drafts, concurrency, split) in enumerate(chosen)
    )


def _disturbs(combination: tuple[Disturbance, int, int]) -> bool:
    """A lone sequence has all pages to itself, and without a drafter nobody drafts."""
    (preemption, speculating), num_drafts, concurrency = combination
    return (preemption != "oversubscribed" or concurrency > 1) and (speculating == "all" or num_drafts > 0)


def _disturbed(
    disturbance: Disturbance,
    *,
    num_drafts: int,
    concurrency: int,
    split: PrefillSplit,
    decoding: Decoding,
    order_seed: int,
) -> Cell:
    preemption, speculating = disturbance
    return Cell(
        num_drafts=num_drafts,
        concurrency=concurrency,
        split=split,
        decoding=decoding,
        order_seed=order_seed,
        preemption=preemption,
        speculating=speculating,
    )
