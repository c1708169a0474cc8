"""The checks of ``probe`` for attention of a drafter's block and for the rows of its context cache.

Dims: S sequences, G block rows, H query heads, J key-value heads, K head width, R rows of the flat cache,
N context rows, T rows of all blocks, O heads of a joined projection, P of them that are normed, L layers,
F features of a sequence or row.
"""

from dataclasses import dataclass

import torch

from outrider.ops.block_attention import (
    AttendBlockFunction,
    BlockHeads,
    BlockMask,
    StoreContextFunction,
    attend_block,
    store_context_rows,
)
from outrider.ops.invariant import island_dtype
from outrider.ops.native.drafter import NativeDrafter
from outrider.ops.native.library import Library
from outrider.ops.paged import KEY_TILE, paged_keys
from outrider.ops.probe import FEW_CASES, NUM_ROWS, OpCheck, company_violation, random_rows
from outrider.ops.probe_ops import row_forms
from outrider.ops.rope import RotaryTable, rotary_table

__all__ = [
    "BlockSizes",
    "block_attention_check",
    "block_attention_name",
    "context_rows_check",
    "context_rows_name",
    "row_numbers",
]

# Context of a probed sequence: more than one key tile, and not a whole number of them.
NUM_KEYS = KEY_TILE + 6
EXTRA_TILES = 2  # key tiles that only a longer neighbour has
# Key-value heads probed at most; their number is a batch dim, and the batch varies with the sequences anyway.
PROBE_KV_HEADS = 8
PROBE_LAYERS = 2  # of the context cache
EPS = 1e-6  # of the norms of heads
ROPE_THETA = 1e4


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSizes:
    """One draft layer's attention."""

    num_rows: int
    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def name(self) -> str:
        """As a report says it."""
        return f"{self.num_rows} rows, {self.num_heads} heads ({self.num_kv_heads}) of {self.head_dim}"

    def cut(self) -> "BlockSizes":
        """The sizes that stand for these in a check."""
        num_kv_heads = min(self.num_kv_heads, PROBE_KV_HEADS)
        return BlockSizes(
            num_rows=self.num_rows,
            num_heads=self.num_heads // self.num_kv_heads * num_kv_heads,
            num_kv_heads=num_kv_heads,
            head_dim=self.head_dim,
        )


def block_attention_name(sizes: BlockSizes, mask: BlockMask) -> str:
    """Name of the check of attention under a mask."""
    kind = "causal block" if mask.causal else "block"
    window = (
        "" if mask.window is None else f", window {mask.window}{' from the anchor' if mask.window_from_anchor else ''}"
    )
    return f"{kind} attention of {sizes.name}{window}"


def context_rows_name(sizes: BlockSizes) -> str:
    """Name of the check of context rows."""
    return f"context rows of {sizes.num_kv_heads} heads of {sizes.head_dim}"


def row_numbers(x_NF: torch.Tensor, limit: int) -> torch.Tensor:
    """A number below ``limit`` for each row, int64, which its first value decides: it moves with the row."""
    return (x_NF[:, 0].double().abs().nan_to_num() * 16).clamp_max(limit - 1).long()


def block_attention_check(
    sizes: BlockSizes, mask: BlockMask, dtype: torch.dtype, device: torch.device, native: Library | None = None
) -> OpCheck:
    """A sequence's block alone and among others, whose context may be longer; norms and rotation included."""
    cut = sizes.cut()

    def find(geometry: str) -> str | None:
        attend: AttendBlockFunction = attend_block
        if native is not None and geometry == native.geometry:
            attend = NativeDrafter(native).attend_block
        num_normed = cut.num_heads + cut.num_kv_heads
        heads = BlockHeads(
            num_heads=cut.num_heads,
            num_rows=cut.num_rows,
            gains_PK=random_rows(num_normed, cut.head_dim, dtype=dtype, device=device, seed=2),
            eps=EPS,
            table=_rotary_table(cut.head_dim, NUM_KEYS + cut.num_rows, dtype, device),
            mask=mask,
            scale=cut.head_dim**-0.5,
        )
        num_features = cut.num_rows * (num_normed + cut.num_kv_heads) * cut.head_dim
        rows_3F = random_rows(NUM_ROWS, num_features, dtype=dtype, device=device)
        return company_violation(lambda x_SF: _attend(attend, heads, x_SF), rows_3F, cases=FEW_CASES)

    return OpCheck(name=block_attention_name(sizes, mask), geometries=row_forms(native), find_violation=find)


