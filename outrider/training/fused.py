"""Elementwise-heavy pieces of the training forward, each compiled into a few loops.

They are memory-bound on a CPU: fusing them is worth more than any matrix product.
"""

import torch
import torch._dynamo
import torch.nn.functional as F

__all__ = [
    "attention_residual_mix",
    "conv_silu",
    "decay_factors",
    "gated_norm",
    "kda_chunk_factors",
    "kda_inputs",
    "rms_norm",
    "situ",
    "unit_lower_inverse",
]

# One compiled form per shape and grad mode; the default limit of 8 would fall back to eager.
torch._dynamo.config.recompile_limit = 64


@torch.compile(dynamic=False)
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm over the last dim, fp32."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


@torch.compile(dynamic=False)
def attention_residual_mix(values: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Softmax mixture over the leading candidate dim (section 4.2): [n, B, T, D] -> [B, T, D]."""
    scores = (values * weight).sum(-1) * torch.rsqrt(values.square().mean(-1) + eps)
    return (values * torch.softmax(scores, 0).unsqueeze(-1)).sum(0)


@torch.compile(dynamic=False)
def situ(gate: torch.Tensor, up: torch.Tensor, beta: float, linear_beta: float) -> torch.Tensor:
    """SiTU activation (section 8)."""
    gated = beta * torch.tanh(gate / beta) * torch.sigmoid(gate)
    return gated * linear_beta * torch.tanh(up / linear_beta)


@torch.compile(dynamic=False)
def conv_silu(x: torch.Tensor, taps: torch.Tensor) -> torch.Tensor:
    """Causal depthwise convolution and SiLU (section 5.2): x [B, T, D], taps [D, 1, kernel]."""
    length, kernel = x.shape[1], taps.shape[2]
    padded = F.pad(x, (0, 0, kernel - 1, 0))
    total = padded[:, :length] * taps[:, 0, 0]
    for tap in range(1, kernel):
        total = total + padded[:, tap : tap + length] * taps[:, 0, tap]
    return total * torch.sigmoid(total)


@torch.compile(dynamic=False)
def kda_inputs(q, k, gate_logits, beta_logits, a_log, dt_bias, lower_bound):
    """l2-normalised scaled q, normalised k, bounded log decay, beta (sections 5.3, 5.4)."""
    q = q * torch.rsqrt(q.square().sum(-1, keepdim=True) + 1e-6) * q.shape[-1] ** -0.5
    k = k * torch.rsqrt(k.square().sum(-1, keepdim=True) + 1e-6)
    log_decay = lower_bound * torch.sigmoid(a_log.exp().unsqueeze(-1) * (gate_logits + dt_bias))
    return q, k, log_decay, torch.sigmoid(beta_logits)


@torch.compile(dynamic=False)
def gated_norm(out, weight, gate, eps):
    """Per-head RMSNorm times the sigmoid output gate (section 5.6)."""
    normed = out * torch.rsqrt(out.square().mean(-1, keepdim=True) + eps) * weight
    return normed * torch.sigmoid(gate)


@torch.compile(dynamic=False)
def decay_factors(q, k, log_decay):
    """The factored decays of one chunk: both exponents are referred to the middle row.

    With the -5 bound and 16 rows every exponent stays within +-40, and the product of two
    factors within e^80, finite in fp32 even where the mask later drops it.
    """
    total = log_decay.cumsum(-2)
    middle = total[..., log_decay.shape[-2] // 2 - 1, :].unsqueeze(-2)
    rise, fall = torch.exp(total - middle), torch.exp(middle - total)
    last = total[..., -1, :].unsqueeze(-2)
    grown = total.exp()
    return q * rise, k * rise, k * fall, q * grown, k * grown, k * torch.exp(last - total), last.squeeze(-2).exp()


def unit_lower_inverse(strict: torch.Tensor) -> torch.Tensor:
    """(I + strict)^-1 for strictly lower triangular [..., 16, 16], by doubling (strict^16 = 0)."""
    identity = torch.eye(strict.shape[-1])
    inverse, power = identity - strict, strict @ strict
    for _ in range(2):
        inverse = inverse + inverse @ power
        power = power @ power
    return inverse + inverse @ power


def kda_chunk_factors(q, k, v, log_decay, beta):
    """Within-chunk algebra of section 5.7 for [B, H, N, C, .] inputs.

    Returns W, U, the masked attention matrix P, exp(G) q, exp(G_last - G) k and exp(G_last).
    """
    q_rise, k_rise, k_fall, q_in, k_in, k_out, decay_out = decay_factors(q, k, log_decay)
    keys = k_fall.transpose(-1, -2)
    attention = (q_rise @ keys).tril()
    strict = (k_rise @ keys).tril(-1) * beta
    solved = unit_lower_inverse(strict)
    return solved @ (k_in * beta), solved @ (v * beta), attention, q_in, k_out, decay_out
