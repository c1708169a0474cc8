"""The DSpark losses (dspark.md section 4.3), for a full or a reduced draft vocabulary.

Dims: N block rows, V draft vocabulary, G rows of a block.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

__all__ = [
    "DraftHeadLoss",
    "DrafterLosses",
    "HeadCrossEntropy",
    "confidence_loss",
    "drafter_losses",
    "row_decay",
    "teacher_head",
]

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


def teacher_head(head: torch.Tensor, draft_ids: torch.Tensor) -> torch.Tensor:
    """The target's head [T, D] with the draft vocabulary's rows first, in draft order."""
    outside = torch.ones(head.shape[0], dtype=torch.bool)
    outside[draft_ids] = False
    return torch.cat((head[draft_ids], head[outside]))


class DraftHeadLoss(torch.autograd.Function):
    """Cross entropy and distance of :func:`drafter_losses`, head and Markov bias included, chunk by chunk.

    The same numbers with neither the drafter's nor the teacher's probabilities of a whole batch in memory.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: torch.Tensor,
        previous_NM: torch.Tensor,
        head_VD: torch.Tensor,
        markov_VM: torch.Tensor,
        teacher_hidden_ND: torch.Tensor,
        teacher_head_TD: torch.Tensor,
        labels_N: torch.Tensor,
        weights_N: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Weighted loss, distance of each row [N], and whether draft and target choose the same id [N].

        ``teacher_head_TD`` comes from :func:`teacher_head`; ``weights_N`` sum to 1.
        """
        vocab = head_VD.shape[0]
        grads = [torch.empty_like(hidden_ND), torch.empty_like(previous_NM)]
        grads += [torch.zeros_like(head_VD), torch.zeros_like(markov_VM)]
        distance_N = hidden_ND.new_empty(hidden_ND.shape[0])
        agree_N = torch.empty(hidden_ND.shape[0], dtype=torch.bool)
        total = hidden_ND.new_zeros(())
        for start in range(0, hidden_ND.shape[0], HEAD_CHUNK):
            rows = slice(start, start + HEAD_CHUNK)
            weights = weights_N[rows].unsqueeze(1)
            taught = teacher_hidden_ND[rows] @ teacher_head_TD.T
            scores = (hidden_ND[rows] @ head_VD.T).addmm_(previous_NM[rows], markov_VM.T)
            agree_N[rows] = scores.argmax(-1) == taught.argmax(-1)
            teacher = taught.softmax(-1)[:, :vocab]
            log_probabilities = scores.log_softmax(-1)
            known = (labels_N[rows] >= 0).unsqueeze(1)
            picked = labels_N[rows].clamp_min(0).unsqueeze(1)
            cross_entropy = -(log_probabilities.gather(1, picked) * weights * known).sum()
            probabilities = log_probabilities.exp_()
            difference = probabilities - teacher
            distance_N[rows] = difference.abs().sum(-1) + (1.0 - teacher.sum(-1)).clamp_min(0)
            total += CROSS_ENTROPY_WEIGHT * cross_entropy
            total += TOTAL_VARIATION_WEIGHT * (distance_N[rows] * weights.squeeze(1)).sum()
            # d sum|p - q| / dz = p (s - sum(p s)) with s = sign(p - q); the cross entropy gives p - onehot.
            sign = difference.sign_()
            slope = sign - (probabilities * sign).sum(-1, keepdim=True)
            slope.mul_(TOTAL_VARIATION_WEIGHT).add_(CROSS_ENTROPY_WEIGHT * known)
            grad = slope.mul_(probabilities)
            grad.scatter_add_(1, picked, -CROSS_ENTROPY_WEIGHT * known.to(grad.dtype))
            grad *= weights
            torch.mm(grad, head_VD, out=grads[0][rows])
            torch.mm(grad, markov_VM, out=grads[1][rows])
            grads[2].addmm_(grad.T, hidden_ND[rows])
            grads[3].addmm_(grad.T, previous_NM[rows])
        ctx.save_for_backward(*grads)
        ctx.mark_non_differentiable(distance_N, agree_N)
        return total, distance_N, agree_N

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _distance: None, _agree: None) -> tuple[torch.Tensor | None, ...]:
        """The stored gradients times the incoming one."""
        return (*(stored * grad for stored in ctx.saved_tensors), None, None, None, None)


def confidence_loss(logits_N: torch.Tensor, distance_N: torch.Tensor, weights_N: torch.Tensor) -> torch.Tensor:
    """Weighted binary cross entropy against the acceptance rate 1 - distance / 2; ``weights_N`` sum to 1."""
    overlap_N = (1.0 - 0.5 * distance_N).detach().clamp(0, 1)
    return (F.binary_cross_entropy_with_logits(logits_N, overlap_N, reduction="none") * weights_N).sum()


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
    confidence = confidence_loss(confidence_N, distance_N, weights_N / total_weight)
    distance = weighted(distance_N)
    total = CROSS_ENTROPY_WEIGHT * cross_entropy + TOTAL_VARIATION_WEIGHT * distance + CONFIDENCE_WEIGHT * confidence
    return DrafterLosses(
        total=total,
        cross_entropy=cross_entropy,
        distance=distance,
        confidence=confidence,
        overlap_N=overlap_N,
    )
