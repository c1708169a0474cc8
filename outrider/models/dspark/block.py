"""DSpark inference: context rows into the drafter cache, and one batched block for all sequences.

Dense operations run once over all S * B block rows; only attention is ragged, and it is one call
per layer for all sequences. Every operation is row-invariant, so a sequence's drafts do not depend
on its neighbours (hazard B10). Formulas: dspark.md 1.1 to 1.4 and 1.8.

Dims: S sequences, B block rows, G drafts kept, T flat rows, D model width, A tapped layers,
L draft layers, R cache rows, H query heads, J key/value heads, K head width, P pages.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from outrider.batch import DraftBlock
from outrider.cache.layout import PagedLayout
from outrider.errors import EngineFault, UnsupportedError
from outrider.models.dspark.config import (
    DraftLayerMask,
    DSparkConfig,
    RopeConfig,
    WindowOrigin,
    resolve_num_draft_tokens,
)
from outrider.models.dspark.heads import Chain, draft_chain
from outrider.models.dspark.model import DraftLayer, DSparkModel
from outrider.ops.activation import Activation, glu_fused
from outrider.ops.attention import BlockMask, PagedKeys, block_attention, paged_keys
from outrider.ops.linear import LinearFunction
from outrider.ops.norm import rms_norm
from outrider.ops.rope import RotaryTable, YarnScaling, apply_half, rotary_table

__all__ = ["BlockAnchors", "BlockPredictor", "ContextCache", "Prediction"]

_SILU = Activation(name="silu")


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockAnchors:
    """Where the blocks of one proposal start; context of sequence s is positions < positions_S[s]."""

    token_ids_S: torch.Tensor  # int64
    positions_S: torch.Tensor  # int64
    page_table_SP: torch.Tensor  # int64
    page_size: int
    max_position: int  # host: largest of positions_S


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextCache:
    """Keys (normed and rotated) and values of context rows, at the target's flat cache rows."""

    rows_2LRJK: torch.Tensor  # keys, values

    def keys(self, layer_index: int) -> torch.Tensor:
        """[R, J, K] of one layer."""
        return self.rows_2LRJK[0, layer_index]

    def values(self, layer_index: int) -> torch.Tensor:
        """[R, J, K] of one layer."""
        return self.rows_2LRJK[1, layer_index]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """A proposal and the logits it was chosen from."""

    block: DraftBlock
    logits: tuple[torch.Tensor, ...]  # per draft [S, draft vocabulary], Markov bias included


@dataclass(frozen=True, slots=True, kw_only=True)
class _LayerWeights:
    """One layer, projections joined so that a block costs few calls."""

    input_norm_D: torch.Tensor
    qkv_OD: torch.Tensor  # queries, keys, values
    head_norm_NK: torch.Tensor  # per-head gains of H query heads, then J key heads
    output_DO: torch.Tensor
    mlp_norm_D: torch.Tensor
    gate_up_ID: torch.Tensor
    down_DI: torch.Tensor
    mask: BlockMask


