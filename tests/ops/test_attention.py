import itertools

import pytest
import torch

from outrider.ops import attention, paged, tiled
from outrider.ops.spans import spans_from_lengths

PAGE = 16
HEADS, NOPE, ROPE, LATENT, VALUE = 3, 16, 8, 48, 24
SCALE = (NOPE + ROPE) ** -0.5


class Case:
    """Sequences with their spans at the end of their context, in a cache full of NaN elsewhere."""

    def __init__(self, contexts, lengths, dtype, heads=HEADS):
        self.contexts, self.lengths, self.dtype, self.heads = contexts, lengths, dtype, heads
        pages = [-(-c // PAGE) for c in contexts]
        ids = torch.randperm(sum(pages) + 3).tolist()
        self.table = [[ids.pop() for _ in range(n)] for n in pages]
        self.cache = torch.full(((sum(pages) + 3) * PAGE, LATENT + ROPE), float("nan"), dtype=dtype)
        for context, own in zip(contexts, self.table, strict=True):
            rows = [own[p // PAGE] * PAGE + p % PAGE for p in range(context)]
            self.cache[rows] = torch.randn(context, LATENT + ROPE).to(dtype)
        rows = sum(lengths)
        self.q_nope, self.q_rope = (
            torch.randn(rows, heads, NOPE).to(dtype) * 2,
            torch.randn(rows, heads, ROPE).to(dtype) * 2,
        )
        self.kv_b = (torch.randn(heads * (NOPE + VALUE), LATENT) * 0.3).to(dtype)
        self.weights = attention.absorb_weights(self.kv_b, num_heads=heads, nope_dim=NOPE, value_dim=VALUE)

    def spans(self, chosen, extra_context=0):
        """Paged spans of some of the sequences; a page table padded with a page that was never written."""
        width = max(len(own) for own in self.table) + 9
        unused = next(i for i in range(10**6) if all(i not in own for own in self.table))
        table = torch.tensor([self.table[s] + [unused] * (width - len(self.table[s])) for s in chosen])
        lengths = tuple(self.lengths[s] for s in chosen)
        limits = [self.contexts[s] - self.lengths[s] + m + 1 for s in chosen for m in range(self.lengths[s])]
        sequence = [i for i, n in enumerate(lengths) for _ in range(n)]
        longest = max(self.contexts[s] for s in chosen) + extra_context
        return paged.paged_spans(
            spans_from_lengths(lengths),
            torch.tensor(limits),
            torch.tensor(sequence),
            table,
            page_size=PAGE,
            max_context=longest,
        )

    def rows(self, chosen):
        starts = [0, *itertools.accumulate(self.lengths)]
        return torch.cat([torch.arange(starts[s], starts[s + 1]) for s in chosen])

    def run(self, function, chosen, extra_context=0):
        weight = self.weights if function in ABSORBED else self.kv_b
        rows = self.rows(chosen)
        spans = self.spans(chosen, extra_context)
        return function(self.q_nope[rows], self.q_rope[rows], weight, self.cache, spans, scale=SCALE)


FORMS = [attention.mla_absorbed, attention.mla_expanded]
ABSORBED = (attention.mla_absorbed, attention.mla_absorbed_plain)


@pytest.mark.parametrize("function", [*FORMS, attention.mla_absorbed_plain])
def test_matches_plain_softmax_attention(function, dtype, assert_close):
    case = Case((1, 64, 65, 150, 17), (1, 3, 8, 2, 16), dtype)
    got, expected = (case.run(f, range(5)) for f in (function, attention.mla_reference))
    # bfloat16 expanded form rounds keys and values, as the vendor code does
    assert_close(got, expected, 2.0**-6 if dtype == torch.bfloat16 else None)


def test_absorbed_equals_expanded_in_float64():
    case = Case((130, 40), (8, 3), torch.float64)
    absorbed, expanded = (case.run(f, range(2)) for f in FORMS)
    assert torch.allclose(absorbed, expanded, rtol=0, atol=1e-12)


@pytest.mark.parametrize("function", FORMS)
def test_the_shared_key_dims_and_the_scale_count(function):
    case = Case((70,), (2,), torch.float64)
    before = case.run(function, [0])
    case.q_rope[:] = 0
    assert not torch.allclose(before, case.run(function, [0]))


@pytest.mark.parametrize("function", FORMS)
@pytest.mark.parametrize("heads", [2, 3, 8])
def test_rows_have_the_same_bits_alone_and_among_others(function, heads, dtype, threads):
    contexts, lengths = (5, 64, 200, 129, 16, 70), (1, 8, 3, 16, 2, 1)
    case = Case(contexts, lengths, dtype, heads)
    whole = case.run(function, range(6))
    assert bool(whole.isfinite().all()), "poisoned cache rows leaked"
    for chosen in ([0], [1], [2], [3], [4], [5], [0, 1], [4, 5, 0], [5, 3]):
        assert torch.equal(case.run(function, chosen), whole[case.rows(chosen)]), chosen


@pytest.mark.parametrize("function", FORMS)
def test_a_span_cut_into_single_rows_has_the_same_bits(function, dtype):
    case = Case((90,), (8,), dtype)
    whole = case.run(function, [0])
    for m in range(8):
        context = 90 - 8 + m + 1
        spans = paged.paged_spans(
            spans_from_lengths((1,)),
            torch.tensor([context]),
            torch.tensor([0]),
            torch.tensor([case.table[0]]),
            page_size=PAGE,
            max_context=context,
        )
        weight = case.weights if function is attention.mla_absorbed else case.kv_b
        one = function(case.q_nope[m : m + 1], case.q_rope[m : m + 1], weight, case.cache, spans, scale=SCALE)
        assert torch.equal(one, whole[m : m + 1])


@pytest.mark.parametrize("function", FORMS)
def test_masked_tiles_and_panel_size_change_no_bit(function, dtype, monkeypatch):
    case = Case((200, 30), (3, 2), dtype)
    whole = case.run(function, [0, 1])
    assert torch.equal(case.run(function, [0, 1], extra_context=140), whole)
    monkeypatch.setattr(tiled, "PANEL_ELEMENTS", 1)
    assert torch.equal(case.run(function, [0, 1]), whole)
    monkeypatch.setattr(tiled, "PANEL_ELEMENTS", 1 << 40)
    assert torch.equal(case.run(function, [0, 1]), whole)


@pytest.mark.parametrize("function", FORMS)
def test_a_row_sees_its_own_key_and_nothing_later(function):
    case = Case((20,), (4,), torch.float64)
    before = case.run(function, [0])
    last = case.table[0][19 // PAGE] * PAGE + 19 % PAGE
    case.cache[last] += 1
    after = case.run(function, [0])
    assert torch.equal(after[:3], before[:3])
    assert not torch.allclose(after[3], before[3])


@pytest.mark.parametrize("function", FORMS)
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_broken_later_row_does_not_reach_earlier_rows(function, poison, dtype):
    case = Case((70,), (5,), dtype)
    before = case.run(function, [0])
    for position in (67, 68, 69):
        case.cache[case.table[0][position // PAGE] * PAGE + position % PAGE] = poison
    after = case.run(function, [0])
    assert torch.equal(after[:2], before[:2])
    assert bool(after[4].isnan().any()), "a visible broken key must not be hidden"


@pytest.mark.parametrize("function", FORMS)
def test_large_scores_do_not_overflow(function, dtype):
    case = Case((140,), (2,), dtype)
    case.q_nope *= 1e3
    assert bool(case.run(function, [0]).isfinite().all())
