"""The K3 text model over flat batches: layers, residual stream, taps, head.

Dims: T flat tokens, N rows that need logits, V vocabulary, D model width, A tapped layers.
"""

from collections.abc import Iterator

import torch
from torch import nn

from outrider.batch import ForwardBatch, TargetOutput
from outrider.cache.layout import CacheLayout, PagedLayout, RecurrentLayout
from outrider.errors import ConfigError
from outrider.models.kimi_k3.config import KimiK3Config
from outrider.models.kimi_k3.kda import KDA_CHUNK, KdaAttention
from outrider.models.kimi_k3.mla import MlaAttention
from outrider.models.kimi_k3.moe import DenseFfn, ExpertStorage, MoeFfn
from outrider.models.kimi_k3.residual import ResidualMix, ResidualStream
from outrider.models.layers import Build, pin_attributes
from outrider.models.numerics import UNPROBED, NumericsReport
from outrider.models.protocol import AuxStream, TargetCaches
from outrider.models.recorded import RecordedSteps
from outrider.models.step import StepIndex
from outrider.ops.activation import Activation
from outrider.ops.linear import embedding
from outrider.ops.native.library import library_for
from outrider.ops.native.linear import pack_weights

__all__ = ["DecoderLayer", "KimiK3Model", "cache_layouts"]


class DecoderLayer(nn.Module):
    """One layer: two sublayers, each fed by a mix of the residual stream and a norm (section 4.3)."""

    def __init__(self, config: KimiK3Config, i: int, experts: ExpertStorage, build: Build) -> None:
        super().__init__()
        width, eps, block = config.hidden_size, config.rms_norm_eps, config.attn_res_block_size
        self.eps = eps
        self.opens_block = block is not None and i % block == 0
        self.attention_norm = build.weight(width)
        self.ffn_norm = build.weight(width)
        # Layer 0 has an entry mix in the checkpoint that is never used: there is no snapshot yet.
        self.attention_mix = None if block is None else ResidualMix(width, eps, build)
        self.ffn_mix = None if block is None else ResidualMix(width, eps, build)
        cache_index = config.layer_kinds[:i].count(config.layer_kinds[i])
        self.attention: KdaAttention | MlaAttention
        if config.layer_kinds[i] == "kda":
            self.attention = KdaAttention(config.kda, width, eps, cache_index, build)
        else:
            self.attention = MlaAttention(config.mla, width, cache_index, build)
        activation = Activation(name=config.activation, beta=config.situ_beta, linear_beta=config.situ_linear_beta)
        self.ffn: DenseFfn | MoeFfn
        if config.moe is not None and config.moe_layers[i]:
            self.ffn = MoeFfn(config.moe, width, eps, activation, experts, build)
        else:
            self.ffn = DenseFfn(width, config.intermediate_size, activation, build)

    def forward(self, normed_TD: torch.Tensor, stream: ResidualStream, index: StepIndex, caches: TargetCaches) -> None:
        """Advance ``stream`` by both sublayers; ``normed_TD`` is what it gave on entry, normed for the first."""
        attention_TD = self.attention(normed_TD, index, caches)
        if self.opens_block:
            stream.open_block()
            stream.restart(attention_TD)
        else:
            stream.add(attention_TD)
        _, normed_TD = stream.read_normed(self.ffn_mix, self.ffn_norm, self.eps)
        stream.add(self.ffn(normed_TD))


