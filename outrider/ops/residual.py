"""Attention residuals: the mixture that a sublayer reads (k3-architecture section 4).

Dims: B candidates (snapshots, then the running prefix), T rows, D model width.
"""

from collections.abc import Callable

import torch

from outrider.ops.invariant import exp, island_dtype
from outrider.ops.norm import rms_norm

__all__ = ["MixNormFunction", "attention_residual_mix", "residual_mix_norm"]

# (candidates, addend of the prefix, scoring vector, gamma, eps) -> mixture, its norm; see ``residual_mix_norm``.
MixNormFunction = Callable[
    [torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor, float], tuple[torch.Tensor, torch.Tensor]
]


def attention_residual_mix(candidates_BTD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    """Softmax mixture of the candidates per row (section 4.2), island dtype until the last rounding.

    Args:
        candidates_BTD: Snapshots and prefix, compute dtype, the candidate dim first.
        weight_D: Fused scoring vector ``norm * proj``, island dtype.
        eps: Of the weightless RMSNorm of each candidate.

    Returns:
        ``[T, D]`` in the dtype of the candidates. Sums over the width run along the last, contiguous
        dim; sums over candidates run in ascending order, so a row's bits are its own.
    """
    wide_BTD = candidates_BTD.to(island_dtype(candidates_BTD.dtype))
    inverse_BT1 = torch.rsqrt(wide_BTD.square().mean(-1, keepdim=True) + eps)
    scores_TB = (wide_BTD * inverse_BT1 * weight_D).sum(-1).t().contiguous()
    shares_TB = exp(scores_TB - scores_TB.amax(-1, keepdim=True))
    shares_TB = shares_TB / shares_TB.sum(-1, keepdim=True)
    first_TD, *others = (wide_BTD * shares_TB.t()[..., None]).unbind(0)
    mixed_TD = first_TD
    for other_TD in others:
        mixed_TD = mixed_TD + other_TD
    return mixed_TD.to(candidates_BTD.dtype)


def residual_mix_norm(
    candidates_BTD: torch.Tensor,
    added_TD: torch.Tensor | None,
    mix_weight_D: torch.Tensor | None,
    norm_weight_D: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add a sublayer's output to the prefix, mix, norm: what lies between two sublayers.

    Args:
        candidates_BTD: Snapshots and prefix, rows contiguous; the prefix, the last of them, is written.
        added_TD: Added to the prefix first, rounded; None adds nothing.
        mix_weight_D: Scoring vector of the mix, island dtype; None takes the prefix as it is, and so does a
            single candidate.
        norm_weight_D: Gamma of the norm that follows.
        eps: Of both.

    Returns:
        The mixture (a view of the prefix where nothing is mixed) and its norm, ``[T, D]`` each.
    """
    if added_TD is not None:
        candidates_BTD[-1].add_(added_TD)
    if mix_weight_D is None or candidates_BTD.shape[0] == 1:
        mixed_TD = candidates_BTD[-1]
    else:
        mixed_TD = attention_residual_mix(candidates_BTD, mix_weight_D, eps)
    return mixed_TD, rms_norm(mixed_TD, norm_weight_D, eps)
