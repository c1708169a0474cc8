"""MXFP4-aware training: round weights to the values a checkpoint can hold, pass gradients through.

Source: k3-architecture.md section 7.3 (E2M1 values, E8M0 scale per group of 32 inputs).
"""

import torch

__all__ = ["fake_mxfp4", "mxfp4_exponents", "round_to_e2m1"]

MXFP4_GROUP = 32
E2M1_MAXIMUM = 6.0


def mxfp4_exponents(weight: torch.Tensor) -> torch.Tensor:
    """Shared exponents of ``weight`` [..., I], one per 32 inputs: int32 [..., I / 32].

    ``floor(log2(max)) - 2`` puts the group's maximum into (3, 6] where rounding up cannot
    overflow past 6 by more than the saturation allows (OCP microscaling conversion rule).
    """
    groups = weight.detach().unflatten(-1, (-1, MXFP4_GROUP))
    maximum = groups.abs().amax(-1).clamp_min(2.0**-100)
    return torch.frexp(maximum)[1].to(torch.int32) - 3


def round_to_e2m1(scaled: torch.Tensor) -> torch.Tensor:
    """Nearest E2M1 value of each element, saturating at 6 (ties to the even mantissa)."""
    magnitude = scaled.abs().clamp_max(E2M1_MAXIMUM)
    # The grid step is 0.5 below 2, 1 in [2, 4), 2 in [4, 6].
    step = torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0))
    return torch.copysign(torch.round(magnitude / step) * step, scaled)


def fake_mxfp4(weight: torch.Tensor) -> torch.Tensor:
    """Weight [..., I] rounded to MXFP4 in the forward pass, identity in the backward pass."""
    scale = torch.exp2(mxfp4_exponents(weight).float()).repeat_interleave(MXFP4_GROUP, -1)
    rounded = round_to_e2m1(weight.detach() / scale) * scale
    return weight + (rounded - weight).detach()
