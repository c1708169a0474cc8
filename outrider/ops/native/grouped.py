"""Grouped-query attention and its cache rows, each in one call (``src/grouped.cpp``).

Dims as in ``outrider.ops.grouped_attention``.
"""

import torch

from outrider.ops.grouped_attention import GroupedHeads
from outrider.ops.native.library import INT, POINTER, REAL, Library
from outrider.ops.paged import PagedSpans

__all__ = ["NativeGrouped"]


class NativeGrouped:
    """Native forms of ``append_keys`` and ``grouped_attention`` for bfloat16; the head width must be even."""

    def __init__(self, library: Library) -> None:
        self._attend = library.function(
            "grouped_attention",
            [
                *(POINTER,) * 6,  # queries, cache, spans, page table
                *(INT,) * 7,  # page table's stride, page size, counts, width
                *(REAL, POINTER, INT),  # scale, result, threads
            ],
        )
        self._append = library.function(
            "append_keys",
            [
                *(POINTER, INT),  # projections and their stride
                *(POINTER,) * 5,  # gains, rotary table, positions, slots
                *(INT,) * 4,  # counts, width
                *(REAL, POINTER, POINTER, INT),  # eps, cache, queries, threads
            ],
        )

    def append(
        self,
        qkv_TO: torch.Tensor,
        heads: GroupedHeads,
        positions_T: torch.Tensor,
        rows_RC: torch.Tensor,
        slots_T: torch.Tensor,
    ) -> torch.Tensor:
        """See ``append_keys``; projections may be a view whose last dim is dense."""
        num_rows = qkv_TO.shape[0]
        assert qkv_TO.dtype == rows_RC.dtype == torch.bfloat16 and qkv_TO.stride(1) == 1 and rows_RC.is_contiguous()
        assert positions_T.is_contiguous() and slots_T.is_contiguous()
        q_THK = qkv_TO.new_empty(num_rows, heads.num_heads, heads.head_dim)
        self._append(
            qkv_TO.data_ptr(),
            qkv_TO.stride(0),
            None if heads.gains_PK is None else heads.gains_PK.data_ptr(),
            heads.table.cos_PF.data_ptr(),
            heads.table.sin_PF.data_ptr(),
            positions_T.data_ptr(),
            slots_T.data_ptr(),
            num_rows,
            heads.num_heads,
            heads.num_kv_heads,
            heads.head_dim,
            heads.eps,
            rows_RC.data_ptr(),
            q_THK.data_ptr(),
            torch.get_num_threads(),
        )
        return q_THK

    def attend(
        self, q_THK: torch.Tensor, rows_RC: torch.Tensor, heads: GroupedHeads, spans: PagedSpans
    ) -> torch.Tensor:
        """See ``grouped_attention``."""
        layout, keys = spans.layout, spans.keys
        table_SP = keys.page_table_SP
        assert q_THK.dtype == rows_RC.dtype == torch.bfloat16 and q_THK.is_contiguous() and rows_RC.is_contiguous()
        assert table_SP.stride(1) == 1 and spans.limits_SM.is_contiguous()
        assert layout.padded_rows_SM.is_contiguous() and layout.valid_SM.is_contiguous()
        out_THK = q_THK.new_empty(q_THK.shape)
        self._attend(
            q_THK.data_ptr(),
            rows_RC.data_ptr(),
            layout.padded_rows_SM.data_ptr(),
            layout.valid_SM.data_ptr(),
            spans.limits_SM.data_ptr(),
            table_SP.data_ptr(),
            table_SP.stride(0),
            keys.page_size,
            layout.num_sequences,
            layout.max_length,
            heads.num_heads,
            heads.num_kv_heads,
            heads.head_dim,
            heads.scale,
            out_THK.data_ptr(),
            torch.get_num_threads(),
        )
        return out_THK
