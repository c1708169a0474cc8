"""Grouped-query attention and its stored rows against the plain form, over odd shapes."""

import pytest
import torch

from outrider.ops.grouped_attention import GroupedHeads, append_keys, grouped_attention, grouped_attention_reference
from outrider.ops.paged import KEY_TILE, paged_spans
from outrider.ops.probe_grouped import GroupedSizes, grouped_check
from outrider.ops.rope import apply_half_reference, rotary_table
from outrider.ops.spans import spans_from_lengths

CASES = [
    ((1,), (0,)),
    ((5,), (0,)),
    ((1, 1, 1), (0, 63, 64)),
    ((7, 1, 66), (60, 200, 0)),
]


def heads(num_heads: int, num_kv_heads: int, width: int, *, normed: bool, dtype: torch.dtype) -> GroupedHeads:
    island = torch.float64 if dtype == torch.float64 else torch.float32
    gains = torch.randn(num_heads + num_kv_heads, width).to(dtype) if normed else None
    table = rotary_table(300, width, 1000.0, dtype=island)
    return GroupedHeads(
        num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=width, gains_PK=gains, eps=1e-6, table=table
    )


@pytest.mark.parametrize(("lengths", "starts"), CASES)
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "width", "normed"), [(6, 2, 8, True), (3, 3, 10, False)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_against_the_plain_form(
    lengths: tuple[int, ...], starts: tuple[int, ...], num_heads: int, num_kv_heads: int, width: int, normed: bool,
    dtype: torch.dtype,
) -> None:  # fmt: skip
    torch.manual_seed(3)
    form = heads(num_heads, num_kv_heads, width, normed=normed, dtype=dtype)
    layout, page_size, pages = spans_from_lengths(lengths, starts=starts), 4, 80
    positions = torch.cat([torch.arange(s, s + n) for s, n in zip(starts, lengths, strict=True)])
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    table = torch.randperm(len(lengths) * pages).view(len(lengths), pages)
    slots = table[sequence, positions // page_size] * page_size + positions % page_size
    rows = torch.full((table.numel() * page_size, 2 * num_kv_heads * width), torch.nan, dtype=dtype)
    for s, start in enumerate(starts):  # what earlier steps stored; all else is poisoned
        past = torch.arange(start)
        rows[table[s, past // page_size] * page_size + past % page_size] = torch.randn(start, rows.shape[1]).to(dtype)
    qkv = torch.randn(len(positions), (num_heads + 2 * num_kv_heads) * width).to(dtype)
    queries = append_keys(qkv, form, positions, rows, slots)
    split = qkv.view(len(positions), -1, width)
    if not normed:
        expected = apply_half_reference(split[:, : num_heads + num_kv_heads], form.table, positions)
        stored = rows[slots].view(len(positions), 2 * num_kv_heads, width)
        tolerance = 1e-12 if dtype == torch.float64 else 0.04
        assert torch.allclose(queries.double(), expected[:, :num_heads].double(), rtol=0, atol=tolerance)
        assert torch.allclose(stored[:, :num_kv_heads].double(), expected[:, num_heads:].double(), atol=tolerance)
    assert torch.equal(
        rows[slots].view(len(positions), -1, width)[:, num_kv_heads:], split[:, num_heads + num_kv_heads :]
    )
    spans = paged_spans(
        layout, positions + 1, sequence, table, page_size=page_size, max_context=int(positions.max()) + 1
    )
    found = grouped_attention(queries, rows, form, spans)
    plain = grouped_attention_reference(queries, rows, form, spans)
    assert torch.allclose(found, plain, rtol=0, atol=1e-12 if dtype == torch.float64 else 0.02)
    longer = paged_spans(
        layout, positions + 1, sequence, table, page_size=page_size, max_context=4 * KEY_TILE
    )  # tiles that only a longer neighbour would have change no bit
    assert torch.equal(grouped_attention(queries, rows, form, longer), found)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_the_probe_finds_nothing(dtype: torch.dtype) -> None:
    check = grouped_check(
        GroupedSizes(num_heads=9, num_kv_heads=3, head_dim=16, head_norms=True), dtype, torch.device("cpu"), None
    )
    assert check.find_violation(check.geometries[0]) is None
