"""Acceptance of drafts that were drawn from the drafter's own distribution, exact in distribution.

Both rules want the same things of their inputs: draft i was drawn from ``draft_probs`` row i, given the
drafts before it (a Markov-corrected row, not the row of the parallel block); the target's rows are the
distributions that plain sampling would draw from, after every penalty and cut; and whether draft i was
submitted depends on the drafts before it at most, never on itself or on later ones.

Dims: C sequences, G draft positions, G1 = G + 1, V vocabulary.
"""

from dataclasses import dataclass

import torch

from outrider.ops.sampling import row_sum

__all__ = ["Verdict", "accept_block", "accept_tokenwise"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """How many drafts stand, and what the token after them is drawn from."""

    num_accepted_C: torch.Tensor  # int64
    final_CV: torch.Tensor  # unnormalised probabilities


def accept_tokenwise(
    target_CG1V: torch.Tensor,
    draft_CGV: torch.Tensor,
    draft_ids_CG: torch.Tensor,
    lengths_C: torch.Tensor,
    coins_CG: torch.Tensor,
) -> Verdict:
    """Prefix rejection sampling (Leviathan et al. 2023, algorithm 1; dspark.md 3.2).

    Draft i stands while ``coin_i < p_i(d_i) / q_i(d_i)``. After a rejection the token is drawn from
    ``max(p - q, 0)`` of the rejected row; after the last submitted draft from p itself, also when the
    drafter has a further row whose draft was not submitted.

    Args:
        target_CG1V: p, one row more than drafts; rows beyond a sequence's length are ignored.
        draft_CGV: q; rows at or beyond a sequence's length are ignored.
        draft_ids_CG: int64, in 0..V-1; ignored at or beyond a sequence's length.
        lengths_C: int64, submitted drafts.
        coins_CG: float64, uniform in [0, 1).
    """
    ratio_CG = _ratio(target_CG1V, draft_CGV, draft_ids_CG)
    stands_CG = (coins_CG < ratio_CG) & _submitted(lengths_C, draft_ids_CG)
    num_accepted_C = stands_CG.cumprod(1).sum(1)
    one_C = torch.ones_like(num_accepted_C, dtype=target_CG1V.dtype)
    return _verdict(num_accepted_C, one_C, target_CG1V, draft_CGV, lengths_C)


def accept_block(
    target_CG1V: torch.Tensor,
    draft_CGV: torch.Tensor,
    draft_ids_CG: torch.Tensor,
    lengths_C: torch.Tensor,
    coins_CG: torch.Tensor,
) -> Verdict:
    """Block verification (Sun et al. 2024, arXiv 2403.10444, algorithm 2; dspark.md 3.3).

    With ``P_0 = 1`` and ``P_i = min(P_{i-1} p_i / q_i, 1)`` over the first i drafts, the longest prefix
    i stands whose coin is below ``h_i = Z_i / (Z_i + 1 - P_i)``, ``Z_i = sum max(P_i p - q, 0)`` over the
    next row, and below ``P_L`` for the whole block of L submitted drafts. The token after i < L drafts is
    drawn from ``max(P_i p - q, 0)``. It never accepts fewer drafts on average than the token-wise rule.

    Arguments as for ``accept_tokenwise``.
    """
    num_drafts = draft_ids_CG.shape[1]
    submitted_CG = _submitted(lengths_C, draft_ids_CG)
    ratio_CG = _ratio(target_CG1V, draft_CGV, draft_ids_CG)
    prefix_C = torch.ones_like(lengths_C, dtype=target_CG1V.dtype)
    prefixes = [prefix_C]
    num_accepted_C = torch.zeros_like(lengths_C)
    for i in range(1, num_drafts + 1):
        prefix_C = (prefix_C * ratio_CG[:, i - 1].to(prefix_C.dtype)).clamp_max(1)
        prefixes.append(prefix_C)
        bar_C = prefix_C
        if i < num_drafts:
            excess_C = row_sum((prefix_C[:, None] * target_CG1V[:, i] - draft_CGV[:, i]).clamp_min(0))
            # 0/0 means p = q here: the next draft then stands for certain, so nothing ends at this one.
            inner_C = excess_C / (excess_C + (1 - prefix_C))
            bar_C = torch.where(lengths_C == i, prefix_C, inner_C)
        stands_C = (coins_CG[:, i - 1] < bar_C) & submitted_CG[:, i - 1]
        num_accepted_C = torch.where(stands_C, i, num_accepted_C)
    prefix_at_cut_C = torch.stack(prefixes, 1).gather(1, num_accepted_C[:, None])[:, 0]
    return _verdict(num_accepted_C, prefix_at_cut_C, target_CG1V, draft_CGV, lengths_C)


def _ratio(target_CG1V: torch.Tensor, draft_CGV: torch.Tensor, draft_ids_CG: torch.Tensor) -> torch.Tensor:
    """``p(d) / q(d)`` of every draft in float64; a draft was drawn, so its q is not 0."""
    ids_CG1 = draft_ids_CG[..., None]
    target_CG = target_CG1V[:, :-1].gather(-1, ids_CG1)[..., 0].double()
    return target_CG / draft_CGV.gather(-1, ids_CG1)[..., 0].double()


def _submitted(lengths_C: torch.Tensor, draft_ids_CG: torch.Tensor) -> torch.Tensor:
    return torch.arange(draft_ids_CG.shape[1], device=lengths_C.device) < lengths_C[:, None]


def _verdict(
    num_accepted_C: torch.Tensor,
    prefix_C: torch.Tensor,
    target_CG1V: torch.Tensor,
    draft_CGV: torch.Tensor,
    lengths_C: torch.Tensor,
) -> Verdict:
    """The distribution of the final token after ``num_accepted`` drafts with prefix probability ``prefix``."""
    rows_C = torch.arange(num_accepted_C.shape[0], device=num_accepted_C.device)
    target_CV = target_CG1V[rows_C, num_accepted_C]
    if draft_CGV.shape[1] == 0:
        return Verdict(num_accepted_C=num_accepted_C, final_CV=target_CV)
    draft_CV = draft_CGV[rows_C, num_accepted_C.clamp_max(draft_CGV.shape[1] - 1)]
    residual_CV = (prefix_C[:, None] * target_CV - draft_CV).clamp_min(0)
    # Where p and q agree to the last bit there is nothing left; only rounding can lead there.
    rejected_C = (num_accepted_C < lengths_C) & (residual_CV.max(-1).values > 0)
    return Verdict(num_accepted_C=num_accepted_C, final_CV=torch.where(rejected_C[:, None], residual_CV, target_CV))
