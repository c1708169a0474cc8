"""SiTU and SwiGLU against float64 over the whole range of bfloat16, alone against in company."""

import pytest
import torch

from outrider.ops.activation import Activation, glu_fused
from outrider.ops.native.activation import NativeGlu

SILU = Activation(name="silu")
ACTIVATIONS = (
    SILU,
    Activation(name="situ"),
    Activation(name="situ", beta=4.0),
    Activation(name="situ", beta=4.0, linear_beta=25.0),
)
WIDTHS = (1, 7, 16, 20, 33, 64, 129)


def exact(activation, gate_up):
    return glu_fused(activation, gate_up.double())  # the float64 form, held to the formula by its own test


@pytest.fixture
def every_value():
    """Every finite bfloat16 as a gate, four times, with different values above."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    values = bits.view(torch.bfloat16)
    values = values[values.isfinite()].repeat(4)
    other = torch.randn(len(values), generator=torch.Generator().manual_seed(1)).bfloat16() * 10
    return torch.stack((values, other), dim=1).reshape(-1, 2)


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
@pytest.mark.parametrize("swapped", [False, True])
def test_every_gate_and_every_input(native, activation, swapped, every_value):
    gate_up = every_value.flip(1) if swapped else every_value
    expected = exact(activation, gate_up)
    out = NativeGlu(native)(activation, gate_up.contiguous())
    assert out.dtype == torch.bfloat16 and not out.isnan().any()
    largest = torch.finfo(torch.bfloat16).max
    expected = torch.where(expected.abs() > largest, expected.sign() * largest, expected)
    out = out.double().clamp(-largest, largest)  # beyond the range either becomes infinite
    # one rounding and a few units of float32; a sigmoid below the least normal number may be zero
    least = 2.0**-126 * gate_up.double().abs().clamp(1, largest).prod(-1, keepdim=True)
    assert ((out - expected).abs() <= expected.abs() * 2.0**-8 * 1.01 + least).all()


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
@pytest.mark.parametrize("width", WIDTHS)
def test_a_row_keeps_its_bits_in_company(native, activation, width, threads):
    glu = NativeGlu(native)
    x = torch.randn(300, 2 * width, generator=torch.Generator().manual_seed(2)).bfloat16() * 3
    alone = torch.cat([glu(activation, x[row : row + 1]) for row in range(len(x))])
    expected = exact(activation, x)
    assert ((alone.double() - expected).abs() <= expected.abs() * 2.0**-8 * 1.01 + 2.0**-126).all()
    padded = torch.full((302, 2 * width + 3), float("nan"), dtype=torch.bfloat16)
    padded[1:-1, 2:-1] = x
    for num_rows in (0, 1, 2, 9, 300):
        assert torch.equal(glu(activation, x[:num_rows]), alone[:num_rows])
        assert torch.equal(glu(activation, padded[1 : 1 + num_rows, 2:-1]), alone[:num_rows])
    assert torch.equal(glu(activation, x.view(3, 100, -1)), alone.view(3, 100, -1))
    x[1] = float("nan")
    assert torch.equal(glu(activation, x[:3])[::2], alone[:3:2])
