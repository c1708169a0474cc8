"""Gated activations, evaluated in the island dtype with one rounding.

Dims: T rows, I inner width, J = 2 I.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from outrider.ops.invariant import island_dtype, sigmoid, silu, tanh

__all__ = [
    "Activation",
    "GluFunction",
    "glu",
    "glu_fused",
    "sigmoid_gate",
    "silu_mul",
    "silu_mul_reference",
    "situ",
    "situ_reference",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Activation:
    """Which gated activation an MLP uses, with its constants."""

    name: Literal["situ", "silu"]
    beta: float | None = None  # SiTU gate bound; None means 1.0
    linear_beta: float | None = None  # SiTU bound of the linear half; None leaves it unbounded


GluFunction = Callable[[Activation, torch.Tensor], torch.Tensor]


def situ(gate: torch.Tensor, up: torch.Tensor, beta: float | None, linear_beta: float | None) -> torch.Tensor:
    """``beta tanh(gate/beta) sigmoid(gate) * linear_beta tanh(up/linear_beta)``.

    Source: k3-architecture section 8. Inputs ``[..., I]`` of one dtype, which the result has too.
    """
    island = island_dtype(gate.dtype)
    wide_gate, wide_up = gate.to(island), up.to(island)
    bound = 1.0 if beta is None else beta
    bounded = tanh(wide_gate / bound) * bound * sigmoid(wide_gate)
    if linear_beta is not None:
        wide_up = tanh(wide_up / linear_beta) * linear_beta
    return (bounded * wide_up).to(gate.dtype)


def situ_reference(gate: torch.Tensor, up: torch.Tensor, beta: float | None, linear_beta: float | None) -> torch.Tensor:
    """SiTU by the formula, in float64, one rounding."""
    bound = 1.0 if beta is None else beta
    g, u = gate.double(), up.double()
    linear = u if linear_beta is None else linear_beta * torch.tanh(u / linear_beta)
    return (bound * torch.tanh(g / bound) * torch.sigmoid(g) * linear).to(gate.dtype)


def silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up``, one rounding."""
    island = island_dtype(gate.dtype)
    return (silu(gate.to(island)) * up.to(island)).to(gate.dtype)


def silu_mul_reference(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """SwiGLU by the formula, in float64, one rounding."""
    return (gate.double() * torch.sigmoid(gate.double()) * up.double()).to(gate.dtype)


def glu(activation: Activation, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """The gated activation that ``activation`` names."""
    if activation.name == "situ":
        return situ(gate, up, activation.beta, activation.linear_beta)
    return silu_mul(gate, up)


def glu_fused(activation: Activation, gate_up_TJ: torch.Tensor) -> torch.Tensor:
    """As ``glu`` on one tensor whose first half is the gate and whose second half is the input."""
    gate_TI, up_TI = gate_up_TJ.chunk(2, dim=-1)
    return glu(activation, gate_TI, up_TI)


def sigmoid_gate(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """``x * sigmoid(gate)`` with the sigmoid rounded to the dtype of x first.

    Source: k3-architecture section 6.1 (gate of the MLA output).
    """
    return x * sigmoid(gate.to(island_dtype(gate.dtype))).to(x.dtype)
