"""The K3 text model written down literally: slow, float64, one sequence, no caches, no batching.

Every formula is the one of k3-architecture.md, with the section beside it, as plain loops over
tokens, heads and experts. It shares no code with ``outrider.ops`` or ``outrider.models``, so a common
mistake would have to be made twice. Inputs are tensors by checkpoint name and the raw config.

Dims: T tokens, D width, H heads, K key width, W value width, C latent width, E experts.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["ReferenceOutput", "reference_forward", "reference_greedy"]

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceOutput:
    """All intermediate results a test may want, float64."""

    logits_TV: torch.Tensor
    mixtures_LTD: torch.Tensor  # index t + 1: what layer t + 1 reads before its norm; 0: the embedding
    prefixes_LTD: torch.Tensor  # index t + 1: the residual stream after layer t; 0: the embedding
    snapshots: tuple[torch.Tensor, ...]  # section 4.1, each [T, D]
    attention_outputs: tuple[torch.Tensor, ...]  # per layer [T, D]
    ffn_outputs: tuple[torch.Tensor, ...]  # per layer [T, D]
    expert_ids: tuple[tuple[tuple[int, ...], ...], ...]  # per MoE layer and token, ascending ids
    kda_states: Mapping[int, torch.Tensor]  # layer -> [H, K, W] after the last token (K first)

    def taps(self, layer_ids: Sequence[int], stream: str) -> torch.Tensor:
        """Taps [T, A, D] by 0-based layer id (section 14.25); ``stream`` is mixture or prefix."""
        source = {"mixture": self.mixtures_LTD, "prefix": self.prefixes_LTD}[stream]
        return torch.stack([source[layer + 1] for layer in layer_ids], dim=1)


class _Weights:
    """Tensors by text name, float64; strips the wrapper prefix and decodes MXFP4."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = {name.removeprefix("language_model."): value for name, value in tensors.items()}
        self._decoded: dict[str, torch.Tensor] = {}

    def has(self, name: str) -> bool:
        return name in self._tensors

    def get(self, name: str) -> torch.Tensor:
        return self._tensors[name].to(torch.float64)

    def linear(self, name: str) -> torch.Tensor:
        """Matrix ``name.weight`` or its packed form (section 7.3)."""
        if self.has(f"{name}.weight"):
            return self.get(f"{name}.weight")
        if name not in self._decoded:
            self._decoded[name] = self._decode(name)
        return self._decoded[name]

    def _decode(self, name: str) -> torch.Tensor:
        packed = self._tensors[f"{name}.weight_packed"]
        scale = self._tensors[f"{name}.weight_scale"]
        table = torch.tensor(E2M1, dtype=torch.float64)
        out = torch.zeros(packed.shape[0], 2 * packed.shape[1], dtype=torch.float64)
        out[:, 0::2] = table[(packed & 15).to(torch.int64)]  # low nibble: even column
        out[:, 1::2] = table[(packed >> 4).to(torch.int64)]
        two = torch.tensor(2.0, dtype=torch.float64)
        out *= torch.pow(two, scale.to(torch.float64) - 127).repeat_interleave(32, dim=1)
        return out


def _sigmoid(x: torch.Tensor) -> torch.Tensor:
    return 1.0 / (1.0 + torch.exp(-x))


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Section 2; ``x`` [..., D]."""
    return x / torch.sqrt((x * x).mean(dim=-1, keepdim=True) + eps) * weight


def _glu(text: Mapping[str, Any], gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Section 8, or SiLU."""
    if text["hidden_act"] == "silu":
        return gate * _sigmoid(gate) * up
    beta = text.get("activation_situ_beta")
    beta = 1.0 if beta is None else beta
    linear_beta = text.get("activation_situ_linear_beta")
    bounded = up if linear_beta is None else linear_beta * torch.tanh(up / linear_beta)
    return beta * torch.tanh(gate / beta) * _sigmoid(gate) * bounded


def _mlp(w: _Weights, text: Mapping[str, Any], name: str, x: torch.Tensor) -> torch.Tensor:
    gate, up = x @ w.linear(f"{name}.gate_proj").T, x @ w.linear(f"{name}.up_proj").T
    return _glu(text, gate, up) @ w.linear(f"{name}.down_proj").T


