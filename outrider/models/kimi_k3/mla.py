"""Multi-head latent attention layer body, gated, without positions (k3-architecture section 6).

Dims: T rows, D model width, H heads, N nope width, R rope width (never rotated), W value width,
C cached row width = latent rank + R.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from outrider.models.kimi_k3.config import MlaConfig
from outrider.models.layers import Build
from outrider.models.protocol import TargetCaches
from outrider.models.step import GroupIndex, StepIndex, scatter_groups
from outrider.ops.attention import AbsorbedWeights

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
        self.absorbed = self.kernels.absorb(
            self.kv_b_proj.detach(),
            num_heads=self.config.num_heads,
            nope_dim=self.config.nope_head_dim,
            value_dim=self.config.v_head_dim,
        )

    def forward(self, x_TD: torch.Tensor, index: StepIndex, caches: TargetCaches) -> torch.Tensor:
        """Normed layer input ``[T, D]`` to attention output ``[T, D]``; appends one latent row each."""
        config, eps = self.config, self.config.lora_norm_eps
        query, kv_TC, gate = self.linear(x_TD, self.in_proj).split_with_sizes(self.sections, -1)
        if self.q_norm is not None and self.q_b_proj is not None:
            query = self.linear(self.kernels.norm(query, self.q_norm, eps), self.q_b_proj)
        rows_RC = caches.latents.rows(self.cache_index)
        self.kernels.append_latents(kv_TC, self.kv_norm, eps, rows_RC, index.batch.slot_mapping_T)
        query_THK = query.view(-1, config.num_heads, config.qk_head_dim)
        gate_THW = gate.view(-1, config.num_heads, config.v_head_dim) if config.output_gate else None
        return self.linear(self._attend(query_THK, gate_THW, rows_RC, index).flatten(1), self.o_proj)

    def _attend(
        self, query_THK: torch.Tensor, gate_THW: torch.Tensor | None, rows_RC: torch.Tensor, index: StepIndex
    ) -> torch.Tensor:
        """Prompt rows in the form the kernels have for them, step rows absorbed, both gated; ``[T, H, W]``."""
        assert self.absorbed is not None, "call prepare() after filling the weights"
        absorbed, expanded = partial(self.kernels.absorbed, weights=self.absorbed), self.kernels.expanded
        prompt = absorbed if expanded is None else partial(expanded, kv_b_weight_OC=self.kv_b_proj)
        widths = [self.config.nope_head_dim, self.config.rope_head_dim]

        def of(group: GroupIndex | None, form: Callable[..., torch.Tensor]) -> torch.Tensor | None:
            if group is None:
                return None
            q_nope_THN, q_rope_THR = group.take(query_THK).split_with_sizes(widths, -1)
            gate = None if gate_THW is None else group.take(gate_THW)
            return form(q_nope_THN, q_rope_THR, rows_RC=rows_RC, spans=group.spans, scale=self.scale, gate_THW=gate)

        return scatter_groups(index, of(index.chunk, prompt), of(index.step, absorbed))
