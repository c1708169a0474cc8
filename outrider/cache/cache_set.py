"""All device state of one engine: built once from layouts and budgets, committed and released together."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from outrider.batch import ForwardBatch
from outrider.cache.layout import CacheLayout, PagedLayout, RecurrentLayout
from outrider.cache.paged import LatentCache
from outrider.cache.recurrent import RecurrentCache, RecurrentSnapshot
from outrider.errors import ConfigError

__all__ = ["CacheBudget", "CacheSet", "CacheSnapshot"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheBudget:
    """How much state to hold. Seats, pages and log rows are separate numbers."""

    num_pages: int  # pages of the paged layers, shared by all sequences
    page_size: int  # tokens per page
    num_slots: int  # recurrent seats = sequences that can run at once
    max_step_rows: int  # decode and verify rows of one step


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSnapshot:
    """Committed state of one sequence on the host."""

    latents_LRC: torch.Tensor  # R rows in order of position
    recurrent: RecurrentSnapshot

    @property
    def num_bytes(self) -> int:
        """Bytes on the host."""
        return self.latents_LRC.nbytes + self.recurrent.num_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSet:
    """The caches a target forward reads and writes tentatively; only the round commits."""

    latents: LatentCache
    recurrent: RecurrentCache

    @classmethod
    def build(
        cls,
        layouts: Sequence[CacheLayout],
        budget: CacheBudget,
        device: torch.device,
    ) -> "CacheSet":
        """Allocate the caches of a model that declares one paged and one recurrent layout.

        Raises:
            ConfigError: the model declares another set of layouts.
        """
        paged = [layout for layout in layouts if isinstance(layout, PagedLayout)]
        recurrent = [layout for layout in layouts if isinstance(layout, RecurrentLayout)]
        if len(paged) != 1 or len(recurrent) != 1:
            raise ConfigError(
                f"the model declares {len(paged)} paged and {len(recurrent)} recurrent cache layouts; "
                "this engine holds exactly one of each, so declare layers without state as zero layers"
            )
        return cls(
            latents=_build_latents(paged[0], budget, device),
            recurrent=_build_recurrent(recurrent[0], budget, device),
        )

    @property
    def num_bytes(self) -> int:
        """Bytes held on the device."""
        return self.latents.num_bytes + self.recurrent.num_bytes

    def commit(self, batch: ForwardBatch, num_committed_S: torch.Tensor) -> None:
        """Make the first ``num_committed_S`` rows of every step span permanent.

        Paged rows need no move: the scheduler's length already bounds every later read.
        """
        self.recurrent.commit(batch, num_committed_S)

    def reset(self, slots: Sequence[int]) -> None:
        """Prepare slots for a new sequence. Pages need nothing: they are written before being read."""
        self.recurrent.reset(slots)

    def snapshot(self, slot: int, rows_R: torch.Tensor) -> CacheSnapshot:
        """Copy to the host: the state of ``slot``, and the latents at ``rows_R`` (int64, in order of position)."""
        return CacheSnapshot(latents_LRC=self.latents.snapshot(rows_R), recurrent=self.recurrent.snapshot(slot))

    def restore(self, slot: int, rows_R: torch.Tensor, snapshot: CacheSnapshot) -> None:
        """Put a snapshot into another slot and other rows, as many as it has."""
        self.latents.restore(rows_R, snapshot.latents_LRC)
        self.recurrent.restore(slot, snapshot.recurrent)


def _build_latents(layout: PagedLayout, budget: CacheBudget, device: torch.device) -> LatentCache:
    (width,) = layout.row_shape
    return LatentCache(
        num_layers=layout.num_layers,
        num_pages=budget.num_pages,
        page_size=budget.page_size,
        width=width,
        dtype=layout.dtype,
        device=device,
    )


def _build_recurrent(layout: RecurrentLayout, budget: CacheBudget, device: torch.device) -> RecurrentCache:
    return RecurrentCache(
        num_layers=layout.num_layers,
        num_slots=budget.num_slots,
        max_step_rows=budget.max_step_rows,
        state_shape=layout.state_shape,
        conv_shape=layout.conv_shape,
        state_dtype=layout.state_dtype,
        conv_dtype=layout.conv_dtype,
        device=device,
        fold=layout.fold,
    )
