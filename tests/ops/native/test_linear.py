"""The packed product against float64, alone against in company, and what it must not read."""

import pytest
import torch

from outrider.ops.linear import linear
from outrider.ops.native.linear import PackedLinear, pack_weights

# (O, I): one output, odd inputs, less than a group, several groups with a rest, one input.
SHAPES = ((1, 1), (1, 64), (31, 7), (32, 33), (33, 64), (96, 192), (130, 95), (257, 48), (320, 2))
POISON = torch.tensor([0x3E3E], dtype=torch.int16).view(torch.bfloat16).item()  # a plausible number


def operands(num_out, num_in, num_rows, seed=0):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(num_out, num_in, generator=generator).bfloat16()
    return weight, torch.randn(num_rows, num_in, generator=generator).bfloat16()


def packed(native, weight, **options):
    product = PackedLinear(native, fallback=pytest.fail, **options)
    product.pack(weight)
    return product


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("num_rows", [0, 1, 2, 3, 5, 8, 9, 17, 40])
def test_equals_float64_up_to_one_rounding(native, shape, num_rows):
    weight, x = operands(*shape, num_rows)
    out = packed(native, weight)(x, weight)
    assert out.shape == (num_rows, shape[0]) and out.dtype == torch.bfloat16
    exact = x.double() @ weight.double().T
    # half a unit of the result, and float32 sums of terms that may cancel
    terms = x.double().abs() @ weight.double().abs().T
    assert ((out.double() - exact).abs() <= exact.abs() * 2.0**-8 + terms * 2.0**-20).all()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_small_integers_are_exact(native, shape):
    weight, x = (t.mul(2).round() for t in operands(*shape, 11, seed=1))
    x = torch.where(torch.rand(x.shape) < 8 / shape[1], x, 0)  # sums stay below 256
    out = packed(native, weight)(x, weight)
    exact = x.double() @ weight.double().T
    fits = exact.abs() <= 256
    assert fits.any() and torch.equal(out.double()[fits], exact[fits])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_row_keeps_its_bits_in_company(native, shape, threads):
    weight, x = operands(*shape, 37, seed=2)
    product = packed(native, weight)
    alone = torch.cat([product(x[row : row + 1], weight) for row in range(len(x))])
    for num_rows in (2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 17, 37):
        for begin in (0, 37 - num_rows):
            assert torch.equal(product(x[begin : begin + num_rows], weight), alone[begin : begin + num_rows])


@pytest.mark.parametrize("num_rows", [1, 8, 21])
def test_threads_do_not_change_bits(native, num_rows):
    weight, x = operands(4100, 260, num_rows, seed=3)  # large enough to be split
    product = packed(native, weight)
    before = torch.get_num_threads()
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results += [product(x, weight) for _ in range(20)]
    torch.set_num_threads(before)
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("fill", [float("nan"), POISON])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_reads_nothing_beside_its_operands(native, shape, fill):
    num_out, num_in = shape
    weight, x = operands(num_out, num_in, 5, seed=4)
    expected = packed(native, weight)(x, weight)
    wide_weight = torch.full((num_out + 2, num_in + 3), fill, dtype=torch.bfloat16)
    wide_x = torch.full((7, num_in + 5), fill, dtype=torch.bfloat16)
    inner_weight, inner_x = wide_weight[1:-1, 1 : 1 + num_in], wide_x[1:-1, 2 : 2 + num_in]
    inner_weight.copy_(weight)
    inner_x.copy_(x)
    assert torch.equal(packed(native, inner_weight)(inner_x, inner_weight), expected)
    assert torch.equal(packed(native, weight)(inner_x[2:3], weight), expected[2:3])


def test_nan_rows_stay_among_themselves(native):
    weight, x = operands(70, 50, 6, seed=5)
    product = packed(native, weight)
    expected = product(x, weight)
    x[1], x[4] = float("nan"), torch.finfo(torch.bfloat16).max
    out = product(x, weight)
    assert out[1].isnan().all()
    kept = [0, 2, 3, 5]
    assert torch.equal(out[kept], expected[kept])


def test_leading_dims_and_column_strides(native):
    weight, x = operands(40, 24, 6, seed=6)
    product = packed(native, weight)
    expected = product(x, weight)
    assert torch.equal(product(x.view(2, 3, 24), weight), expected.view(2, 3, 40))
    assert torch.equal(product(x.T.contiguous().T, weight), expected)


def test_weights_that_were_not_packed_take_the_fallback(native):
    weight, x = operands(8, 16, 3)
    other = weight.clone()
    product = PackedLinear(native, linear, shapes=frozenset({(8, 16)}))
    pack_weights(product, [weight, weight[:4], weight.float()])
    pack_weights(linear, [weight])  # a torch form needs nothing
    assert product._packed.keys() == {id(weight)}
    assert torch.equal(product(x, other), linear(x, other))
    assert torch.equal(product(x.float(), weight.float()), linear(x.float(), weight.float()))


def test_packing_again_follows_changed_values(native):
    weight, x = operands(33, 20, 3)
    product = packed(native, weight)
    weight.mul_(2)
    pointer = product._packed[id(weight)].pointer
    product.pack(weight)
    assert product._packed[id(weight)].pointer == pointer  # no second copy
    fresh = weight.clone()
    assert torch.equal(product(x, weight), packed(native, fresh)(x, fresh))
