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


def test_probe_chooses(monkeypatch):
    assert ops.choose_linear(SHAPES, torch.bfloat16) is ops.linear
    assert ops.probe_row_invariance(SHAPES, torch.float32)

    def by_row_count(x, weight):
        return F.linear(x, weight) + x.shape[0]

    monkeypatch.setattr(ops, "linear", by_row_count)
    assert not ops.probe_row_invariance([(8, 16)], torch.bfloat16)
    assert ops.choose_linear([(8, 16)], torch.bfloat16) is ops.linear_padded


def test_probe_cuts_wide_outputs(monkeypatch):
    seen = set()
    real = ops.linear
    monkeypatch.setattr(ops, "linear", lambda x, weight: seen.add(tuple(weight.shape)) or real(x, weight))
    assert ops.probe_row_invariance([(10_000_000, 8), (20_000_000, 8), (96, 8)], torch.bfloat16)
    assert seen == {(ops.PROBE_COLUMNS, 8), (96, 8)}


def test_embedding_reads_rows():
    table = torch.randn(11, 4)
    assert torch.equal(ops.embedding(torch.tensor([3, 0, 10]), table), table[[3, 0, 10]])
