"""Multi-head latent attention layer body, gated, without positions (k3-architecture section 6).

Dims: T rows, D model width, H heads, N nope width, R rope width (never rotated), W value width,
C cached row width = latent rank + R.
"""

import torch
from torch import nn

from outrider.models.kimi_k3.config import MlaConfig
from outrider.models.kimi_k3.step import StepIndex, scatter_groups
from outrider.models.layers import Build
from outrider.models.protocol import TargetCaches
from outrider.ops.activation import sigmoid_gate
from outrider.ops.attention import AbsorbedWeights, absorb_weights, mla_expanded

__all__ = ["MlaAttention"]


class MlaAttention(nn.Module):
    """Projections, norms and gate of one MLA layer; attention is an op, latents live in the cache."""

    def __init__(self, config: MlaConfig, hidden_size: int, cache_index: int, build: Build) -> None:
        super().__init__()
        self.config, self.cache_index = config, cache_index
        self.kernels, self.linear = build.kernels, build.linear
        # The exact float: a bf16 scale would be 0.13 % off (section 14.16).
        self.scale = config.qk_head_dim**-0.5
        num_heads, rank = config.num_heads, config.q_lora_rank
        value_rows = num_heads * config.v_head_dim
        query_rows = num_heads * config.qk_head_dim if rank is None else rank
        # One product per layer input: query (or its low rank) | latent and shared key | output gate.
        self.sections = [query_rows, config.latent_row_size, value_rows if config.output_gate else 0]
        self.in_proj = build.weight(sum(self.sections), hidden_size)
        self.q_norm = None if rank is None else build.weight(rank)
        self.q_b_proj = None if rank is None else build.weight(num_heads * config.qk_head_dim, rank)
        self.kv_norm = build.weight(config.kv_lora_rank)
        kv_b_rows = num_heads * (config.nope_head_dim + config.v_head_dim)
        self.kv_b_proj = build.weight(kv_b_rows, config.kv_lora_rank)
        self.o_proj = build.weight(hidden_size, value_rows)
        self.absorbed: AbsorbedWeights | None = None

    def prepare(self) -> None:
        """Derive the absorbed form of ``kv_b_proj``; call again whenever that weight changes."""
        self.absorbed = absorb_weights(
            self.kv_b_proj.detach(),
            num_heads=self.config.num_heads,
            nope_dim=self.config.nope_head_dim,
            value_dim=self.config.v_head_dim,
        )

    def forward(self, x_TD: torch.Tensor, index: StepIndex, caches: TargetCaches) -> torch.Tensor:
        """Normed layer input ``[T, D]`` to attention output ``[T, D]``; appends one latent row each."""
        config, eps = self.config, self.config.lora_norm_eps
        query, kv_TC, gate = torch.split(self.linear(x_TD, self.in_proj), self.sections, dim=-1)
        if self.q_norm is not None and self.q_b_proj is not None:
            query = self.linear(self.kernels.norm(query, self.q_norm, eps), self.q_b_proj)
        latent, shared_key = torch.split(kv_TC, [config.kv_lora_rank, config.rope_head_dim], dim=-1)
        row_TC = torch.cat([self.kernels.norm(latent, self.kv_norm, eps), shared_key], dim=-1)
        caches.latents.write(self.cache_index, index.batch.slot_mapping_T, row_TC)
        query_THK = query.view(-1, config.num_heads, config.qk_head_dim)
        out_THW = self._attend(query_THK, caches.latents.rows(self.cache_index), index)
        out = out_THW.flatten(1)
        return self.linear(sigmoid_gate(out, gate) if config.output_gate else out, self.o_proj)

    def _attend(self, query_THK: torch.Tensor, rows_RC: torch.Tensor, index: StepIndex) -> torch.Tensor:
        """Prompt rows in the expanded form, step rows in the absorbed form; ``[T, H, W]``."""
        assert self.absorbed is not None, "call prepare() after filling the weights"
        widths = [self.config.nope_head_dim, self.config.rope_head_dim]
        chunk_out = step_out = None
        if index.chunk is not None:
            q_nope_THN, q_rope_THR = torch.split(index.chunk.take(query_THK), widths, dim=-1)
            chunk_out = mla_expanded(
                q_nope_THN, q_rope_THR, self.kv_b_proj, rows_RC, index.chunk.spans, scale=self.scale
            )
        if index.step is not None:
            q_nope_THN, q_rope_THR = torch.split(index.step.take(query_THK), widths, dim=-1)
            step_out = self.kernels.absorbed(
                q_nope_THN, q_rope_THR, self.absorbed, rows_RC, index.step.spans, scale=self.scale
            )
        return scatter_groups(index, chunk_out, step_out)
