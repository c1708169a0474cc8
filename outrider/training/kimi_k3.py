"""The K3 text model in its training form: whole sequences, differentiable, fp32.

The mathematics is that of ``outrider.models.kimi_k3`` (k3-architecture.md sections 2-8);
the shape of the computation is another one, made for batches of whole sequences, so that a
test can hold the two against each other. Parameter names are the checkpoint's, except that
the routed experts are stacked (``experts.w1`` [E, I, L]).

Dims: B sequences, T tokens, D width, H heads, K key width, W value width, C chunk rows,
N chunks, E experts, L latent width, I expert width, X experts per token.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from outrider.training.fused import (
    attention_residual_mix,
    conv_silu,
    gated_norm,
    kda_chunk_factors,
    kda_inputs,
    rms_norm,
    situ,
)
from outrider.training.grouped import grouped_linear
from outrider.training.quantisation import fake_mxfp4


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


COPY_GAIN = 3.0  # of a seeded copy head's output projection
TIED_HEAD_SCALE = 0.06  # of the head's start, as a multiple of the embedding


class KdaAttention(nn.Module):
    """Kimi Delta Attention over whole sequences, chunkwise (section 5.7)."""

    chunk = 16  # within 16 rows the bounded gate keeps both factors finite in fp32

    def __init__(self, config: TrainConfig) -> None:
        super().__init__()
        width, inner = config.hidden_size, config.kda_heads * config.kda_head_dim
        self.heads, self.head_dim = config.kda_heads, config.kda_head_dim
        self.lower_bound, self.eps = config.gate_lower_bound, config.rms_eps
        self.q_proj, self.k_proj, self.v_proj = (linear(width, inner) for _ in range(3))
        self.g_proj = linear(width, inner)
        self.f_a_proj, self.f_b_proj = linear(width, self.head_dim), linear(self.head_dim, inner, 0.1)
        self.b_proj = linear(width, self.heads)
        self.o_proj = linear(inner, width, 0.5)
        for name in ("q_conv1d", "k_conv1d", "v_conv1d"):
            taps = torch.randn(inner, 1, config.conv_kernel) * 0.1
            taps[:, :, -1] += 1.0
            self.register_parameter(name + "_weight", nn.Parameter(taps))
        self.A_log = nn.Parameter(torch.zeros(self.heads))
        # Half of the channels forget within a few tokens, the others keep for hundreds.
        self.dt_bias = nn.Parameter(torch.linspace(-7.0, -1.5, self.head_dim).repeat(self.heads))
        self.o_norm = Norm(self.head_dim, config.rms_eps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` [B, T, D] (after input_layernorm) -> attention output [B, T, D]."""
        num_sequences, length, _ = x.shape
        heads = (num_sequences, length, self.heads, self.head_dim)
        q = conv_silu(self.q_proj(x), self.q_conv1d_weight)
        k = conv_silu(self.k_proj(x), self.k_conv1d_weight)
        v = conv_silu(self.v_proj(x), self.v_conv1d_weight)
        gate_logits = self.f_b_proj(self.f_a_proj(x))
        rows = (-1, self.heads, self.head_dim)  # one shape whatever the row length: fewer compiles
        q, k, log_decay, beta = kda_inputs(
            q.view(rows),
            k.view(rows),
            gate_logits.view(rows),
            self.b_proj(x).flatten(0, 1),
            self.A_log,
            self.dt_bias.view(self.heads, self.head_dim),
            self.lower_bound,
        )
        q, k, v, log_decay = (part.reshape(heads) for part in (q, k, v, log_decay))
        out = chunked_delta_rule(q, k, v, log_decay, beta.view(heads[:3]), self.chunk)
        out = gated_norm(out.reshape(rows), self.o_norm.weight, self.g_proj(x).view(rows), self.eps)
        return self.o_proj(out.reshape(x.shape[0], length, -1))


