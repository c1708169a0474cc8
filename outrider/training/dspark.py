"""DSpark in its training form: many anchors of whole sequences at once (dspark.md section 4.2).

Parameter names are the drafter checkpoint's. Dims: B sequences, T tokens of a sequence,
A anchors per sequence, G block rows, R = A * G block rows of a sequence, D width, H heads,
J key/value heads, K head width, V draft vocabulary, M Markov rank.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from outrider.training.kimi_k3 import Norm, linear

__all__ = [
    "Blocks",
    "ConfidenceHead",
    "DSparkForTraining",
    "DrafterAttention",
    "DrafterConfig",
    "DrafterLayer",
    "DrafterMlp",
    "DrafterOutput",
    "DrafterRows",
    "MarkovHead",
    "block_mask",
    "rotary",
    "rotate",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterConfig:
    """Sizes of a DSpark drafter (vanilla Markov head, confidence head with Markov input)."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    block_rows: int
    mask_token_id: int
    aux_layer_ids: tuple[int, ...]  # output-of
    target_vocab_size: int
    draft_vocab_size: int
    markov_rank: int
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """Anchors of a batch and what their rows have to predict."""

    anchors_BA: torch.Tensor  # int64, position of the anchor in its sequence
    inputs_BR: torch.Tensor  # int64, anchor then MASK
    labels_BR: torch.Tensor  # int64, target ids of positions anchor + 1 .. anchor + G
    previous_BR: torch.Tensor  # int64, target id before each label (teacher forcing)
    weights_BR: torch.Tensor  # float, 0 where a row has no label to learn


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterOutput:
    """Rows' Markov-corrected logits [B, R, V] and confidence logits [B, R]."""

    logits_BRV: torch.Tensor
    confidence_BR: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterRows:
    """What the heads read: hidden rows [B, R, D], Markov embedding of the token before each [B, R, M]."""

    hidden_BRD: torch.Tensor
    previous_BRM: torch.Tensor
    confidence_BR: torch.Tensor