class BlockPredictor:
    """A drafter prepared for inference.

    The model's projections become views of joined storage (no second copy, except keys and values,
    which are also stacked over layers: all layers' context rows are then one product). Do not train
    or move the model afterwards.

    Args:
        model: loaded weights, in the compute dtype, on the device.
        embed: the target's input embedding, [T] -> [T, D].
        head: the target's output head, [N, D] -> [N, V]; not called for a reduced vocabulary.
        linear: row-invariant product chosen for this process.
        max_context: positions a sequence may reach; sizes the rotary table.
        num_draft_tokens: drafts per round; None is all of the block.

    Raises:
        ConfigError: more drafts than the block was trained for.
        UnsupportedError: a mask that the attention does not offer.
    """

    def __init__(
        self,
        model: DSparkModel,
        *,
        embed: Callable[[torch.Tensor], torch.Tensor],
        head: Callable[[torch.Tensor], torch.Tensor],
        linear: LinearFunction,
        max_context: int,
        num_draft_tokens: int | None = None,
    ) -> None:
        config = model.config
        self.config: DSparkConfig = config
        self.num_draft_tokens = resolve_num_draft_tokens(config, num_draft_tokens)
        self._model = model.requires_grad_(False)
        self._embed = embed
        self._head = head
        self._linear = linear
        self._dtype = model.fc.weight.dtype
        self._device = model.fc.weight.device
        self._layers = [
            _joined(layer, config, _block_mask(mask))
            for layer, mask in zip(model.draft_layers(), config.layer_masks, strict=True)
        ]
        kv_begin = config.num_heads * config.head_dim
        self._context_kv_OD = torch.cat([layer.qkv_OD[kv_begin:] for layer in self._layers])
        self._context_norm_L1K = torch.stack([layer.self_attn.k_norm.weight for layer in model.draft_layers()])[:, None]
        self._ones_K = self._context_norm_L1K.new_ones(config.head_dim)
        self._table = _rotary(config, max_context + config.num_block_rows, self._dtype, self._device)
        self._offsets_B = torch.arange(config.num_block_rows, device=self._device)

    @property
    def context_layout(self) -> PagedLayout:
        """What one context token occupies."""
        config = self.config
        return PagedLayout(
            name="drafter",
            num_layers=config.num_layers,
            row_shape=(2, config.num_kv_heads, config.head_dim),
            dtype=self._dtype,
        )

    def allocate_context(self, num_cache_rows: int) -> ContextCache:
        """Cache with as many rows as the target's paged cache."""
        config = self.config
        shape = (2, config.num_layers, num_cache_rows, config.num_kv_heads, config.head_dim)
        return ContextCache(rows_2LRJK=torch.zeros(shape, dtype=self._dtype, device=self._device))

    def context_features(self, aux_hidden_TAD: torch.Tensor) -> torch.Tensor:
        """Project tap rows [T, A, D_target] to context features [T, D]: hidden_norm(fc(taps))."""
        model, eps = self._model, self.config.rms_norm_eps
        if model.fc_norm is not None:
            normed = [
                rms_norm(aux_TD, norm.weight, eps)
                for aux_TD, norm in zip(aux_hidden_TAD.unbind(1), model.fc_norm, strict=True)
            ]
            aux_hidden_TAD = torch.stack(normed, dim=1)
        projected_TD = self._linear(aux_hidden_TAD.flatten(1), model.fc.weight)
        return rms_norm(projected_TD, model.hidden_norm.weight, eps)

    def store_context(
        self,
        cache: ContextCache,
        aux_hidden_TAD: torch.Tensor,
        positions_T: torch.Tensor,
        cache_rows_T: torch.Tensor,
        *,
        max_position: int,
    ) -> None:
        """Write keys and values of context rows for every draft layer.

        Args:
            cache: written in place.
            aux_hidden_TAD: taps of the rows, in the config's order.
            positions_T: int64, absolute position of each row.
            cache_rows_T: int64, flat cache row of each, all different.
            max_position: host, largest of positions_T.
        """
        config = self.config
        self._check_position(max_position)
        num_rows = aux_hidden_TAD.shape[0]
        kv_TO = self._linear(self.context_features(aux_hidden_TAD), self._context_kv_OD)
        kv_TL2JK = kv_TO.view(num_rows, config.num_layers, 2, config.num_kv_heads, config.head_dim)
        # A unit gain leaves the rounding of the norm as it is; the layers' own gains follow.
        keys_TLJK = rms_norm(kv_TL2JK[:, :, 0].contiguous(), self._ones_K, config.rms_norm_eps) * self._context_norm_L1K
        rotated_TNK = apply_half(keys_TLJK.flatten(1, 2), self._table, positions_T)
        cache.rows_2LRJK[0].index_copy_(1, cache_rows_T, rotated_TNK.view_as(keys_TLJK).transpose(0, 1))
        cache.rows_2LRJK[1].index_copy_(1, cache_rows_T, kv_TL2JK[:, :, 1].transpose(0, 1))

    def predict(self, cache: ContextCache, anchors: BlockAnchors) -> Prediction:
        """Propose drafts for every anchor in one pass; nothing is copied to the host.

        Always runs the trained number of block rows, because every row sees the others; fewer
        drafts are a truncation.
        """
        config = self.config
        self._check_position(anchors.max_position)
        hidden_SBD = self._block_hidden(cache, anchors)
        first = config.first_draft_row
        kept_GSD = hidden_SBD[:, first : first + self.num_draft_tokens].transpose(0, 1).contiguous()
        rows_ND = kept_GSD.flatten(0, 1)
        lm_head = self._model.lm_head
        logits_NV = self._head(rows_ND) if lm_head is None else self._linear(rows_ND, lm_head.weight)
        chain = draft_chain(
            self._model.markov_head,
            anchor_ids_S=anchors.token_ids_S,
            hidden_GSD=kept_GSD,
            logits_GSV=logits_NV.view(*kept_GSD.shape[:2], -1),
            d2t_V=self._model.d2t,
            linear=self._linear,
        )
        block = DraftBlock(token_ids_SG=chain.token_ids_SG, confidence_SG=self._confidence(kept_GSD, chain))
        return Prediction(block=block, logits=chain.logits)

    def _block_hidden(self, cache: ContextCache, anchors: BlockAnchors) -> torch.Tensor:
        config = self.config
        num_rows = config.num_block_rows
        num_sequences = anchors.token_ids_S.shape[0]
        token_ids_SB = anchors.token_ids_S.new_full((num_sequences, num_rows), config.mask_token_id)
        token_ids_SB[:, 0] = anchors.token_ids_S
        positions_T = (anchors.positions_S[:, None] + self._offsets_B).flatten()
        keys = paged_keys(
            anchors.page_table_SP,
            anchors.positions_S,
            page_size=anchors.page_size,
            max_context=anchors.max_position,
        )
        hidden_TD = self._embed(token_ids_SB.flatten())
        for index, layer in enumerate(self._layers):
            normed_TD = rms_norm(hidden_TD, layer.input_norm_D, config.rms_norm_eps)
            attended_TO = self._attend(cache, index, normed_TD, positions_T, keys)
            hidden_TD = hidden_TD + self._linear(attended_TO, layer.output_DO)
            normed_TD = rms_norm(hidden_TD, layer.mlp_norm_D, config.rms_norm_eps)
            activated_TI = glu_fused(_SILU, self._linear(normed_TD, layer.gate_up_ID))
            hidden_TD = hidden_TD + self._linear(activated_TI, layer.down_DI)
        normed_TD = rms_norm(hidden_TD, self._model.norm.weight, config.rms_norm_eps)
        return normed_TD.view(num_sequences, num_rows, -1)

    def _attend(
        self, cache: ContextCache, index: int, normed_TD: torch.Tensor, positions_T: torch.Tensor, keys: PagedKeys
    ) -> torch.Tensor:
        config, layer = self.config, self._layers[index]
        num_heads, num_kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        qkv_TNK = self._linear(normed_TD, layer.qkv_OD).view(normed_TD.shape[0], -1, head_dim)
        qk_TNK = qkv_TNK[:, : num_heads + num_kv_heads].contiguous()
        qk_TNK = rms_norm(qk_TNK, self._ones_K, config.rms_norm_eps) * layer.head_norm_NK
        qk_TNK = apply_half(qk_TNK, self._table, positions_T)
        by_sequence = (-1, config.num_block_rows)
        attended_SBHK = block_attention(
            qk_TNK[:, :num_heads].unflatten(0, by_sequence),
            cache.keys(index),
            cache.values(index),
            qk_TNK[:, num_heads:].unflatten(0, by_sequence),
            qkv_TNK[:, num_heads + num_kv_heads :].unflatten(0, by_sequence),
            keys,
            layer.mask,
            scale=head_dim**-0.5,
        )
        return attended_SBHK.reshape(normed_TD.shape[0], num_heads * head_dim)

    def _confidence(self, kept_GSD: torch.Tensor, chain: Chain) -> torch.Tensor | None:
        head, settings = self._model.confidence_head, self.config.confidence
        if head is None or settings is None:
            return None
        features = kept_GSD.transpose(0, 1)
        if settings.with_markov:
            if chain.previous_SGr is None:
                raise EngineFault("the confidence head reads the Markov embedding, but there is no Markov head")
            features = torch.cat((features, chain.previous_SGr), dim=-1)
        return head.probability(features, self._linear)

    def _check_position(self, position: int) -> None:
        limit = self._table.cos_PK.shape[0] - self.config.num_block_rows
        if position >= limit:
            raise EngineFault(f"drafter position {position} is not below max_context={limit}")