@torch.no_grad()
def seed_copy_heads(layer: KdaAttention, heads: Sequence[int]) -> None:
    """Start ``heads`` as induction heads that write what they read.

    Keys are the previous token's queries, so ``S^T q_t`` holds the value that followed earlier
    occurrences of token t; values go in and come out through the same orthonormal directions; the
    memory is long. From a random start a few million tokens do not find any of this: early
    training learns to forget fast, and then nothing is left to copy from.
    """
    for head in heads:
        rows = slice(head * layer.head_dim, (head + 1) * layer.head_dim)
        layer.k_proj.weight[rows] = layer.q_proj.weight[rows]
        taps_of = ((layer.q_conv1d_weight, -1), (layer.k_conv1d_weight, -2), (layer.v_conv1d_weight, -1))
        for taps, position in taps_of:
            taps[rows] = 0.0
            taps[rows, :, position] = 1.0
        directions = nn.init.orthogonal_(torch.empty(layer.head_dim, layer.v_proj.weight.shape[1]))
        layer.v_proj.weight[rows] = directions
        layer.o_proj.weight[:, rows] = COPY_GAIN * directions.T
        layer.dt_bias[rows] = torch.linspace(-12.0, -6.5, layer.head_dim)


@torch.no_grad()
def seed_previous_token_head(layer: KdaAttention, head: int) -> None:
    """Start ``head`` as a previous-token head: it reads back the value just written, one late."""
    rows = slice(head * layer.head_dim, (head + 1) * layer.head_dim)
    layer.k_proj.weight[rows] = layer.q_proj.weight[rows]
    taps_of = ((layer.q_conv1d_weight, -1), (layer.k_conv1d_weight, -1), (layer.v_conv1d_weight, -2))
    for taps, position in taps_of:
        taps[rows] = 0.0
        taps[rows, :, position] = 1.0


def to_chunks(x: torch.Tensor, chunk: int) -> torch.Tensor:
    """[B, T, H, ...] -> [B, H, N, C, ...]."""
    return x.unflatten(1, (-1, chunk)).movedim(3, 1).contiguous()


def chunked_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    chunk: int,
) -> torch.Tensor:
    """Outputs [B, T, H, W] of the gated delta rule from a zero state; T a multiple of ``chunk``."""
    num_sequences, length, num_heads, _ = q.shape
    q, k, v, log_decay = (to_chunks(x, chunk) for x in (q, k, v, log_decay))
    beta = to_chunks(beta.unsqueeze(-1), chunk)
    leading = q.shape[:3]
    factors = kda_chunk_factors(*(x.flatten(0, 2) for x in (q, k, v, log_decay, beta)))
    w, u, attention, q_in, k_out, decay_out = (x.unflatten(0, leading) for x in factors)
    out = InterChunk.apply(w, u, attention, q_in, k_out, decay_out)
    return out.movedim(1, 3).reshape(num_sequences, length, num_heads, -1)


