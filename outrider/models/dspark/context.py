"""The context of a drafter: keys and values of committed rows, projected from the target's taps.

Rows are written at once, or wait as taps in a ring of their slot until they are needed; keys and values have the same
bits either way, as every operation of a row is its own. Formulas: dspark.md 1.1 to 1.4.

Dims: T flat rows, A tapped layers, D model width, L draft layers, R cache rows, J key/value heads, K head width,
O joined outputs, B slots, W values of a row of taps, S spans, P pages.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from outrider.models.dspark.kernels import BlockKernels
from outrider.models.dspark.model import DSparkModel
from outrider.models.kernels import Kernels
from outrider.ops.block_attention import store_context_rows
from outrider.ops.rope import RotaryTable
from outrider.ops.waiting import KeptSpans

__all__ = ["ContextCache", "ContextProjection"]


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


class ContextProjection:
    """What makes context rows of taps.

    Args:
        model: loaded weights.
        qkv_OD: joined projections of each layer.
        table: rotary table.
        kernels: row-invariant forms.
        block_kernels: forms of what writes the rows.
    """

    def __init__(
        self,
        model: DSparkModel,
        qkv_OD: Sequence[torch.Tensor],
        table: RotaryTable,
        *,
        kernels: Kernels,
        block_kernels: BlockKernels,
    ) -> None:
        config = model.config
        self.config = config
        self._model, self._table, self._block_kernels = model, table, block_kernels
        self._linear, self._norm = kernels.linear, kernels.norm
        kv_begin = config.num_heads * config.head_dim
        self.kv_OD = torch.cat([weight_OD[kv_begin:] for weight_OD in qkv_OD])  # of all layers: one product
        self._gains_LK = torch.stack([layer.self_attn.k_norm.weight for layer in model.draft_layers()])

    @property
    def takes_spare_rows(self) -> bool:
        """Whether ``store_waiting`` may be given more rows than the spans have."""
        return self._block_kernels.store is not store_context_rows

    def allocate(self, num_cache_rows: int) -> ContextCache:
        """Cache with as many rows as the target's paged cache."""
        config = self.config
        shape = (2, config.num_layers, num_cache_rows, config.num_kv_heads, config.head_dim)
        return ContextCache(rows_2LRJK=torch.zeros(shape, dtype=self.kv_OD.dtype, device=self.kv_OD.device))

    def features(self, aux_hidden_TAD: torch.Tensor) -> torch.Tensor:
        """Project tap rows [T, A, D_target] to context features [T, D]: hidden_norm(fc(taps))."""
        model, eps = self._model, self.config.rms_norm_eps
        if model.fc_norm is not None:
            normed = [
                self._norm(aux_TD, weight_D, eps)
                for aux_TD, weight_D in zip(aux_hidden_TAD.unbind(1), model.fc_norm.parameters(), strict=True)
            ]
            aux_hidden_TAD = torch.stack(normed, dim=1)
        projected_TD = self._linear(aux_hidden_TAD.flatten(1), model.fc.weight)
        return self._norm(projected_TD, model.hidden_norm.weight, eps)

    def store(
        self, cache: ContextCache, aux_hidden_TAD: torch.Tensor, positions_T: torch.Tensor, cache_rows_T: torch.Tensor
    ) -> None:
        """Write keys and values of rows; see ``BlockPredictor.store_context``. No position is checked."""
        config = self.config
        kv_TO = self._linear(self.features(aux_hidden_TAD), self.kv_OD)
        kv_TL2JK = kv_TO.view(kv_TO.shape[0], config.num_layers, 2, config.num_kv_heads, config.head_dim)
        self._block_kernels.store(
            kv_TL2JK, self._gains_LK, config.rms_norm_eps, self._table, positions_T, cache_rows_T, cache.rows_2LRJK
        )

    def store_waiting(
        self,
        cache: ContextCache,
        ring_BRW: torch.Tensor,
        spans_3S: torch.Tensor,
        page_table_SP: torch.Tensor,
        *,
        page_size: int,
        num_rows: int,
    ) -> None:
        """``store`` for rows that wait in rings; see ``outrider.ops.waiting.take_rows``.

        ``num_rows`` (host) is the number of rows that the spans have, or more where it takes spare ones.
        """
        taps_TW = ring_BRW.new_empty(num_rows, ring_BRW.shape[2])
        positions_T, cache_rows_T = spans_3S.new_empty(num_rows), spans_3S.new_empty(num_rows)
        self._block_kernels.waiting.take(
            ring_BRW, spans_3S, page_table_SP, page_size, taps_TW, positions_T, cache_rows_T
        )
        self.store(cache, self.as_taps(taps_TW), positions_T, cache_rows_T)

    def keep_waiting(self, ring_BRW: torch.Tensor, aux_hidden_TAD: torch.Tensor, spans: KeptSpans) -> None:
        """Let tap rows of a batch wait in the rings of their slots."""
        self._block_kernels.waiting.keep(aux_hidden_TAD, spans, ring_BRW)

    def allocate_rings(self, num_slots: int, num_rows: int) -> torch.Tensor:
        """Rings ``[B, R, W]`` for tap rows that wait."""
        width = len(self.config.aux_layer_ids) * self.config.target_hidden_size
        with torch.inference_mode(False):  # rows are copied to them in either mode
            return torch.zeros((num_slots, num_rows, width), dtype=self.kv_OD.dtype, device=self.kv_OD.device)

    def as_taps(self, taps_TW: torch.Tensor) -> torch.Tensor:
        """Rows of a ring as taps ``[T, A, D]``."""
        return taps_TW.view(taps_TW.shape[0], -1, self.config.target_hidden_size)
