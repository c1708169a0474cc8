"""The target's own token at every row: penalties, masks and cuts of that row, then argmax or a draw.

Row i of a verify span is judged as plain decoding would judge it after the drafts before it: they count
as emitted. Order: logit_bias, repetition, presence and frequency penalties, ``min_tokens``, temperature,
top_k, top_p, min_p.

Dims: N rows that need logits, R rows with a choice of their own, Q their sequences, V vocabulary.
"""

from dataclasses import dataclass

import torch

from outrider.batch import Penalties, TokenChoices
from outrider.ops.draws import Purpose, draw_keys
from outrider.ops.invariant import island_dtype
from outrider.ops.sampling import draw, penalise, tempered, truncate
from outrider.ops.select import argmax_lowest

__all__ = ["Chosen", "choose_tokens"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """Tokens of the rows R and the distributions that they come from."""

    token_ids_R: torch.Tensor  # int64; V marks logits that are not finite
    scores_RV: torch.Tensor  # logarithms of unnormalised probabilities, maximum 0, -inf where cut


def choose_tokens(logits_RV: torch.Tensor, choices: TokenChoices) -> Chosen:
    """Choose the token of every row R.

    Args:
        logits_RV: target logits of the rows ``choices.rows_R``, compute dtype.
        choices: parameters of their sequences.
    """
    sequence_R = choices.sequence_R
    shaped_RV = _shape(logits_RV.to(island_dtype(logits_RV.dtype)), choices)
    cuts = choices.truncation.rows(sequence_R)
    scores_RV = truncate(
        tempered(shaped_RV, choices.temperature_Q[sequence_R]),
        top_k_N=cuts.top_k_S,
        largest_k=cuts.largest_k,
        top_p_N=cuts.top_p_S,
        min_p_N=cuts.min_p_S,
    )
    vocabulary_V = torch.arange(logits_RV.shape[1], device=logits_RV.device)
    keys_R = draw_keys(choices.seed_Q[sequence_R], choices.sample_Q[sequence_R], choices.positions_R, Purpose.SAMPLE)
    token_ids_R = torch.where(
        choices.greedy_Q[sequence_R], argmax_lowest(shaped_RV), draw(scores_RV, keys_R, vocabulary_V)
    )
    return Chosen(token_ids_R=token_ids_R, scores_RV=scores_RV)


def _shape(logits_RV: torch.Tensor, choices: TokenChoices) -> torch.Tensor:
    sequence_R = choices.sequence_R
    if choices.bias_QV is not None:
        logits_RV = logits_RV + choices.bias_QV.to(logits_RV.dtype)[sequence_R]
    if choices.penalties is not None:
        logits_RV = _penalise(logits_RV, choices.penalties, sequence_R)
    if choices.stop_mask is not None:
        masked_RV = choices.stop_mask.stop_QV[sequence_R] & choices.stop_mask.masked_R[:, None]
        logits_RV = logits_RV.masked_fill(masked_RV, -torch.inf)
    return logits_RV


def _penalise(logits_RV: torch.Tensor, penalties: Penalties, sequence_R: torch.Tensor) -> torch.Tensor:
    """Count the drafts before each row on top of the committed tokens; integers, so order is nothing."""
    counts_RV = penalties.counts_QV[sequence_R]
    seen_RV = penalties.seen_QV[sequence_R]
    if penalties.later_rows_B.shape[0]:
        cells = (penalties.later_rows_B, penalties.earlier_ids_B)
        counts_RV.index_put_(cells, torch.ones_like(cells[0], dtype=counts_RV.dtype), accumulate=True)
        seen_RV = seen_RV | (counts_RV > 0)
    columns = (penalties.repetition_Q, penalties.presence_Q, penalties.frequency_Q)
    repetition_R, presence_R, frequency_R = (column_Q[sequence_R].to(logits_RV.dtype) for column_Q in columns)
    return penalise(
        logits_RV,
        counts_RV,
        seen_RV,
        repetition_N=repetition_R,
        presence_N=presence_R,
        frequency_N=frequency_R,
    )
