"""Kimi Delta Attention in its training form: chunkwise over whole sequences, with its own backward.

Dims: B sequences, T tokens, D width, H heads, K key width, W value width, C chunk rows, N chunks.
"""

from typing import Any

import torch
from torch import nn

from outrider.training.fused import conv_silu, gated_norm, kda_chunk_factors, kda_inputs
from outrider.training.layers import Norm, TrainConfig, linear

__all__ = ["KdaAttention", "chunked_delta_rule"]


class KdaAttention(nn.Module):
    """Kimi Delta Attention over whole sequences, chunkwise (section 5.7)."""

    q_conv1d_weight: nn.Parameter
    k_conv1d_weight: nn.Parameter
    v_conv1d_weight: nn.Parameter
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
    def forward(
        ctx: Any,
        w: torch.Tensor,
        u: torch.Tensor,
        attention: torch.Tensor,
        q_in: torch.Tensor,
        k_out: torch.Tensor,
        decay_out: torch.Tensor,
    ) -> torch.Tensor:
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
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[torch.Tensor, ...]:
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
