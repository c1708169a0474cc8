"""Latent attention of decode and verify rows in one call, straight from the pages (``src/mla.cpp``).

Dims as in ``outrider.ops.attention``.
"""

from dataclasses import replace

import torch

from outrider.ops.attention import AbsorbedPanels, AbsorbedWeights, absorb_weights
from outrider.ops.native.arena import Arena
from outrider.ops.native.library import INT, POINTER, REAL, Library
from outrider.ops.native.panels import pack_panels
from outrider.ops.paged import PagedSpans

__all__ = ["NativeMla", "absorb_into_panels"]


def absorb_into_panels(
    kv_b_weight_OC: torch.Tensor, *, num_heads: int, nope_dim: int, value_dim: int, arena: Arena | None = None
) -> AbsorbedWeights:
    """As ``absorb_weights``, and the same halves packed for ``NativeMla.absorbed``, in ``arena`` if there is one."""
    weights = absorb_weights(kv_b_weight_OC, num_heads=num_heads, nope_dim=nope_dim, value_dim=value_dim)
    uk, uv = (pack_panels(half.to(torch.bfloat16)) for half in (weights.w_uk_HNC, weights.w_uv_HCW))
    if arena is not None:
        uk, uv = (arena.empty(half.shape, half.dtype).copy_(half) for half in (uk, uv))
    panels = AbsorbedPanels(uk=uk, uv=uv)
    return replace(weights, panels=panels)


class NativeMla:
    """Native forms of ``mla_absorbed`` and ``append_latents`` for bfloat16; widths N, C and r must be even."""

    def __init__(self, library: Library) -> None:
        self._absorbed = library.function(
            "mla_absorbed",
            [
                *(POINTER, INT, INT) * 2,  # queries: rows, their stride, that of a head
                *(POINTER,) * 3,  # weights, cache
                *(POINTER,) * 4,  # spans, page table
                *(INT,) * 10,  # page table's stride, page size, counts, widths
                *(REAL, POINTER, INT, POINTER, INT),  # scale, gate and stride, result, threads
            ],
        )
        self._append = library.function(
            "append_latents", [POINTER, INT, POINTER, INT, INT, INT, REAL, POINTER, POINTER]
        )

    def absorbed(
        self,
        q_nope_THN: torch.Tensor,
        q_rope_THR: torch.Tensor,
        weights: AbsorbedWeights,
        rows_RC: torch.Tensor,
        spans: PagedSpans,
        *,
        scale: float,
        gate_THW: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See ``mla_absorbed``; queries may be views whose last dim is dense, and so may the gate be per row."""
        panels, layout, keys = weights.panels, spans.layout, spans.keys
        assert panels is not None, "weights for the native form come from absorb_into_panels"
        num_rows, num_heads, nope_dim = q_nope_THN.shape
        _, latent_dim, value_dim = weights.w_uv_HCW.shape
        out_THW = q_nope_THN.new_empty(num_rows, num_heads, value_dim)
        table_SP = keys.page_table_SP
        assert q_nope_THN.stride(2) == q_rope_THR.stride(2) == table_SP.stride(1) == 1 and rows_RC.is_contiguous()
        assert gate_THW is None or gate_THW.stride()[1:] == (value_dim, 1)
        assert spans.limits_SM.is_contiguous() and layout.padded_rows_SM.is_contiguous()
        self._absorbed(
            q_nope_THN.data_ptr(),
            *q_nope_THN.stride()[:2],
            q_rope_THR.data_ptr(),
            *q_rope_THR.stride()[:2],
            panels.uk.data_ptr(),
            panels.uv.data_ptr(),
            rows_RC.data_ptr(),
            layout.padded_rows_SM.data_ptr(),
            layout.valid_SM.data_ptr(),
            spans.limits_SM.data_ptr(),
            table_SP.data_ptr(),
            table_SP.stride(0),
            keys.page_size,
            layout.num_sequences,
            layout.max_length,
            num_rows,
            num_heads,
            nope_dim,
            q_rope_THR.shape[2],
            latent_dim,
            value_dim,
            scale,
            None if gate_THW is None else gate_THW.data_ptr(),
            0 if gate_THW is None else gate_THW.stride(0),
            out_THW.data_ptr(),
            torch.get_num_threads(),
        )
        return out_THW

    def append_latents(
        self, row_TC: torch.Tensor, weight_C: torch.Tensor, eps: float, rows_RC: torch.Tensor, slots_T: torch.Tensor
    ) -> None:
        """See ``append_latents`` of ``outrider.ops.attention``; rows may be a view whose last dim is dense."""
        num_rows, width = row_TC.shape
        latent_dim = weight_C.shape[0]
        assert row_TC.stride(1) == slots_T.stride(0) == 1 and rows_RC.is_contiguous()
        self._append(
            row_TC.data_ptr(),
            row_TC.stride(0),
            weight_C.data_ptr(),
            num_rows,
            latent_dim,
            width - latent_dim,
            eps,
            slots_T.data_ptr(),
            rows_RC.data_ptr(),
        )
