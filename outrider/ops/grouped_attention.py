"""Grouped-query attention over paged keys and values, with rotary positions; the same form for all rows.

A cache row of a token holds its keys, normed and rotated, then its values. Prompt, decode and verify rows take
one path, so a row's bits depend neither on its kind nor on where a prompt was cut.

Dims: T rows, S sequences, M rows of the longest span, H query heads, J key-value heads, K head width,
O = H + 2 J heads of a joined projection, C = 2 J K values of a cache row, R rows of the flat cache,
B = S * J matrices, Q query rows of one matrix (M x heads per group, padded), Y tiles, N keys of a tile.
"""

from dataclasses import dataclass
from typing import Protocol

import torch

from outrider.ops.invariant import island_dtype, pad_rows
from outrider.ops.norm import rms_norm
from outrider.ops.paged import KEY_TILE, PagedSpans
from outrider.ops.rope import RotaryTable, apply_half
from outrider.ops.spans import to_flat, to_padded
from outrider.ops.tiled import attend_panels, combine_partials, tiles_per_panel

__all__ = [
    "AppendKeysFunction",
    "GroupedAttentionFunction",
    "GroupedHeads",
    "append_keys",
    "grouped_attention",
    "grouped_attention_reference",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedHeads:
    """What a layer does to its heads, the same in every step."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    gains_PK: torch.Tensor | None  # norm gains of every query head, then of every key head; None: no norms
    eps: float
    table: RotaryTable

    @property
    def scale(self) -> float:
        """Softmax scale."""
        return float(self.head_dim**-0.5)

    @property
    def num_rotated(self) -> int:
        """Heads that are rotated: queries and keys."""
        return self.num_heads + self.num_kv_heads


class AppendKeysFunction(Protocol):
    """A form of ``append_keys``."""

    def __call__(
        self,
        qkv_TO: torch.Tensor,
        heads: GroupedHeads,
        positions_T: torch.Tensor,
        rows_RC: torch.Tensor,
        slots_T: torch.Tensor,
    ) -> torch.Tensor:
        """See ``append_keys``."""
        ...


class GroupedAttentionFunction(Protocol):
    """A form of ``grouped_attention``."""

    def __call__(
        self, q_THK: torch.Tensor, rows_RC: torch.Tensor, heads: GroupedHeads, spans: PagedSpans
    ) -> torch.Tensor:
        """See ``grouped_attention``."""
        ...


def append_keys(
    qkv_TO: torch.Tensor,
    heads: GroupedHeads,
    positions_T: torch.Tensor,
    rows_RC: torch.Tensor,
    slots_T: torch.Tensor,
) -> torch.Tensor:
    """Norm and rotate queries and keys; store keys and values of new rows in the cache.

    Args:
        qkv_TO: ``[T, O * K]``: queries, then keys, then values.
        heads: constants of the layer.
        positions_T: int64, absolute.
        rows_RC: flat cache of the layer, written in place.
        slots_T: int64, cache row of each new row, all different.

    Returns:
        The rotated queries, ``[T, H, K]``.
    """
    num_rows, width = qkv_TO.shape[0], heads.head_dim
    qkv_TOK = qkv_TO.view(num_rows, -1, width)
    qk_TPK = qkv_TOK[:, : heads.num_rotated]
    if heads.gains_PK is not None:
        qk_TPK = rms_norm(qk_TPK, heads.gains_PK, heads.eps)
    rotated_TPK = apply_half(qk_TPK, heads.table, positions_T)
    keys_TJK, values_TJK = rotated_TPK[:, heads.num_heads :], qkv_TOK[:, heads.num_rotated :]
    rows_RC.index_copy_(0, slots_T, torch.cat([keys_TJK, values_TJK], dim=1).flatten(1))
    return rotated_TPK[:, : heads.num_heads]


def grouped_attention(
    q_THK: torch.Tensor, rows_RC: torch.Tensor, heads: GroupedHeads, spans: PagedSpans
) -> torch.Tensor:
    """Softmax attention of every row over the keys that it may see.

    Args:
        q_THK: rotated queries, compute dtype.
        rows_RC: flat cache of the layer; the rows of this step are already written, unused ones may hold anything.
        heads: constants of the layer.
        spans: from ``paged_spans``.

    Returns:
        ``[T, H, K]`` in the dtype of the queries.
    """
    island, layout = island_dtype(q_THK.dtype), spans.layout
    num_sequences, num_kv_heads, width = layout.num_sequences, heads.num_kv_heads, heads.head_dim
    group = heads.num_heads // num_kv_heads
    q_SMJGK = to_padded(q_THK, layout).to(island).unflatten(2, (num_kv_heads, group))
    q_BQK = pad_rows(q_SMJGK.permute(0, 2, 1, 3, 4).reshape(num_sequences * num_kv_heads, -1, width) * heads.scale)
    # A matrix has the rows of one key head: M rows times the query heads that share it.
    limits_SQ = spans.limits_SM.repeat_interleave(group, dim=1)
    missing = q_BQK.shape[1] - limits_SQ.shape[1]
    limits_SQ = torch.nn.functional.pad(limits_SQ, (0, missing), value=1)  # padding sees a key, so it stays finite
    limits_BQ = limits_SQ.repeat_interleave(num_kv_heads, dim=0)

    def load(first: int, last: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        index_SN = spans.keys.key_rows_SK[:, first * KEY_TILE : last * KEY_TILE]
        rows = rows_RC.index_select(0, index_SN.reshape(-1)).to(island)
        shape = (num_sequences, last - first, KEY_TILE, 2, num_kv_heads, width)
        keys_BYNK, values_BYNK = rows.view(shape).permute(3, 0, 4, 1, 2, 5).flatten(1, 2).unbind(0)
        position_YN = torch.arange(first * KEY_TILE, last * KEY_TILE, device=q_BQK.device).view(-1, KEY_TILE)
        return keys_BYNK, values_BYNK, position_YN[None, :, None, :] < limits_BQ[:, None, :, None]

    panel = tiles_per_panel(q_BQK.shape[0] * max(q_BQK.shape[1], KEY_TILE) * width)
    out_BQK = combine_partials(attend_panels(q_BQK, spans.keys.num_tiles, panel, load))
    out_SJMGK = out_BQK[:, : layout.max_length * group].reshape(num_sequences, num_kv_heads, -1, group, width)
    return to_flat(out_SJMGK.transpose(1, 2).flatten(2, 3), layout).to(q_THK.dtype)


def grouped_attention_reference(
    q_THK: torch.Tensor, rows_RC: torch.Tensor, heads: GroupedHeads, spans: PagedSpans
) -> torch.Tensor:
    """Plain softmax attention, one row at a time; arguments as above."""
    island = island_dtype(q_THK.dtype)
    group = heads.num_heads // heads.num_kv_heads
    outputs, row = [], 0
    for sequence, length in enumerate(spans.layout.lengths):
        for m in range(length):
            limit = int(spans.limits_SM[sequence, m])
            rows_NC = rows_RC[spans.keys.key_rows_SK[sequence, :limit]].to(island)
            rows_N2JK = rows_NC.view(limit, 2, heads.num_kv_heads, heads.head_dim)
            keys_NHK, values_NHK = (part.repeat_interleave(group, 1) for part in rows_N2JK.unbind(1))
            scores_HN = torch.einsum("hk,nhk->hn", q_THK[row].to(island), keys_NHK) * heads.scale
            outputs.append(torch.einsum("hn,nhk->hk", torch.softmax(scores_HN, dim=-1), values_NHK))
            row += 1
    return torch.stack(outputs).to(q_THK.dtype)
