"""Counting what is held: every storage once, weights apart from what was made of them."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from outrider.engine.resident import count_memory, resident_bytes
from outrider.ops.linear import linear
from outrider.ops.native.library import library
from outrider.ops.native.linear import PackedLinear

CACHES = SimpleNamespace(total_bytes=77)


def test_shared_memory_counts_once_and_for_the_target() -> None:
    joined = torch.zeros(6, 4)
    target = nn.Linear(4, 2, bias=False)
    target.weight = nn.Parameter(joined[:2])
    target.rest = nn.ParameterList([nn.Parameter(joined[2:])])
    table = torch.zeros(10, dtype=torch.int64)
    drafter = {
        "head": partial(torch.mul, target.weight),
        "bound": nn.Linear(3, 5).forward,
        "tables": [table, table[:2]],
    }
    report = count_memory(target, drafter, CACHES)
    assert (report.target_bytes, report.drafter_bytes) == (6 * 4 * 4, (3 * 5 + 5) * 4)
    assert (report.derived_bytes, report.cache_bytes) == (10 * 8, 77)
    assert count_memory(target, None, CACHES).drafter_bytes == 0


@pytest.mark.skipif(library() is None, reason="no native operations on this machine")
def test_packed_copies_are_counted() -> None:
    layer = nn.Linear(32, 48, bias=False, dtype=torch.bfloat16)
    layer.product = PackedLinear(library(), linear)
    before = count_memory(layer, None, CACHES)
    layer.product.pack(layer.weight)
    after = count_memory(layer, None, CACHES)
    assert before.derived_bytes == 0
    assert 4 * layer.weight.nbytes > after.derived_bytes >= layer.weight.nbytes == after.target_bytes


def test_the_system_tells_what_is_resident() -> None:
    resident = resident_bytes()
    if resident:
        assert resident["peak"] >= resident["total"] > 1e6
        assert "resident" in count_memory(None, None, CACHES).summary()
