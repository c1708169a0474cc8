"""Attention of a drafter's block: context keys from a paged cache, then the block's own keys.

Dims: S sequences, G block rows, H query heads, J key-value heads, K head width, R rows of the flat cache,
B = S * J matrices, Q query rows of one matrix (G x heads per group, padded), Y tiles, N keys of a tile,
T flat rows, O = H + 2 J heads of a joined projection, P = H + J of them that are normed, L layers.
"""

from dataclasses import dataclass
from typing import Protocol

import torch

from outrider.ops.invariant import island_dtype, pad_rows
from outrider.ops.norm import rms_norm
from outrider.ops.paged import KEY_TILE, PagedKeys
from outrider.ops.rope import RotaryTable, apply_half
from outrider.ops.tiled import attend_panels, combine_partials, tiles_per_panel

__all__ = [
    "AttendBlockFunction",
    "BlockHeads",
    "BlockMask",
    "StoreContextFunction",
    "attend_block",
    "block_attention",
    "block_attention_reference",
    "store_context_rows",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockMask:
    """What a block row sees besides all committed context. The default is everything."""

    causal: bool = False  # inside the block, a row sees itself and earlier rows only
    window: int | None = None  # a key is visible iff query position - key position < window
    window_from_anchor: bool = False  # instead: context keys from anchor - window on, and the whole block


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockHeads:
    """What a layer does to the heads of a block, the same in every round."""

    num_heads: int  # of queries
    num_rows: int  # of one block
    gains_PK: torch.Tensor  # norm gains of every query head, then of every key head
    eps: float
    table: RotaryTable
    mask: BlockMask
    scale: float  # softmax scale


class AttendBlockFunction(Protocol):
    """A form of ``attend_block``."""

    def __call__(
        self,
        qkv_TOK: torch.Tensor,
        heads: BlockHeads,
        context_keys_RJK: torch.Tensor,
        context_values_RJK: torch.Tensor,
        keys: PagedKeys,
    ) -> torch.Tensor:
        """See ``attend_block``."""
        ...


class StoreContextFunction(Protocol):
    """A form of ``store_context_rows``."""

    def __call__(
        self,
        kv_TL2JK: torch.Tensor,
        gains_LK: torch.Tensor,
        eps: float,
        table: RotaryTable,
        positions_T: torch.Tensor,
        cache_rows_T: torch.Tensor,
        rows_2LRJK: torch.Tensor,
    ) -> None:
        """See ``store_context_rows``."""
        ...


def attend_block(
    qkv_TOK: torch.Tensor,
    heads: BlockHeads,
    context_keys_RJK: torch.Tensor,
    context_values_RJK: torch.Tensor,
    keys: PagedKeys,
) -> torch.Tensor:
    """Norm and rotate the heads of all block rows, then ``block_attention``.

    Row g of a block is at position ``keys.num_keys_S + g``. Source: dspark section 1.3.

    Args:
        qkv_TOK: projections of all rows of all blocks: queries, then keys, then values.
        heads: constants of the layer.
        context_keys_RJK: see ``block_attention``.
        context_values_RJK: see ``block_attention``.
        keys: see ``block_attention``.

    Returns:
        ``[T, H, K]`` in the dtype of the projections.
    """
    positions_T = (keys.num_keys_S[:, None] + torch.arange(heads.num_rows, device=qkv_TOK.device)).flatten()
    num_heads, num_normed = heads.num_heads, heads.gains_PK.shape[0]
    qk_TPK = apply_half(rms_norm(qkv_TOK[:, :num_normed], heads.gains_PK, heads.eps), heads.table, positions_T)
    qk_SGPK = qk_TPK.view(-1, heads.num_rows, *qk_TPK.shape[1:])
    qkv_SGOK = qkv_TOK.view(-1, heads.num_rows, *qkv_TOK.shape[1:])
    attended_SGHK = block_attention(
        qk_SGPK[:, :, :num_heads],
        context_keys_RJK,
        context_values_RJK,
        qk_SGPK[:, :, num_heads:],
        qkv_SGOK[:, :, num_normed:],
        keys,
        heads.mask,
        scale=heads.scale,
    )
    return attended_SGHK.flatten(0, 1)


def store_context_rows(
    kv_TL2JK: torch.Tensor,
    gains_LK: torch.Tensor,
    eps: float,
    table: RotaryTable,
    positions_T: torch.Tensor,
    cache_rows_T: torch.Tensor,
    rows_2LRJK: torch.Tensor,
) -> None:
    """Norm and rotate the keys of context rows; store keys and values of all layers.

    Args:
        kv_TL2JK: projected keys and values of every layer.
        gains_LK: gain of each layer's key norm.
        eps: of the norm.
        table: rotary table.
        positions_T: int64, absolute position of each row.
        cache_rows_T: int64, flat cache row of each, all different.
        rows_2LRJK: the cache, written in place.
    """
    keys_TLJK = rms_norm(kv_TL2JK[:, :, 0], gains_LK[:, None], eps)
    rotated_TNK = apply_half(keys_TLJK.flatten(1, 2), table, positions_T)
    rows_2LRJK[0].index_copy_(1, cache_rows_T, rotated_TNK.view_as(keys_TLJK).transpose(0, 1))
    rows_2LRJK[1].index_copy_(1, cache_rows_T, kv_TL2JK[:, :, 1].transpose(0, 1))


def block_attention(
    q_SGHK: torch.Tensor,
    context_keys_RJK: torch.Tensor,
    context_values_RJK: torch.Tensor,
    block_keys_SGJK: torch.Tensor,
    block_values_SGJK: torch.Tensor,
    keys: PagedKeys,
    mask: BlockMask,
    *,
    scale: float,
) -> torch.Tensor:
    """Grouped-query attention of every block row. Source: dspark section 1.3.

    Args:
        q_SGHK: queries, compute dtype; row g sits at absolute position ``keys.num_keys_S + g``.
        context_keys_RJK: flat paged cache of the layer; unused rows may hold anything.
        context_values_RJK: likewise.
        block_keys_SGJK: the block's own keys; G at most 64.
        block_values_SGJK: likewise.
        keys: from ``paged_keys``; ``num_keys`` may be 0.
        mask: in-block causality and window.
        scale: softmax scale.

    Returns:
        ``[S, G, H, K]`` in the dtype of the queries.
    """
    num_sequences, num_rows, num_heads, width = q_SGHK.shape
    num_kv_heads = block_keys_SGJK.shape[2]
    assert num_rows <= KEY_TILE, f"a block of {num_rows} rows exceeds the key tile of {KEY_TILE}"
    island = island_dtype(q_SGHK.dtype)
    group = num_heads // num_kv_heads
    q_SGJXK = q_SGHK.to(island).view(num_sequences, num_rows, num_kv_heads, group, width)
    q_BQK = pad_rows(q_SGJXK.permute(0, 2, 1, 3, 4).reshape(num_sequences * num_kv_heads, -1, width) * scale)
    num_keys_B = keys.num_keys_S.repeat_interleave(num_kv_heads)
    block_visible_1QN = _block_visible(q_BQK.shape[1], group, num_rows, mask, q_BQK.device)

    def load(first: int, last: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Key tiles first..last; tile number ``keys.num_tiles`` is the block's own."""
        context_end = min(last, keys.num_tiles)
        size = (2, num_sequences, num_kv_heads, last - first, KEY_TILE, width)
        tiles_2SJYNK = torch.zeros(size, dtype=island, device=q_BQK.device)
        visible = []
        if first < context_end:
            index_N = keys.key_rows_SK[:, first * KEY_TILE : context_end * KEY_TILE].reshape(-1)
            shape = (num_sequences, context_end - first, KEY_TILE, num_kv_heads, width)
            for side, cache_RJK in enumerate((context_keys_RJK, context_values_RJK)):
                rows_SYNJK = cache_RJK.index_select(0, index_N).view(shape)
                tiles_2SJYNK[side, :, :, : context_end - first] = rows_SYNJK.permute(0, 3, 1, 2, 4)
            visible.append(_context_visible(num_keys_B, first, context_end, q_BQK.shape[1], group, mask))
        if last > keys.num_tiles:
            for side, block_SGJK in enumerate((block_keys_SGJK, block_values_SGJK)):
                tiles_2SJYNK[side, :, :, -1, :num_rows] = block_SGJK.transpose(1, 2)
            visible.append(block_visible_1QN.expand(q_BQK.shape[0], 1, -1, -1))
        keys_BYNK, values_BYNK = tiles_2SJYNK.flatten(1, 2).unbind(0)
        return keys_BYNK, values_BYNK, visible[0] if len(visible) == 1 else torch.cat(visible, dim=1)

    panel = tiles_per_panel(q_BQK.shape[0] * max(q_BQK.shape[1], KEY_TILE) * width)
    partials = attend_panels(q_BQK, keys.num_tiles + 1, panel, load)
    out_BQK = combine_partials(partials)[:, : num_rows * group]
    out_SJGXK = out_BQK.reshape(num_sequences, num_kv_heads, num_rows, group, width)
    return out_SJGXK.permute(0, 2, 1, 3, 4).reshape(q_SGHK.shape).to(q_SGHK.dtype)


def _context_visible(
    num_keys_B: torch.Tensor, first: int, last: int, num_queries: int, group: int, mask: BlockMask
) -> torch.Tensor:
    """Mask ``[B, Y, Q or 1, N]`` of context tiles first..last; one query row without window and causality."""
    position_YN = torch.arange(first * KEY_TILE, last * KEY_TILE, device=num_keys_B.device).view(-1, KEY_TILE)
    visible_BY1N = (position_YN < num_keys_B[:, None, None])[:, :, None]
    if mask.window is None:
        return visible_BY1N.expand(-1, -1, num_queries, -1) if mask.causal else visible_BY1N
    row_Q = torch.arange(num_queries, device=num_keys_B.device) // group  # block row of each query row
    origin_Q1 = torch.full_like(row_Q, -1)[:, None] if mask.window_from_anchor else row_Q[:, None]
    distance = num_keys_B[:, None, None, None] + origin_Q1 - position_YN[:, None, :]
    return visible_BY1N & (distance < mask.window)


def _block_visible(num_queries: int, group: int, num_rows: int, mask: BlockMask, device: torch.device) -> torch.Tensor:
    """Mask ``[1, Q or 1, N]`` inside the block, Q as in ``_context_visible``. Padding rows see what row 0 sees."""
    key_N = torch.arange(KEY_TILE, device=device)
    visible_QN = (key_N < num_rows)[None]
    if mask.causal or mask.window is not None:
        row_Q = torch.arange(num_queries, device=device) // group
        query_Q1 = torch.where(row_Q < num_rows, row_Q, 0)[:, None]
        visible_QN = visible_QN.expand(num_queries, -1)
        if mask.causal:
            visible_QN = visible_QN & (key_N <= query_Q1)
        if mask.window is not None and not mask.window_from_anchor:
            visible_QN = visible_QN & (query_Q1 - key_N < mask.window)
    return visible_QN[None]


def block_attention_reference(
    q_SGHK: torch.Tensor,
    context_keys_RJK: torch.Tensor,
    context_values_RJK: torch.Tensor,
    block_keys_SGJK: torch.Tensor,
    block_values_SGJK: torch.Tensor,
    keys: PagedKeys,
    mask: BlockMask,
    *,
    scale: float,
) -> torch.Tensor:
    """Plain softmax attention, one sequence and one row at a time; arguments as above."""
    island = island_dtype(q_SGHK.dtype)
    num_sequences, num_rows, num_heads, _ = q_SGHK.shape
    group = num_heads // block_keys_SGJK.shape[2]
    out = torch.empty(q_SGHK.shape, dtype=island)
    for s in range(num_sequences):
        count = int(keys.num_keys_S[s])
        context = keys.key_rows_SK[s, :count]
        k_NHK = torch.cat([context_keys_RJK[context], block_keys_SGJK[s]]).to(island).repeat_interleave(group, 1)
        v_NHK = torch.cat([context_values_RJK[context], block_values_SGJK[s]]).to(island).repeat_interleave(group, 1)
        position_N = torch.arange(count + num_rows)
        for g in range(num_rows):
            visible_N = position_N < count + (g + 1 if mask.causal else num_rows)
            if mask.window is not None:
                origin = count - 1 if mask.window_from_anchor else count + g
                visible_N &= origin - position_N < mask.window
            scores_HN = torch.einsum("hk,nhk->hn", q_SGHK[s, g].to(island), k_NHK[visible_N]) * scale
            out[s, g] = torch.einsum("hn,nhk->hk", torch.softmax(scores_HN, dim=-1), v_NHK[visible_N])
    return out.to(q_SGHK.dtype)
