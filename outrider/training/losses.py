"""The DSpark losses (dspark.md section 4.3), for a full or a reduced draft vocabulary.

Dims: N block rows, V draft vocabulary, G rows of a block.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

__all__ = ["DrafterLosses", "HeadCrossEntropy", "drafter_losses", "row_decay"]

CROSS_ENTROPY_WEIGHT, TOTAL_VARIATION_WEIGHT, CONFIDENCE_WEIGHT = 0.1, 0.9, 1.0
DECAY_ROWS = 4.0
HEAD_CHUNK = 512  # rows whose logits exist at once: they stay in the cache


class HeadCrossEntropy(torch.autograd.Function):
    """Weighted sum of the next-token cross entropies of a linear head, in nats.

    The logits are made, used and dropped chunk by chunk, gradients included: a batch's logits at once are
    hundreds of megabytes, and moving them was a sixth of a training step.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, head: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """``hidden`` [N, D], ``head`` [V, D], ``targets`` int64 [N], ``weights`` [N] -> scalar."""
        grad_hidden, grad_head = torch.empty_like(hidden), torch.zeros_like(head)
        total = hidden.new_zeros(())
        for start in range(0, hidden.shape[0], HEAD_CHUNK):
            rows = slice(start, start + HEAD_CHUNK)
            scores = torch.log_softmax(hidden[rows] @ head.T, -1)
            picked = targets[rows].unsqueeze(1)
            total -= (scores.gather(1, picked).squeeze(1) * weights[rows]).sum()
            grad = scores.exp_()
            grad.scatter_add_(1, picked, grad.new_full(picked.shape, -1.0))
            grad *= weights[rows].unsqueeze(1)
            torch.mm(grad, head, out=grad_hidden[rows])
            grad_head.addmm_(grad.T, hidden[rows])
        ctx.save_for_backward(grad_hidden, grad_head)
        return total

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        """The stored gradients times the incoming one."""
        grad_hidden, grad_head = ctx.saved_tensors
        return grad_hidden * grad, grad_head * grad, None, None


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
