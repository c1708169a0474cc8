"""Block attention and context rows of a drafter, each in one call (``src/drafter.cpp``).

Dims as in ``outrider.ops.block_attention``.
"""

import torch

from outrider.ops.block_attention import BlockHeads
from outrider.ops.native.library import INT, POINTER, REAL, Library
from outrider.ops.paged import PagedKeys
from outrider.ops.rope import RotaryTable

__all__ = ["NativeDrafter"]


class NativeDrafter:
    """Native forms of ``attend_block`` and ``store_context_rows`` for bfloat16."""

    def __init__(self, library: Library) -> None:
        self._attend = library.function(
            "attend_block",
            [
                *(POINTER,) * 8,  # projections, gains, rotary table, context, key counts, page table
                *(INT,) * 7,  # page table's stride, page size, counts, width
                *(REAL, REAL),  # eps, scale
                *(INT,) * 3,  # mask
                *(POINTER, INT),  # result, threads
            ],
        )
        self._store = library.function("store_context", [*(POINTER,) * 6, INT, INT, INT, INT, REAL, INT, POINTER, INT])

    def attend_block(
        self,
        qkv_TOK: torch.Tensor,
        heads: BlockHeads,
        context_keys_RJK: torch.Tensor,
        context_values_RJK: torch.Tensor,
        keys: PagedKeys,
    ) -> torch.Tensor:
        """See ``attend_block`` of ``outrider.ops.block_attention``."""
        num_rows, _, width = qkv_TOK.shape
        mask, table_SP = heads.mask, keys.page_table_SP
        assert qkv_TOK.is_contiguous() and context_keys_RJK.is_contiguous() and context_values_RJK.is_contiguous()
        assert table_SP.stride(1) == 1 and keys.num_keys_S.is_contiguous()
        out_THK = qkv_TOK.new_empty(num_rows, heads.num_heads, width)
        self._attend(
            qkv_TOK.data_ptr(),
            heads.gains_PK.data_ptr(),
            heads.table.cos_PF.data_ptr(),
            heads.table.sin_PF.data_ptr(),
            context_keys_RJK.data_ptr(),
            context_values_RJK.data_ptr(),
            keys.num_keys_S.data_ptr(),
            table_SP.data_ptr(),
            table_SP.stride(0),
            keys.page_size,
            num_rows // heads.num_rows,
            heads.num_rows,
            heads.num_heads,
            context_keys_RJK.shape[1],
            width,
            heads.eps,
            heads.scale,
            mask.causal,
            mask.window or 0,
            mask.window_from_anchor,
            out_THK.data_ptr(),
            torch.get_num_threads(),
        )
        return out_THK

    def store_context_rows(
        self,
        kv_TL2JK: torch.Tensor,
        gains_LK: torch.Tensor,
        eps: float,
        table: RotaryTable,
        positions_T: torch.Tensor,
        cache_rows_T: torch.Tensor,
        rows_2LRJK: torch.Tensor,
    ) -> None:
        """See ``store_context_rows`` of ``outrider.ops.block_attention``."""
        num_rows, num_layers, _, num_kv_heads, width = kv_TL2JK.shape
        assert kv_TL2JK.is_contiguous() and rows_2LRJK.is_contiguous() and gains_LK.is_contiguous()
        assert positions_T.is_contiguous() and cache_rows_T.is_contiguous()
        self._store(
            kv_TL2JK.data_ptr(),
            gains_LK.data_ptr(),
            positions_T.data_ptr(),
            table.cos_PF.data_ptr(),
            table.sin_PF.data_ptr(),
            cache_rows_T.data_ptr(),
            num_rows,
            num_layers,
            num_kv_heads,
            width,
            eps,
            rows_2LRJK.shape[2],
            rows_2LRJK.data_ptr(),
            torch.get_num_threads(),
        )
