"""Normalisations; statistics always in the island dtype.

Dims: T rows, D width, H heads, K key width, W value width.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from outrider.ops.invariant import island_dtype, sigmoid

__all__ = [
    "NormFunction",
    "gated_rms_norm",
    "gated_rms_norm_reference",
    "l2_norm_scaled",
    "rms_norm",
    "rms_norm_reference",
]

NormFunction = Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]


def rms_norm(x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm with the rounding of the vendor code: normalise, round, then the gamma product.

    Source: k3-architecture section 2. Any leading dims, also of ``weight_D``; the result has the dtype of
    ``x_TD``. The library call without its gamma computes in the island dtype and rounds once; a test holds
    it to that.
    """
    return F.rms_norm(x_TD, x_TD.shape[-1:], None, eps) * weight_D


def rms_norm_reference(x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm by the formula, in float64, one rounding."""
    wide_TD = x_TD.double()
    normed_TD = wide_TD / (wide_TD.pow(2).mean(-1, keepdim=True) + eps).sqrt()
    return (normed_TD * weight_D.double()).to(x_TD.dtype)


def l2_norm_scaled(x_THK: torch.Tensor, scale: float = 1.0, eps: float = 1e-6) -> torch.Tensor:
    """``scale * x / sqrt(sum(x^2) + eps)`` in the island dtype; eps is added to the sum.

    Source: k3-architecture section 5.3.
    """
    island_THK = x_THK.to(island_dtype(x_THK.dtype))
    inverse = torch.rsqrt(island_THK.square().sum(-1, keepdim=True) + eps)
    normed_THK = island_THK * inverse
    return normed_THK if scale == 1.0 else normed_THK * scale


def gated_rms_norm(o_THW: torch.Tensor, weight_W: torch.Tensor, gate_THW: torch.Tensor, eps: float) -> torch.Tensor:
    """``rms_norm(o) * weight * sigmoid(gate)`` per head, in the island dtype, one rounding.

    Source: k3-architecture section 5.6. ``weight_W`` is an island parameter shared by the heads;
    the result has the dtype of the gate.
    """
    island = island_dtype(gate_THW.dtype)
    wide_THW = o_THW.to(island)
    inverse = torch.rsqrt(wide_THW.square().mean(-1, keepdim=True) + eps)
    gate = sigmoid(gate_THW.to(island).flatten(-2)).view(gate_THW.shape)
    return (wide_THW * inverse * weight_W.to(island) * gate).to(gate_THW.dtype)


def gated_rms_norm_reference(
    o_THW: torch.Tensor, weight_W: torch.Tensor, gate_THW: torch.Tensor, eps: float
) -> torch.Tensor:
    """Gated norm by the formula, in float64, one rounding."""
    wide_THW = o_THW.double()
    normed_THW = wide_THW / (wide_THW.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight_W.double()
    return (normed_THW * torch.sigmoid(gate_THW.double())).to(gate_THW.dtype)
