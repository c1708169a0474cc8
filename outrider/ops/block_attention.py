"""Attention of a drafter's block: context keys from a paged cache, then the block's own keys.

Dims: S sequences, G block rows, H query heads, J key-value heads, K head width, R rows of the flat cache,
B = S * J matrices, Q query rows of one matrix (G x heads per group, padded), Y tiles, N keys of a tile.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from outrider.ops.invariant import island_dtype, pad_rows
from outrider.ops.paged import KEY_TILE, PagedKeys
from outrider.ops.tiled import attend_panels, combine_partials, tile_partials, tiles_per_panel

__all__ = ["BlockMask", "block_attention", "block_attention_reference"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockMask:
    """What a block row sees besides all committed context. The default is everything."""

    causal: bool = False  # inside the block, a row sees itself and earlier rows only
    window: int | None = None  # a key is visible iff query position - key position < window
    window_from_anchor: bool = False  # instead: context keys from anchor - window on, and the whole block


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
    row_Q = torch.arange(q_BQK.shape[1], device=q_SGHK.device) // group  # block row of each query row
    num_keys_B = keys.num_keys_S.repeat_interleave(num_kv_heads)

    def load(first: int, last: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        position_YN = torch.arange(first * KEY_TILE, last * KEY_TILE, device=row_Q.device).view(-1, KEY_TILE)
        exists = position_YN < num_keys_B[:, None, None]
        visible_BYQN = exists[:, :, None]
        if mask.window is not None:
            origin = row_Q.new_full((1, 1), -1) if mask.window_from_anchor else row_Q[:, None]
            distance = num_keys_B[:, None, None, None] + origin - position_YN[:, None, :]
            visible_BYQN = visible_BYQN & (distance < mask.window)
        context_K = _context_tiles(context_keys_RJK, keys, first, last, island)
        context_V = _context_tiles(context_values_RJK, keys, first, last, island)
        return context_K, context_V, visible_BYQN

    panel = tiles_per_panel(q_BQK.shape[0] * max(q_BQK.shape[1], KEY_TILE) * width)
    partials = attend_panels(q_BQK, keys.num_tiles, panel, load)
    block_K, block_V = (_block_tile(x, island) for x in (block_keys_SGJK, block_values_SGJK))
    partials.append(tile_partials(q_BQK, block_K, block_V, _block_visible(row_Q, num_rows, mask)))
    out_BQK = combine_partials(partials)[:, : num_rows * group]
    out_SJGXK = out_BQK.reshape(num_sequences, num_kv_heads, num_rows, group, width)
    return out_SJGXK.permute(0, 2, 1, 3, 4).reshape(q_SGHK.shape).to(q_SGHK.dtype)


def _context_tiles(
    cache_RJK: torch.Tensor, keys: PagedKeys, first: int, last: int, island: torch.dtype
) -> torch.Tensor:
    """Cache rows of a run of tiles, ``[S * J, Y, N, K]``, a new tensor."""
    index_SN = keys.key_rows_SK[:, first * KEY_TILE : last * KEY_TILE]
    num_kv_heads, width = cache_RJK.shape[1:]
    rows = cache_RJK.index_select(0, index_SN.reshape(-1)).to(island)
    rows_SYNJK = rows.view(index_SN.shape[0], last - first, KEY_TILE, num_kv_heads, width)
    return rows_SYNJK.permute(0, 3, 1, 2, 4).reshape(-1, last - first, KEY_TILE, width)


def _block_tile(x_SGJK: torch.Tensor, island: torch.dtype) -> torch.Tensor:
    """The block's keys or values as one zero-padded tile ``[S * J, 1, N, K]``."""
    x_BGK = x_SGJK.to(island).transpose(1, 2).flatten(0, 1)
    return F.pad(x_BGK, (0, 0, 0, KEY_TILE - x_BGK.shape[1]))[:, None]


def _block_visible(row_Q: torch.Tensor, num_rows: int, mask: BlockMask) -> torch.Tensor:
    """Mask ``[1, 1, Q, N]`` inside the block. Padding query rows see what row 0 sees."""
    key_N = torch.arange(KEY_TILE, device=row_Q.device)
    query_Q1 = torch.where(row_Q < num_rows, row_Q, 0)[:, None]
    visible_QN = (key_N < num_rows).expand(row_Q.shape[0], -1)
    if mask.causal:
        visible_QN = visible_QN & (key_N <= query_Q1)
    if mask.window is not None and not mask.window_from_anchor:
        visible_QN = visible_QN & (query_Q1 - key_N < mask.window)
    return visible_QN[None, None]


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
