"""The check of ``probe`` for grouped-query attention, its rotation and its stored rows included.

Dims: N rows of a call, T rows, F features of a row, R rows of the flat cache.
"""

from dataclasses import dataclass

import torch

from outrider.ops.grouped_attention import (
    AppendKeysFunction,
    GroupedAttentionFunction,
    GroupedHeads,
    append_keys,
    grouped_attention,
)
from outrider.ops.invariant import island_dtype
from outrider.ops.native.grouped import NativeGrouped
from outrider.ops.native.library import Library
from outrider.ops.paged import KEY_TILE, paged_spans
from outrider.ops.probe import (
    FEW_CASES,
    FIXED,
    NUM_ROWS,
    OpCheck,
    company_violation,
    random_rows,
    same_bits,
)
from outrider.ops.rope import rotary_table
from outrider.ops.spans import SpanLayout, spans_from_lengths

__all__ = ["GroupedSizes", "grouped_check", "grouped_forms"]

Forms = tuple[AppendKeysFunction, GroupedAttentionFunction]

# Key heads probed at most: their number is a batch dim, and the batch varies with the rows anyway.
PROBE_KV_HEADS = 2
NUM_KEYS = KEY_TILE + 6  # before a probed row: more than one key tile, and not a whole number of them
SPAN = 8  # rows of the verify span that is compared with single steps


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedSizes:
    """Heads of a layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    head_norms: bool

    @property
    def name(self) -> str:
        """Name of the check."""
        normed = ", normed" * self.head_norms
        return f"grouped attention of {self.num_heads} over {self.num_kv_heads} heads of {self.head_dim}{normed}"


def grouped_check(sizes: GroupedSizes, dtype: torch.dtype, device: torch.device, native: Library | None) -> OpCheck:
    """Attention of prompt, decode and verify rows, which is one form; candidates are the native and the torch form."""

    def find(geometry: str) -> str | None:
        heads, forms = _heads(sizes, dtype, device), grouped_forms(geometry, native)
        features = (heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim

        def one_row_each(x_NF: torch.Tensor) -> torch.Tensor:
            num_rows = x_NF.shape[0]
            layout = spans_from_lengths((1,) * num_rows, starts=(NUM_KEYS - 1,) * num_rows, device=device)
            return _attend(x_NF, heads, layout, forms, extra_tiles=min(num_rows - 1, 2))

        rows_3F = random_rows(NUM_ROWS, features, dtype=dtype, device=device, seed=2)
        violation = company_violation(one_row_each, rows_3F, cases=FEW_CASES)
        return violation or _span_violation(heads, forms, dtype, device, features)

    names = (FIXED,) if native is None else (native.geometry, FIXED)
    return OpCheck(name=sizes.name, geometries=names, find_violation=find)


def grouped_forms(geometry: str, native: Library | None) -> Forms:
    """What a geometry of ``grouped_check`` means: how keys are stored, and attention."""
    if native is None or geometry != native.geometry:
        return append_keys, grouped_attention
    grouped = NativeGrouped(native)
    return grouped.append, grouped.attend


def _heads(sizes: GroupedSizes, dtype: torch.dtype, device: torch.device) -> GroupedHeads:
    num_kv_heads = min(sizes.num_kv_heads, PROBE_KV_HEADS)
    num_heads = sizes.num_heads // sizes.num_kv_heads * num_kv_heads
    table = rotary_table(NUM_KEYS + SPAN, sizes.head_dim, 10_000.0, dtype=island_dtype(dtype))
    gains_PK = random_rows(num_heads + num_kv_heads, sizes.head_dim, dtype=dtype, device=device)
    return GroupedHeads(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=sizes.head_dim,
        gains_PK=gains_PK if sizes.head_norms else None,
        eps=1e-6,
        table=type(table)(cos_PF=table.cos_PF.to(device), sin_PF=table.sin_PF.to(device)),
    )


def _attend(
    x_TF: torch.Tensor, heads: GroupedHeads, layout: SpanLayout, forms: Forms, extra_tiles: int
) -> torch.Tensor:
    """Queries and what was stored, of rows that are all projections of a token.

    Keys of a sequence are multiples of its first row's; the span's own rows follow at their positions.
    ``extra_tiles`` are key tiles that only a longer neighbour has.
    """
    device, num_keys = x_TF.device, NUM_KEYS + SPAN
    ranges = [range(start, start + length) for start, length in zip(layout.starts, layout.lengths, strict=True)]
    positions_T = torch.tensor([p for span in ranges for p in span], device=device)
    sequence_T = torch.tensor([s for s, span in enumerate(ranges) for _ in span], device=device)
    width = 2 * heads.num_kv_heads * heads.head_dim
    factors_L1 = torch.linspace(-1.0, 1.0, num_keys, device=device).to(x_TF.dtype)[:, None]
    rows_RC = (x_TF[layout.padded_rows_SM[:, 0], -width:][:, None] * factors_L1).flatten(0, 1)
    append, attend = forms
    q_THK = append(x_TF, heads, positions_T, rows_RC, sequence_T * num_keys + positions_T)
    spans = paged_spans(
        layout,
        positions_T + 1,
        sequence_T,
        torch.arange(rows_RC.shape[0], device=device).view(layout.num_sequences, num_keys),
        page_size=1,
        max_context=max(span.stop for span in ranges) + extra_tiles * KEY_TILE,
    )
    stored_TC = rows_RC[sequence_T * num_keys + positions_T]
    return torch.cat([attend(q_THK, rows_RC, heads, spans).flatten(1), stored_TC], dim=1)


def _span_violation(
    heads: GroupedHeads, forms: Forms, dtype: torch.dtype, device: torch.device, features: int
) -> str | None:
    """A verify span beside another one, against the same rows stepped one by one."""
    rows_NF = random_rows(SPAN + NUM_ROWS, features, dtype=dtype, device=device, seed=3)
    first = NUM_KEYS - 1
    together = _attend(
        rows_NF, heads, spans_from_lengths((NUM_ROWS, SPAN), starts=(first, first), device=device), forms, extra_tiles=1
    )
    for begin, end in ((0, NUM_ROWS), (NUM_ROWS, NUM_ROWS + SPAN)):
        for last in range(begin + 1, end + 1):  # the span as far as its last row: that row must be the same
            layout = spans_from_lengths((last - begin,), starts=(first,), device=device)
            alone = _attend(rows_NF[begin:last], heads, layout, forms, extra_tiles=0)
            if not same_bits(alone[-1], together[last - 1]):
                return f"row {last - 1 - begin} of a span differs in a shorter span"
    return None