def _attend(attend: AttendBlockFunction, heads: BlockHeads, x_SF: torch.Tensor) -> torch.Tensor:
    """Attention of blocks ``[S, G, H K]``; a sequence's context is made of multiples of its first block row.

    A call of several sequences reads key tiles beyond the probed context, as with a longer neighbour.
    """
    num_sequences, device = x_SF.shape[0], x_SF.device
    num_normed, width = heads.gains_PK.shape
    qkv_SGOK = x_SF.view(num_sequences, heads.num_rows, -1, width)
    factors_L111 = torch.linspace(-1.0, 1.0, NUM_KEYS, device=device).to(x_SF.dtype)[:, None, None]
    context_keys_RJK, context_values_RJK = (
        (side_SJK[:, None] * factors_L111).flatten(0, 1)
        for side_SJK in (qkv_SGOK[:, 0, heads.num_heads : num_normed], qkv_SGOK[:, 0, num_normed:])
    )
    page_table_SP = torch.arange(num_sequences * NUM_KEYS, device=device).view(num_sequences, NUM_KEYS)
    extra = EXTRA_TILES * KEY_TILE if num_sequences > 1 else 0
    keys = paged_keys(
        page_table_SP,
        torch.full((num_sequences,), NUM_KEYS, device=device),
        page_size=1,
        max_context=NUM_KEYS + extra,
    )
    out_THK = attend(qkv_SGOK.flatten(0, 1), heads, context_keys_RJK, context_values_RJK, keys)
    return out_THK.view(num_sequences, -1)


def context_rows_check(
    sizes: BlockSizes, dtype: torch.dtype, device: torch.device, native: Library | None = None
) -> OpCheck:
    """Keys, normed and rotated, and values of a context row, each row at a position of its own."""
    cut = sizes.cut()
    shape_L2JK = (PROBE_LAYERS, 2, cut.num_kv_heads, cut.head_dim)
    num_features = 2 * PROBE_LAYERS * cut.num_kv_heads * cut.head_dim

    def find(geometry: str) -> str | None:
        store: StoreContextFunction = store_context_rows
        if native is not None and geometry == native.geometry:
            store = NativeDrafter(native).store_context_rows
        gains_LK = random_rows(PROBE_LAYERS, cut.head_dim, dtype=dtype, device=device, seed=2)
        table = _rotary_table(cut.head_dim, NUM_KEYS, dtype, device)

        def stored(x_NF: torch.Tensor) -> torch.Tensor:
            """Rows as the cache holds them, ``[N, 2, L, J, K]``; the last row of the call in the first of the cache."""
            num_rows = x_NF.shape[0]
            cache_2LRJK = x_NF.new_zeros(2, PROBE_LAYERS, num_rows, *shape_L2JK[2:])
            rows_N = torch.arange(num_rows, device=device).flip(0)
            kv_NL2JK = x_NF.view(num_rows, *shape_L2JK)
            store(kv_NL2JK, gains_LK, EPS, table, row_numbers(x_NF, NUM_KEYS), rows_N, cache_2LRJK)
            return cache_2LRJK.flip(2).movedim(2, 0)

        rows_3F = random_rows(NUM_ROWS, num_features, dtype=dtype, device=device, seed=3)
        return company_violation(stored, rows_3F, cases=FEW_CASES)

    return OpCheck(name=context_rows_name(sizes), geometries=row_forms(native), find_violation=find)


def _rotary_table(width: int, num_positions: int, dtype: torch.dtype, device: torch.device) -> RotaryTable:
    table = rotary_table(num_positions, width, ROPE_THETA, dtype=island_dtype(dtype))
    return RotaryTable(cos_PF=table.cos_PF.to(device), sin_PF=table.sin_PF.to(device))