class KimiK3Model(nn.Module):
    """A ``TargetModel``; parameters are uninitialised until the loader fills them.

    Args:
        config: Parsed and validated numbers.
        experts: Keep routed experts as MXFP4 bytes or as compute-dtype matrices.
        build: Dtype, device and kernels; the meta device gives shapes only.
        numerics: How the kernels were found.
    """

    chunk_multiple = KDA_CHUNK

    def __init__(
        self, config: KimiK3Config, *, experts: ExpertStorage, build: Build, numerics: NumericsReport = UNPROBED
    ) -> None:
        super().__init__()
        self.config = config
        self.numerics = numerics
        self.dtype = build.dtype
        self.kernels, self.linear = build.kernels, build.linear
        self.vocab_size = config.vocab_size
        self.hidden_size = config.hidden_size
        self.num_layers = config.num_layers
        self.aux_layer_ids: tuple[int, ...] = ()
        self.aux_stream: AuxStream = "mixture"
        width = config.hidden_size
        self.embedding = build.weight(config.vocab_size, width)
        self.lm_head = build.weight(config.vocab_size, width)
        self.norm = build.weight(width)
        has_mix = config.attn_res_block_size is not None
        self.output_mix = ResidualMix(width, config.rms_norm_eps, build) if has_mix else None
        layers = [DecoderLayer(config, i, experts, build) for i in range(config.num_layers)]
        self.layers = nn.ModuleList(layers)
        self._layers = tuple(layers)  # the same modules, typed
        self.steps = RecordedSteps(library_for(build.dtype, build.device))
        self.cache_layouts: tuple[CacheLayout, ...] = cache_layouts(config, build)

    def prepare(self) -> None:
        """Derive what the weights imply; the loader calls it after filling them."""
        pack_weights(self.linear, self._multiplied())
        for layer in self._layers:
            layer.attention.prepare()
            if isinstance(layer.ffn, MoeFfn):
                layer.ffn.prepare()
        pin_attributes(self)
        self.steps.forget()

    def _multiplied(self) -> Iterator[torch.Tensor]:
        """Every matrix that rows are multiplied with, in the order of use, and parameters that are none."""
        for layer in self._layers:
            # Prompts multiply latents, not rows, with kv_b_proj; decode and verify rows its absorbed halves.
            latents = layer.attention.kv_b_proj if isinstance(layer.attention, MlaAttention) else None
            yield from (weight for weight in layer.parameters() if weight is not latents)
        yield self.lm_head

    def set_aux_layers(self, layer_ids: tuple[int, ...], stream: AuxStream) -> None:
        """Tap "after layer t" for each 0-based t, in the given order; -1 is the embedding.

        ``mixture`` is the tensor that layer t + 1 consumes before its norm (after the last layer: the
        output mix), ``prefix`` the raw residual stream (section 14.25).

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
        self.aux_stream = stream
        self.steps.forget()

    def embed(self, token_ids_T: torch.Tensor) -> torch.Tensor:
        """Embedding rows ``[T, D]``, compute dtype; ids in 0..V-1."""
        return embedding(token_ids_T, self.embedding)

    def head(self, hidden_ND: torch.Tensor) -> torch.Tensor:
        """Logits ``[N, V]`` of normalised rows, compute dtype."""
        return self.linear(hidden_ND, self.lm_head)

    def forward(self, batch: ForwardBatch, caches: TargetCaches) -> TargetOutput:
        """Run one flat batch (sections 2 and 4), from a recording where there is one.

        Chunk rows commit their recurrent state; step rows only log. The host waits for an accelerator in
        the expert loop (rows of each expert) and in prompt chunks (chunk indices from host lists).
        """
        logits_NV, *taps = self.steps.run(batch.place, caches, lambda: self.run_eagerly(batch, caches))
        return TargetOutput(logits_NV=logits_NV, aux_hidden_TAD=taps[0] if taps else None)

    @torch.no_grad()
    def run_eagerly(self, batch: ForwardBatch, caches: TargetCaches) -> tuple[torch.Tensor, ...]:
        """Logits, and taps if there are any, operation by operation."""
        kernels = self.kernels
        stream = ResidualStream(
            batch.token_ids_T, self.embedding, self.config.num_snapshots, kernels.mix_norm, kernels.rows
        )
        taps_TAD = self._tap_buffer(batch)
        if batch.num_tokens:
            index = StepIndex.of(batch)
            for i, layer in enumerate(self._layers):
                entry_TD, normed_TD = stream.read_normed(layer.attention_mix, layer.attention_norm, layer.eps)
                self._capture(i - 1, entry_TD, stream, taps_TAD)
                layer(normed_TD, stream, index, caches)
        logits_NV = self._logits(stream, batch, taps_TAD)
        return (logits_NV,) if taps_TAD is None else (logits_NV, taps_TAD)

    def _logits(self, stream: ResidualStream, batch: ForwardBatch, taps_TAD: torch.Tensor | None) -> torch.Tensor:
        """Logits of the rows that need them; takes the last tap, which is what the head reads, on the way."""
        rows_N, eps = batch.logits_rows_N, self.config.rms_norm_eps
        num_logits, last_layer = rows_N.shape[0], self.num_layers - 1
        is_tapped = taps_TAD is not None and last_layer in self.aux_layer_ids and batch.num_tokens > 0
        if not is_tapped and num_logits == 0:
            return self.embedding.new_empty(0, self.vocab_size)
        if not is_tapped and num_logits < batch.num_tokens:
            _, normed_ND = stream.read_normed(self.output_mix, self.norm, eps, rows_N)
            return self.head(normed_ND)
        mixed_TD, normed_TD = stream.read_normed(self.output_mix, self.norm, eps)
        self._capture(last_layer, mixed_TD, stream, taps_TAD)
        normed_ND = normed_TD.new_empty(num_logits, self.hidden_size)
        self.kernels.rows.gather(normed_TD, rows_N, normed_ND)
        return self.head(normed_ND)

    def _tap_buffer(self, batch: ForwardBatch) -> torch.Tensor | None:
        if not self.aux_layer_ids or not batch.wants_taps:
            return None
        return self.embedding.new_empty(batch.num_tokens, len(self.aux_layer_ids), self.hidden_size)

    def _capture(
        self, layer_id: int, mixture_TD: torch.Tensor, stream: ResidualStream, taps_TAD: torch.Tensor | None
    ) -> None:
        """Copy the tap after ``layer_id`` out of the stream, if it is wanted."""
        if taps_TAD is None or layer_id not in self.aux_layer_ids:
            return
        tapped_TD = mixture_TD if self.aux_stream == "mixture" else stream.prefix_TD
        self.kernels.rows.copy(tapped_TD, taps_TAD[:, self.aux_layer_ids.index(layer_id)])


def cache_layouts(config: KimiK3Config, build: Build) -> tuple[PagedLayout, RecurrentLayout]:
    """One latent row per token and MLA layer; one state and conv window per slot and KDA layer."""
    kda, mla = config.kda, config.mla
    latents = PagedLayout(
        name="latents",
        num_layers=len(config.mla_layers),
        row_shape=(mla.latent_row_size,),
        dtype=build.dtype,
    )
    recurrent = RecurrentLayout(
        name="recurrent",
        num_layers=len(config.kda_layers),
        state_shape=(kda.num_heads, kda.head_dim, kda.head_dim),
        state_dtype=build.island,
        conv_shape=(kda.conv_kernel_size - 1, 3 * kda.inner_size),
        conv_dtype=build.dtype,
        fold=build.kernels.kda.commit,
    )
    return (latents, recurrent)