class InterChunk(torch.autograd.Function):
    """The sequential part: V' = U - W S; O = q_in S + A V'; S <- decay S + k_out^T V'."""

    @staticmethod
    def forward(ctx, w, u, attention, q_in, k_out, decay_out):  # type: ignore[no-untyped-def]
        """All inputs [B, H, N, C, ...]; ``decay_out`` [B, H, N, K]; returns [B, H, N, C, W]."""
        b, h, n, c, key = w.shape
        flat = [x.reshape(b * h, n, *x.shape[3:]) for x in (w, u, q_in, k_out, decay_out)]
        w_f, u_f, q_f, k_f, d_f = flat
        state = w.new_zeros(b * h, key, u.shape[-1])
        states = w.new_empty(n, b * h, key, u.shape[-1])
        corrected = torch.empty_like(u_f)
        out = torch.empty_like(u_f)
        for i in range(n):
            states[i] = state
            corrected[:, i] = torch.baddbmm(u_f[:, i], w_f[:, i], state, alpha=-1)
            out[:, i] = torch.bmm(q_f[:, i], state)
            state = torch.baddbmm(state * d_f[:, i].unsqueeze(-1), k_f[:, i].transpose(1, 2), corrected[:, i])
        attention_f = attention.reshape(b * h * n, c, c)
        out = out.reshape(b * h * n, c, -1).baddbmm_(attention_f, corrected.reshape(b * h * n, c, -1))
        ctx.save_for_backward(w_f, q_f, k_f, d_f, attention_f, states, corrected)
        ctx.shape = (b, h, n, c)
        return out.view(b, h, n, c, -1)

    @staticmethod
    def backward(ctx, grad_out):  # type: ignore[no-untyped-def]
        """Reverse walk over the chunks."""
        w, q, k, d, attention, states, corrected = ctx.saved_tensors
        b, h, n, c = ctx.shape
        grad_o = grad_out.reshape(b * h, n, c, -1)
        flat_grad = grad_o.reshape(b * h * n, c, -1)
        flat_corrected = corrected.reshape(b * h * n, c, -1)
        grad_attention = torch.bmm(flat_grad, flat_corrected.transpose(1, 2))
        grad_v = torch.bmm(attention.transpose(1, 2), flat_grad).view(b * h, n, c, -1)
        grad_w, grad_q, grad_k = torch.empty_like(w), torch.empty_like(q), torch.empty_like(k)
        grad_d, grad_u = torch.empty_like(d), torch.empty_like(corrected)
        grad_state = torch.zeros_like(states[0])
        for i in reversed(range(n)):
            state = states[i]
            grad_vi = torch.baddbmm(grad_v[:, i], k[:, i], grad_state)
            grad_u[:, i] = grad_vi
            grad_k[:, i] = torch.bmm(corrected[:, i], grad_state.transpose(1, 2))
            grad_d[:, i] = (grad_state * state).sum(-1)
            grad_w[:, i] = torch.bmm(grad_vi, state.transpose(1, 2)).neg_()
            grad_q[:, i] = torch.bmm(grad_o[:, i], state.transpose(1, 2))
            grad_state = grad_state * d[:, i].unsqueeze(-1)
            grad_state.baddbmm_(w[:, i].transpose(1, 2), grad_vi, alpha=-1)
            grad_state.baddbmm_(q[:, i].transpose(1, 2), grad_o[:, i])
        shape = (b, h, n)
        return (
            grad_w.view(*shape, c, -1),
            grad_u.view(*shape, c, -1),
            grad_attention.view(*shape, c, c),
            grad_q.view(*shape, c, -1),
            grad_k.view(*shape, c, -1),
            grad_d.view(*shape, -1),
        )


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
        self.self_attn = MlaAttention(config) if is_mla else KdaAttention(config)
        if index == 0:
            self.mlp: nn.Module = DenseMlp(config, config.dense_intermediate)
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

    def seed_copying(self) -> None:
        """Start most KDA heads as copy heads, one as previous-token head, and the head as the embedding.

        With the head's rows along the embedding's, a copied token's direction already means that token.
        """
        kda = [layer.self_attn for layer in self.layers if isinstance(layer.self_attn, KdaAttention)]
        for index, layer in enumerate(kda):
            seed_copy_heads(layer, (0, 1) if index < 3 else (0,))
        seed_previous_token_head(kda[0], kda[0].heads - 1)
        with torch.no_grad():
            self.lm_head.weight.copy_(TIED_HEAD_SCALE * self.embed_tokens.weight)

    def forward(self, token_ids: torch.Tensor, taps: Sequence[int] = ()) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Token ids [B, T] -> final normed hidden [B, T, D] and the tapped mixtures.

        Tap t is the tensor layer t + 1 consumes before its norm (the output mix after the last).
        """
        prefix, snapshots, captured = self.embed_tokens(token_ids), [], []
        for index, layer in enumerate(self.layers):
            entry = layer.entry(prefix, snapshots)
            if index - 1 in taps:
                captured.append(entry)
            prefix = layer(prefix, entry, snapshots)
        mixed = self.output_attn_res(prefix, snapshots)
        if self.config.num_layers - 1 in taps:
            captured.append(mixed)
        return self.norm(mixed), captured
