"""The residual stream of one forward: ordinary, or with attention residuals (k3-architecture section 4).

Dims: B snapshots plus the running prefix, T rows, D model width.
"""

import torch
from torch import nn

from outrider.models.layers import Build
from outrider.ops.invariant import exp, island_dtype

__all__ = ["ResidualMix", "ResidualStream", "attention_residual_mix"]


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


class ResidualMix(nn.Module):
    """Scoring vector of one mix."""

    def __init__(self, hidden_size: int, eps: float, build: Build) -> None:
        super().__init__()
        self.eps = eps
        self.weight = build.island_weight(hidden_size)

    def forward(self, candidates_BTD: torch.Tensor) -> torch.Tensor:
        """``[B, T, D]`` to ``[T, D]``."""
        return attention_residual_mix(candidates_BTD, self.weight.weight, self.eps)


class ResidualStream:
    """Snapshots and prefix in one slab; the last live plane is the prefix.

    Opening a block turns the prefix plane into a snapshot by moving on to the next plane, so nothing is
    copied and every view has one stride: plane first, rows contiguous inside it.
    """

    def __init__(self, embedded_TD: torch.Tensor, num_snapshots: int) -> None:
        self._planes_BTD = embedded_TD.new_empty(num_snapshots + 1, *embedded_TD.shape)
        self._planes_BTD[0] = embedded_TD
        self._num_snapshots = 0

    @property
    def prefix_TD(self) -> torch.Tensor:
        """The running sum; a view that the next addition changes."""
        return self._planes_BTD[self._num_snapshots]

    @property
    def candidates_BTD(self) -> torch.Tensor:
        """Snapshots in order, then the prefix; a view."""
        return self._planes_BTD[: self._num_snapshots + 1]

    def read(self, mix: ResidualMix | None, rows_N: torch.Tensor | None = None) -> torch.Tensor:
        """What the next sublayer norms: the mixture, or the prefix without a mix or snapshots.

        ``rows_N`` restricts the work to some rows.
        """
        candidates_BTD = self.candidates_BTD
        if rows_N is not None:
            candidates_BTD = candidates_BTD.index_select(1, rows_N)
        if mix is None or self._num_snapshots == 0:
            return candidates_BTD[-1]
        mixed_TD: torch.Tensor = mix(candidates_BTD)
        return mixed_TD

    def open_block(self) -> None:
        """Freeze the prefix as a snapshot; ``restart`` must follow before the next read."""
        self._num_snapshots += 1

    def restart(self, out_TD: torch.Tensor) -> None:
        """First sublayer output of a block: it replaces the prefix (section 14.2)."""
        self.prefix_TD.copy_(out_TD)

    def add(self, out_TD: torch.Tensor) -> None:
        """Any other sublayer output: rounded sum in the compute dtype."""
        self.prefix_TD.add_(out_TD)
