"""From logits to a distribution to a token, every row by itself.

Sums over the vocabulary are plain additions in an order that its size alone decides, maxima and sorted
values do not depend on an order, and the rest is element-wise. So no row's bits depend on the other
rows, on threads or on the device's choice of a kernel.

Dims: N rows, V vocabulary.
"""

import torch

from outrider.ops.draws import gumbel
from outrider.ops.invariant import elementwise, exp, pad_last
from outrider.ops.select import argmax_lowest

__all__ = [
    "draw",
    "keep_min_p",
    "keep_top_k",
    "keep_top_p",
    "log_softmax",
    "penalise",
    "row_cumsum",
    "row_sum",
    "softmax",
    "tempered",
    "top_values",
    "truncate",
]

SCAN_BLOCK = 64  # columns scanned together; any constant would do


def row_sum(x_NV: torch.Tensor) -> torch.Tensor:
    """Sum over the last dim by halving: additions only, in an order that V decides."""
    while x_NV.shape[-1] > 1:
        half = (x_NV.shape[-1] + 1) // 2
        upper = x_NV[..., half:]
        folded = x_NV[..., : upper.shape[-1]] + upper
        x_NV = torch.cat((folded, x_NV[..., upper.shape[-1] : half]), -1) if upper.shape[-1] < half else folded
    return x_NV[..., 0]


def row_cumsum(x_NV: torch.Tensor) -> torch.Tensor:
    """Inclusive sum along the last dim: additions only, in an order that V decides."""
    width = x_NV.shape[-1]
    if width <= SCAN_BLOCK:
        return _scan(x_NV)
    inner_NBb = _scan(pad_last(x_NV, SCAN_BLOCK).unflatten(-1, (-1, SCAN_BLOCK)))
    totals_NB = row_cumsum(inner_NBb[..., -1])
    before_NB = torch.constant_pad_nd(totals_NB[..., :-1], (1, 0))
    return (inner_NBb + before_NB[..., None]).flatten(-2)[..., :width]


def _scan(x: torch.Tensor) -> torch.Tensor:
    """Hillis and Steele's scan of the last dim."""
    shift = 1
    while shift < x.shape[-1]:
        x = torch.cat((x[..., :shift], x[..., shift:] + x[..., :-shift]), -1)
        shift *= 2
    return x


def penalise(
    logits_NV: torch.Tensor,
    counts_NV: torch.Tensor,
    seen_NV: torch.Tensor,
    *,
    repetition_N: torch.Tensor,
    presence_N: torch.Tensor,
    frequency_N: torch.Tensor,
) -> torch.Tensor:
    """Repetition, presence and frequency penalties; neutral values change no bit.

    Sources: repetition as in CTRL (Keskar et al. 2019, section 4.1), extended to negative logits as is
    usual: a seen token's logit is divided by the penalty when positive, else multiplied. Presence and
    frequency as in the OpenAI API: ``logit - presence [count > 0] - frequency count``.

    Args:
        logits_NV: island dtype.
        counts_NV: how often each token is in the output before this row; any dtype.
        seen_NV: bool, whether it is in the prompt or in the output before this row.
        repetition_N: > 0; 1 is neutral.
        presence_N: 0 is neutral.
        frequency_N: 0 is neutral.
    """
    factor_N1 = repetition_N[:, None]
    repeated_NV = torch.where(logits_NV > 0, logits_NV / factor_N1, logits_NV * factor_N1)
    logits_NV = torch.where(seen_NV, repeated_NV, logits_NV)
    counts_NV = counts_NV.to(logits_NV.dtype)
    return logits_NV - presence_N[:, None] * (counts_NV > 0) - frequency_N[:, None] * counts_NV


def tempered(logits_NV: torch.Tensor, temperature_N: torch.Tensor) -> torch.Tensor:
    """Scores ``(logits - max) / temperature``: the maximum is 0; a row that holds a NaN or +inf gets NaN."""
    return (logits_NV - logits_NV.max(-1, keepdim=True).values) / temperature_N.to(logits_NV.dtype)[:, None]


def truncate(
    scores_NV: torch.Tensor,
    *,
    top_k_N: torch.Tensor | None,
    largest_k: int,
    top_p_N: torch.Tensor | None,
    min_p_N: torch.Tensor | None,
) -> torch.Tensor:
    """Apply top_k, then top_p to what is left, then min_p; None where no row uses it.

    See ``keep_top_k``, ``keep_top_p`` and ``keep_min_p``; ``scores_NV`` has maximum 0.
    """
    if top_k_N is not None:
        scores_NV = keep_top_k(scores_NV, top_k_N, largest_k)
    if top_p_N is not None:
        scores_NV = keep_top_p(scores_NV, top_p_N.to(scores_NV.dtype))
    if min_p_N is not None:
        scores_NV = keep_min_p(scores_NV, min_p_N.to(scores_NV.dtype))
    return scores_NV


