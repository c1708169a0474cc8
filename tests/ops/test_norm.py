import torch

from outrider.ops import norm


def test_rms_norm_rounds_before_the_gamma_product(dtype, assert_close):
    x, weight = torch.randn(5, 96).to(dtype) * 3, torch.randn(96).to(dtype)
    assert_close(norm.rms_norm(x, weight, 1e-5), norm.rms_norm_reference(x, weight, 1e-5))
    island = torch.float64 if dtype == torch.float64 else torch.float32
    wide = x.to(island)
    unit = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(dtype)
    assert torch.equal(norm.rms_norm(x, weight, 1e-5), unit * weight)


def test_eps_is_added_to_the_mean_of_squares():
    x = torch.full((1, 64), 1e-3, dtype=torch.float64)
    expected = 1e-3 / (1e-6 + 1e-5) ** 0.5
    assert torch.allclose(norm.rms_norm(x, torch.ones(64).double(), 1e-5), torch.full_like(x, expected), rtol=1e-12)


def test_l2_norm_adds_eps_to_the_sum(dtype):
    x = torch.randn(3, 2, 32).to(dtype) * 1e-3
    wide = x.double()
    expected = 0.25 * wide / (wide.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt()
    got = norm.l2_norm_scaled(x, 0.25)
    assert got.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert torch.allclose(got.double(), expected, rtol=1e-12 if dtype == torch.float64 else 1e-5)


def test_gated_norm(dtype, assert_close):
    island = torch.float64 if dtype == torch.float64 else torch.float32
    o, gate = torch.randn(5, 3, 32).to(dtype), torch.randn(5, 3, 32).to(dtype) * 3
    weight = torch.randn(32, dtype=island)
    got = norm.gated_rms_norm(o, weight, gate, 1e-5)
    assert_close(got, norm.gated_rms_norm_reference(o, weight, gate, 1e-5))
    if dtype == torch.bfloat16:  # one rounding only
        wide = norm.gated_rms_norm(o.float(), weight, gate.float(), 1e-5)
        assert torch.equal(got, wide.bfloat16())


def test_rows_do_not_depend_on_each_other(dtype, threads):
    for width in (16, 64, 96, 1000, 7168):
        x, weight = torch.randn(17, width).to(dtype), torch.randn(width).to(dtype)
        whole = norm.rms_norm(x, weight, 1e-5)
        for rows in [slice(0, n) for n in range(1, 17)] + [slice(16, 17)]:
            assert torch.equal(norm.rms_norm(x[rows], weight, 1e-5), whole[rows])
    for heads, width in ((2, 16), (3, 32), (4, 64)):
        o, gate = torch.randn(17, heads, width).to(dtype), torch.randn(17, heads, width).to(dtype)
        weight = torch.randn(width, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
        gated, unit = norm.gated_rms_norm(o, weight, gate, 1e-5), norm.l2_norm_scaled(o, 0.125)
        for rows in [slice(0, n) for n in range(1, 17)] + [slice(16, 17)]:
            assert torch.equal(norm.gated_rms_norm(o[rows], weight, gate[rows], 1e-5), gated[rows])
            assert torch.equal(norm.l2_norm_scaled(o[rows], 0.125), unit[rows])
