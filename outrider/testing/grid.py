"""What `outrider verify` varies: drafts, company, cuts of prompts and steps, and how tokens are chosen."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.engine.build import EngineLimits
from outrider.request import SamplingParams

__all__ = [
    "CONCURRENCIES",
    "DECODINGS",
    "GREEDY",
    "SPLITS",
    "Cell",
    "Decoding",
    "PrefillSplit",
    "default_grid",
    "full_grid",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoding:
    """How tokens are chosen. Each one has plain runs of its own."""

    temperature: float = 0.0
    seed: int | None = None

    @property
    def label(self) -> str:
        """For tables."""
        return "greedy" if self.temperature == 0 else f"T={self.temperature:g} seed={self.seed}"

    def sampling(self, *, max_tokens: int, stop_token_ids: tuple[int, ...]) -> SamplingParams:
        """The parameters of one request."""
        return SamplingParams(
            temperature=self.temperature, seed=self.seed, max_tokens=max_tokens, stop_token_ids=stop_token_ids
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

    @property
    def label(self) -> str:
        """One line that names the cell."""
        return f"{self.num_drafts} drafts, concurrency {self.concurrency}, {self.split.name}, {self.decoding.label}"


GREEDY = Decoding()
DECODINGS = (GREEDY,)  # what the command runs; each further one adds its plain runs and cells
CONCURRENCIES = (1, 2, 4, 8)
SPLITS = (
    PrefillSplit(name="whole prompts", prefill_chunks=None, step_chunks=None, page_size=64),
    PrefillSplit(name="single chunks", prefill_chunks=1, step_chunks=None, page_size=16),
    PrefillSplit(name="narrow steps", prefill_chunks=3, step_chunks=2, page_size=8),
)


def default_grid(num_block_drafts: int, decodings: Sequence[Decoding] = DECODINGS) -> tuple[Cell, ...]:
    """A selection that meets every value, made to end soon.

    The first way of decoding gets every draft length once and the whole block at every concurrency, with
    the splits taking turns. Each further one gets two cells: it shares the arithmetic of the first and
    differs in what it makes of the logits.

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
    return cells


def full_grid(num_block_drafts: int, decodings: Sequence[Decoding] = DECODINGS) -> tuple[Cell, ...]:
    """Every combination; arguments as in ``default_grid``."""
    chosen = list(itertools.product(range(num_block_drafts + 1), CONCURRENCIES, SPLITS))
    return tuple(cell for decoding in decodings for cell in _cells(chosen, decoding))


def _cells(chosen: Sequence[tuple[int, int, PrefillSplit]], decoding: Decoding) -> tuple[Cell, ...]:
    return tuple(
        Cell(num_drafts=num_drafts, concurrency=concurrency, split=split, decoding=decoding, order_seed=index)
        for index, (num_drafts, concurrency, split) in enumerate(chosen)
    )
