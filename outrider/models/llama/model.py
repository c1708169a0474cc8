"""A Llama or Qwen3 model over paged keys and values.

Dims: T rows of the batch, D model width, N rows that need logits, V vocabulary, A tapped layers, H query heads,
K head width, P = H + key heads.
"""

import torch
from torch import nn

from outrider.batch import ForwardBatch, TargetOutput
from outrider.cache.layout import CacheLayout, PagedLayout, RecurrentLayout
from outrider.errors import ConfigError
from outrider.models.layers import Build, pin_attributes
from outrider.models.llama.config import LlamaConfig
from outrider.models.llama.kernels import TORCH_GROUPED_KERNELS, GroupedKernels
from outrider.models.numerics import UNPROBED, NumericsReport
from outrider.models.protocol import AuxStream, TargetCaches
from outrider.models.recorded import RecordedSteps
from outrider.models.step import GroupIndex, StepIndex, scatter_groups
from outrider.ops.activation import Activation
from outrider.ops.grouped_attention import GroupedHeads
from outrider.ops.linear import embedding
from outrider.ops.native.library import library_for
from outrider.ops.native.linear import pack_weights
from outrider.ops.rope import RotaryTable, rotary_table

__all__ = ["LlamaLayer", "LlamaModel"]

SILU = Activation(name="silu")


class LlamaLayer(nn.Module):
    """Attention and feed-forward of one layer; both read a normed stream and give what is added to it."""

    def __init__(self, config: LlamaConfig, i: int, build: Build, grouped: GroupedKernels) -> None:
        super().__init__()
        self.config, self.cache_index = config, i
        self.kernels, self.linear, self.grouped = build.kernels, build.linear, grouped
        width, inner = config.hidden_size, config.intermediate_size
        self.attention_norm = build.weight(width)
        self.qkv_proj = build.weight(config.query_size + 2 * config.kv_size, width)
        self.q_norm = build.weight(config.head_dim) if config.head_norms else None
        self.k_norm = build.weight(config.head_dim) if config.head_norms else None
        self.o_proj = build.weight(width, config.query_size)
        self.ffn_norm = build.weight(width)
        self.gate_up_proj = build.weight(2 * inner, width)
        self.down_proj = build.weight(width, inner)
        self.heads: GroupedHeads | None = None

    def prepare(self, table: RotaryTable) -> None:
        """Constants of the heads; call again whenever a norm changes."""
        config, gains_PK = self.config, None
        if self.q_norm is not None and self.k_norm is not None:
            gains_PK = torch.cat(
                [
                    self.q_norm.detach().expand(config.num_heads, -1),
                    self.k_norm.detach().expand(config.num_kv_heads, -1),
                ]
            )
        self.heads = GroupedHeads(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            gains_PK=gains_PK,
            eps=config.rms_norm_eps,
            table=table,
        )

    def attend(self, normed_TD: torch.Tensor, index: StepIndex, caches: TargetCaches) -> torch.Tensor:
        """Normed stream ``[T, D]`` to attention output ``[T, D]``; appends keys and values of all rows."""
        assert self.heads is not None, "call prepare() after filling the weights"
        batch, rows_RC = index.batch, caches.latents.rows(self.cache_index)
        q_THK = self.grouped.append(
            self.linear(normed_TD, self.qkv_proj), self.heads, batch.positions_T, rows_RC, batch.slot_mapping_T
        )
        outputs = [self._attend_group(q_THK, rows_RC, group) for group in (index.chunk, index.step)]
        return self.linear(scatter_groups(index, *outputs).flatten(1), self.o_proj)

    def _attend_group(
        self, q_THK: torch.Tensor, rows_RC: torch.Tensor, group: GroupIndex | None
    ) -> torch.Tensor | None:
        if group is None:
            return None
        assert self.heads is not None, "checked by the caller"
        return self.grouped.attend(group.take(q_THK), rows_RC, self.heads, group.spans)

    def feed_forward(self, normed_TD: torch.Tensor) -> torch.Tensor:
        """Normed stream ``[T, D]`` to what is added to it."""
        return self.linear(self.kernels.glu(SILU, self.linear(normed_TD, self.gate_up_proj)), self.down_proj)


