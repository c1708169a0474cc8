import torch

from outrider.ops import activation as ops


def test_situ_matches_the_formula(dtype, assert_close):
    gate, up = torch.randn(5, 48).to(dtype) * 4, torch.randn(5, 48).to(dtype) * 30
    for beta, linear_beta in ((4.0, 25.0), (4.0, None), (None, 25.0)):
        got = ops.situ(gate, up, beta, linear_beta)
        assert_close(got, ops.situ_reference(gate, up, beta, linear_beta))
    assert_close(ops.silu_mul(gate, up), ops.silu_mul_reference(gate, up))


def test_situ_bounds():
    gate, up = torch.full((1, 4), 200.0), torch.full((1, 4), -1e4)
    assert torch.allclose(ops.situ(gate, up, 4.0, 25.0), torch.full((1, 4), -100.0))
    x = torch.linspace(-20, 20, 4001)[None]
    factor = ops.situ(x, torch.ones_like(x), 4.0, None)
    assert factor.min() > -0.270 and factor.max() < 4.0


def test_glu_dispatches_and_halves():
    gate_up = torch.randn(3, 32)
    gate, up = gate_up[:, :16], gate_up[:, 16:]
    situ = ops.Activation(name="situ", beta=4.0, linear_beta=25.0)
    assert torch.equal(ops.glu_fused(situ, gate_up), ops.situ(gate, up, 4.0, 25.0))
    assert torch.equal(ops.glu_fused(ops.Activation(name="silu"), gate_up), ops.silu_mul(gate, up))


def test_sigmoid_gate_rounds_the_sigmoid_first():
    x, gate = torch.randn(4, 64).bfloat16(), torch.randn(4, 64).bfloat16()
    expected = x * torch.sigmoid(gate.float()).bfloat16()
    assert (ops.sigmoid_gate(x, gate).float() - expected.float()).abs().max() <= 2**-7


def test_rows_do_not_depend_on_each_other(dtype, threads):
    situ = ops.Activation(name="situ", beta=4.0, linear_beta=25.0)
    for width in (8, 40, 64, 512):
        gate_up = torch.randn(150, 2 * width).to(dtype) * 3
        whole, gated = ops.glu_fused(situ, gate_up), ops.sigmoid_gate(gate_up, gate_up)
        swiglu = ops.glu_fused(ops.Activation(name="silu"), gate_up)
        for rows in [slice(0, n) for n in range(1, 17)] + [slice(149, 150)]:
            assert torch.equal(ops.glu_fused(situ, gate_up[rows]), whole[rows])
            assert torch.equal(ops.glu_fused(ops.Activation(name="silu"), gate_up[rows]), swiglu[rows])
            assert torch.equal(ops.sigmoid_gate(gate_up[rows], gate_up[rows]), gated[rows])
