"""Sizes of a trained K3 and the two layers everything is made of."""

from dataclasses import dataclass

import torch
from torch import nn

from outrider.training.fused import rms_norm

__all__ = ["Norm", "TrainConfig", "linear"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """Sizes of a K3-architecture model with every K3 feature on."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    mla_layers: tuple[int, ...]  # 0-based
    attn_res_block_size: int
    kda_heads: int
    kda_head_dim: int
    mla_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    dense_intermediate: int
    num_experts: int
    experts_per_token: int
    moe_intermediate: int
    latent_size: int
    num_shared_experts: int
    conv_kernel: int = 4
    gate_lower_bound: float = -5.0
    rms_eps: float = 1e-5
    mla_lora_eps: float = 1e-6
    situ_beta: float = 4.0
    situ_linear_beta: float = 25.0


def linear(in_features: int, out_features: int, scale: float = 1.0) -> nn.Linear:
    """Bias-free linear with fan-in initialisation times ``scale``."""
    module = nn.Linear(in_features, out_features, bias=False)
    nn.init.normal_(module.weight, std=scale * in_features**-0.5)
    return module


class Norm(nn.Module):
    """RMSNorm weight holder."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise the last dim of ``x``."""
        return rms_norm(x.reshape(-1, x.shape[-1]), self.weight, self.eps).view(x.shape)