def rotary(positions: torch.Tensor, head_dim: int, theta: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Cos and sin [..., K] of half-split rotary embedding at integer positions [...]."""
    frequencies = theta ** (-torch.arange(0, head_dim, 2).float() / head_dim)
    angles = positions.unsqueeze(-1).float() * frequencies
    angles = torch.cat((angles, angles), -1)
    return angles.cos(), angles.sin()


def rotate(x: torch.Tensor, tables: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Apply rotary tables [B, T, K] to ``x`` [B, T, H, K]."""
    cos, sin = (table.unsqueeze(2) for table in tables)
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def block_mask(anchors_BA: torch.Tensor, num_tokens: int, block_rows: int) -> torch.Tensor:
    """Visible keys of each block row: bool [B, 1, R, T + R].

    Context strictly before the anchor, and every row of the own block (non-causal).
    """
    anchors_BR = anchors_BA.repeat_interleave(block_rows, 1)
    context = torch.arange(num_tokens) < anchors_BR.unsqueeze(-1)
    block = torch.arange(anchors_BR.shape[1]) // block_rows
    own = (block.unsqueeze(0) == block.unsqueeze(1)).expand(anchors_BR.shape[0], -1, -1)
    return torch.cat((context, own), -1).unsqueeze(1)


class DrafterAttention(nn.Module):
    """Grouped-query attention over projected context and the block's own rows."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = (
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
        )
        width = config.hidden_size
        self.q_proj = linear(width, self.heads * self.head_dim)
        self.k_proj = linear(width, self.kv_heads * self.head_dim)
        self.v_proj = linear(width, self.kv_heads * self.head_dim)
        self.o_proj = linear(self.heads * self.head_dim, width, 0.5)
        self.q_norm = Norm(self.head_dim, config.rms_norm_eps)
        self.k_norm = Norm(self.head_dim, config.rms_norm_eps)

    def forward(self, rows, context, tables, mask):
        """``rows`` [B, R, D] normed, ``context`` [B, T, D], rotary tables of rows and of all keys."""
        keys_in = torch.cat((context, rows), 1)
        shape = (rows.shape[0], -1, self.kv_heads, self.head_dim)
        query = self.q_norm(self.q_proj(rows).view(rows.shape[0], -1, self.heads, self.head_dim))
        key = rotate(self.k_norm(self.k_proj(keys_in).view(shape)), tables[1])
        value = self.v_proj(keys_in).view(shape)
        query = rotate(query, tables[0])
        repeat = self.heads // self.kv_heads
        key, value = (x.repeat_interleave(repeat, 2).transpose(1, 2) for x in (key, value))
        out = F.scaled_dot_product_attention(query.transpose(1, 2), key, value, attn_mask=mask)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class DrafterMlp(nn.Module):
    """SwiGLU."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = linear(config.hidden_size, config.intermediate_size)
        self.up_proj = linear(config.hidden_size, config.intermediate_size)
        self.down_proj = linear(config.intermediate_size, config.hidden_size, 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., D] -> [..., D]."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DrafterLayer(nn.Module):
    """One draft layer (dspark.md section 1.3)."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.self_attn, self.mlp = DrafterAttention(config), DrafterMlp(config)
        self.input_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = Norm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x, context, tables, mask):
        """Advance the block rows; the context is shared by all layers and never changed."""
        x = x + self.self_attn(self.input_layernorm(x), context, tables, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class MarkovHead(nn.Module):
    """Low-rank first-order bias ``W2 W1[previous]`` (section 1.6, vanilla)."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(config.target_vocab_size, config.markov_rank)
        nn.init.normal_(self.markov_w1.weight, std=0.05)
        self.markov_w2 = linear(config.markov_rank, config.draft_vocab_size)


class ConfidenceHead(nn.Module):
    """P(draft accepted | drafts before it accepted) from ``[h ; W1[previous]]`` (section 1.7)."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.proj = nn.Linear(config.hidden_size + config.markov_rank, 1)
        nn.init.zeros_(self.proj.weight)
        nn.init.zeros_(self.proj.bias)


class DSparkForTraining(nn.Module):
    """The drafter over sampled anchors; the embedding is the target's and stays frozen."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        width = config.hidden_size
        self.fc = linear(len(config.aux_layer_ids) * width, width)
        self.hidden_norm, self.norm = Norm(width, config.rms_norm_eps), Norm(width, config.rms_norm_eps)
        self.layers = nn.ModuleList(DrafterLayer(config) for _ in range(config.num_layers))
        self.lm_head = linear(width, config.draft_vocab_size)
        self.markov_head, self.confidence_head = MarkovHead(config), ConfidenceHead(config)

    def forward(self, taps_BTC: torch.Tensor, blocks: Blocks, embed: nn.Embedding) -> DrafterOutput:
        """``taps_BTC`` [B, T, m * D] (taps side by side) and the blocks of each sequence."""
        rows = self.rows(taps_BTC, blocks, embed)
        logits = self.lm_head(rows.hidden_BRD) + self.markov_head.markov_w2(rows.previous_BRM)
        return DrafterOutput(logits_BRV=logits, confidence_BR=rows.confidence_BR)

    def rows(self, taps_BTC: torch.Tensor, blocks: Blocks, embed: nn.Embedding) -> DrafterRows:
        """Everything up to the vocabulary; arguments as for ``forward``."""
        config, num_tokens = self.config, taps_BTC.shape[1]
        context = self.hidden_norm(self.fc(taps_BTC))
        offsets = torch.arange(config.block_rows)
        positions = (blocks.anchors_BA.unsqueeze(-1) + offsets).flatten(1)
        before = torch.arange(num_tokens).expand(positions.shape[0], -1)
        tables = (
            rotary(positions, config.head_dim, config.rope_theta),
            rotary(torch.cat((before, positions), 1), config.head_dim, config.rope_theta),
        )
        mask = block_mask(blocks.anchors_BA, num_tokens, config.block_rows)
        x = embed(blocks.inputs_BR)
        for layer in self.layers:
            x = layer(x, context, tables, mask)
        hidden = self.norm(x)
        previous = self.markov_head.markov_w1(blocks.previous_BR)
        confidence = self.confidence_head.proj(torch.cat((hidden, previous), -1)).squeeze(-1)
        return DrafterRows(hidden_BRD=hidden, previous_BRM=previous, confidence_BR=confidence)
