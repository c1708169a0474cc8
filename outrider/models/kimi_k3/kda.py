"""Kimi Delta Attention layer body (k3-architecture section 5).

Dims: T rows, D model width, H heads, K key width, W value width, C conv channels, I = H * W, X columns of the joint
projection.
"""

import torch
from torch import nn

from outrider.models.kimi_k3.config import KdaConfig
from outrider.models.layers import Build
from outrider.models.protocol import TargetCaches
from outrider.models.step import GroupIndex, StepIndex, scatter_groups
from outrider.ops.kda_step import KdaParameters, LayerRows, ProjectedRows

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
        self.form = build.kernels.kda
        self.run_prompt: LayerRows | None = None
        self.run_step: LayerRows | None = None

    def prepare(self) -> None:
        """Give the parameters to both forms of rows; call again whenever they change."""
        parameters = self._kda_parameters()
        self.run_prompt = self.form.bind_prompt(parameters, KDA_CHUNK)
        self.run_step = self.form.bind_step(parameters)

    def _kda_parameters(self) -> KdaParameters:
        return KdaParameters(
            conv_CJ=self.conv.weight.detach(),
            a_log_H=self.a_log.weight.detach(),
            dt_bias_HK=self.dt_bias.weight.detach().view(self.config.num_heads, self.config.head_dim),
            o_norm_W=self.o_norm.weight.detach(),
            lower_bound=self.config.gate_lower_bound,
            eps=self.eps,
        )

    def forward(self, x_TD: torch.Tensor, index: StepIndex, caches: TargetCaches) -> torch.Tensor:
        """Normed layer input ``[T, D]`` to attention output ``[T, D]``."""
        # The method, not torch.split: that is a Python function around it which costs more than the views.
        inputs_TC, gate, forget, beta_TH = self.linear(x_TD, self.in_proj).split_with_sizes(self.sections, -1)
        projected = ProjectedRows(
            inputs_TC=inputs_TC,
            gate_TI=gate if self.g_b_proj is None else self.linear(gate, self.g_b_proj),
            forget_TI=self.linear(forget, self.f_b_proj),
            beta_TH=beta_TH,
        )
        assert self.run_prompt is not None and self.run_step is not None, "call prepare() after filling the weights"
        chunk_out = step_out = None
        if (chunk := index.chunk) is not None:
            rows, seats = _rows(chunk, projected), caches.recurrent.seats(self.cache_index)
            chunk_out = self.run_prompt(rows, seats, chunk.state_slots_S, chunk.layout)
        if (step := index.step) is not None:
            rows = _rows(step, projected)
            seats = caches.recurrent.seats(self.cache_index, num_rows=step.layout.num_rows)
            step_out = self.run_step(rows, seats, step.state_slots_S, step.layout)
        return self.linear(scatter_groups(index, chunk_out, step_out), self.o_proj)


def _rows(group: GroupIndex, projected: ProjectedRows) -> ProjectedRows:
    """The group's rows of all projections."""
    if group.rows_T is None:
        return projected
    return ProjectedRows(
        inputs_TC=group.take(projected.inputs_TC),
        gate_TI=group.take(projected.gate_TI),
        forget_TI=group.take(projected.forget_TI),
        beta_TH=group.take(projected.beta_TH),
    )
