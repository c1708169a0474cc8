"""Native latent attention against the plain forms, and the independence of its rows."""

import itertools
from copy import copy
from functools import partial

import pytest
import torch

from outrider.ops import attention, paged
from outrider.ops.native.mla import NativeMla, absorb_into_panels
from outrider.ops.probe_mixers import MlaSizes, absorbed_check, expanded_check
from outrider.ops.spans import spans_from_lengths

BF16 = torch.bfloat16
CONTEXTS, LENGTHS = (5, 64, 200, 129, 16, 70, 1), (1, 8, 3, 16, 2, 1, 1)
# heads, nope, rope, latent, value, page size: whole vectors, and ends of vectors in every width
SHAPES = [(4, 48, 16, 96, 48, 16), (3, 6, 2, 22, 5, 7), (1, 128, 64, 130, 128, 64), (5, 32, 8, 48, 24, 4)]


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(11)


@pytest.fixture
def mla(native):
    return NativeMla(native)


class Case:
    """Spans at the end of their contexts, in a cache full of NaN elsewhere; queries and gate are views."""

    def __init__(self, shape=SHAPES[0], contexts=CONTEXTS, lengths=LENGTHS):
        self.heads, self.nope, self.rope, self.latent, self.value, self.page = shape
        self.contexts, self.lengths = contexts, lengths
        pages = [-(-c // self.page) for c in contexts]
        ids = torch.randperm(sum(pages) + 2).tolist()
        self.unused = ids.pop()
        self.table = [[ids.pop() for _ in range(n)] for n in pages]
        self.cache = torch.full(((sum(pages) + 2) * self.page, self.latent + self.rope), float("nan"), dtype=BF16)
        for s, context in enumerate(contexts):
            self.cache[[self.row(s, p) for p in range(context)]] = torch.randn(context, self.latent + self.rope).to(
                BF16
            )
        num_rows, qk, value = sum(lengths), self.heads * (self.nope + self.rope), self.heads * self.value
        self.joined = torch.randn(num_rows, qk + value + 3).to(BF16) * 2
        kv_b = (torch.randn(self.heads * (self.nope + self.value), self.latent) * 0.3).to(BF16)
        sizes = {"num_heads": self.heads, "nope_dim": self.nope, "value_dim": self.value}
        self.weights = absorb_into_panels(kv_b, **sizes)
        self.exact = attention.absorb_weights(kv_b.double(), **sizes)
        self.kv_b = kv_b
        self.scale = (self.nope + self.rope) ** -0.5

    def row(self, sequence, position):
        return self.table[sequence][position // self.page] * self.page + position % self.page

    def arguments(self, chosen, extra_context=0, last=None):
        """Queries, spans and gate of some sequences; ``last`` keeps that many rows of each from its first one."""
        starts = [0, *itertools.accumulate(self.lengths)]
        lengths = tuple(min(self.lengths[s], last or self.lengths[s]) for s in chosen)
        rows = torch.cat([torch.arange(starts[s], starts[s] + n) for s, n in zip(chosen, lengths, strict=True)])
        width = max(len(own) for own in self.table) + 40
        table = torch.tensor([self.table[s] + [self.unused] * (width - len(self.table[s])) for s in chosen])
        limits = [
            self.contexts[s] - self.lengths[s] + m + 1 for s, n in zip(chosen, lengths, strict=True) for m in range(n)
        ]
        spans = paged.paged_spans(
            spans_from_lengths(lengths),
            torch.tensor(limits),
            torch.tensor([i for i, n in enumerate(lengths) for _ in range(n)]),
            table,
            page_size=self.page,
            max_context=max(limits) + extra_context,
        )
        joined = self.joined[rows]
        qk = self.nope + self.rope
        q_nope, q_rope = joined[:, : self.heads * qk].view(-1, self.heads, qk).split([self.nope, self.rope], dim=-1)
        gate = joined[:, self.heads * qk : -3].view(-1, self.heads, self.value)
        return q_nope, q_rope, spans, gate, rows

    def run(self, mla, chosen, gated=True, **changes):
        q_nope, q_rope, spans, gate, _ = self.arguments(chosen, **changes)
        weights, gate = self.weights, gate if gated else None
        return mla.absorbed(q_nope, q_rope, weights, self.cache, spans, scale=self.scale, gate_THW=gate)

    def expected(self, chosen):
        """The same in float64, without rounding in between."""
        q_nope, q_rope, spans, gate, _ = self.arguments(chosen)
        return attention.mla_absorbed(
            q_nope.double(),
            q_rope.double(),
            self.exact,
            self.cache.double(),
            spans,
            scale=self.scale,
            gate_THW=gate.double(),
        )


def everyone(case):
    return list(range(len(case.contexts)))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_the_plain_form_within_bfloat16(mla, shape, threads):
    case = Case(shape)
    got, expected = case.run(mla, everyone(case)), case.expected(everyone(case))
    assert got.dtype == BF16 and got.shape == expected.shape
    # Roundings of 2^-9 each: latent query, weights, attended latent, value, gate, result.
    assert float((got.double() - expected).abs().max() / expected.abs().max()) < 2.0**-6


def test_error_is_of_the_size_of_the_torch_form(mla):
    case = Case(contexts=(900, 300), lengths=(8, 4))
    chosen = everyone(case)
    q_nope, q_rope, spans, gate, _ = case.arguments(chosen)
    torch_form = attention.mla_absorbed(
        q_nope, q_rope, case.weights, case.cache, spans, scale=case.scale, gate_THW=gate
    )
    expected = case.expected(chosen)

    def error(out):
        return float((out.double() - expected).square().mean().sqrt())

    assert error(case.run(mla, chosen)) < 4 * error(torch_form)


def test_gate_is_the_plain_gate_of_the_ungated_result(mla):
    case = Case()
    gate = case.arguments(everyone(case))[3]
    plain = attention._gated(case.run(mla, everyone(case), gated=False), gate)
    difference = (case.run(mla, everyone(case)).double() - plain.double()).abs()
    # The gate multiplies the rounded value; only the sigmoid may differ, by one unit in the last place.
    assert float((difference / plain.double().abs().clamp_min(1e-6)).max()) <= 2.0**-7


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_have_the_same_bits_alone_and_among_others(mla, shape, threads):
    case = Case(shape)
    whole = case.run(mla, everyone(case))
    assert bool(whole.isfinite().all()), "poisoned cache rows leaked"
    for chosen in ([0], [1], [2], [3], [4], [5], [6], [0, 1], [4, 5, 0], [5, 3], [6, 2, 1]):
        rows = case.arguments(chosen)[4]
        assert torch.equal(case.run(mla, chosen), whole[rows]), chosen
        assert torch.equal(case.run(mla, chosen, extra_context=130), whole[rows]), chosen


def test_threads_change_no_bit(mla):
    case = Case(contexts=(500, 300, 70), lengths=(8, 4, 1))
    before, results = torch.get_num_threads(), []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        results.append([case.run(mla, chosen) for chosen in ([0], [0, 1, 2], [1, 2])])
    torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_limits_alone_say_how_long_the_contexts_are(mla, threads):
    case = Case(contexts=(200, 140), lengths=(1, 3))
    q_nope, q_rope, spans, gate, _ = case.arguments([0, 1])
    grown = spans.limits_SM.clone()
    spans.limits_SM.fill_(1)
    spans.keys.num_tiles = 1
    addresses = spans.limits_SM.data_ptr(), spans.keys.page_table_SP.data_ptr()
    attend = partial(mla.absorbed, q_nope, q_rope, case.weights, case.cache, spans, scale=case.scale, gate_THW=gate)
    attend()
    spans.limits_SM.copy_(grown)
    assert addresses == (spans.limits_SM.data_ptr(), spans.keys.page_table_SP.data_ptr())
    assert torch.equal(attend(), case.run(mla, [0, 1]))


@pytest.mark.parametrize("context", [8, 63, 64, 65, 90, 140])
def test_a_span_cut_short_has_the_same_bits(mla, context):
    case = Case(contexts=(context, 33), lengths=(8, 5))
    whole = case.run(mla, [0])
    for rows in range(1, 8):
        assert torch.equal(case.run(mla, [0], last=rows), whole[:rows])


@pytest.mark.parametrize(("context", "length"), [(150, 150), (300, 170)])
def test_prompt_rows_have_the_same_bits_wherever_the_prompt_is_cut(mla, context, length, threads):
    case = Case(contexts=(context,), lengths=(length,))
    whole = case.run(mla, [0])
    for first in (0, 64, 128):
        rest = copy(case)
        last = min(first + 64, length)
        rest.contexts, rest.lengths = (context - length + last,), (last - first,)
        rest.joined = case.joined[first:last]
        assert torch.equal(rest.run(mla, [0]), whole[first:last])


def test_prompt_rows_are_those_of_the_expanded_form(mla):
    case = Case(contexts=(300,), lengths=(170,))
    q_nope, q_rope, spans, gate, _ = case.arguments([0])
    expected = attention.mla_expanded(
        q_nope.double(), q_rope.double(), case.kv_b.double(), case.cache.double(), spans,
        scale=case.scale, gate_THW=gate.double(),
    )  # fmt: skip
    got = case.run(mla, [0])
    assert float((got.double() - expected).abs().max() / expected.abs().max()) < 2.0**-6


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
def test_a_broken_later_row_does_not_reach_earlier_rows(mla, poison):
    case = Case(contexts=(70,), lengths=(5,))
    before = case.run(mla, [0])
    for position in (67, 68, 69):
        case.cache[case.row(0, position)] = poison
    after = case.run(mla, [0])
    assert torch.equal(after[:2], before[:2])
    assert bool(after[4].isnan().any()), "a visible broken key must not be hidden"


def test_a_row_sees_its_own_key_and_nothing_later(mla):
    case = Case(contexts=(20,), lengths=(4,))
    before = case.run(mla, [0])
    case.cache[case.row(0, 19)] += 1
    after = case.run(mla, [0])
    assert torch.equal(after[:3], before[:3])
    assert not torch.equal(after[3], before[3])


def test_bytes_around_the_results_and_neighbours_inputs_are_left_alone(mla):
    case = Case()
    rows = case.arguments([1])[4]
    alone = case.run(mla, [1])
    case.joined[[r for r in range(case.joined.shape[0]) if r not in rows.tolist()]] = float("nan")
    case.joined[:, -3:] = float("nan")
    whole = case.run(mla, everyone(case))
    assert torch.equal(whole[rows], alone)


def test_large_scores_do_not_overflow(mla):
    case = Case(contexts=(140,), lengths=(2,))
    case.joined *= 1e3
    assert bool(case.run(mla, [0]).isfinite().all())


@pytest.mark.parametrize(("latent", "rope", "extra"), [(96, 16, 0), (22, 2, 5), (130, 64, 1), (16, 8, 0)])
def test_new_latents_are_those_of_the_plain_form(mla, latent, rope, extra):
    rows = torch.randn(9, latent + rope + extra).to(BF16)[:, : latent + rope]
    gain, slots = torch.randn(latent).to(BF16), torch.randperm(30)[:9]
    filler = torch.full((1,), 0x3E3E, dtype=torch.int16).view(BF16)
    ours, theirs = (filler.expand(30, latent + rope).clone() for _ in range(2))
    mla.append_latents(rows, gain, 1e-6, ours, slots)
    attention.append_latents(rows, gain, 1e-6, theirs, slots)
    untouched = [r for r in range(30) if r not in slots.tolist()]
    assert torch.equal(ours[untouched].view(torch.int16), theirs[untouched].view(torch.int16))
    assert torch.equal(ours[:, latent:], theirs[:, latent:])
    # The sum of squares may differ in its last bit, which can move both roundings by one unit.
    assert torch.allclose(ours.float(), theirs.float(), rtol=2.0**-7, atol=0)
    for row in range(9):
        one = torch.zeros(1, latent + rope, dtype=BF16)
        mla.append_latents(rows[row : row + 1], gain, 1e-6, one, torch.tensor([0]))
        assert torch.equal(one[0], ours[slots[row]])


def test_no_rows_is_no_work(mla):
    mla.append_latents(torch.empty(0, 24, dtype=BF16), torch.ones(16).to(BF16), 1e-6, torch.zeros(4, 24).to(BF16),
                       torch.empty(0, dtype=torch.int64))  # fmt: skip


def probe_check(native, **changes):
    sizes = {"num_heads": 4, "nope_dim": 16, "rope_dim": 8, "value_dim": 24, "latent_dim": 48} | changes
    return absorbed_check(MlaSizes(**sizes), BF16, torch.device("cpu"), native)


def test_the_probe_offers_the_native_form_first_and_finds_it_to_hold(native):
    check = probe_check(native)
    assert check.geometries[0] == native.geometry
    assert check.find_violation(native.geometry) is None
    assert native.geometry not in probe_check(native, rope_dim=7).geometries  # pairs need even widths


def test_the_probe_finds_the_native_form_to_hold_for_prompts(native):
    sizes = MlaSizes(num_heads=4, nope_dim=16, rope_dim=8, value_dim=24, latent_dim=48)
    check = expanded_check(sizes, BF16, torch.device("cpu"), native)
    assert check.geometries[0] == native.geometry
    assert all(check.find_violation(geometry) is None for geometry in check.geometries)


@pytest.mark.parametrize("method", ["absorbed", "append_latents"])
def test_the_probe_notices_company(native, method, monkeypatch):
    plain = getattr(NativeMla, method)

    def dependent(self, rows, *others, **options):
        scaled = rows * (1 + 2.0**-6) if rows.shape[0] > 4 else rows
        return plain(self, scaled, *others, **options)

    monkeypatch.setattr(NativeMla, method, dependent)
    assert probe_check(native).find_violation(native.geometry) is not None
