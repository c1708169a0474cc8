import pytest
import torch

from outrider.ops.block_attention import BlockMask, block_attention, block_attention_reference
from outrider.ops.paged import paged_keys

PAGE = 16
MASKS = [
    BlockMask(),
    BlockMask(causal=True),
    BlockMask(window=20),
    BlockMask(causal=True, window=3),
    BlockMask(causal=True, window=2, window_from_anchor=True),
    BlockMask(window=64, window_from_anchor=True),
]


class Case:
    """Block queries of several sequences, in a cache full of NaN outside their context."""

    def __init__(self, contexts, rows, heads, kv_heads, width, dtype):
        self.contexts = torch.tensor(contexts)
        pages = [-(-c // PAGE) for c in contexts]
        ids = torch.randperm(sum(pages)).tolist()
        per_sequence = [[ids.pop() for _ in range(n)] for n in pages]
        unused = sum(pages)
        self.table = torch.tensor([own + [unused] * (40 - len(own)) for own in per_sequence])
        self.context = torch.full((2, (unused + 1) * PAGE, kv_heads, width), float("nan"), dtype=dtype)
        for count, own in zip(contexts, per_sequence, strict=True):
            index = [own[p // PAGE] * PAGE + p % PAGE for p in range(count)]
            self.context[:, index] = torch.randn(2, count, kv_heads, width).to(dtype)
        self.q = torch.randn(len(contexts), rows, heads, width).to(dtype) * 2
        self.block = torch.randn(2, len(contexts), rows, kv_heads, width).to(dtype)

    def run(self, function, mask, chosen, extra_context=0):
        counts = self.contexts[chosen]
        keys = paged_keys(self.table[chosen], counts, page_size=PAGE, max_context=int(counts.max()) + extra_context)
        return function(
            self.q[chosen], *self.context, *self.block[:, chosen], keys, mask, scale=self.q.shape[-1] ** -0.5
        )


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize(("rows", "heads", "kv_heads", "width"), [(7, 4, 2, 16), (5, 3, 3, 32), (8, 4, 1, 64)])
def test_matches_plain_softmax_attention(rows, heads, kv_heads, width, mask, dtype, assert_close):
    case = Case((1, 64, 130, 17, 0), rows, heads, kv_heads, width, dtype)
    got, expected = (case.run(f, mask, list(range(5))) for f in (block_attention, block_attention_reference))
    assert_close(got, expected)


def test_the_default_sees_the_whole_block_and_the_whole_context():
    case = Case((30,), 4, 2, 2, 16, torch.float64)
    everything, causal = (case.run(block_attention, mask, [0]) for mask in (BlockMask(), BlockMask(causal=True)))
    assert torch.equal(everything[:, 3], causal[:, 3])
    assert not torch.allclose(everything[:, 0], causal[:, 0])
    case.block[1, :, 3] += 1  # the last row's value reaches row 0 only without causality
    assert not torch.allclose(case.run(block_attention, BlockMask(), [0])[:, 0], everything[:, 0])
    assert torch.equal(case.run(block_attention, BlockMask(causal=True), [0])[:, 0], causal[:, 0])


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_a_sequence_has_the_same_bits_alone_and_among_others(mask, dtype, threads):
    for heads, kv_heads in ((4, 2), (2, 2), (4, 1)):
        case = Case((3, 64, 200, 17, 0), 7, heads, kv_heads, 32, dtype)
        whole = case.run(block_attention, mask, list(range(5)))
        assert bool(whole.isfinite().all()), "poisoned cache rows leaked"
        for chosen in ([0], [1], [2], [3], [4], [3, 0], [4, 1, 3]):
            assert torch.equal(case.run(block_attention, mask, chosen), whole[chosen]), chosen
        assert torch.equal(case.run(block_attention, mask, [0, 4], extra_context=150), whole[[0, 4]])


def test_no_context_at_all():
    case = Case((0, 0), 4, 2, 1, 16, torch.float32)
    got = case.run(block_attention, BlockMask(), [0, 1])
    assert torch.allclose(got, case.run(block_attention_reference, BlockMask(), [0, 1]), atol=1e-6)
