import pytest
import torch

from outrider.ops.select import argmax_lowest, first_maximum, topk_lowest


def test_argmax_takes_the_lowest_of_equals():
    x = torch.tensor([[1.0, 3.0, 3.0, 2.0], [5.0, 5.0, 5.0, 5.0], [-1.0, -2.0, -3.0, float("-inf")]])
    assert argmax_lowest(x).tolist() == [1, 0, 0]


def test_argmax_on_many_ties_and_dtypes(dtype):
    x = torch.randint(0, 4, (50, 3000)).to(dtype)
    expected = [row.tolist().index(max(row.tolist())) for row in x]
    assert argmax_lowest(x).tolist() == expected
    assert first_maximum(x).tolist() == expected
    assert first_maximum(x[::7]).tolist() == expected[::7]


@pytest.mark.parametrize("width", [1, 7, 64, 1000, 8192, 163840])
def test_ties_at_any_distance_go_to_the_lowest_index(dtype, threads, width):
    for first in {0, width // 3, width - 1}:
        x = torch.full((3, width), -2.0).to(dtype)
        x[:, first:] = torch.tensor([3.0, float("inf"), -2.0]).to(dtype)[:, None]
        expected = [first, first, 0]
        assert argmax_lowest(x).tolist() == first_maximum(x).tolist() == expected
        assert argmax_lowest(x[1:2]).tolist() == expected[1:2]
        x[:, first:] = -0.0
        x[:, width - 1] = 0.0  # equal zeros
        assert argmax_lowest(x).tolist() == [first] * 3


def test_argmax_of_nan_is_out_of_range():
    assert argmax_lowest(torch.tensor([[0.0, float("nan"), 1.0]])).tolist() == [3]
    assert first_maximum(torch.tensor([[0.0, float("nan"), float("inf")]])).tolist() == [1]


def test_topk_orders_ties_by_index():
    x = torch.randint(0, 5, (40, 64)).float()
    values, ids = topk_lowest(x, 9)
    for row, row_values, row_ids in zip(x.tolist(), values.tolist(), ids.tolist(), strict=True):
        expected = sorted(range(64), key=lambda i: (-row[i], i))[:9]
        assert row_ids == expected
        assert row_values == [row[i] for i in expected]