class LlamaModel(nn.Module):
    """A ``TargetModel``; parameters are uninitialised until the loader fills them.

    Args:
        config: parsed and validated numbers.
        build: dtype, device and kernels; the meta device gives shapes only.
        max_positions: positions of the rotary table; None takes all of the config's.
        grouped: forms of attention.
        numerics: how the kernels were found.
    """

    chunk_multiple = 1  # a row's bits do not depend on where its prompt was cut

    def __init__(
        self,
        config: LlamaConfig,
        *,
        build: Build,
        max_positions: int | None = None,
        grouped: GroupedKernels = TORCH_GROUPED_KERNELS,
        numerics: NumericsReport = UNPROBED,
    ) -> None:
        super().__init__()
        self.config, self.numerics, self.dtype = config, numerics, build.dtype
        self.kernels, self.linear = build.kernels, build.linear
        self.vocab_size, self.hidden_size, self.num_layers = config.vocab_size, config.hidden_size, config.num_layers
        self.max_positions = max_positions or config.max_position_embeddings
        self.island = build.island
        self.aux_layer_ids: tuple[int, ...] = ()
        self.embedding = build.weight(config.vocab_size, config.hidden_size)
        self.own_head = None if config.tied_head else build.weight(config.vocab_size, config.hidden_size)
        self.norm = build.weight(config.hidden_size)
        layers = [LlamaLayer(config, i, build, grouped) for i in range(config.num_layers)]
        self.layers = nn.ModuleList(layers)
        self._layers = tuple(layers)  # the same modules, typed
        self.steps = RecordedSteps(library_for(build.dtype, build.device))
        self.cache_layouts: tuple[CacheLayout, ...] = cache_layouts(config, build)

    @property
    def lm_head(self) -> torch.Tensor:
        """Output head ``[V, D]``: the embedding where the two are tied."""
        return self.embedding if self.own_head is None else self.own_head

    def prepare(self) -> None:
        """Derive what the weights imply; the loader calls it after filling them."""
        # An untied embedding is indexed, not multiplied with; what is no matrix or no bfloat16 is left alone.
        pack_weights(self.linear, (w for w in self.parameters() if w is self.lm_head or w is not self.embedding))
        config = self.config
        table = rotary_table(
            self.max_positions, config.head_dim, config.rope_theta, config.rope_scaling, dtype=self.island
        )
        device = self.embedding.device
        table = RotaryTable(cos_PF=table.cos_PF.to(device), sin_PF=table.sin_PF.to(device))
        for layer in self._layers:
            layer.prepare(table)
        pin_attributes(self)
        self.steps.forget()

    def set_aux_layers(self, layer_ids: tuple[int, ...], stream: AuxStream) -> None:
        """Tap the residual stream after layer t for each 0-based t, in the given order; -1 is the embedding.

        Raises:
            ConfigError: an id is out of range or given twice.
        """
        for position, layer_id in enumerate(layer_ids):
            if not -1 <= layer_id < self.num_layers:
                raise ConfigError(
                    f"aux layer id {layer_id} is outside -1..{self.num_layers - 1} of this target; "
                    "ids are 0-based and mean the stream after that layer"
                )
            if layer_id in layer_ids[:position]:
                raise ConfigError(f"aux layer id {layer_id} is given twice in {list(layer_ids)}")
        self.aux_layer_ids = tuple(layer_ids)
        self.steps.forget()

    def embed(self, token_ids_T: torch.Tensor) -> torch.Tensor:
        """Embedding rows ``[T, D]``, compute dtype; ids in 0..V-1."""
        return embedding(token_ids_T, self.embedding)

    def head(self, hidden_ND: torch.Tensor) -> torch.Tensor:
        """Logits ``[N, V]`` of normalised rows, compute dtype."""
        return self.linear(hidden_ND, self.lm_head)

    @torch.no_grad()
    def forward(self, batch: ForwardBatch, caches: TargetCaches) -> TargetOutput:
        """Run one flat batch, from a recording where there is one.

        Nothing is recurrent, so chunk and step rows differ only in who reads their logits.
        """
        logits_NV, *taps = self.steps.run(batch.place, caches, lambda: self.run_eagerly(batch, caches))
        return TargetOutput(logits_NV=logits_NV, aux_hidden_TAD=taps[0] if taps else None)

    @torch.no_grad()
    def run_eagerly(self, batch: ForwardBatch, caches: TargetCaches) -> tuple[torch.Tensor, ...]:
        """Logits, and taps if there are any, operation by operation."""
        num_rows, rows_N = batch.num_tokens, batch.logits_rows_N
        taps_TAD = self._tap_buffer(batch)
        if num_rows == 0:
            none_NV = self.embedding.new_empty(0, self.vocab_size)
            return (none_NV,) if taps_TAD is None else (none_NV, taps_TAD)
        stream_1TD = self.embedding.new_empty(1, num_rows, self.hidden_size)
        self.kernels.rows.gather(self.embedding, batch.token_ids_T, stream_1TD[0])
        index = StepIndex.of(batch)
        added_TD: torch.Tensor | None = None
        mix_norm, eps = self.kernels.mix_norm, self.config.rms_norm_eps
        for i, layer in enumerate(self._layers):
            stream_TD, normed_TD = mix_norm(stream_1TD, added_TD, None, layer.attention_norm, eps)
            self._capture(i - 1, stream_TD, taps_TAD)
            added_TD = layer.attend(normed_TD, index, caches)
            _, normed_TD = mix_norm(stream_1TD, added_TD, None, layer.ffn_norm, eps)
            added_TD = layer.feed_forward(normed_TD)
        stream_TD, normed_TD = mix_norm(stream_1TD, added_TD, None, self.norm, eps)
        self._capture(self.num_layers - 1, stream_TD, taps_TAD)
        normed_ND = normed_TD.new_empty(rows_N.shape[0], self.hidden_size)
        self.kernels.rows.gather(normed_TD, rows_N, normed_ND)
        logits_NV = self.head(normed_ND)
        return (logits_NV,) if taps_TAD is None else (logits_NV, taps_TAD)

    def _tap_buffer(self, batch: ForwardBatch) -> torch.Tensor | None:
        if not self.aux_layer_ids or not batch.wants_taps:
            return None
        return self.embedding.new_empty(batch.num_tokens, len(self.aux_layer_ids), self.hidden_size)

    def _capture(self, layer_id: int, stream_TD: torch.Tensor, taps_TAD: torch.Tensor | None) -> None:
        """Copy the stream after ``layer_id``, if it is tapped."""
        if taps_TAD is not None and layer_id in self.aux_layer_ids:
            self.kernels.rows.copy(stream_TD, taps_TAD[:, self.aux_layer_ids.index(layer_id)])


def cache_layouts(config: LlamaConfig, build: Build) -> tuple[PagedLayout, RecurrentLayout]:
    """One row of keys and values per token and layer; no recurrent layer."""
    pages = PagedLayout(
        name="keys and values", num_layers=config.num_layers, row_shape=(2 * config.kv_size,), dtype=build.dtype
    )
    none = RecurrentLayout(
        name="recurrent",
        num_layers=0,
        state_shape=(1, 1, 1),
        state_dtype=build.island,
        conv_shape=(1, 1),
        conv_dtype=build.dtype,
        fold=build.kernels.kda.commit,
    )
    return (pages, none)
