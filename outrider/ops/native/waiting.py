"""Native forms of ``outrider.ops.waiting`` for bfloat16 on a CPU (``src/waiting.cpp``)."""

from array import array
from itertools import chain

import torch

from outrider.ops.native.library import INT, POINTER, Library
from outrider.ops.waiting import KeptSpans, WaitingForm

__all__ = ["native_waiting"]


def native_waiting(library: Library) -> WaitingForm:
    """The operations of a library; everything but the page table is contiguous."""
    keep = library.function("keep_rows", [POINTER, POINTER, INT, POINTER, INT, INT])
    take = library.function("take_rows", [POINTER, INT, INT, POINTER, INT, POINTER, INT, INT, INT, *(POINTER,) * 3])

    def keep_rows(taps_TAD: torch.Tensor, spans: KeptSpans, ring_BRW: torch.Tensor) -> None:
        _, num_ring_rows, width = ring_BRW.shape
        assert taps_TAD.is_contiguous() and taps_TAD.shape[1] * taps_TAD.shape[2] == width
        columns = array("q", chain(spans.slots, spans.begins, spans.starts, spans.counts))
        keep(
            taps_TAD.data_ptr(), columns.buffer_info()[0], len(spans.slots), ring_BRW.data_ptr(), num_ring_rows, width
        )  # fmt: skip

    def take_rows(
        ring_BRW: torch.Tensor,
        spans_3S: torch.Tensor,
        page_table_SP: torch.Tensor,
        page_size: int,
        taps_TW: torch.Tensor,
        positions_T: torch.Tensor,
        cache_rows_T: torch.Tensor,
    ) -> None:
        _, num_ring_rows, width = ring_BRW.shape
        assert ring_BRW.is_contiguous() and spans_3S.is_contiguous() and page_table_SP.stride(1) == 1
        assert taps_TW.is_contiguous() and taps_TW.shape == (positions_T.shape[0], width)
        take(
            ring_BRW.data_ptr(), num_ring_rows, width, spans_3S.data_ptr(), spans_3S.shape[1],
            page_table_SP.data_ptr(), page_table_SP.stride(0), page_size, positions_T.shape[0], taps_TW.data_ptr(),
            positions_T.data_ptr(), cache_rows_T.data_ptr(),
        )  # fmt: skip

    return WaitingForm(keep=keep_rows, take=take_rows)
