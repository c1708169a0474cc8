"""RMSNorm and the residual mix against float64, alone against in company, and what they must not touch."""

import pytest
import torch

from outrider.ops.native.norm import NativeNorm
from outrider.ops.norm import rms_norm
from outrider.ops.residual import residual_mix_norm

WIDTHS = (1, 5, 16, 24, 33, 64, 96, 130, 192)
EPS = 1e-5
NAN = float("nan")


def rows(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def close(actual, expected, units=1.02):
    """Within so many units in the last place of bfloat16 (two roundings), and a little for sums that cancel."""
    error = (actual.double() - expected).abs()
    return actual.dtype == torch.bfloat16 and (error <= units * 2.0**-7 * expected.abs() + 2.0**-12).all()


def exact_norm(x, weight):
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


def exact_mix(candidates_BTD, weight_D):
    wide = candidates_BTD.double()
    scores = (wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt() * weight_D.double()).sum(-1)
    return (wide * scores.softmax(0)[..., None]).sum(0)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("num_rows", [0, 1, 7, 40])
def test_norm_equals_the_formula(native, width, num_rows):
    x, weight = rows(num_rows, width), rows(width, seed=1)
    assert close(NativeNorm(native).rms_norm(x, weight, EPS), exact_norm(x, weight))


@pytest.mark.parametrize("width", WIDTHS)
def test_norm_rounds_before_the_gamma_product(native, width):
    """As the vendor code: with a gamma of powers of two the second product changes nothing but the exponent."""
    x = rows(9, width)
    plain = NativeNorm(native).rms_norm(x, torch.ones(width).bfloat16(), EPS)
    third = torch.full((width,), 1 / 3).bfloat16()
    assert torch.equal(NativeNorm(native).rms_norm(x, third, EPS), plain * third)


def test_norm_of_more_dims_and_strides(native):
    norm = NativeNorm(native).rms_norm
    wide = rows(5, 3, 2, 4, 40)
    for x, weight in (
        (wide[:, :, 0], rows(3, 1, 40, seed=1)),  # keys of all layers, a gain per layer
        (wide[:, 0, 1], rows(4, 40, seed=2)),  # heads with a gain each
        (wide[:, 0, 1, 1:3], rows(40, seed=3)),
        (wide[:, 1, 1, 2, 8:29], rows(21, seed=4)),  # columns of a wider row
        (wide[0, 0, 0, 0], rows(40, seed=5)),
        (wide[0, 0, 0].T, rows(4, seed=6)),
    ):
        expected = rms_norm(x, weight, EPS)
        out = norm(x, weight, EPS)
        assert out.shape == x.shape and out.is_contiguous()
        assert close(out, exact_norm(x, weight)) and close(out, expected.double())
        assert torch.equal(out, norm(x.contiguous(), weight.contiguous(), EPS))


@pytest.mark.parametrize("width", WIDTHS)
def test_norm_of_a_row_keeps_its_bits(native, width, threads):
    norm, weight = NativeNorm(native).rms_norm, rows(width, seed=1)
    x = rows(600, width)
    alone = torch.cat([norm(x[row : row + 1], weight, EPS) for row in range(len(x))])
    padded = torch.full((602, width + 3), NAN, dtype=torch.bfloat16)
    padded[1:-1, 1:-2] = x
    for num_rows in (2, 3, 17, 600):
        assert torch.equal(norm(x[:num_rows], weight, EPS), alone[:num_rows])
        assert torch.equal(norm(padded[1 : 1 + num_rows, 1:-2], weight, EPS), alone[:num_rows])


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("num_candidates", [1, 2, 3, 9, 19])
@pytest.mark.parametrize("num_rows", [0, 1, 6])
def test_mix_equals_the_formula(native, width, num_candidates, num_rows):
    candidates, added = rows(num_candidates, num_rows, width), rows(num_rows, width, seed=1)
    weight, gamma = rows(width, seed=2).float(), rows(width, seed=3)
    planes = candidates.clone()
    mixed, normed = NativeNorm(native).mix_norm(planes, added, weight, gamma, EPS)
    settled = candidates.clone()
    settled[-1] += added
    assert torch.equal(planes, settled), "the sum in the prefix is the rounded one, snapshots stay"
    if num_candidates == 1:
        assert torch.equal(mixed, settled[0])
    else:
        assert close(mixed, exact_mix(settled, weight))
    assert close(normed, exact_norm(mixed, gamma))
    for given_weight in (weight, None):
        again, normed_again = NativeNorm(native).mix_norm(planes, None, given_weight, gamma, EPS)
        if given_weight is None:
            assert torch.equal(again, planes[-1]) and close(normed_again, exact_norm(planes[-1], gamma))
        else:
            assert torch.equal(again, mixed) and torch.equal(normed_again, normed)


@pytest.mark.parametrize("places", [(), (3,), (0, 16, 39), tuple(range(40))], ids=str)
def test_rounding_keeps_denormals_nans_and_ties(native, places):
    """Sums of two bfloat16 values, of which those in some places are denormal, rounded as torch does."""
    prefix, added = rows(5, 40), rows(5, 40, seed=1)
    added[0] = prefix[0] * 2.0**-8  # sums in the middle of two values
    added[1, 5], prefix[2, 7], prefix[3, 8] = NAN, float("inf"), -0.0
    added[3, 8] = -0.0
    smallest = 2.0**-133
    for place in places:
        prefix[:, place] = smallest * 3
        added[:, place] = -smallest * torch.arange(5)
    planes, expected = prefix[None].clone(), prefix + added
    NativeNorm(native).mix_norm(planes, added, None, rows(40), EPS)
    assert torch.equal(planes[0].isnan(), expected.isnan())
    bits = planes[0].nan_to_num(nan=0.0).view(torch.int16)
    assert torch.equal(bits, expected.nan_to_num(nan=0.0).view(torch.int16))
    assert not places or (planes[0] != 0).sum() > (planes[0].abs() >= torch.finfo(torch.bfloat16).tiny).sum()


def test_mix_is_near_the_torch_form(native):
    candidates, added = rows(4, 9, 192), rows(9, 192, seed=1)
    weight, gamma = rows(192, seed=2).float() / 4, rows(192, seed=3)
    native_planes, torch_planes = candidates.clone(), candidates.clone()
    ours = NativeNorm(native).mix_norm(native_planes, added, weight, gamma, EPS)
    theirs = residual_mix_norm(torch_planes, added, weight, gamma, EPS)
    assert torch.equal(native_planes, torch_planes)
    assert all(close(a, b.double(), units=2) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("width", WIDTHS)
def test_mix_of_a_row_keeps_its_bits_among_poisoned_ones(native, width, threads):
    mix = NativeNorm(native).mix_norm
    weight, gamma = rows(width, seed=2).float(), rows(width, seed=3)
    candidates, added = rows(4, 400, width), rows(400, width, seed=1)
    alone = [
        torch.cat(parts)
        for parts in zip(
            *(mix(candidates[:, [row]].clone(), added[[row]], weight, gamma, EPS) for row in range(400)), strict=True
        )
    ]
    for num_rows in (2, 5, 400):
        slab = torch.full((6, 402, width), NAN, dtype=torch.bfloat16)
        planes = slab[1:5, 1 : 1 + num_rows]
        planes.copy_(candidates[:, :num_rows])
        wide_added = torch.full((num_rows, width + 2), NAN, dtype=torch.bfloat16)
        wide_added[:, 1:-1] = added[:num_rows]
        results = mix(planes, wide_added[:, 1:-1], weight, gamma, EPS)
        for result, expected in zip(results, alone, strict=True):
            assert torch.equal(result, expected[:num_rows])
        outside = slab.clone()
        outside[1:5, 1 : 1 + num_rows] = NAN
        assert outside.isnan().all(), "wrote beside the candidates"
    candidates[:, 1] = NAN
    results = mix(candidates[:, :3].clone(), added[:3], weight, gamma, EPS)
    assert results[0][1].isnan().all()
    assert all(torch.equal(r[::2], e[:3:2]) for r, e in zip(results, alone, strict=True))
