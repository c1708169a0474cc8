"""The DSpark losses (dspark.md section 4.3), for a full or a reduced draft vocabulary.

Dims: N block rows, V draft vocabulary, G rows of a block.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

__all__ = ["DrafterLosses", "drafter_losses", "row_decay"]

CROSS_ENTROPY_WEIGHT, TOTAL_VARIATION_WEIGHT, CONFIDENCE_WEIGHT = 0.1, 0.9, 1.0
DECAY_ROWS = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterLosses:
    """Weighted means over rows; ``total`` is what is minimised."""

    total: torch.Tensor
    cross_entropy: torch.Tensor
    distance: torch.Tensor  # L1 between the two distributions, 0..2
    confidence: torch.Tensor  # binary cross entropy, nats
    overlap_N: torch.Tensor  # 1 - L1 / 2 of each row: the acceptance rate at temperature 1


def row_decay(num_rows: int, block_rows: int) -> torch.Tensor:
    """exp(-k / 4) for row k of its block, [N]."""
    return torch.exp(-(torch.arange(num_rows) % block_rows) / DECAY_ROWS)


def drafter_losses(
    logits_NV: torch.Tensor,
    confidence_N: torch.Tensor,
    teacher_NV: torch.Tensor,
    labels_N: torch.Tensor,
    weights_N: torch.Tensor,
) -> DrafterLosses:
    """Losses of rows; the teacher is detached and the confidence label has no gradient.

    ``teacher_NV``: target probabilities (temperature 1) of the draft vocabulary, whose rows may
    sum to less than 1: the mass the drafter cannot propose counts as distance. ``labels_N``:
    draft ids, -1 where the label has none. ``weights_N``: decay times the evaluation mask.
    """
    total_weight = weights_N.sum().clamp_min(1e-6)

    def weighted(values: torch.Tensor) -> torch.Tensor:
        return (values * weights_N).sum() / total_weight

    log_probabilities = torch.log_softmax(logits_NV, -1)
    known = labels_N >= 0
    picked = log_probabilities.gather(1, labels_N.clamp_min(0).unsqueeze(1)).squeeze(1)
    cross_entropy = weighted(torch.where(known, -picked, torch.zeros_like(picked)))
    outside = 1.0 - teacher_NV.sum(-1)
    distance_N = (log_probabilities.exp() - teacher_NV).abs().sum(-1) + outside.clamp_min(0)
    overlap_N = (1.0 - 0.5 * distance_N).detach().clamp(0, 1)
    confidence = weighted(F.binary_cross_entropy_with_logits(confidence_N, overlap_N, reduction="none"))
    distance = weighted(distance_N)
    total = CROSS_ENTROPY_WEIGHT * cross_entropy + TOTAL_VARIATION_WEIGHT * distance + CONFIDENCE_WEIGHT * confidence
    return DrafterLosses(
        total=total,
        cross_entropy=cross_entropy,
        distance=distance,
        confidence=confidence,
        overlap_N=overlap_N,
    )
