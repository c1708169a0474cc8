"""Tensors of an arena: where they lie, that they do not overlap, and that their memory outlives the arena."""

import mmap
import sys

import pytest
import torch

from outrider.errors import CapacityError
from outrider.ops.native import arena as arena_module
from outrider.ops.native.arena import HUGE_PAGE, Arena


def test_tensors_follow_each_other_from_the_begin_of_a_huge_page() -> None:
    arena = Arena()
    first = arena.empty((3, 5), torch.bfloat16)
    empty = arena.empty((0, 4), torch.float32)
    second = arena.empty((7,), torch.int64)
    assert first.data_ptr() % HUGE_PAGE == 0 and second.data_ptr() == first.data_ptr() + 64
    assert first.shape == (3, 5) and first.dtype == torch.bfloat16 and first.is_contiguous()
    assert empty.shape == (0, 4) and empty.dtype == torch.float32
    first.fill_(1.0)
    second.fill_(-1)
    assert bool((first == 1.0).all()) and second.tolist() == [-1] * 7


def test_a_tensor_that_does_not_fit_gets_a_block_of_its_own(monkeypatch) -> None:
    monkeypatch.setattr(arena_module, "BLOCK_BYTES", HUGE_PAGE)
    arena = Arena()
    sizes = (HUGE_PAGE - 64, 65, 3 * HUGE_PAGE + 1, 1)
    tensors = [arena.empty((size,), torch.uint8) for size in sizes]
    for value, tensor in enumerate(tensors):
        tensor.fill_(value)
    assert all(bool((tensor == value).all()) for value, tensor in enumerate(tensors))
    assert all(tensor.data_ptr() % HUGE_PAGE == 0 for tensor in tensors[:3])
    assert tensors[3].data_ptr() == tensors[2].data_ptr() + 3 * HUGE_PAGE + 64


def test_a_tensor_outlives_its_arena() -> None:
    values = Arena().empty((1 << 20,), torch.float32).fill_(2.0)
    others = Arena().empty((1 << 20,), torch.float32).fill_(3.0)
    assert values.sum().item() == 2 << 20 and others.sum().item() == 3 << 20


def test_without_huge_pages_the_memory_is_the_same(monkeypatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(22, "Invalid argument")

    class Refusing(mmap.mmap):
        madvise = refuse

    monkeypatch.setattr(mmap, "mmap", Refusing)
    assert Arena().empty((5,), torch.float32).fill_(1.0).sum().item() == 5.0
    monkeypatch.setattr(sys, "platform", "darwin")
    assert Arena().empty((5,), torch.float32).fill_(1.0).sum().item() == 5.0


@pytest.mark.parametrize("size", [1 << 46, 1 << 62])  # more than addresses, more than a count of bytes
def test_too_much_is_refused_by_name(size) -> None:
    with pytest.raises(CapacityError, match=rf"shape \({size},\) and dtype torch.float32"):
        Arena().empty((size,), torch.float32)
