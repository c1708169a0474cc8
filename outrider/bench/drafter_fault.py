"""Drafters that propose garbage, to measure what a policy loses by them; for benchmarks only.

Dims: S sequences, G draft positions.
"""

import dataclasses

import torch

from outrider.batch import DraftBlock, ForwardBatch, TargetOutput
from outrider.errors import ConfigError
from outrider.models.dspark.block import BlockPredictor
from outrider.speculative.drafter import Anchors, DSparkDrafter, ObservedSpans

__all__ = ["GarbageDrafter", "GarbageDrafters", "parse_fault"]

GARBAGE = "garbage"


def parse_fault(text: str) -> "GarbageDrafters | None":
    """The drafters of ``garbage`` or ``garbage@N``; None for an empty text.

    Raises:
        ConfigError: another fault, or N is no number.
    """
    if not text:
        return None
    kind, at, number = text.partition("@")
    if kind != GARBAGE or (at and not number.isdecimal()):
        raise ConfigError(f"--drafter-fault {text!r} is unknown; use garbage, or garbage@N for garbage after N rounds")
    return GarbageDrafters(int(number) if at else 0)


class GarbageDrafters:
    """Makes the drafters of all engines of a measurement, and heals them where a cell begins.

    Args:
        num_good_rounds: rounds after a ``restart`` in which drafts are still the real ones.
    """

    def __init__(self, num_good_rounds: int) -> None:
        self._num_good_rounds = num_good_rounds
        self._drafters: list[GarbageDrafter] = []

    def __call__(self, predictor: BlockPredictor, *, num_cache_rows: int) -> "GarbageDrafter":
        """A drafter for one engine."""
        drafter = GarbageDrafter(predictor, num_cache_rows=num_cache_rows, num_good_rounds=self._num_good_rounds)
        self._drafters.append(drafter)
        return drafter

    def restart(self) -> None:
        """Count rounds from here on."""
        for drafter in self._drafters:
            drafter.num_rounds = 0


class GarbageDrafter(DSparkDrafter):
    """A DSpark drafter whose drafts are replaced by uniform random tokens; its cost and its confidence stay.

    Args:
        predictor: the model prepared for inference.
        num_cache_rows: rows of the target's paged cache.
        num_good_rounds: observed steps before the garbage.
    """

    def __init__(self, predictor: BlockPredictor, *, num_cache_rows: int, num_good_rounds: int) -> None:
        super().__init__(predictor, num_cache_rows=num_cache_rows)
        self._vocab_size = predictor.config.vocab_size
        self._num_good_rounds = num_good_rounds
        self._generator = torch.Generator().manual_seed(0)
        self.num_rounds = 0  # steps observed, with or without a proposal

    def propose(self, anchors: Anchors) -> DraftBlock | None:
        """See Drafter; the tokens depend on nothing, so they need no distribution to be judged by."""
        block = super().propose(anchors)
        if block is None or self.num_rounds < self._num_good_rounds:
            return block
        shape = block.token_ids_SG.shape
        garbage_SG = torch.randint(self._vocab_size, shape, generator=self._generator)
        return dataclasses.replace(block, token_ids_SG=garbage_SG.to(block.token_ids_SG.device), probs_SGV=None)

    def observe(self, batch: ForwardBatch, output: TargetOutput, spans: ObservedSpans) -> None:
        """See Drafter."""
        super().observe(batch, output, spans)
        self.num_rounds += 1
