"""Trains a DSpark drafter of any target on a collection; resumable, one optimiser step at a time.

The target's embedding and head stay frozen; of the head, the rows of the draft vocabulary are used and not stored.
Losses: dspark.md section 4.3.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from outrider.errors import CheckpointError
from outrider.training.drafter_data import Batch, Collection, sample_blocks
from outrider.training.dspark import DrafterConfig, DSparkForTraining
from outrider.training.losses import CONFIDENCE_WEIGHT, DraftHeadLoss, confidence_loss, row_decay, teacher_head
from outrider.training.muon import Muon

__all__ = ["DrafterTrainer", "FrozenTables", "Quality", "TrainerSettings", "TrainingRecord"]

WARM_UP_STEPS = 40
LAST_RATE = 0.05  # of the rate, at the end
REST_RATE = 0.4  # of AdamW's rate against that of the matrices
EVALUATION_BATCHES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSettings:
    """How long and how fast."""

    num_steps: int
    learning_rate: float = 0.01
    batch_tokens: int = 4096
    row_length: int = 512
    anchors: int = 512  # of a batch
    seed: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenTables:
    """The target's part, float32."""

    embedding_VD: torch.Tensor
    head_VD: torch.Tensor
    norm_D: torch.Tensor  # before the head
    eps: float

    def normed(self, stream: torch.Tensor) -> torch.Tensor:
        """What the head reads, from the stream after the last layer."""
        scale = torch.rsqrt(stream.square().mean(-1, keepdim=True) + self.eps)
        return stream * scale * self.norm_D


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRecord:
    """One optimiser step."""

    step: int
    loss: float
    distance: float  # weighted mean L1 between the two distributions, 0..2
    seconds: float  # of training so far


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """Held-out greedy agreement, teacher forced."""

    survival: tuple[float, ...]  # probability that draft k and all before it agree
    tokens_per_round: float


