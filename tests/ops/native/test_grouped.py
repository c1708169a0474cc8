"""Native grouped-query attention and its cache rows against the torch forms, and the independence of rows."""

from dataclasses import replace

import pytest
import torch

from outrider.ops.grouped_attention import GroupedHeads, append_keys, grouped_attention_reference
from outrider.ops.native.grouped import NativeGrouped
from outrider.ops.paged import PagedSpans, paged_spans
from outrider.ops.rope import rotary_table
from outrider.ops.spans import spans_from_lengths

BF16 = torch.bfloat16
PAGE, PAGES = 8, 40
SHAPES = [(6, 2, 64, True), (3, 3, 18, False), (8, 1, 32, True), (9, 3, 64, False), (1, 1, 2, False)]
SPANS = [((1,), (0,)), ((1, 1, 1), (63, 64, 200)), ((7, 1, 70), (60, 130, 0)), ((8, 8), (121, 3))]


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(4)


@pytest.fixture
def grouped(native):
    return NativeGrouped(native)


class Case:
    """Projections of the rows of several sequences, in a cache full of NaN outside their contexts."""

    def __init__(self, shape, lengths, starts):
        num_heads, num_kv_heads, width, normed = shape
        gains = (1 + torch.randn(num_heads + num_kv_heads, width) / 4).to(BF16)
        self.heads = GroupedHeads(
            num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=width, gains_PK=gains if normed else None,
            eps=1e-6, table=rotary_table(PAGE * PAGES, width, 1e4),
        )  # fmt: skip
        self.lengths, self.starts = lengths, starts
        self.table = torch.randperm(len(lengths) * PAGES).view(len(lengths), PAGES)
        self.cache = torch.full((self.table.numel() * PAGE, 2 * num_kv_heads * width), torch.nan, dtype=BF16)
        for s, start in enumerate(starts):
            self.cache[self.rows_of(s, torch.arange(start))] = torch.randn(start, self.cache.shape[1]).to(BF16)
        self.qkv = torch.randn(sum(lengths), (num_heads + 2 * num_kv_heads) * width).to(BF16) * 2
        self.sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
        self.positions = torch.cat([torch.arange(s, s + n) for s, n in zip(starts, lengths, strict=True)])

    def rows_of(self, sequence, positions):
        return self.table[sequence, positions // PAGE] * PAGE + positions % PAGE

    @property
    def slots(self):
        return self.rows_of(self.sequence, self.positions)

    def spans(self) -> PagedSpans:
        layout = spans_from_lengths(self.lengths, starts=self.starts)
        longest = int(self.positions.max()) + 1
        return paged_spans(layout, self.positions + 1, self.sequence, self.table, page_size=PAGE, max_context=longest)

    def run(self, grouped):
        cache = self.cache.clone()
        queries = grouped.append(self.qkv, self.heads, self.positions, cache, self.slots)
        return queries, cache, grouped.attend(queries, cache, self.heads, self.spans())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("lengths", "starts"), SPANS, ids=str)
def test_against_the_torch_forms(grouped, shape, lengths, starts):
    case = Case(shape, lengths, starts)
    queries, cache, out = case.run(grouped)
    expected_cache = case.cache.clone()
    expected = append_keys(case.qkv, case.heads, case.positions, expected_cache, case.slots)
    # One norm sums in another order, which moves a few values to the neighbouring bfloat16.
    assert torch.allclose(queries.float(), expected.float(), rtol=0.01, atol=0.02)
    assert torch.equal(cache.isnan(), expected_cache.isnan())
    assert torch.allclose(cache.nan_to_num().float(), expected_cache.nan_to_num().float(), rtol=0.01, atol=0.02)
    plain = grouped_attention_reference(queries, cache, case.heads, case.spans())
    assert torch.allclose(out.float(), plain.float(), rtol=0.02, atol=0.03)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_row_does_not_depend_on_company_cut_or_threads(grouped, shape, monkeypatch):
    lengths, starts = (7, 1, 70, 8), (60, 130, 0, 121)
    case = Case(shape, lengths, starts)
    _, cache, together = case.run(grouped)
    begin = 0
    for s, (length, start) in enumerate(zip(lengths, starts, strict=True)):
        parts = []
        for first, last in ((0, length // 2), (length // 2, length)):  # the sequence alone, in two pieces
            if first == last:
                continue
            alone = Case.__new__(Case)
            vars(alone).update(vars(case))
            rows = slice(begin + first, begin + last)
            alone.qkv, alone.positions = case.qkv[rows], case.positions[rows]
            alone.sequence = torch.zeros(last - first, dtype=torch.int64)
            alone.table, alone.lengths, alone.starts = case.table[s : s + 1], (last - first,), (start + first,)
            alone.cache = cache
            parts.append(alone.run(grouped)[2])
        assert torch.equal(torch.cat(parts), together[begin : begin + length])
        begin += length
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2 if before == 1 else 1)
        assert torch.equal(case.run(grouped)[2], together)
    finally:
        torch.set_num_threads(before)


def test_no_rows(grouped):
    case = Case(SHAPES[0], (1,), (5,))
    heads = replace(case.heads)
    empty = case.qkv[:0]
    none = torch.empty(0, dtype=torch.int64)
    assert grouped.append(empty, heads, none, case.cache, none).shape == (0, 6, 64)
