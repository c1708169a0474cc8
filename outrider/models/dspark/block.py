"""DSpark inference: one batched block for all sequences.

Dense operations run once over all S * B block rows; only attention is ragged, and it is one call
per layer for all sequences. Every operation is row-invariant, so a sequence's drafts do not depend
on its neighbours (hazard B10). Formulas: dspark.md 1.1 to 1.4 and 1.8.

Dims: S sequences, B block rows, G drafts kept, T flat rows, D model width, A tapped layers,
L draft layers, R cache rows, H query heads, J key/value heads, K head width, P pages.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from outrider.batch import DraftBlock, DraftSampling
from outrider.errors import ConfigError, EngineFault
from outrider.models.dspark.config import DSparkConfig
from outrider.models.dspark.context import ContextCache, ContextProjection
from outrider.models.dspark.drawing import DraftDraws
from outrider.models.dspark.heads import Chain, ConfidenceHead, draft_chain, greedy_draft
from outrider.models.dspark.joined import drafter_rotary_table, join_layer
from outrider.models.dspark.kernels import TORCH_BLOCK_KERNELS, BlockKernels
from outrider.models.dspark.model import DSparkModel
from outrider.models.dspark.numerics import suits_native_chain
from outrider.models.kernels import Kernels
from outrider.models.layers import pin_attributes
from outrider.models.numerics import UNPROBED, NumericsReport
from outrider.ops.activation import Activation
from outrider.ops.native.linear import pack_weights
from outrider.ops.native.markov import ChainWeights, chain_weights
from outrider.ops.paged import paged_keys

__all__ = ["SILU", "BlockAnchors", "BlockPredictor", "Prediction"]

SILU = Activation(name="silu")


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockAnchors:
    """Where the blocks of one proposal start; context of sequence s is positions < positions_S[s]."""

    token_ids_S: torch.Tensor  # int64
    positions_S: torch.Tensor  # int64
    page_table_SP: torch.Tensor  # int64
    page_size: int
    max_position: int  # host: largest of positions_S
    sampling: DraftSampling | None = None  # None = greedy drafts for all


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """A proposal and the logits it was chosen from."""

    block: DraftBlock
    logits: tuple[torch.Tensor, ...]  # per draft [S, draft vocabulary], Markov bias included; () unless asked for


class BlockPredictor:
    """A drafter prepared for inference.

    The model's projections become views of joined storage (no second copy, except keys and values,
    which are also stacked over layers: all layers' context rows are then one product). Do not train
    or move the model afterwards.

    Args:
        model: loaded weights, in the compute dtype, on the device.
        embedding_VD: the target's input embedding.
        head: the target's output head, [N, D] -> [N, V]; not called for a reduced vocabulary.
        kernels: row-invariant forms chosen for this process.
        max_context: positions a sequence may reach; sizes the rotary table.
        num_draft_tokens: drafts per round; None is all of the block. Head and Markov chain run for these only.
        with_confidence: give the confidence of each draft, for a policy that reads it.
        numerics: how the kernels were found.
        block_kernels: forms of attention, context rows and chain.

    Raises:
        ConfigError: more drafts than the block was trained for, or confidence asked of a drafter without it.
    """

    def __init__(
        self,
        model: DSparkModel,
        *,
        embedding_VD: torch.Tensor,
        head: Callable[[torch.Tensor], torch.Tensor],
        kernels: Kernels,
        max_context: int,
        num_draft_tokens: int | None = None,
        with_confidence: bool = False,
        numerics: NumericsReport = UNPROBED,
        block_kernels: BlockKernels = TORCH_BLOCK_KERNELS,
    ) -> None:
        config = model.config
        if with_confidence and model.confidence_head is None:
            raise ConfigError("the drafter has no confidence head; run without confidence")
        self._confidence_head = model.confidence_head if with_confidence else None
        self.config: DSparkConfig = config
        self.numerics = numerics
        self.num_draft_tokens = config.num_draft_tokens if num_draft_tokens is None else num_draft_tokens
        if not 1 <= self.num_draft_tokens <= config.num_draft_tokens:
            raise ConfigError(
                f"num_draft_tokens={num_draft_tokens} is outside 1..{config.num_draft_tokens}, what a block of "
                f"{config.num_block_rows} rows ({config.layout.value}) was trained for; lower it"
            )
        self._model = model.requires_grad_(False)
        self._embedding_VD = embedding_VD
        self._head = head
        self._kernels, self._linear, self._norm = kernels, kernels.linear, kernels.norm
        self._dtype = model.fc.weight.dtype
        self._device = model.fc.weight.device
        self._table = drafter_rotary_table(config, max_context + config.num_block_rows, self._dtype, self._device)
        self._layers = [
            join_layer(layer, config, mask, self._table)
            for layer, mask in zip(model.draft_layers(), config.layer_masks, strict=True)
        ]
        self.context = ContextProjection(
            model, [layer.qkv_OD for layer in self._layers], self._table, kernels=kernels, block_kernels=block_kernels
        )
        self._target_ids_V = (
            None if model.d2t is None else torch.arange(config.draft_vocab_size, device=self._device) + model.d2t
        )
        pack_weights(self._linear, self._multiplied())
        self._mask_hidden_D = embedding_VD[config.mask_token_id].clone()
        self._mask_qkv_O = self._first_qkv(self._mask_hidden_D[None])[0]
        self._block_kernels = block_kernels
        self._chain_weights = None if block_kernels.markov is None else self._native_chain_weights()
        pin_attributes(self._model)

    def _multiplied(self) -> Iterator[torch.Tensor]:
        """Every matrix that rows are multiplied with; the joined ones stand for the projections in them."""
        yield self.context.kv_OD
        for layer in self._layers:
            yield from (layer.qkv_OD, layer.output_DO, layer.gate_up_ID, layer.down_DI)
        for name, weight in self._model.named_parameters():
            if not name.startswith(("layers.", "markov_head.markov_w1.")):
                yield weight

    def allocate_context(self, num_cache_rows: int) -> ContextCache:
        """Cache with as many rows as the target's paged cache."""
        return self.context.allocate(num_cache_rows)

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
        self.check_position(max_position)
        self.context.store(cache, aux_hidden_TAD, positions_T, cache_rows_T)

    def predict(self, cache: ContextCache, anchors: BlockAnchors, *, keep_logits: bool = False) -> Prediction:
        """Propose drafts for every anchor in one pass; nothing is copied to the host.

        Always runs the trained number of block rows, because every row sees the others; fewer
        drafts are a truncation.

        Args:
            cache: context of all sequences.
            anchors: where the blocks start.
            keep_logits: hand over the logits that the drafts were chosen from.
        """
        self.check_position(anchors.max_position)
        kept_SGD = self._block_hidden(cache, anchors)
        rows_ND = kept_SGD.flatten(0, 1)
        lm_head = self._model.lm_head
        logits_NV = self._head(rows_ND) if lm_head is None else self._linear(rows_ND, lm_head.weight)
        logits_SGV = logits_NV.view(*kept_SGD.shape[:2], -1)
        if anchors.sampling is None and self._block_kernels.markov is not None and self._chain_weights is not None:
            token_ids_SG, confidence_SG = self._block_kernels.markov.chain(
                self._chain_weights, anchors.token_ids_S, kept_SGD, logits_SGV, keep_logits=keep_logits
            )
            block = DraftBlock(token_ids_SG=token_ids_SG, confidence_SG=confidence_SG)
            return Prediction(block=block, logits=logits_SGV.unbind(1) if keep_logits else ())
        # Rows of one draft side by side: a product's operands have one layout.
        kept_GSD, logits_GSV = (rows_SGX.transpose(0, 1).contiguous() for rows_SGX in (kept_SGD, logits_SGV))
        return self._predict_in_steps(anchors, kept_GSD, logits_GSV)

    def _predict_in_steps(self, anchors: BlockAnchors, kept_GSD: torch.Tensor, logits_GSV: torch.Tensor) -> Prediction:
        """Draft by draft: for drafts that are drawn, and for every head and dtype."""
        draws = self._draws(anchors)
        chain = draft_chain(
            self._model.markov_head,
            anchor_ids_S=anchors.token_ids_S,
            hidden_GSD=kept_GSD,
            logits_GSV=logits_GSV,
            target_ids_V=self._target_ids_V,
            linear=self._linear,
            choose=greedy_draft if draws is None else draws,
        )
        confidence_SG = (
            None if self._confidence_head is None else self._confidence(self._confidence_head, kept_GSD, chain)
        )
        block = DraftBlock(
            token_ids_SG=chain.token_ids_SG,
            confidence_SG=confidence_SG,
            probs_SGV=None if draws is None else draws.probs(),
        )
        return Prediction(block=block, logits=chain.logits)

    def _native_chain_weights(self) -> ChainWeights | None:
        """The heads as the native chain reads them; None where the chain does not take them."""
        markov, confidence = self._model.markov_head, self._confidence_head
        if markov is None or not suits_native_chain(self.config):
            return None
        bias = None if confidence is None else confidence.proj.bias
        return chain_weights(
            markov.markov_w1.weight,
            markov.markov_w2.weight,
            target_ids_U=self._target_ids_V,
            confidence_F=None if confidence is None else confidence.proj.weight[0],
            confidence_bias=0.0 if bias is None else float(bias),
            hidden_size=self.config.hidden_size,
        )

    def _draws(self, anchors: BlockAnchors) -> DraftDraws | None:
        if anchors.sampling is None:
            return None
        return DraftDraws(
            anchors.sampling,
            anchor_positions_S=anchors.positions_S,
            target_ids_U=self._target_ids_V,
            vocab_size=self.config.vocab_size,
        )

    def _block_hidden(self, cache: ContextCache, anchors: BlockAnchors) -> torch.Tensor:
        """Normed rows of the drafts that are kept, ``[S, G, D]``, contiguous."""
        config, kernels = self.config, self._kernels
        num_sequences = anchors.token_ids_S.shape[0]
        keys = paged_keys(
            anchors.page_table_SP,
            anchors.positions_S,
            page_size=anchors.page_size,
            max_context=anchors.max_position,
        )
        hidden_TD, qkv_TO = self._block_start(anchors.token_ids_S)
        last = len(self._layers) - 1
        for index, layer in enumerate(self._layers):
            qkv_TOK = qkv_TO.view(qkv_TO.shape[0], -1, config.head_dim)
            attended_THK = self._block_kernels.attend(
                qkv_TOK, layer.heads, cache.keys(index), cache.values(index), keys
            )
            added_TD = self._linear(attended_THK.flatten(1), layer.output_DO)
            _, normed_TD = kernels.mix_norm(hidden_TD[None], added_TD, None, layer.mlp_norm_D, config.rms_norm_eps)
            activated_TI = kernels.glu(SILU, self._linear(normed_TD, layer.gate_up_ID))
            added_TD = self._linear(activated_TI, layer.down_DI)
            next_norm_D = self._model.norm.weight if index == last else self._layers[index + 1].input_norm_D
            _, normed_TD = kernels.mix_norm(hidden_TD[None], added_TD, None, next_norm_D, config.rms_norm_eps)
            if index < last:
                qkv_TO = self._linear(normed_TD, self._layers[index + 1].qkv_OD)
        return self._kept_rows(normed_TD.view(num_sequences, config.num_block_rows, -1))

    def _kept_rows(self, normed_SBD: torch.Tensor) -> torch.Tensor:
        num_sequences, num_rows, width = normed_SBD.shape
        first, num_kept = self.config.first_draft_row, self.num_draft_tokens
        if num_kept == num_rows:
            return normed_SBD
        kept_SGD = normed_SBD.new_empty(num_sequences, num_kept, width)
        columns_SF = normed_SBD.view(num_sequences, -1)[:, first * width : (first + num_kept) * width]
        self._kernels.rows.copy(columns_SF, kept_SGD.view(num_sequences, -1))
        return kept_SGD

    def _block_start(self, anchor_ids_S: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Embedded block rows ``[T, D]``, to be written on, and their projections in the first layer ``[T, O]``.

        All rows but the anchors' hold the mask, whose projections are known since loading.
        """
        rows, num_sequences, num_rows = self._kernels.rows, anchor_ids_S.shape[0], self.config.num_block_rows
        embedding_VD, mask_O = self._embedding_VD, self._mask_qkv_O
        hidden_TD = embedding_VD.new_empty(num_sequences * num_rows, embedding_VD.shape[1])
        anchors_SD = hidden_TD.view(num_sequences, num_rows, -1)[:, 0]
        rows.copy(self._mask_hidden_D.expand(hidden_TD.shape[0], -1), hidden_TD)
        rows.gather(embedding_VD, anchor_ids_S, anchors_SD)
        qkv_TO = embedding_VD.new_empty(hidden_TD.shape[0], mask_O.shape[0])
        rows.copy(mask_O.expand(hidden_TD.shape[0], -1), qkv_TO)
        rows.copy(self._first_qkv(anchors_SD), qkv_TO.view(num_sequences, num_rows, -1)[:, 0])
        return hidden_TD, qkv_TO

    def _first_qkv(self, embedded_SD: torch.Tensor) -> torch.Tensor:
        """Projections of embedded rows in the first layer."""
        layer = self._layers[0]
        return self._linear(self._norm(embedded_SD, layer.input_norm_D, self.config.rms_norm_eps), layer.qkv_OD)

    def _confidence(self, head: ConfidenceHead, kept_GSD: torch.Tensor, chain: Chain) -> torch.Tensor:
        features = kept_GSD.transpose(0, 1)
        if self.config.confidence is not None and self.config.confidence.with_markov:
            features = torch.cat((features, torch.stack(chain.previous_GSr, dim=1)), dim=-1)
        return head.probability(features, self._linear)

    def check_position(self, position: int) -> None:
        """Refuse a position that the rotary table does not hold.

        Raises:
            EngineFault: it is not below ``max_context``.
        """
        limit = self._table.cos_PF.shape[0] - self.config.num_block_rows
        if position >= limit:
            raise EngineFault(f"drafter position {position} is not below max_context={limit}")