class DrafterTrainer:
    """Drafter, optimisers and counters.

    Args:
        config: sizes.
        tables: the target's.
        collection: what it learns from.
        draft_ids: target id of every draft id, ascending.
        settings: how.
        directory: of the checkpoint.
    """

    def __init__(
        self,
        config: DrafterConfig,
        tables: FrozenTables,
        collection: Collection,
        draft_ids: torch.Tensor,
        settings: TrainerSettings,
        directory: Path,
    ) -> None:
        torch.manual_seed(settings.seed)
        self.config, self.settings, self.collection, self.draft_ids = config, settings, collection, draft_ids
        self._tables, self._file = tables, directory / "checkpoint.pt"
        self.drafter = DSparkForTraining(config)
        self.drafter.lm_head.weight.requires_grad_(False).copy_(tables.head_VD[draft_ids])
        self._embedding = nn.Embedding.from_pretrained(tables.embedding_VD)
        self._teacher_head = teacher_head(tables.head_VD, draft_ids)
        self._to_draft = torch.full((config.target_vocab_size,), -1, dtype=torch.int64)
        self._to_draft[draft_ids] = torch.arange(len(draft_ids))
        trained = [(name, p) for name, p in self.drafter.named_parameters() if p.requires_grad]
        matrices = [p for name, p in trained if name.startswith(("layers", "fc")) and p.ndim == 2]
        chosen = {id(p) for p in matrices}
        self._optimizers: tuple[torch.optim.Optimizer, ...] = (
            Muon(matrices, lr=settings.learning_rate, weight_decay=0.02),
            torch.optim.AdamW(
                [p for _, p in trained if id(p) not in chosen],
                lr=settings.learning_rate,
                betas=(0.9, 0.95),
                weight_decay=0.0,
            ),
        )
        self.step, self.seconds = 0, 0.0

    def resume(self) -> bool:
        """Continue from the checkpoint of the directory; False when there is none.

        Raises:
            CheckpointError: it is of other sizes or another draft vocabulary.
        """
        if not self._file.is_file():
            return False
        state = torch.load(self._file, weights_only=True)
        if not torch.equal(state["draft_ids"], self.draft_ids):
            raise CheckpointError(f"{self._file} was trained for another draft vocabulary; use another directory")
        self._fill(state["model"], self._file)
        for optimizer, saved in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step, self.seconds = state["step"], state["seconds"]
        return True

    def start_from(self, weights: dict[str, torch.Tensor], source: Path) -> None:
        """Start from another drafter's weights, with fresh optimisers."""
        self._fill({"lm_head.weight": self.drafter.lm_head.weight, **weights}, source)

    def save(self) -> None:
        """Write the checkpoint in one rename."""
        state: dict[str, Any] = {
            "model": self.drafter.state_dict(),
            "draft_ids": self.draft_ids,
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
            "step": self.step,
            "seconds": self.seconds,
        }
        temporary = self._file.with_suffix(".tmp")
        torch.save(state, temporary)
        temporary.replace(self._file)

    def run(self, tell: Callable[[TrainingRecord], None], *, save_every_s: float = 120.0) -> None:
        """Train up to the number of steps of the settings."""
        settings, last_save = self.settings, time.perf_counter()
        num_rows = max(1, settings.batch_tokens // settings.row_length)
        while self.step < settings.num_steps:
            begun = time.perf_counter()
            dice = np.random.default_rng((settings.seed, self.step))
            batch = self.collection.rows(dice, settings.row_length, num_rows, valid=False)
            loss, distance = self._train(batch)
            self.step += 1
            self.seconds += time.perf_counter() - begun
            tell(TrainingRecord(step=self.step, loss=loss, distance=distance, seconds=self.seconds))
            if time.perf_counter() - last_save > save_every_s:
                self.save()
                last_save = time.perf_counter()
        self.save()

    @torch.no_grad()
    def evaluate(self) -> Quality:
        """Agreement on held-out conversations."""
        rows, length = self.config.block_rows, self.settings.row_length
        agreed, reached = torch.zeros(rows), torch.zeros(rows)
        for index in range(EVALUATION_BATCHES):
            batch = self.collection.rows(np.random.default_rng(99 + index), length, 8, valid=True)
            step = self._forward(batch, 64, 7 + index)
            agree = (step.agreement_BR.float() * step.weights_BR).unflatten(1, (-1, rows))
            agreed += agree.cumprod(-1).sum((0, 1))
            reached += step.weights_BR.unflatten(1, (-1, rows)).sum((0, 1))
        survival = (agreed / reached.clamp_min(1)).tolist()
        return Quality(survival=tuple(survival), tokens_per_round=1 + sum(survival))

    def _fill(self, weights: dict[str, torch.Tensor], source: Path) -> None:
        try:
            self.drafter.load_state_dict({name: value.float() for name, value in weights.items()})
        except RuntimeError as error:
            reason = str(error).splitlines()[-1].strip()
            raise CheckpointError(f"{source} does not fit a drafter of these sizes ({reason})") from error

    def _train(self, batch: Batch) -> tuple[float, float]:
        scale = _rate_at(self.step, self.settings.num_steps)
        for optimizer, share in zip(self._optimizers, (1.0, REST_RATE), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = self.settings.learning_rate * scale * share
        step = self._forward(batch, max(1, self.settings.anchors // len(batch.ids_BT)), self.step)
        step.loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.drafter.parameters(), 1.0)
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return step.loss.item(), step.distance

    def _forward(self, batch: Batch, num_anchors: int, seed: int) -> "_Step":
        config = self.config
        blocks = sample_blocks(batch, config, num_anchors, seed)
        context = batch.features_BTMD[:, :, :-1].flatten(2)
        last = batch.features_BTMD[:, :, -1]
        before = (blocks.anchors_BA.unsqueeze(-1) + torch.arange(config.block_rows)).flatten(1)
        before = before.clamp_max(batch.ids_BT.shape[1] - 1)
        taught = self._tables.normed(last.gather(1, before.unsqueeze(-1).expand(-1, -1, last.shape[-1])))
        rows = self.drafter.rows(context, blocks, self._embedding)
        weights = blocks.weights_BR.flatten()
        weights = weights * row_decay(len(weights), config.block_rows)
        weights = weights / weights.sum().clamp_min(1e-6)
        loss, distance, agreement = DraftHeadLoss.apply(
            rows.hidden_BRD.flatten(0, 1),
            rows.previous_BRM.flatten(0, 1),
            self.drafter.lm_head.weight,
            self.drafter.markov_head.markov_w2.weight,
            taught.flatten(0, 1),
            self._teacher_head,
            self._to_draft[blocks.labels_BR.flatten()],
            weights,
        )
        confidence = confidence_loss(rows.confidence_BR.flatten(), distance, weights)
        return _Step(
            loss=loss + CONFIDENCE_WEIGHT * confidence,
            distance=float((distance * weights).sum()),
            agreement_BR=agreement.view_as(blocks.labels_BR),
            weights_BR=blocks.weights_BR,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    loss: torch.Tensor
    distance: float
    agreement_BR: torch.Tensor
    weights_BR: torch.Tensor


def _rate_at(step: int, num_steps: int) -> float:
    """Share of the rate: a linear rise, then half a cosine down to ``LAST_RATE``."""
    if step < WARM_UP_STEPS:
        return (step + 1) / WARM_UP_STEPS
    progress = min(1.0, (step - WARM_UP_STEPS) / max(1, num_steps - WARM_UP_STEPS))
    return LAST_RATE + (1 - LAST_RATE) * 0.5 * (1 + math.cos(math.pi * progress))