def keep_top_k(scores_NV: torch.Tensor, top_k_N: torch.Tensor, largest_k: int) -> torch.Tensor:
    """The k best tokens of each row, ties to the lowest ids; the others get -inf.

    Args:
        scores_NV: any float dtype.
        top_k_N: int64 >= 1; a row whose k reaches ``largest_k`` or V keeps at least that many.
        largest_k: host, the largest k below V that a row asks for.
    """
    vocab_size = scores_NV.shape[-1]
    best_NK = scores_NV.topk(min(largest_k, vocab_size), dim=-1).values
    last_N1 = best_NK.gather(-1, top_k_N.clamp(max=best_NK.shape[-1])[:, None] - 1)
    kept_NV = _keep_largest(scores_NV, last_N1, top_k_N[:, None])
    return torch.where((top_k_N >= vocab_size)[:, None], scores_NV, kept_NV)


def keep_top_p(scores_NV: torch.Tensor, top_p_N: torch.Tensor) -> torch.Tensor:
    """The smallest set of best tokens whose probability reaches ``top_p``; the others get -inf.

    Source: Holtzman et al. 2020, section 3.1. Ties go to the lowest ids. ``top_p`` = 1 keeps everything.

    Args:
        scores_NV: logarithms of unnormalised probabilities with maximum 0.
        top_p_N: in (0, 1].
    """
    weights_NV = exp(scores_NV)
    sorted_NV = weights_NV.sort(dim=-1, descending=True).values
    reached_NV = row_cumsum(sorted_NV)
    before_NV = torch.constant_pad_nd(reached_NV[..., :-1], (1, 0))
    num_kept_N1 = (before_NV < (top_p_N * row_sum(sorted_NV))[:, None]).sum(-1, keepdim=True).clamp_min(1)
    last_N1 = sorted_NV.gather(-1, num_kept_N1 - 1)
    kept_NV = torch.where(_keep_largest(weights_NV, last_N1, num_kept_N1).isfinite(), scores_NV, -torch.inf)
    return torch.where((top_p_N >= 1)[:, None], scores_NV, kept_NV)


def keep_min_p(scores_NV: torch.Tensor, min_p_N: torch.Tensor) -> torch.Tensor:
    """Tokens at least ``min_p`` times as probable as the best one; the others get -inf.

    Source: Nguyen et al. 2024 (min-p sampling). The maximum of ``scores_NV`` is 0; ``min_p`` = 0 keeps everything.
    """
    threshold_N1 = elementwise(torch.log, min_p_N[:, None])
    return torch.where(scores_NV < threshold_N1, -torch.inf, scores_NV)


def _keep_largest(x_NV: torch.Tensor, last_N1: torch.Tensor, count_N1: torch.Tensor) -> torch.Tensor:
    """The ``count`` largest values of each row, of which ``last`` is the smallest; ties to the lowest ids."""
    above_NV, tied_NV = x_NV > last_N1, x_NV == last_N1
    room_N1 = count_N1 - above_NV.sum(-1, keepdim=True)
    return torch.where(above_NV | (tied_NV & (tied_NV.cumsum(-1) <= room_N1)), x_NV, -torch.inf)


def softmax(scores_NV: torch.Tensor) -> torch.Tensor:
    """Probabilities of scores whose maximum is 0."""
    weights_NV = exp(scores_NV)
    return weights_NV / row_sum(weights_NV)[..., None]


def log_softmax(logits_NV: torch.Tensor) -> torch.Tensor:
    """Logarithms of the probabilities of logits in the island dtype."""
    shifted_NV = logits_NV - logits_NV.max(-1, keepdim=True).values
    return shifted_NV - elementwise(torch.log, row_sum(exp(shifted_NV))[..., None])


def draw(scores_NV: torch.Tensor, key_N: torch.Tensor, token_ids_V: torch.Tensor) -> torch.Tensor:
    """One column per row, drawn from ``softmax(scores)`` by the Gumbel-max rule; int64.

    It needs no sum over the vocabulary. Two rows with nearby scores and the same key mostly draw the
    same token, which is what lets a drafter guess the target's draw (Daliri, Musco, Suresh 2024,
    "Coupling without communication").

    Args:
        scores_NV: logarithms of unnormalised probabilities, -inf where impossible.
        key_N: int64 key of each draw.
        token_ids_V: int64, token id of each column.

    Returns:
        The column; V where the row holds a NaN or has nothing to draw.
    """
    noisy_NV = scores_NV + gumbel(key_N, token_ids_V, scores_NV.dtype)
    possible_N = scores_NV.max(-1).values > -torch.inf  # False for NaN too
    return torch.where(possible_N, argmax_lowest(noisy_NV), scores_NV.shape[-1])


def top_values(x_NV: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``count`` largest values and their columns, descending, ties by ascending column; ``[N, count]`` each."""
    left_NV = x_NV.clone()
    picked = []
    for _ in range(count):
        value_N1, column_N1 = left_NV.max(-1, keepdim=True)
        picked.append((value_N1, column_N1))
        left_NV.scatter_(-1, column_N1, -torch.inf)
    values, columns = zip(*picked, strict=True)
    return torch.cat(values, -1), torch.cat(columns, -1)
