"""Tap rows of committed tokens that wait, in a ring of each slot, until keys and values of them are needed.

The row of position p lies at ``p % R`` of its slot's ring. Copies only: every form gives the same bits.

Dims: T rows, A taps of D values each, W = A D values of a row, B slots, R rows of a ring, S spans, P pages.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

import torch

__all__ = ["PLAIN_WAITING", "KeepRows", "KeptSpans", "TakeRows", "WaitingForm", "keep_rows", "take_rows"]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptSpans:
    """Rows of a flat batch that begin to wait; host integers, one entry per span."""

    slots: Sequence[int]
    begins: Sequence[int]  # first row of the batch
    starts: Sequence[int]  # position of that row
    counts: Sequence[int]  # at most R, and all that wait in a slot are


class KeepRows(Protocol):
    """A form of ``keep_rows``."""

    def __call__(self, taps_TAD: torch.Tensor, spans: KeptSpans, ring_BRW: torch.Tensor) -> None:
        """See ``keep_rows``."""
        ...


class TakeRows(Protocol):
    """A form of ``take_rows``."""

    def __call__(
        self,
        ring_BRW: torch.Tensor,
        spans_3S: torch.Tensor,
        page_table_SP: torch.Tensor,
        page_size: int,
        taps_TW: torch.Tensor,
        positions_T: torch.Tensor,
        cache_rows_T: torch.Tensor,
    ) -> None:
        """See ``take_rows``."""
        ...


def keep_rows(taps_TAD: torch.Tensor, spans: KeptSpans, ring_BRW: torch.Tensor) -> None:
    """Copy rows of a batch to where they wait."""
    num_ring_rows, device = ring_BRW.shape[1], ring_BRW.device
    columns = list(zip(spans.slots, spans.begins, spans.starts, spans.counts, strict=True))
    source = chain.from_iterable(range(begin, begin + count) for _, begin, _, count in columns)
    target = (slot * num_ring_rows + (start + i) % num_ring_rows for slot, _, start, n in columns for i in range(n))
    source_T, target_T = (torch.tensor(list(rows), dtype=torch.int64, device=device) for rows in (source, target))
    ring_BRW.flatten(0, 1).index_copy_(0, target_T, taps_TAD.flatten(1).index_select(0, source_T))


def take_rows(
    ring_BRW: torch.Tensor,
    spans_3S: torch.Tensor,
    page_table_SP: torch.Tensor,
    page_size: int,
    taps_TW: torch.Tensor,
    positions_T: torch.Tensor,
    cache_rows_T: torch.Tensor,
) -> None:
    """Copy waiting rows side by side, with their positions and the cache rows that they are for.

    Args:
        ring_BRW: where they wait.
        spans_3S: int64 slot, first position and number of rows of each span.
        page_table_SP: int64, pages of each span's sequence, that far at least.
        page_size: tokens per page.
        taps_TW: result. There may be more rows than the spans have: they become zeros at position 0, for cache row -1.
        positions_T: result, int64.
        cache_rows_T: result, int64.
    """
    num_ring_rows, num_rows = ring_BRW.shape[1], positions_T.shape[0]
    slots_S, starts_S, counts_S = spans_3S
    ends_S = counts_S.cumsum(0)
    row_T = torch.arange(num_rows, device=ring_BRW.device)
    is_real_T = row_T < ends_S[-1]
    span_T = torch.searchsorted(ends_S, row_T, right=True).clamp_max(len(slots_S) - 1)
    at_T = torch.where(is_real_T, starts_S[span_T] + row_T - (ends_S - counts_S)[span_T], 0)
    taken_TW = ring_BRW.flatten(0, 1).index_select(0, slots_S[span_T] * num_ring_rows + at_T % num_ring_rows)
    taps_TW.copy_(taken_TW.masked_fill(~is_real_T[:, None], 0))
    positions_T.copy_(at_T)
    rows_T = page_table_SP[span_T, at_T // page_size] * page_size + at_T % page_size
    cache_rows_T.copy_(torch.where(is_real_T, rows_T, -1))


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingForm:
    """Both operations in one form."""

    keep: KeepRows
    take: TakeRows


PLAIN_WAITING = WaitingForm(keep=keep_rows, take=take_rows)
