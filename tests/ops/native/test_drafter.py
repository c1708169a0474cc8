"""Native block attention and context rows of a drafter against the torch forms, and the independence of sequences."""

import pytest
import torch

from outrider.ops.block_attention import BlockHeads, BlockMask, attend_block, store_context_rows
from outrider.ops.native.drafter import NativeDrafter
from outrider.ops.paged import paged_keys
from outrider.ops.rope import YarnScaling, rotary_table

BF16 = torch.bfloat16
CONTEXTS = (1, 64, 200, 17, 0, 129)
PAGE = 16
MASKS = [
    BlockMask(),
    BlockMask(causal=True),
    BlockMask(window=20),
    BlockMask(causal=True, window=3),
    BlockMask(causal=True, window=2, window_from_anchor=True),
    BlockMask(window=70, window_from_anchor=True),
]
SHAPES = [(7, 4, 2, 64), (5, 3, 3, 32), (8, 4, 1, 18), (1, 2, 2, 128)]  # block rows, heads, key heads, width


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(12)


@pytest.fixture
def drafter(native):
    return NativeDrafter(native)


class Case:
    """Projections of blocks of several sequences, in a context cache full of NaN outside their pages."""

    def __init__(self, shape=SHAPES[0], contexts=CONTEXTS):
        self.rows, self.num_heads, self.kv_heads, self.width = shape
        self.contexts = torch.tensor(contexts)
        pages = [-(-c // PAGE) for c in contexts]
        ids = torch.randperm(sum(pages)).tolist()
        own = [[ids.pop() for _ in range(n)] for n in pages]
        self.table = torch.tensor([row + [sum(pages)] * (40 - len(row)) for row in own])
        size = (2, (sum(pages) + 1) * PAGE, self.kv_heads, self.width)
        self.context = torch.full(size, float("nan"), dtype=BF16)
        for count, row in zip(contexts, own, strict=True):
            index = [row[p // PAGE] * PAGE + p % PAGE for p in range(count)]
            self.context[:, index] = torch.randn(2, count, *size[2:]).to(BF16)
        num_joined = self.num_heads + 2 * self.kv_heads
        self.qkv = torch.randn(len(contexts), self.rows, num_joined, self.width).to(BF16) * 2
        self.gains = (1 + torch.randn(self.num_heads + self.kv_heads, self.width) / 4).to(BF16)
        scaling = YarnScaling(factor=4.0, original_max_positions=64)
        self.angles = rotary_table(300, self.width, 1e4, scaling)

    def arguments(self, mask, chosen, extra_context=0):
        counts = self.contexts[chosen]
        heads = BlockHeads(
            num_heads=self.num_heads,
            num_rows=self.rows,
            gains_PK=self.gains,
            eps=1e-5,
            table=self.angles,
            mask=mask,
            scale=self.width**-0.5,
        )
        keys = paged_keys(self.table[chosen], counts, page_size=PAGE, max_context=int(counts.max()) + extra_context)
        return self.qkv[chosen].flatten(0, 1), heads, self.context[0], self.context[1], keys

    def run(self, function, mask, chosen, extra_context=0):
        out = function(*self.arguments(mask, chosen, extra_context))
        return out.view(len(chosen), self.rows, self.num_heads, self.width)


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_the_torch_form_within_bfloat16(drafter, shape, mask):
    case = Case(shape)
    chosen = list(range(len(CONTEXTS)))
    got, expected = (case.run(function, mask, chosen) for function in (drafter.attend_block, attend_block))
    assert got.dtype == BF16
    difference = (got.double() - expected.double()).abs().max() / expected.double().abs().max()
    # Weights round to 2^-9, and the result twice.
    assert float(difference) < 2.0**-6


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_sequence_has_the_same_bits_alone_and_among_others(drafter, shape, mask, threads):
    case = Case(shape)
    whole = case.run(drafter.attend_block, mask, list(range(len(CONTEXTS))))
    assert bool(whole.isfinite().all()), "poisoned cache rows leaked"
    for chosen in ([0], [1], [2], [3], [4], [5], [3, 0], [4, 1, 3], [5, 2]):
        assert torch.equal(case.run(drafter.attend_block, mask, chosen), whole[chosen]), chosen
        assert torch.equal(case.run(drafter.attend_block, mask, chosen, extra_context=100), whole[chosen]), chosen


def test_a_broken_neighbour_is_not_seen(drafter):
    case = Case()
    before = case.run(drafter.attend_block, BlockMask(), list(range(6)))
    case.qkv[[1, 4]] = float("nan")
    after = case.run(drafter.attend_block, BlockMask(), list(range(6)))
    kept = [0, 2, 3, 5]
    assert torch.equal(after[kept], before[kept])
    assert bool(after[1].isnan().all())


def test_a_broken_hidden_row_of_a_causal_block_is_not_seen(drafter):
    case = Case()
    before = case.run(drafter.attend_block, BlockMask(causal=True), [2])
    case.qkv[2, 5:] = float("nan")
    after = case.run(drafter.attend_block, BlockMask(causal=True), [2])
    assert torch.equal(after[:, :5], before[:, :5])


@pytest.mark.parametrize("shape", [(3, 2, 64), (2, 1, 18), (1, 4, 32)], ids=str)
@pytest.mark.parametrize("num_rows", [0, 1, 9])
def test_context_rows_are_those_of_the_torch_form(drafter, shape, num_rows, threads):
    num_layers, kv_heads, width = shape
    kv = torch.randn(num_rows, num_layers, 2, kv_heads, width).to(BF16)
    gains = (1 + torch.randn(num_layers, width) / 4).to(BF16)
    table = rotary_table(60, width, 1e4)
    positions, slots = torch.randint(0, 60, (num_rows,)), torch.randperm(30)[:num_rows]
    filler = torch.full((1,), 0x3E3E, dtype=torch.int16).view(BF16)
    ours, theirs = (filler.expand(2, num_layers, 30, kv_heads, width).clone() for _ in range(2))
    drafter.store_context_rows(kv, gains, 1e-5, table, positions, slots, ours)
    store_context_rows(kv, gains, 1e-5, table, positions, slots, theirs)
    untouched = [row for row in range(30) if row not in slots.tolist()]
    assert torch.equal(ours[:, :, untouched], theirs[:, :, untouched])
    assert torch.equal(ours[1], theirs[1])
    # A norm's sum of squares may differ in its last bit, and with it each of three roundings.
    assert torch.allclose(ours.float(), theirs.float(), rtol=0, atol=float(theirs.float().abs().max()) * 2.0**-7)
    for row in range(num_rows):
        one = torch.zeros_like(ours[:, :, :1])
        drafter.store_context_rows(
            kv[row : row + 1], gains, 1e-5, table, positions[row : row + 1], torch.tensor([0]), one
        )
        assert torch.equal(one[:, :, 0], ours[:, :, slots[row]])
