"""Multi-head latent attention over paged latent rows ``[c | r]``, without rotary (NoPE).

Decode and verify rows use the absorbed form, prompt rows the expanded form or, where the native one runs, the
absorbed form too; which one depends on the kind of row and on what was found at load, never on the batch.

Dims: T rows, S sequences, M rows of the longest span, H heads, N nope key width, r shared key width,
C latent width, W value width, R rows of the flat cache, Q query rows of one matrix, Y tiles.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from outrider.ops.activation import sigmoid_gate
from outrider.ops.invariant import ROW_TILE, island_dtype, pad_rows, tile_bmm
from outrider.ops.linear import linear
from outrider.ops.norm import rms_norm
from outrider.ops.paged import KEY_TILE, PagedSpans
from outrider.ops.spans import to_flat, to_padded
from outrider.ops.tiled import attend_panels, combine_partials, tiles_per_panel


@dataclass(frozen=True, slots=True, kw_only=True)
class AbsorbedPanels:
    """The two halves of kv_b_proj per head in bfloat16, packed for the native form (``ops/native/panels.py``)."""

    uk: torch.Tensor
    uv: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class AbsorbedWeights:
    """The two halves of kv_b_proj per head, island dtype, laid out for the absorbed form."""

    w_uk_HNC: torch.Tensor
    w_uv_HCW: torch.Tensor
    panels: AbsorbedPanels | None = None  # where the native form runs


BatchedProduct = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class AbsorbedFunction(Protocol):
    """A form of ``mla_absorbed``."""

    def __call__(
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
        """See ``mla_absorbed``."""
        ...


class ExpandedFunction(Protocol):
    """A form of ``mla_expanded``."""

    def __call__(
        self,
        q_nope_THN: torch.Tensor,
        q_rope_THR: torch.Tensor,
        kv_b_weight_OC: torch.Tensor,
        rows_RC: torch.Tensor,
        spans: PagedSpans,
        *,
        scale: float,
        gate_THW: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See ``mla_expanded``."""
        ...


class AbsorbFunction(Protocol):
    """A form of ``absorb_weights``."""

    def __call__(
        self, kv_b_weight_OC: torch.Tensor, *, num_heads: int, nope_dim: int, value_dim: int
    ) -> AbsorbedWeights:
        """See ``absorb_weights``."""
        ...


class AppendFunction(Protocol):
    """A form of ``append_latents``."""

    def __call__(
        self, row_TC: torch.Tensor, weight_C: torch.Tensor, eps: float, rows_RC: torch.Tensor, slots_T: torch.Tensor
    ) -> None:
        """See ``append_latents``."""
        ...


def append_latents(
    row_TC: torch.Tensor, weight_C: torch.Tensor, eps: float, rows_RC: torch.Tensor, slots_T: torch.Tensor
) -> None:
    """Norm the latent part of new rows and store them in the cache. Source: k3-architecture section 6.1.

    Args:
        row_TC: ``[T, C + r]``, latent before its norm, then shared key; a view with a row stride is fine.
        weight_C: gain of the latent norm.
        eps: of the latent norm.
        rows_RC: flat cache of the layer, written in place.
        slots_T: int64 cache row of each new row, all different.
    """
    latent_TC, shared_Tr = row_TC.split([weight_C.shape[0], row_TC.shape[1] - weight_C.shape[0]], dim=-1)
    rows_RC.index_copy_(0, slots_T, torch.cat([rms_norm(latent_TC, weight_C, eps), shared_Tr], dim=-1))


def absorb_weights(kv_b_weight_OC: torch.Tensor, *, num_heads: int, nope_dim: int, value_dim: int) -> AbsorbedWeights:
    """Split kv_b_proj (rows of head h: N keys, then W values). Once, at load."""
    per_head = kv_b_weight_OC.to(island_dtype(kv_b_weight_OC.dtype)).view(num_heads, nope_dim + value_dim, -1)
    return AbsorbedWeights(
        w_uk_HNC=per_head[:, :nope_dim].contiguous(),
        w_uv_HCW=per_head[:, nope_dim:].transpose(1, 2).contiguous(),
    )