def _short_conv(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Section 5.2 for one stream: ``x`` [T, channels], ``weight`` [channels, 1, taps]."""
    num_taps = weight.shape[-1]
    out = torch.zeros_like(x)
    for t in range(x.shape[0]):
        for j in range(num_taps):
            source = t - (num_taps - 1) + j
            if source >= 0:
                out[t] += weight[:, 0, j] * x[source]
    return out * _sigmoid(out)


def _l2_norm(x: torch.Tensor) -> torch.Tensor:
    """Section 5.3: eps inside the root, added to the sum."""
    return x / math.sqrt(float((x * x).sum()) + 1e-6)


def _log_decay(linear: Mapping[str, Any], a: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    """Section 5.4 for one head: ``a`` = exp(A_log), ``z`` [K] = logits plus dt_bias."""
    bound: float | None = linear.get("gate_lower_bound")
    if bound is None:
        return -a * torch.log1p(torch.exp(-z.abs())) - a * z.clamp(min=0)
    return bound * _sigmoid(a * z)


def _kda(w: _Weights, text: Mapping[str, Any], name: str, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Section 5; returns the layer output [T, D] and the final state [H, K, W]."""
    linear = text["linear_attn_config"]
    num_heads, width = linear["num_heads"], linear["head_dim"]
    q, k, v = (_short_conv(x @ w.linear(f"{name}.{s}_proj").T, w.get(f"{name}.{s}_conv1d.weight")) for s in "qkv")
    z = (x @ w.linear(f"{name}.f_a_proj").T) @ w.linear(f"{name}.f_b_proj").T + w.get(f"{name}.dt_bias")
    beta = _sigmoid(x @ w.linear(f"{name}.b_proj").T)
    if linear.get("use_full_rank_gate", False):
        gate = x @ w.linear(f"{name}.g_proj").T
    else:
        gate = (x @ w.linear(f"{name}.g_a_proj").T) @ w.linear(f"{name}.g_b_proj").T
    a = torch.exp(w.get(f"{name}.A_log").reshape(-1)[:num_heads])
    norm_weight = w.get(f"{name}.o_norm.weight")
    states = torch.zeros(num_heads, width, width, dtype=torch.float64)
    mixed = torch.zeros_like(v)
    for t in range(x.shape[0]):
        for h in range(num_heads):
            part = slice(h * width, (h + 1) * width)
            q_t = _l2_norm(q[t, part]) * width**-0.5
            k_t = _l2_norm(k[t, part])
            decayed = torch.diag(torch.exp(_log_decay(linear, a[h], z[t, part]))) @ states[h]
            error = v[t, part] - decayed.T @ k_t
            states[h] = decayed + beta[t, h] * torch.outer(k_t, error)
            normed = _rms_norm(states[h].T @ q_t, norm_weight, text["rms_norm_eps"])
            mixed[t, part] = normed * _sigmoid(gate[t, part])
    return mixed @ w.linear(f"{name}.o_proj").T, states


def _mla(w: _Weights, text: Mapping[str, Any], name: str, x: torch.Tensor) -> torch.Tensor:
    """Section 6.1, expanded form; returns [T, D]."""
    num_heads, nope, rope = (text[f] for f in ("num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim"))
    v_width, latent = text["v_head_dim"], text["kv_lora_rank"]
    eps = text.get("mla_lora_norm_eps", 1e-6)
    if text.get("q_lora_rank") is None:
        q = x @ w.linear(f"{name}.q_proj").T
    else:
        low = _rms_norm(x @ w.linear(f"{name}.q_a_proj").T, w.get(f"{name}.q_a_layernorm.weight"), eps)
        q = low @ w.linear(f"{name}.q_b_proj").T
    kv = x @ w.linear(f"{name}.kv_a_proj_with_mqa").T
    c = _rms_norm(kv[:, :latent], w.get(f"{name}.kv_a_layernorm.weight"), eps)
    r = kv[:, latent:]
    kv_b = c @ w.linear(f"{name}.kv_b_proj").T
    out = torch.zeros(x.shape[0], num_heads * v_width, dtype=torch.float64)
    for t in range(x.shape[0]):
        for h in range(num_heads):
            q_t = q[t, h * (nope + rope) : (h + 1) * (nope + rope)]
            head = kv_b[: t + 1, h * (nope + v_width) : (h + 1) * (nope + v_width)]
            scores = (head[:, :nope] @ q_t[:nope] + r[: t + 1] @ q_t[nope:]) * (nope + rope) ** -0.5
            weights = torch.exp(scores - scores.max())
            out[t, h * v_width : (h + 1) * v_width] = (weights / weights.sum()) @ head[:, nope:]
    if text.get("mla_use_output_gate", False):
        out = out * _sigmoid(x @ w.linear(f"{name}.g_proj").T)
    return out @ w.linear(f"{name}.o_proj").T


def _route(w: _Weights, text: Mapping[str, Any], name: str, x_D: torch.Tensor) -> tuple[tuple[int, ...], torch.Tensor]:
    """Section 7.1 for one token: expert ids ascending (ties: lowest id) and their weights."""
    scores = _sigmoid(w.linear(f"{name}.gate") @ x_D)
    choice = scores + w.get(f"{name}.gate.e_score_correction_bias")
    ranked = sorted(range(len(scores)), key=lambda e: (-float(choice[e]), e))
    ids = tuple(sorted(ranked[: text["num_experts_per_token"]]))
    weights = scores[list(ids)]
    if text.get("moe_renormalize", True) and len(ids) > 1:
        weights = weights / (weights.sum() + 1e-20)
    return ids, weights * text.get("routed_scaling_factor", 1.0)


def _moe(
    w: _Weights, text: Mapping[str, Any], name: str, x: torch.Tensor
) -> tuple[torch.Tensor, tuple[tuple[int, ...], ...]]:
    """Section 7.2; returns [T, D] and the expert ids of each token."""
    has_latent = text.get("routed_expert_hidden_size") is not None
    z = x @ w.linear(f"{name}.routed_expert_down_proj").T if has_latent else x
    routed = torch.zeros_like(z)
    chosen = []
    for t in range(x.shape[0]):
        ids, weights = _route(w, text, name, x[t])
        chosen.append(ids)
        for expert, weight in zip(ids, weights, strict=True):
            e = f"{name}.experts.{expert}"
            hidden = _glu(text, w.linear(f"{e}.w1") @ z[t], w.linear(f"{e}.w3") @ z[t])
            routed[t] += weight * (w.linear(f"{e}.w2") @ hidden)
    if has_latent:
        if text.get("latent_moe_use_norm", False):
            routed = _rms_norm(routed, w.get(f"{name}.routed_expert_norm.weight"), text["rms_norm_eps"])
        routed = routed @ w.linear(f"{name}.routed_expert_up_proj").T
    if text.get("num_shared_experts", 0):
        routed = routed + _mlp(w, text, f"{name}.shared_experts", x)
    return routed, tuple(chosen)


def _attn_res_mix(w: _Weights, text: Mapping[str, Any], name: str, candidates: Sequence[torch.Tensor]) -> torch.Tensor:
    """Section 4.2; ``name`` is the prefix of ``_norm`` and ``_proj``."""
    vector = w.get(f"{name}_norm.weight") * w.get(f"{name}_proj.weight")[0]
    out = torch.zeros_like(candidates[0])
    for t in range(out.shape[0]):
        scores = torch.stack(
            [(c[t] / torch.sqrt((c[t] * c[t]).mean() + text["rms_norm_eps"]) * vector).sum() for c in candidates]
        )
        weights = torch.exp(scores - scores.max())
        weights = weights / weights.sum()
        for weight, candidate in zip(weights, candidates, strict=True):
            out[t] += weight * candidate[t]
    return out


def _is_moe(text: Mapping[str, Any], i: int) -> bool:
    if text.get("num_experts") is None:
        return False
    first, every = int(text.get("first_k_dense_replace", 0)), int(text.get("moe_layer_freq", 1))
    return i >= first and i % every == 0


class _Walk:
    """The layer walk of one sequence; keeps every intermediate result (sections 2 and 4.3)."""

    def __init__(self, w: _Weights, text: Mapping[str, Any]) -> None:
        self.w, self.text, self.block = w, text, text.get("attn_res_block_size")
        self.snapshots: list[torch.Tensor] = []
        self.mixtures: list[torch.Tensor] = []
        self.prefixes: list[torch.Tensor] = []
        self.attention: list[torch.Tensor] = []
        self.ffn: list[torch.Tensor] = []
        self.expert_ids: list[tuple[tuple[int, ...], ...]] = []
        self.kda_states: dict[int, torch.Tensor] = {}

    def mix(self, name: str, prefix: torch.Tensor) -> torch.Tensor:
        if self.block is None or not self.snapshots:
            return prefix
        return _attn_res_mix(self.w, self.text, name, [*self.snapshots, prefix])

    def attend(self, i: int, x: torch.Tensor) -> torch.Tensor:
        name = f"model.layers.{i}.self_attn"
        if i + 1 in self.text["linear_attn_config"]["kda_layers"]:
            out, self.kda_states[i] = _kda(self.w, self.text, name, x)
            return out
        return _mla(self.w, self.text, name, x)

    def feed_forward(self, i: int, x: torch.Tensor) -> torch.Tensor:
        if not _is_moe(self.text, i):
            return _mlp(self.w, self.text, f"model.layers.{i}.mlp", x)
        out, ids = _moe(self.w, self.text, f"model.layers.{i}.block_sparse_moe", x)
        self.expert_ids.append(ids)
        return out

    def layer(self, i: int, prefix: torch.Tensor) -> torch.Tensor:
        name, eps = f"model.layers.{i}", self.text["rms_norm_eps"]
        opens_block = self.block is not None and i % self.block == 0
        h = self.mix(f"{name}.self_attention_res", prefix)
        self.mixtures.append(h)
        self.prefixes.append(prefix)
        if opens_block:
            self.snapshots.append(prefix)
        a = self.attend(i, _rms_norm(h, self.w.get(f"{name}.input_layernorm.weight"), eps))
        prefix = a if opens_block else prefix + a
        h = self.mix(f"{name}.mlp_res", prefix)
        m = self.feed_forward(i, _rms_norm(h, self.w.get(f"{name}.post_attention_layernorm.weight"), eps))
        self.attention.append(a)
        self.ffn.append(m)
        return prefix + m


def reference_forward(
    tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any], token_ids: Sequence[int]
) -> ReferenceOutput:
    """Run the whole model on one sequence from its start.

    Args:
        tensors: Checkpoint tensors by name, any stored dtype, with or without ``language_model.``.
        config: Raw ``config.json``, wrapper or bare text form.
        token_ids: The sequence, at least one token.
    """
    text = config.get("text_config", config)
    w = _Weights(tensors)
    prefix = w.get("model.embed_tokens.weight")[list(token_ids)]
    walk = _Walk(w, text)
    for i in range(text["num_hidden_layers"]):
        prefix = walk.layer(i, prefix)
    y = walk.mix("model.output_attn_res", prefix)
    normed = _rms_norm(y, w.get("model.norm.weight"), text["rms_norm_eps"])
    return ReferenceOutput(
        logits_TV=normed @ w.linear("lm_head").T,
        mixtures_LTD=torch.stack([*walk.mixtures, y]),
        prefixes_LTD=torch.stack([*walk.prefixes, prefix]),
        snapshots=tuple(walk.snapshots),
        attention_outputs=tuple(walk.attention),
        ffn_outputs=tuple(walk.ffn),
        expert_ids=tuple(walk.expert_ids),
        kda_states=walk.kda_states,
    )


def reference_greedy(
    tensors: Mapping[str, torch.Tensor],
    config: Mapping[str, Any],
    prompt_token_ids: Sequence[int],
    num_tokens: int,
) -> tuple[int, ...]:
    """Greedy continuation by full recomputation per token; ties go to the lowest id."""
    token_ids = list(prompt_token_ids)
    for _ in range(num_tokens):
        logits_V = reference_forward(tensors, config, token_ids).logits_TV[-1]
        token_ids.append(int((logits_V == logits_V.max()).nonzero()[0, 0]))
    return tuple(token_ids[len(prompt_token_ids) :])
