"""Draft logits through what the target's go through: bias, penalties and masked stop ids of the request.

A draft stands only if it is the target's own token, which is chosen after all of this. So a drafter that ignores it
drafts banned tokens and repeats what a penalty forbids. Nothing here can change a token that is emitted.

Dims: S sequences, Q those that ask for it, U draft vocabulary, V target vocabulary.
"""

import torch

from outrider.batch import DraftShaping
from outrider.ops.sampling import penalise

__all__ = ["DraftShaper"]


class DraftShaper:
    """Shapes the logits of one block, draft after draft, and counts the drafts as if they had been emitted.

    Args:
        shaping: parameters and counts of committed tokens, over target ids.
        target_ids_U: int64, target id of each draft id; None when they are the same.
    """

    def __init__(self, shaping: DraftShaping, target_ids_U: torch.Tensor | None) -> None:
        def columns(table_QV: torch.Tensor | None) -> torch.Tensor | None:
            return table_QV if table_QV is None or target_ids_U is None else table_QV.index_select(1, target_ids_U)

        penalties = shaping.penalties
        self._rows_Q = shaping.rows_Q
        self._bias_QU = columns(shaping.bias_QV)
        self._stop_QU = columns(shaping.stop_QV)
        self._num_masked_Q = shaping.num_masked_Q
        self._penalties = penalties
        self._counts_QU = None if penalties is None else columns(penalties.counts_QV.clone())
        self._seen_QU = None if penalties is None else columns(penalties.seen_QV.clone())

    def shape(self, logits_SU: torch.Tensor, index: int) -> torch.Tensor:
        """The logits of draft ``index``, in the island dtype, in the order of ``speculative.choose``.

        Rows that ask for nothing keep their bits. Where a small draft vocabulary has no other token than masked
        ones, none is masked: some draft must be given.
        """
        logits_QU = logits_SU.index_select(0, self._rows_Q)
        shaped_QU = logits_QU
        if self._bias_QU is not None:
            shaped_QU = shaped_QU + self._bias_QU.to(shaped_QU.dtype)
        if self._penalties is not None and self._counts_QU is not None and self._seen_QU is not None:
            columns = (
                self._penalties.repetition_Q,
                self._penalties.presence_Q,
                self._penalties.frequency_Q,
            )
            repetition_Q, presence_Q, frequency_Q = (column_Q.to(shaped_QU.dtype) for column_Q in columns)
            shaped_QU = penalise(
                shaped_QU,
                self._counts_QU,
                self._seen_QU,
                repetition_N=repetition_Q,
                presence_N=presence_Q,
                frequency_N=frequency_Q,
            )
        if self._stop_QU is not None:
            masked_QU = self._stop_QU & (index < self._num_masked_Q)[:, None]
            shaped_QU = shaped_QU.masked_fill(masked_QU, -torch.inf)
        possible_Q1 = shaped_QU.max(-1, keepdim=True).values > -torch.inf
        return logits_SU.index_copy(0, self._rows_Q, torch.where(possible_Q1, shaped_QU, logits_QU))

    def count(self, drafts_S: torch.Tensor) -> None:
        """Take in the draft ids of one position: the next ones are judged after them."""
        if self._counts_QU is None or self._seen_QU is None:
            return
        drafts_Q1 = drafts_S.index_select(0, self._rows_Q)[:, None]
        self._counts_QU.scatter_add_(1, drafts_Q1, torch.ones_like(drafts_Q1, dtype=self._counts_QU.dtype))
        self._seen_QU.scatter_(1, drafts_Q1, True)
