"""How the tokens of a draft block are chosen: greedily, with the target's noise, or from the own distribution.

Dims: S sequences, G drafts kept, V vocabulary, U draft vocabulary.
"""

import torch

from outrider.batch import DraftSampling
from outrider.models.dspark.shaping import DraftShaper
from outrider.ops.draws import Purpose, draw_keys
from outrider.ops.invariant import island_dtype
from outrider.ops.sampling import draw, softmax, tempered, truncate
from outrider.ops.select import first_maximum

__all__ = ["DraftDraws"]


class DraftDraws:
    """Draws the drafts of one block, position after position.

    A request that lets drafts stand while they equal the target's draw is drafted with the target's own
    noise of that position: the closer the two distributions, the more often the draws agree. A request
    that tosses coins needs drafts independent of the target's draws, and their distribution handed over.

    Args:
        sampling: parameters of the sequences.
        anchor_positions_S: int64, absolute.
        target_ids_U: int64, target id of each draft id; None when they are the same.
        vocab_size: V, of the target.
    """

    def __init__(
        self,
        sampling: DraftSampling,
        *,
        anchor_positions_S: torch.Tensor,
        target_ids_U: torch.Tensor | None,
        vocab_size: int,
    ) -> None:
        self._sampling = sampling
        self._anchor_positions_S = anchor_positions_S
        self._target_ids_U = target_ids_U
        self._vocab_size = vocab_size
        self._shaper = None if sampling.shaping is None else DraftShaper(sampling.shaping, target_ids_U)
        self._probs: list[torch.Tensor] = []

    def __call__(self, logits_SU: torch.Tensor, index: int) -> torch.Tensor:
        """Draft ids of position ``index`` of the block, int64 ``[S]``.

        A row without a drawable token, such as one with a NaN, takes its first maximum: a draft is always
        in range.
        """
        if self._shaper is None:
            return self._choose(logits_SU, index)
        drafts_S = self._choose(self._shaper.shape(logits_SU.to(island_dtype(logits_SU.dtype)), index), index)
        self._shaper.count(drafts_S)
        return drafts_S

    def _choose(self, logits_SU: torch.Tensor, index: int) -> torch.Tensor:
        if not self._sampling.draws:
            return first_maximum(logits_SU)
        sampling, cuts = self._sampling, self._sampling.truncation
        scores_SU = tempered(logits_SU.to(island_dtype(logits_SU.dtype)), sampling.temperature_S)
        scores_SU = truncate(
            scores_SU, top_k_N=cuts.top_k_S, largest_k=cuts.largest_k, top_p_N=cuts.top_p_S, min_p_N=cuts.min_p_S
        )
        num_columns = logits_SU.shape[1]
        ids_U = torch.arange(num_columns, device=logits_SU.device) if self._target_ids_U is None else self._target_ids_U
        drawn_S = draw(scores_SU, self._keys(index), ids_U)
        if sampling.hands_over:
            self._probs.append(self._over_targets(softmax(scores_SU)))
        return torch.where(sampling.greedy_S | (drawn_S == num_columns), first_maximum(logits_SU), drawn_S)

    def probs(self) -> torch.Tensor | None:
        """What the drafts were drawn from, over target ids, ``[S, G, V]``; None when nobody needs it."""
        return torch.stack(self._probs, dim=1) if self._probs else None

    def _keys(self, index: int) -> torch.Tensor:
        sampling, anchors_S = self._sampling, self._anchor_positions_S
        with_target_S = draw_keys(sampling.seed_S, sampling.sample_S, anchors_S + (1 + index), Purpose.SAMPLE)
        own_S = draw_keys(sampling.seed_S, sampling.sample_S, anchors_S, index, Purpose.DRAFT)
        return torch.where(sampling.coins_S, own_S, with_target_S)

    def _over_targets(self, probs_SU: torch.Tensor) -> torch.Tensor:
        if self._target_ids_U is None:
            return probs_SU
        probs_SV = probs_SU.new_zeros((probs_SU.shape[0], self._vocab_size))
        return probs_SV.index_copy_(1, self._target_ids_U, probs_SU)