def _joined(layer: DraftLayer, config: DSparkConfig, mask: BlockMask) -> _LayerWeights:
    """Join the layer's projections; its parameters become views of the joined storage."""
    attention, mlp = layer.self_attn, layer.mlp
    head_norm_NK = torch.cat(
        (
            attention.q_norm.weight.expand(config.num_heads, -1),
            attention.k_norm.weight.expand(config.num_kv_heads, -1),
        )
    )
    return _LayerWeights(
        input_norm_D=layer.input_layernorm.weight,
        qkv_OD=_join_rows(attention.q_proj, attention.k_proj, attention.v_proj),
        head_norm_NK=head_norm_NK,
        output_DO=attention.o_proj.weight,
        mlp_norm_D=layer.post_attention_layernorm.weight,
        gate_up_ID=_join_rows(mlp.gate_proj, mlp.up_proj),
        down_DI=mlp.down_proj.weight,
        mask=mask,
    )


@torch.no_grad()
def _join_rows(*projections: torch.nn.Linear) -> torch.Tensor:
    joined_OI = torch.cat([projection.weight for projection in projections])
    begin = 0
    for projection in projections:
        end = begin + projection.out_features
        projection.weight.data = joined_OI[begin:end]
        begin = end
    return joined_OI


def _block_mask(mask: DraftLayerMask) -> BlockMask:
    if mask.window is not None and mask.window_origin is WindowOrigin.ANCHOR:
        raise UnsupportedError(
            f"drafter window of {mask.window} tokens measured from the anchor (speculators) is not offered"
        )
    return BlockMask(causal=mask.causal_block, window=mask.window)


def _rotary(config: DSparkConfig, num_positions: int, dtype: torch.dtype, device: torch.device) -> RotaryTable:
    rope: RopeConfig = config.rope
    scaling = None
    if rope.yarn is not None:
        scaling = YarnScaling(
            factor=rope.yarn.factor,
            original_max_positions=rope.yarn.original_max_position,
            beta_fast=rope.yarn.beta_fast,
            beta_slow=rope.yarn.beta_slow,
            attention_factor=rope.yarn.attention_factor,
        )
    table_dtype = torch.float64 if dtype is torch.float64 else torch.float32
    table = rotary_table(num_positions, config.head_dim, rope.theta, scaling, dtype=table_dtype)
    return RotaryTable(cos_PK=table.cos_PK.to(device), sin_PK=table.sin_PK.to(device))
