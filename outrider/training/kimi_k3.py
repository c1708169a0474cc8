"""The K3 text model in its training form: whole sequences, differentiable, fp32.

The mathematics is that of ``outrider.models.kimi_k3`` (k3-architecture.md sections 2-8);
the shape of the computation is another one, made for batches of whole sequences, so that a
test can hold the two against each other. Parameter names are the checkpoint's, except that
the routed experts are stacked (``experts.w1`` [E, I, L]).

Dims: B sequences, T tokens, D width, H heads, K key width, W value width, C chunk rows,
N chunks, E experts, L latent width, I expert width, X experts per token.
"""

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import nn

from outrider.training.fused import attention_residual_mix, situ
from outrider.training.grouped import grouped_linear
from outrider.training.kda import KdaAttention
from outrider.training.layers import Norm, TrainConfig, linear
from outrider.training.quantisation import fake_mxfp4

__all__ = ["KimiK3ForTraining", "TrainConfig"]


class MlaAttention(nn.Module):
    """NoPE multi-head latent attention with an output gate (section 6), expanded form."""

    def __init__(self, config: TrainConfig) -> None:
        super().__init__()
        self.heads = config.mla_heads
        self.nope, self.rope, self.value = (
            config.qk_nope_head_dim,
            config.qk_rope_head_dim,
            config.v_head_dim,
        )
        self.latent = config.kv_lora_rank
        width = config.hidden_size
        self.q_a_proj = linear(width, config.q_lora_rank)
        self.q_a_layernorm = Norm(config.q_lora_rank, config.mla_lora_eps)
        self.q_b_proj = linear(config.q_lora_rank, self.heads * (self.nope + self.rope))
        self.kv_a_proj_with_mqa = linear(width, self.latent + self.rope)
        self.kv_a_layernorm = Norm(self.latent, config.mla_lora_eps)
        self.kv_b_proj = linear(self.latent, self.heads * (self.nope + self.value))
        self.g_proj = linear(width, self.heads * self.value)
        self.o_proj = linear(self.heads * self.value, width, 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` [B, T, D] (after input_layernorm) -> attention output [B, T, D]."""
        num_sequences, length, _ = x.shape
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        q = q.view(num_sequences, length, self.heads, -1).transpose(1, 2)
        latent, shared = self.kv_a_proj_with_mqa(x).split((self.latent, self.rope), -1)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent))
        kv = kv.view(num_sequences, length, self.heads, -1).transpose(1, 2)
        key, value = kv.split((self.nope, self.value), -1)
        shared = shared.unsqueeze(1).expand(-1, self.heads, -1, -1)
        key = torch.cat((key, shared), -1)
        padded = F.pad(value, (0, self.nope + self.rope - self.value))
        out = F.scaled_dot_product_attention(q, key, padded, is_causal=True)
        out = out[..., : self.value].transpose(1, 2).flatten(2)
        return self.o_proj(out * torch.sigmoid(self.g_proj(x)))


class DenseMlp(nn.Module):
    """SiTU MLP: the dense first layer and the shared experts (section 8)."""

    def __init__(self, config: TrainConfig, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = linear(config.hidden_size, intermediate)
        self.up_proj = linear(config.hidden_size, intermediate)
        self.down_proj = linear(intermediate, config.hidden_size, 0.5)
        self.betas = (config.situ_beta, config.situ_linear_beta)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., D] -> [..., D]."""
        flat = x.reshape(-1, x.shape[-1])
        activated = situ(self.gate_proj(flat), self.up_proj(flat), *self.betas)
        return self.down_proj(activated).view(x.shape)


class Router(nn.Module):
    """Sigmoid router with a selection-only bias (section 7.1)."""

    e_score_correction_bias: torch.Tensor
    load: torch.Tensor

    def __init__(self, config: TrainConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(config.num_experts, config.hidden_size) * 0.02)
        self.register_buffer("e_score_correction_bias", torch.zeros(config.num_experts))
        self.register_buffer("load", torch.zeros(config.num_experts), persistent=False)
        self.experts_per_token = config.experts_per_token

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``x`` [T, D] -> expert ids [T, X], weights [T, X]."""
        scores = torch.sigmoid(F.linear(x, self.weight))
        ids = (scores + self.e_score_correction_bias).topk(self.experts_per_token, -1).indices
        weights = scores.gather(1, ids)
        return ids, weights / (weights.sum(-1, keepdim=True) + 1e-20)

    @torch.no_grad()
    def balance(self, rate: float) -> None:
        """Move the bias against the load seen since the last call (auxiliary-loss-free balancing)."""
        self.e_score_correction_bias -= rate * torch.sign(self.load - self.load.mean())
        self.load.zero_()


class Experts(nn.Module):
    """Stacked routed experts, trained at the values MXFP4 can hold."""

    def __init__(self, config: TrainConfig) -> None:
        super().__init__()
        shape = (config.num_experts, config.moe_intermediate, config.latent_size)
        self.w1 = nn.Parameter(torch.randn(shape) * config.latent_size**-0.5)
        self.w3 = nn.Parameter(torch.randn(shape) * config.latent_size**-0.5)
        self.w2 = nn.Parameter(torch.randn(shape[0], shape[2], shape[1]) * config.moe_intermediate**-0.5)


class LatentMoe(nn.Module):
    """Latent mixture of experts with shared experts (section 7.2)."""

    def __init__(self, config: TrainConfig) -> None:
        super().__init__()
        self.gate = Router(config)
        self.routed_expert_down_proj = linear(config.hidden_size, config.latent_size)
        self.routed_expert_norm = Norm(config.latent_size, config.rms_eps)
        self.routed_expert_up_proj = linear(config.latent_size, config.hidden_size, 0.5)
        self.experts = Experts(config)
        self.shared_experts = DenseMlp(config, config.num_shared_experts * config.moe_intermediate)
        self.betas = (config.situ_beta, config.situ_linear_beta)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, T, D] -> [B, T, D]."""
        flat = x.flatten(0, 1)
        ids, weights = self.gate(flat)
        order = ids.flatten().argsort(stable=True)
        counts = torch.bincount(ids.flatten(), minlength=self.gate.weight.shape[0])
        if self.training:
            self.gate.load += counts
        sizes = counts.tolist()
        rows = order // ids.shape[1]
        latent = self.routed_expert_down_proj(flat).index_select(0, rows)
        w13 = fake_mxfp4(torch.cat((self.experts.w1, self.experts.w3), 1))
        gate, up = grouped_linear(latent, w13, sizes).chunk(2, -1)
        routed = grouped_linear(situ(gate, up, *self.betas), fake_mxfp4(self.experts.w2), sizes)
        routed = routed * weights.flatten()[order].unsqueeze(-1)
        combined = torch.zeros(flat.shape[0], routed.shape[1]).index_add(0, rows, routed)
        out = self.routed_expert_up_proj(self.routed_expert_norm(combined))
        return out.view_as(x) + self.shared_experts(x)


class ResidualScore(nn.Module):
    """Scoring vector of one attention-residual mix (section 4.2)."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.norm, self.proj = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(1, width))
        self.eps = eps

    def forward(self, prefix: torch.Tensor, snapshots: Sequence[torch.Tensor]) -> torch.Tensor:
        """Softmax mixture of the snapshots and the running prefix, [B, T, D]."""
        values = torch.stack((*snapshots, prefix), 0).flatten(1, 2)
        mixed = attention_residual_mix(values, self.norm * self.proj[0], self.eps)
        return mixed.view(prefix.shape)


class Layer(nn.Module):
    """One decoder layer with attention residuals (section 4.3)."""

    def __init__(self, config: TrainConfig, index: int) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_eps
        self.snapshots_here = index % config.attn_res_block_size == 0
        is_mla = index in config.mla_layers
        self.self_attn: nn.Module = MlaAttention(config) if is_mla else KdaAttention(config)
        if index == 0:
            self.mlp = DenseMlp(config, config.dense_intermediate)
        else:
            self.block_sparse_moe = LatentMoe(config)
        self.is_dense = index == 0
        self.input_layernorm, self.post_attention_layernorm = Norm(width, eps), Norm(width, eps)
        self.self_attention_res, self.mlp_res = ResidualScore(width, eps), ResidualScore(width, eps)

    def entry(self, prefix: torch.Tensor, snapshots: list[torch.Tensor]) -> torch.Tensor:
        """What the layer's attention norm consumes; also the tap after the layer before."""
        return self.self_attention_res(prefix, snapshots) if snapshots else prefix

    def forward(self, prefix: torch.Tensor, entry: torch.Tensor, snapshots: list[torch.Tensor]) -> torch.Tensor:
        """Advance the prefix; appends to ``snapshots`` at a block start."""
        if self.snapshots_here:
            snapshots.append(prefix)
        attention = self.self_attn(self.input_layernorm(entry))
        prefix = attention if self.snapshots_here else prefix + attention
        mixed = self.post_attention_layernorm(self.mlp_res(prefix, snapshots))
        feed_forward = self.mlp if self.is_dense else self.block_sparse_moe
        return prefix + feed_forward(mixed)


class KimiK3ForTraining(nn.Module):
    """Embedding, layers, output mix, head; ``forward`` returns hidden states, not logits."""

    def __init__(self, config: TrainConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        nn.init.normal_(self.embed_tokens.weight, std=1.0)
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.num_layers))
        self.output_attn_res = ResidualScore(config.hidden_size, config.rms_eps)
        self.norm = Norm(config.hidden_size, config.rms_eps)
        self.lm_head = linear(config.hidden_size, config.vocab_size, 0.5)

    def walk(self) -> Iterator[Layer]:
        """The decoder layers, typed."""
        for layer in self.layers:
            assert isinstance(layer, Layer), type(layer)
            yield layer

    def forward(self, token_ids: torch.Tensor, taps: Sequence[int] = ()) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Token ids [B, T] -> final normed hidden [B, T, D] and the tapped mixtures.

        Tap t is the tensor layer t + 1 consumes before its norm (the output mix after the last).
        """
        prefix = self.embed_tokens(token_ids)
        snapshots: list[torch.Tensor] = []
        captured: list[torch.Tensor] = []
        for index, layer in enumerate(self.walk()):
            entry = layer.entry(prefix, snapshots)
            if index - 1 in taps:
                captured.append(entry)
            prefix = layer(prefix, entry, snapshots)
        mixed = self.output_attn_res(prefix, snapshots)
        if self.config.num_layers - 1 in taps:
            captured.append(mixed)
        return self.norm(mixed), captured
