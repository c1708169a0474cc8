"""Feed-forward layer bodies: dense, and sparse in a latent space (k3-architecture sections 7 and 8).

Dims: T rows, D model width, E experts, I expert width, L width the experts work in, J = 2 I.
"""

from typing import Literal

import torch
from torch import nn

from outrider.models.kimi_k3.config import MXFP4_GROUP, MoeConfig
from outrider.models.layers import Build
from outrider.ops.activation import Activation
from outrider.ops.moe import PackedExperts, RoutedFunction, Router, StackedExperts, routed_path

__all__ = ["DenseFfn", "ExpertForm", "ExpertStorage", "MoeFfn"]

ExpertStorage = Literal["unpacked", "packed"]
ExpertForm = Literal["auto", "unpacked", "packed"]  # as asked for; auto is settled when a checkpoint is loaded


class DenseFfn(nn.Module):
    """Gated MLP of a dense layer."""

    def __init__(self, hidden_size: int, intermediate_size: int, activation: Activation, build: Build) -> None:
        super().__init__()
        self.activation, self.linear, self.glu = activation, build.linear, build.kernels.glu
        self.gate_up = build.weight(2 * intermediate_size, hidden_size)
        self.down = build.weight(hidden_size, intermediate_size)

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        """``[T, D]`` to ``[T, D]``."""
        return self.linear(self.glu(self.activation, self.linear(x_TD, self.gate_up)), self.down)


class UnpackedWeights(nn.Module):
    """All routed experts of a layer in the compute dtype."""

    def __init__(self, num_experts: int, width: int, inner: int, build: Build) -> None:
        super().__init__()
        self.gate_up = build.weight(num_experts, 2 * inner, width)
        self.down = build.weight(num_experts, width, inner)

    def stacked(self) -> StackedExperts:
        """The record the op takes."""
        return StackedExperts(gate_up_EJL=self.gate_up, down_ELI=self.down)


class PackedWeights(nn.Module):
    """All routed experts of a layer as MXFP4 bytes: 4.25 bits per weight, decoded by the op."""

    def __init__(self, num_experts: int, width: int, inner: int, build: Build) -> None:
        super().__init__()
        self.dtype = build.dtype
        self.gate_up_packed = build.packed(num_experts, 2 * inner, width // 2)
        self.gate_up_scale = build.packed(num_experts, 2 * inner, width // MXFP4_GROUP)
        self.down_packed = build.packed(num_experts, width, inner // 2)
        self.down_scale = build.packed(num_experts, width, inner // MXFP4_GROUP)

    def stacked(self) -> PackedExperts:
        """The record the op takes."""
        return PackedExperts(
            gate_up_packed_EJB=self.gate_up_packed,
            gate_up_scale_EJG=self.gate_up_scale,
            down_packed_ELB=self.down_packed,
            down_scale_ELG=self.down_scale,
            dtype=self.dtype,
        )


class MoeFfn(nn.Module):
    """Routed experts, combined and normed in the latent space, plus the shared expert."""

    def __init__(
        self,
        config: MoeConfig,
        hidden_size: int,
        eps: float,
        activation: Activation,
        experts: ExpertStorage,
        build: Build,
    ) -> None:
        super().__init__()
        self.config, self.eps, self.activation = config, eps, activation
        self.kernels, self.linear = build.kernels, build.linear
        latent, shared, inner = config.latent_size, config.shared_intermediate_size, config.intermediate_size
        # Router on the full width, in fp32: rounding its logits changes the selection (14.19).
        self.gate = build.island_weight(config.num_experts, hidden_size)
        self.correction_bias = build.island_weight(config.num_experts)
        # One product per layer input: latent down-projection | shared gate | shared up.
        self.sections = [latent or 0, 2 * shared]
        self.in_proj = build.weight(sum(self.sections), hidden_size) if latent or shared else None
        self.shared_down = build.weight(hidden_size, shared) if shared else None
        self.up_proj = build.weight(hidden_size, latent) if latent else None
        self.routed_norm = build.weight(latent) if latent and config.latent_norm else None
        width = latent or hidden_size
        make = UnpackedWeights if experts == "unpacked" else PackedWeights
        # None once a kernel holds them in its own layout.
        self.experts: UnpackedWeights | PackedWeights | None = make(config.num_experts, width, inner, build)
        self.routed: RoutedFunction | None = None

    def prepare(self) -> None:
        """Hand the weights of the routed path to the kernel that wants them in its own layout, and drop ours."""
        if self.kernels.routed is not None and self.experts is not None:
            self.routed = self.kernels.routed(self._router(), self.experts.stacked(), self.activation)
            self.experts = None

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        """``[T, D]`` to ``[T, D]``."""
        latent_TL, shared_TJ = x_TD, None
        if self.in_proj is not None:
            down_TL, shared_TJ = self.linear(x_TD, self.in_proj).split_with_sizes(self.sections, -1)
            latent_TL = down_TL if self.up_proj is not None else x_TD
        out = self._run_routed(x_TD, latent_TL)
        if self.routed_norm is not None:
            out = self.kernels.norm(out, self.routed_norm, self.eps)
        if self.up_proj is not None:
            out = self.linear(out, self.up_proj)
        if self.shared_down is not None and shared_TJ is not None:
            shared = self.linear(self.kernels.glu(self.activation, shared_TJ), self.shared_down)
            self.kernels.rows.add(out, shared, out)
        return out

    def _run_routed(self, x_TD: torch.Tensor, x_TL: torch.Tensor) -> torch.Tensor:
        """Router, experts and combine, ``[T, L]``."""
        if self.routed is not None:
            return self.routed(x_TD, x_TL)
        assert self.experts is not None, "the weights of the experts were handed over without a kernel"
        return routed_path(
            x_TD,
            x_TL,
            self._router(),
            self.experts.stacked(),
            self.activation,
            product=self.kernels.router,
            run_experts=self.kernels.experts,
        )

    def _router(self) -> Router:
        return Router(
            gate_weight_ED=self.gate.weight,
            correction_bias_E=self.correction_bias.weight,
            top_k=self.config.experts_per_token,
            renormalize=self.config.renormalize,
            scaling=self.config.routed_scaling_factor,
        )
