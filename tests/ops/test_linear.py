import pytest
import torch
import torch.nn.functional as F

from outrider.ops import linear as ops

SHAPES = ((64, 48), (128, 256), (512, 256), (1, 64), (8, 64), (96, 1024))


@pytest.mark.parametrize("function", [ops.linear, ops.linear_padded])
def test_matches_the_plain_product(function, dtype, assert_close):
    for num_rows in (0, 1, 16, 33, 70):
        x, weight = torch.randn(num_rows, 48).to(dtype), torch.randn(64, 48).to(dtype)
        if num_rows:
            assert_close(function(x, weight), ops.linear_reference(x, weight))
        assert function(x, weight).shape == (num_rows, 64)
    x = torch.randn(2, 3, 48).to(dtype)
    assert torch.equal(function(x, weight).view(6, 64), function(x.view(6, 48), weight))


@pytest.mark.parametrize("function", [ops.linear, ops.linear_padded])
def test_a_row_has_the_same_bits_alone_and_among_others(function, dtype, threads):
    for num_out, num_in in SHAPES:
        weight = torch.randn(num_out, num_in).to(dtype)
        x = torch.randn(70, num_in).to(dtype)
        whole = function(x, weight)
        for rows in (slice(0, n) for n in (1, 2, 3, 5, 8, 15, 16, 17, 33, 69)):
            assert torch.equal(function(x[rows], weight), whole[rows]), (num_out, num_in, rows)
        assert torch.equal(function(x[37:38], weight), whole[37:38])


def test_small_bfloat16_calls_are_one_library_call(monkeypatch):
    calls = []
    real = F.linear
    monkeypatch.setattr(ops.F, "linear", lambda x, w: calls.append(x.shape) or real(x, w))
    weight = torch.randn(65, 64).bfloat16()
    ops.linear(torch.randn(32, 64).bfloat16(), weight)
    ops.linear(torch.randn(1, 64).bfloat16(), weight)
    assert calls == [(32, 64), (1, 64)]
    ops.linear(torch.randn(33, 64).bfloat16(), weight)
    assert calls[2:] == [(32, 64), (1, 64)]


def test_small_bfloat16_products_get_zero_rows(monkeypatch):
    """At most 16 ** 3 multiplications take another kernel."""
    calls = []
    real = F.linear
    monkeypatch.setattr(ops.F, "linear", lambda x, w: calls.append(x.shape[0]) or real(x, w))
    for num_out, num_in, least_rows in ((65, 64, 1), (64, 64, 2), (96, 24, 2), (64, 32, 3), (8, 16, 32)):
        calls.clear()
        weight = torch.randn(num_out, num_in).bfloat16()
        for num_rows in (1, 2, 3, 32):
            assert ops.linear(torch.randn(num_rows, num_in).bfloat16(), weight).shape == (num_rows, num_out)
        assert calls == [max(num_rows, least_rows) for num_rows in (1, 2, 3, 32)]


def test_a_row_of_cancelling_products_has_the_same_bits_alone_and_among_others(threads):
    """Random operands would need tens of thousands of elements to show a difference after rounding."""
    for num_out, num_in in ((64, 32), (32, 32), (96, 24), (64, 64), (128, 20), (128, 64), (8, 16)):
        for _ in range(20):
            operands = ops.cancelling_operands(torch.randn(num_out, num_in), torch.randn(32, num_in))
            weight, x = (operand.bfloat16() for operand in operands)
            whole = ops.linear(x, weight)
            for num_rows in (1, 2, 3, 5, 8, 31):
                assert torch.equal(ops.linear(x[:num_rows], weight), whole[:num_rows]), (num_out, num_in, num_rows)


def test_every_candidate_is_the_product(dtype, assert_close):
    weight = torch.randn(24, 48).to(dtype)
    for tiles in ops.tile_candidates(dtype):
        for num_rows in (0, 1, 31, 65):
            x = torch.randn(num_rows, 48).to(dtype)
            got = ops.linear_in_tiles(x, weight, tiles)
            assert got.shape == (num_rows, 24)
            if num_rows:
                assert_close(got, ops.linear_reference(x, weight))


def test_the_first_candidate_is_what_linear_does(dtype):
    x, weight = torch.randn(37, 48).to(dtype), torch.randn(24, 48).to(dtype)
    assert torch.equal(ops.linear_in_tiles(x, weight, ops.tile_candidates(dtype)[0]), ops.linear(x, weight))


@pytest.mark.parametrize("padded", [True, False])
def test_tiles_are_cut_as_they_say(padded, monkeypatch):
    calls = []
    real = F.linear
    monkeypatch.setattr(ops.F, "linear", lambda x, w: calls.append(x.shape[0]) or real(x, w))
    ops.linear_in_tiles(torch.randn(35, 8), torch.randn(4, 8), ops.RowTiles(num_rows=16, padded=padded))
    assert calls == [16, 16, 16 if padded else 3]


def test_a_table_takes_the_geometry_of_each_weight(monkeypatch):
    calls = []
    real = F.linear
    monkeypatch.setattr(ops.F, "linear", lambda x, w: calls.append((x.shape[0], w.shape[0])) or real(x, w))
    table = ops.LinearTable(tiles={(4, 8): ops.RowTiles(num_rows=1, padded=True)}, dtype=torch.bfloat16)
    x = torch.randn(2, 8)
    table(x.bfloat16(), torch.randn(4, 8).bfloat16())
    table(x.bfloat16(), torch.randn(6, 8).bfloat16())  # not in the table
    table(x, torch.randn(4, 8))  # in the table, but of another dtype: float32 products need their padding
    assert calls == [(1, 4), (1, 4), (32, 6), (16, 4)]  # few multiplications: a whole tile of rows


def test_embedding_reads_rows():
    table = torch.randn(11, 4)
    assert torch.equal(ops.embedding(torch.tensor([3, 0, 10]), table), table[[3, 0, 10]])
