"""The native argmax against a plain search."""

import pytest
import torch

from outrider.ops.native.library import library
from outrider.ops.native.select import argmax_of, native_argmax
from outrider.ops.select import argmax_lowest, first_maximum


def by_search(row, nan_is_largest):
    values = row.tolist()
    nans = [index for index, value in enumerate(values) if value != value]
    if nans:
        return nans[0] if nan_is_largest else len(values)
    return values.index(max(values))


@pytest.mark.parametrize("width", [1, 2, 15, 16, 17, 40, 129, 8192])
@pytest.mark.parametrize("nan_is_largest", [False, True])
def test_equals_a_search(native, width, nan_is_largest, threads):
    generator = torch.Generator().manual_seed(width)
    x = torch.randint(-3, 3, (24, width), generator=generator).bfloat16()  # many ties
    x[1::4] = torch.randn(6, width, generator=generator).bfloat16()
    x[2] = float("-inf")
    x[3, -1] = x[6, 0] = x[7, width // 2] = float("nan")
    x[10], x[10, -1] = -0.0, 0.0  # equal, so the first wins
    x[11] = -1 - torch.arange(width) % 5  # padding lanes of zeros would win
    expected = [by_search(row, nan_is_largest) for row in x]
    assert argmax_of(native, x, nan_is_largest).tolist() == expected
    wide = torch.full((24, width + 2), float("inf"), dtype=torch.bfloat16)
    wide[:, 1:-1] = x
    assert argmax_of(native, wide[:, 1:-1], nan_is_largest).tolist() == expected
    assert argmax_of(native, x[:0], nan_is_largest).shape == (0,)


def test_both_forms_agree():
    if library() is None:
        pytest.skip("no native operations on this machine")
    x = torch.randint(-3, 3, (50, 70)).bfloat16()
    x[4, 60], x[5] = float("nan"), 0
    assert native_argmax(x.float(), nan_is_largest=True) is None
    assert native_argmax(x.T, nan_is_largest=True) is None
    ours = argmax_lowest(x), first_maximum(x)
    wide = x.float()
    assert torch.equal(ours[0], argmax_lowest(wide)) and torch.equal(ours[1], first_maximum(wide))