def mla_absorbed(
    q_nope_THN: torch.Tensor,
    q_rope_THR: torch.Tensor,
    weights: AbsorbedWeights,
    rows_RC: torch.Tensor,
    spans: PagedSpans,
    *,
    scale: float,
    gate_THW: torch.Tensor | None = None,
    row_tile: int = ROW_TILE,
) -> torch.Tensor:
    """Attention with queries moved into the latent space. Source: k3-architecture section 6.2.

    All heads and rows of a sequence share one read of its keys.

    Args:
        q_nope_THN: compute dtype.
        q_rope_THR: compute dtype; ordinary content dims on K3.
        weights: from ``absorb_weights``.
        rows_RC: flat cache of the layer, ``[R, C + r]``; the rows of this step are already written.
        spans: from ``paged_spans``.
        scale: softmax scale, ``(N + r) ** -0.5``.
        gate_THW: output gate before its sigmoid; None where the model has none.
        row_tile: query rows of a product are padded to a multiple of it; part of the geometry.

    Returns:
        ``[T, H, W]`` in the dtype of the queries.
    """
    island = weights.w_uk_HNC.dtype
    num_heads, _, latent_width = weights.w_uk_HNC.shape
    product = partial(tile_bmm, row_tile=row_tile)
    layout, num_sequences = spans.layout, spans.layout.num_sequences
    q_SQK = pad_rows(_latent_queries(q_nope_THN, q_rope_THR, weights, spans, scale=scale, product=product), row_tile)
    limits_SQ = _row_limits(spans, num_heads, q_SQK.shape[1])

    def load(first: int, last: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        rows_SYNK = _gather_tiles(rows_RC, spans, first, last).to(island)
        return rows_SYNK, rows_SYNK[..., :latent_width], _visible(limits_SQ, first, last)

    panel = tiles_per_panel(num_sequences * max(q_SQK.shape[1], KEY_TILE) * q_SQK.shape[2])
    latent_SQC = combine_partials(attend_panels(q_SQK, spans.keys.num_tiles, panel, load))
    used = layout.max_length * num_heads
    out_THW = _values(latent_SQC[:, :used], weights, spans, product=product).to(q_nope_THN.dtype)
    return _gated(out_THW, gate_THW)


def mla_absorbed_plain(
    q_nope_THN: torch.Tensor,
    q_rope_THR: torch.Tensor,
    weights: AbsorbedWeights,
    rows_RC: torch.Tensor,
    spans: PagedSpans,
    *,
    scale: float,
    gate_THW: torch.Tensor | None = None,
) -> torch.Tensor:
    """As ``mla_absorbed`` in one softmax over all keys, without tiles: bits depend on the batch."""
    island = weights.w_uk_HNC.dtype
    num_heads, _, latent_width = weights.w_uk_HNC.shape
    q_SQK = _latent_queries(q_nope_THN, q_rope_THR, weights, spans, scale=scale, product=torch.bmm)
    key_rows_SN = spans.keys.key_rows_SK
    rows_SNK = rows_RC.index_select(0, key_rows_SN.reshape(-1)).view(*key_rows_SN.shape, -1).to(island)
    limits_SQ1 = _row_limits(spans, num_heads, q_SQK.shape[1])[..., None]
    visible_SQN = torch.arange(key_rows_SN.shape[1], device=q_SQK.device) < limits_SQ1
    scores_SQN = torch.where(visible_SQN, torch.bmm(q_SQK, rows_SNK.transpose(1, 2)), float("-inf"))
    # As in the tiles: a hidden key may be NaN all through, and 0 * NaN is NaN.
    latents_SNC = rows_SNK[..., :latent_width].nan_to_num(0.0, 0.0, 0.0)
    latent_SQC = torch.bmm(torch.softmax(scores_SQN, dim=-1), latents_SNC)
    out_THW = _values(latent_SQC, weights, spans, product=torch.bmm).to(q_nope_THN.dtype)
    return _gated(out_THW, gate_THW)


def _gated(out_THW: torch.Tensor, gate_THW: torch.Tensor | None) -> torch.Tensor:
    """Gated per value; as one run of values per row, which is what the gate's geometry rests on."""
    if gate_THW is None:
        return out_THW
    return sigmoid_gate(out_THW.flatten(1), gate_THW.flatten(1)).view(out_THW.shape)


def _latent_queries(
    q_nope_THN: torch.Tensor,
    q_rope_THR: torch.Tensor,
    weights: AbsorbedWeights,
    spans: PagedSpans,
    *,
    scale: float,
    product: BatchedProduct,
) -> torch.Tensor:
    """Scaled queries in the latent space, all rows and heads of a sequence in one dim: ``[S, Q, C + r]``."""
    island = weights.w_uk_HNC.dtype
    q_latent_HTC = product(q_nope_THN.to(island).transpose(0, 1), weights.w_uk_HNC)
    q_THK = torch.cat([q_latent_HTC.transpose(0, 1), q_rope_THR.to(island)], dim=-1) * scale
    return to_padded(q_THK, spans.layout).reshape(spans.layout.num_sequences, -1, q_THK.shape[-1])


def _values(
    latent_SQC: torch.Tensor, weights: AbsorbedWeights, spans: PagedSpans, *, product: BatchedProduct
) -> torch.Tensor:
    """Attended latents, rows as in ``_latent_queries``, moved to the values of each head: ``[T, H, W]``."""
    layout, (num_heads, latent_width, _) = spans.layout, weights.w_uv_HCW.shape
    latent_SMHC = latent_SQC.reshape(layout.num_sequences, layout.max_length, num_heads, latent_width)
    return product(to_flat(latent_SMHC, layout).transpose(0, 1), weights.w_uv_HCW).transpose(0, 1)


def mla_expanded(
    q_nope_THN: torch.Tensor,
    q_rope_THR: torch.Tensor,
    kv_b_weight_OC: torch.Tensor,
    rows_RC: torch.Tensor,
    spans: PagedSpans,
    *,
    scale: float,
    gate_THW: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention with latents expanded to keys and values per head. Source: k3-architecture section 6.1.

    Arguments and result as for ``mla_absorbed``, with the weight of kv_b_proj in the compute dtype.
    """
    island = island_dtype(q_nope_THN.dtype)
    num_heads, nope_width = q_nope_THN.shape[1:]
    latent_width = kv_b_weight_OC.shape[1]
    layout, num_sequences = spans.layout, spans.layout.num_sequences
    q_THK = torch.cat([q_nope_THN, q_rope_THR], dim=-1).to(island) * scale
    q_BQK = pad_rows(to_padded(q_THK, layout).transpose(1, 2).flatten(0, 1))
    limits_BQ = _row_limits(spans, 1, q_BQK.shape[1]).repeat_interleave(num_heads, dim=0)

    def load(first: int, last: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        rows_SYNK = _gather_tiles(rows_RC, spans, first, last)
        expanded = linear(rows_SYNK[..., :latent_width].contiguous(), kv_b_weight_OC)
        expanded_SYNHO = expanded.view(*rows_SYNK.shape[:3], num_heads, -1)
        shared_SYNHr = rows_SYNK[..., None, latent_width:].expand(-1, -1, -1, num_heads, -1)
        keys = torch.cat([expanded_SYNHO[..., :nope_width], shared_SYNHr], dim=-1)
        return (
            _per_head(keys, island),
            _per_head(expanded_SYNHO[..., nope_width:], island),
            _visible(limits_BQ, first, last),
        )

    panel = tiles_per_panel(q_BQK.shape[0] * max(q_BQK.shape[1], KEY_TILE) * q_BQK.shape[2])
    out_BQW = combine_partials(attend_panels(q_BQK, spans.keys.num_tiles, panel, load))
    out_SHMW = out_BQW[:, : layout.max_length].reshape(num_sequences, num_heads, layout.max_length, -1)
    return _gated(to_flat(out_SHMW.transpose(1, 2), layout).to(q_nope_THN.dtype), gate_THW)


def _per_head(x_SYNHK: torch.Tensor, island: torch.dtype) -> torch.Tensor:
    """``[S, Y, N, H, K] -> [S * H, Y, N, K]`` in the island dtype."""
    return x_SYNHK.permute(0, 3, 1, 2, 4).to(island).flatten(0, 1)


def _row_limits(spans: PagedSpans, repeats: int, num_rows: int) -> torch.Tensor:
    """Visible keys of each query row ``[S, Q]``; padding rows see one key, so that they stay finite."""
    limits_SQ = spans.limits_SM.repeat_interleave(repeats, dim=1) if repeats > 1 else spans.limits_SM
    missing = num_rows - limits_SQ.shape[1]
    return torch.nn.functional.pad(limits_SQ, (0, missing), value=1) if missing else limits_SQ


def _visible(limits_BQ: torch.Tensor, first: int, last: int) -> torch.Tensor:
    """Causal mask ``[B, Y, Q, N]`` of a run of tiles."""
    position_YN = torch.arange(first * KEY_TILE, last * KEY_TILE, device=limits_BQ.device).view(-1, KEY_TILE)
    return position_YN[None, :, None, :] < limits_BQ[:, None, :, None]


def _gather_tiles(rows_RC: torch.Tensor, spans: PagedSpans, first: int, last: int) -> torch.Tensor:
    """Cache rows of a run of tiles, ``[S, Y, N, C + r]``; each sequence's keys are read once."""
    index_SN = spans.keys.key_rows_SK[:, first * KEY_TILE : last * KEY_TILE]
    rows = rows_RC.index_select(0, index_SN.reshape(-1))
    return rows.view(index_SN.shape[0], last - first, KEY_TILE, rows_RC.shape[1])


def mla_reference(
    q_nope_THN: torch.Tensor,
    q_rope_THR: torch.Tensor,
    kv_b_weight_OC: torch.Tensor,
    rows_RC: torch.Tensor,
    spans: PagedSpans,
    *,
    scale: float,
) -> torch.Tensor:
    """Plain softmax attention, one row at a time; arguments as for ``mla_expanded``."""
    island = island_dtype(q_nope_THN.dtype)
    _, num_heads, nope_width = q_nope_THN.shape
    latent_width = kv_b_weight_OC.shape[1]
    outputs, row = [], 0
    for sequence, length in enumerate(spans.layout.lengths):
        for m in range(length):
            limit = int(spans.limits_SM[sequence, m])
            rows_NC = rows_RC[spans.keys.key_rows_SK[sequence, :limit]].to(island)
            expanded = (rows_NC[:, :latent_width] @ kv_b_weight_OC.to(island).T).view(limit, num_heads, -1)
            nope = torch.einsum("hk,nhk->hn", q_nope_THN[row].to(island), expanded[..., :nope_width])
            shared = torch.einsum("hk,nk->hn", q_rope_THR[row].to(island), rows_NC[:, latent_width:])
            weights_HN = torch.softmax((nope + shared) * scale, dim=-1)
            outputs.append(torch.einsum("hn,nhw->hw", weights_HN, expanded[..., nope_width:]))
            row += 1
    return torch.stack(outputs).to(q_nope_THN.dtype)


__all__ = [
    "AbsorbFunction",
    "AbsorbedFunction",
    "AbsorbedPanels",
    "AbsorbedWeights",
    "AppendFunction",
    "ExpandedFunction",
    "absorb_weights",
    "append_latents",
    "mla_absorbed",
    "mla_absorbed_plain",
    "mla_expanded",
    "mla_reference",
]
