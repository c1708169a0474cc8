"""Records of a mixture of experts, shared by its torch and native forms.

Dims: T rows, D model width, E experts, X experts per token, L width the experts work in, I inner width,
J = 2 I, B bytes, G groups.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from outrider.ops.activation import Activation
from outrider.ops.quant import decode_mxfp4

__all__ = [
    "Experts",
    "ExpertsFunction",
    "PackedExperts",
    "PrepareRouted",
    "RoutedFunction",
    "Router",
    "Routing",
    "StackedExperts",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """Chosen experts of each row, ascending, with their weights."""

    expert_ids_TX: torch.Tensor  # int64
    weights_TX: torch.Tensor  # island dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class Router:
    """How a layer chooses experts; arguments of ``route``."""

    gate_weight_ED: torch.Tensor  # island dtype
    correction_bias_E: torch.Tensor  # island dtype
    top_k: int
    renormalize: bool
    scaling: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StackedExperts:
    """Weights of all experts in the compute dtype; gate and up projection share one product."""

    gate_up_EJL: torch.Tensor  # rows of w1 (gate), then rows of w3 (up)
    down_ELI: torch.Tensor

    @property
    def num_experts(self) -> int:
        """Experts in the stack."""
        return int(self.gate_up_EJL.shape[0])

    @property
    def width(self) -> int:
        """Inputs and outputs of an expert, L."""
        return int(self.down_ELI.shape[1])

    @property
    def inner(self) -> int:
        """Width between its two products, I."""
        return int(self.gate_up_EJL.shape[1]) // 2

    def expert(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Gate-up ``[J, L]`` and down ``[L, I]`` weights of one expert."""
        return self.gate_up_EJL[index], self.down_ELI[index]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedExperts:
    """The same weights as MXFP4 codes and scales (uint8), decoded when an expert is used."""

    gate_up_packed_EJB: torch.Tensor
    gate_up_scale_EJG: torch.Tensor
    down_packed_ELB: torch.Tensor
    down_scale_ELG: torch.Tensor
    dtype: torch.dtype  # compute dtype of the decoded weights

    @property
    def num_experts(self) -> int:
        """Experts in the stack."""
        return int(self.gate_up_packed_EJB.shape[0])

    @property
    def width(self) -> int:
        """Inputs and outputs of an expert, L."""
        return int(self.down_packed_ELB.shape[1])

    @property
    def inner(self) -> int:
        """Width between its two products, I."""
        return int(self.gate_up_packed_EJB.shape[1]) // 2

    def expert(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Decoded weights of one expert: exact, so equal to having unpacked them at load."""
        return (
            decode_mxfp4(self.gate_up_packed_EJB[index], self.gate_up_scale_EJG[index], self.dtype),
            decode_mxfp4(self.down_packed_ELB[index], self.down_scale_ELG[index], self.dtype),
        )


Experts = StackedExperts | PackedExperts
ExpertsFunction = Callable[[torch.Tensor, Routing, Experts, Activation], torch.Tensor]
# The whole routed path of a layer, (router input [T, D], expert input [T, L]) -> [T, L], and what makes one of weights.
RoutedFunction = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
PrepareRouted = Callable[[Router, Experts, Activation], RoutedFunction]
