"""Kimi Delta Attention layer body (k3-architecture section 5).

Dims: T rows, S sequences, D model width, H heads, K key width, W value width, C conv channels.
"""

import torch
from torch import nn

from outrider.models.kimi_k3.config import KdaConfig
from outrider.models.kimi_k3.step import GroupIndex, StepIndex, scatter_groups
from outrider.models.layers import Build
from outrider.models.protocol import TargetCaches
from outrider.ops.conv import short_conv, window_after_spans
from outrider.ops.kda import kda_beta, kda_gate, kda_recurrent
from outrider.ops.kda_chunk import kda_chunk
from outrider.ops.norm import gated_rms_norm

__all__ = ["KDA_CHUNK", "KdaAttention"]

# Prompt rows advance in chunks at absolute multiples of this. 16 rows keep the pairwise decay tensor
# small; the published engines use 16 or 64 and the vendor pins none (section 15, U3).
KDA_CHUNK = 16


class KdaAttention(nn.Module):
    """Projections, gates and output of one KDA layer; recurrence and state live elsewhere."""

    def __init__(self, config: KdaConfig, hidden_size: int, eps: float, cache_index: int, build: Build) -> None:
        super().__init__()
        self.config, self.eps, self.cache_index, self.linear = config, eps, cache_index, build.linear
        inner, rank = config.inner_size, config.head_dim
        gate_rows = inner if config.full_rank_gate else rank
        # One product per layer input: q | k | v | output gate | forget gate | beta.
        self.sections = [3 * inner, gate_rows, rank, config.num_heads]
        self.in_proj = build.weight(sum(self.sections), hidden_size)
        self.conv = build.island_weight(3 * inner, config.conv_kernel_size)
        self.f_b_proj = build.weight(inner, rank)
        self.g_b_proj = None if config.full_rank_gate else build.weight(inner, rank)
        self.a_log = build.island_weight(config.num_heads)
        self.dt_bias = build.island_weight(inner)
        self.o_norm = build.island_weight(config.head_dim)
        self.o_proj = build.weight(hidden_size, inner)

    def forward(self, x_TD: torch.Tensor, index: StepIndex, caches: TargetCaches) -> torch.Tensor:
        """Normed layer input ``[T, D]`` to attention output ``[T, D]``."""
        inputs_TC, gate, forget, beta_TH = torch.split(self.linear(x_TD, self.in_proj), self.sections, dim=-1)
        if self.g_b_proj is not None:
            gate = self.linear(gate, self.g_b_proj)
        forget = self.linear(forget, self.f_b_proj)
        heads = (-1, self.config.num_heads, self.config.head_dim)
        decay_THK = kda_gate(
            forget.view(heads),
            self.a_log.weight,
            self.dt_bias.weight.view(heads[1:]),
            self.config.gate_lower_bound,
        )
        beta_TH = kda_beta(beta_TH)
        parts = (inputs_TC, decay_THK, beta_TH)
        chunk, step = index.chunk, index.step
        out_THW = scatter_groups(
            index,
            None if chunk is None else self._chunk(chunk, caches, *map(chunk.take, parts)),
            None if step is None else self._step(step, index, caches, *map(step.take, parts)),
        )
        mixed_THW = gated_rms_norm(out_THW, self.o_norm.weight, gate.reshape(heads), self.eps)
        return self.linear(mixed_THW.flatten(1), self.o_proj)

    def _carried(self, slots_S: torch.Tensor, caches: TargetCaches) -> tuple[torch.Tensor, torch.Tensor]:
        """Committed conv window ``[S, W, C]`` and state ``[S, H, W, K]`` of the slots."""
        window_SWC = caches.recurrent.conv_window(self.cache_index).index_select(0, slots_S)
        return window_SWC, caches.recurrent.state(self.cache_index).index_select(0, slots_S)

    def _convolved(
        self, group: GroupIndex, inputs_TC: torch.Tensor, window_SWC: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """q, k, v after conv and SiLU, each ``[T, H, K]``."""
        mixed_TC = short_conv(inputs_TC, window_SWC, self.conv.weight, group.layout)
        return torch.unbind(mixed_TC.view(-1, 3, self.config.num_heads, self.config.head_dim), dim=1)

    def _chunk(
        self,
        group: GroupIndex,
        caches: TargetCaches,
        inputs_TC: torch.Tensor,
        decay_THK: torch.Tensor,
        beta_TH: torch.Tensor,
    ) -> torch.Tensor:
        """Prompt rows: chunkwise form, state and window committed at once."""
        slots_S = group.state_slots_S
        window_SWC, state_SHWK = self._carried(slots_S, caches)
        q, k, v = self._convolved(group, inputs_TC, window_SWC)
        result = kda_chunk(q, k, v, decay_THK, beta_TH, state_SHWK, group.layout, chunk_size=KDA_CHUNK)
        window_SWC = window_after_spans(window_SWC, inputs_TC, group.layout)
        caches.recurrent.store(self.cache_index, slots_S, result.state_SHWK, window_SWC)
        return result.out_THW

    def _step(
        self,
        group: GroupIndex,
        index: StepIndex,
        caches: TargetCaches,
        inputs_TC: torch.Tensor,
        decay_THK: torch.Tensor,
        beta_TH: torch.Tensor,
    ) -> torch.Tensor:
        """Decode and verify rows: per-token form, everything logged, nothing committed."""
        slots_S = group.state_slots_S
        window_SWC, state_SHWK = self._carried(slots_S, caches)
        q, k, v = self._convolved(group, inputs_TC, window_SWC)
        result = kda_recurrent(q, k, v, decay_THK, beta_TH, state_SHWK, group.layout)
        log = result.log
        assert log is not None, "the per-token form logs every row"
        caches.recurrent.write_log(self.cache_index, index.batch, log.u_THW, log.k_THK, log.decay_THK, inputs_TC)
        return result.out_THW
