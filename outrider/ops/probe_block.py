"""The check of ``probe`` for attention of a drafter's block.

Dims: S sequences, G block rows, H query heads, J key-value heads, K head width, R rows of the flat cache,
F features of a sequence.
"""

from dataclasses import dataclass

import torch

from outrider.ops.block_attention import BlockMask, block_attention
from outrider.ops.paged import KEY_TILE, paged_keys
from outrider.ops.probe import FEW_CASES, NUM_ROWS, OpCheck, company_violation, fixed_check, random_rows

__all__ = ["BlockSizes", "block_attention_check"]

# Context of a probed sequence: more than one key tile, and not a whole number of them.
NUM_KEYS = KEY_TILE + 6
EXTRA_TILES = 2  # key tiles that only a longer neighbour has
# Key-value heads probed at most; their number is a batch dim, and the batch varies with the sequences anyway.
PROBE_KV_HEADS = 8


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


def block_attention_check(sizes: BlockSizes, mask: BlockMask, dtype: torch.dtype, device: torch.device) -> OpCheck:
    """A sequence's block alone and among others, whose context may be longer."""
    cut = sizes.cut()

    def find() -> str | None:
        num_features = cut.num_rows * (cut.num_heads + 2 * cut.num_kv_heads) * cut.head_dim
        rows_3F = random_rows(NUM_ROWS, num_features, dtype=dtype, device=device)
        return company_violation(lambda x_SF: _attend(cut, mask, x_SF), rows_3F, cases=FEW_CASES)

    kind = "causal block" if mask.causal else "block"
    window = (
        "" if mask.window is None else f", window {mask.window}{' from the anchor' if mask.window_from_anchor else ''}"
    )
    return fixed_check(f"{kind} attention of {sizes.name}{window}", find)


def _attend(sizes: BlockSizes, mask: BlockMask, x_SF: torch.Tensor) -> torch.Tensor:
    """Attention of blocks ``[S, G, H K]``; a sequence's context is made of multiples of its first block row.

    A call of several sequences reads key tiles beyond the probed context, as with a longer neighbour.
    """
    num_rows, heads, kv_heads, width = sizes.num_rows, sizes.num_heads, sizes.num_kv_heads, sizes.head_dim
    num_sequences, device = x_SF.shape[0], x_SF.device
    qkv_SGNK = x_SF.view(num_sequences, num_rows, heads + 2 * kv_heads, width)
    q_SGHK, keys_SGJK, values_SGJK = qkv_SGNK.split([heads, kv_heads, kv_heads], dim=2)
    factors_L111 = torch.linspace(-1.0, 1.0, NUM_KEYS, device=device).to(x_SF.dtype)[:, None, None]
    context_keys_RJK, context_values_RJK = (
        (side_SGJK[:, :1] * factors_L111).flatten(0, 1) for side_SGJK in (keys_SGJK, values_SGJK)
    )
    page_table_SP = torch.arange(num_sequences * NUM_KEYS, device=device).view(num_sequences, NUM_KEYS)
    extra = EXTRA_TILES * KEY_TILE if num_sequences > 1 else 0
    keys = paged_keys(
        page_table_SP,
        torch.full((num_sequences,), NUM_KEYS, device=device),
        page_size=1,
        max_context=NUM_KEYS + extra,
    )
    out_SGHK = block_attention(
        q_SGHK,
        context_keys_RJK,
        context_values_RJK,
        keys_SGJK,
        values_SGJK,
        keys,
        mask,
        scale=width**-0.5,
    )
    return out_SGHK.flatten(1)
