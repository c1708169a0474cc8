"""Train the k3-small drafter on the target's own outputs; resumable like ``train_target.py``.

Usage: ``python recipes/k3_small/train_drafter.py models/k3-small OUT_DIR ROLLOUTS_DIR... --minutes 30``

Each ``ROLLOUTS_DIR`` is what ``rollouts.py`` wrote. The frozen target reads every rollout once, in its
training form and at the weights as shipped (bf16, MXFP4 experts); its taps and final hidden states
stay in ``OUT_DIR/features.pt``, because the target's forward would be over half of every step.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))

from config import K3_SMALL, K3_SMALL_DSPARK
from train_target import learning_rate_scale

from outrider.training.dspark import Blocks, DSparkForTraining
from outrider.training.export import read_drafter, read_target
from outrider.training.kimi_k3 import KimiK3ForTraining
from outrider.training.losses import (
    CONFIDENCE_WEIGHT,
    DraftHeadLoss,
    confidence_loss,
    row_decay,
    teacher_head,
)
from outrider.training.muon import Muon
from outrider.training.seeding_dspark import PinnedCopying, seed_drafter

LENGTHS = ((0.70, 512), (0.90, 1024), (1.01, 2048))  # row length until this share of the budget
MAX_LENGTH = 2048
MIN_OUTPUTS = 16  # output tokens a row needs
VALID_SHARE = 0.03  # of the rollouts, the last ones
SEED_ROWS = 32  # conversations the seeded drafter is fitted to


class Rollouts:
    """Prompt and output ids of the target, one conversation after another."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self.ids = np.concatenate([np.fromfile(folder / "rollouts.ids.bin", np.uint16) for folder in folders])
        self.answer = np.concatenate([np.fromfile(folder / "rollouts.answer.bin", np.uint8) for folder in folders])
        lengths = np.concatenate([np.diff(np.load(folder / "rollouts.offsets.npy")) for folder in folders])
        self.offsets = np.concatenate(([0], np.cumsum(lengths)))
        self.features: torch.Tensor | None = None
        self.num_train = int((len(self.offsets) - 1) * (1 - VALID_SHARE))

    def draft_vocabulary(self, size: int, special: list[int]) -> torch.Tensor:
        """The ``size`` most frequent output ids and the special ones, ascending."""
        counts = np.bincount(self.ids[self.answer == 1], minlength=K3_SMALL.vocab_size).astype(float)
        counts += np.bincount(self.ids[self.answer == 0], minlength=K3_SMALL.vocab_size) * 1e-3
        counts[special] = np.inf
        picked = np.sort(np.argsort(-counts, kind="stable")[:size])
        return torch.from_numpy(picked.astype(np.int64))

    def conversation(self, index: int, length: int) -> slice:
        """Where conversation ``index`` stands in the arrays, its end cut off after ``length`` tokens."""
        start, end = int(self.offsets[index]), int(self.offsets[index + 1])
        return slice(start, min(end, start + length))

    def rows(self, rng: np.random.Generator, length: int, num_rows: int, valid: bool) -> "Batch":
        """Random conversations, one a row, so that context always starts at position 0."""
        low, high = (self.num_train, len(self.offsets) - 1) if valid else (0, self.num_train)
        picked: list[slice] = []
        while len(picked) < num_rows:
            where = self.conversation(int(rng.integers(low, high)), length)
            if self.answer[where].sum() >= MIN_OUTPUTS:  # a long prompt may leave no output in the row
                picked.append(where)
        return self.batch(picked, length)

    def batch(self, picked: list[slice], length: int) -> "Batch":
        """Rows of ``length`` with the given stretches of the arrays, zero behind their ends."""
        ids = torch.zeros(len(picked), length, dtype=torch.int64)
        answer = torch.zeros(len(picked), length, dtype=torch.bool)
        width = 0 if self.features is None else self.features.shape[1]
        features = torch.zeros(len(picked), length, width)
        for row, where in enumerate(picked):
            size = where.stop - where.start
            ids[row, :size] = torch.from_numpy(self.ids[where].astype(np.int64))
            answer[row, :size] = torch.from_numpy(self.answer[where] == 1)
            if self.features is not None:
                features[row, :size] = self.features[where].float()
        return Batch(ids=ids, answer=answer, features=features)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Conversations: ids and output mask [B, T], taps and final hidden side by side [B, T, (m + 1) * D]."""

    ids: torch.Tensor
    answer: torch.Tensor
    features: torch.Tensor


@torch.no_grad()
def read_features(target: KimiK3ForTraining, rollouts: Rollouts) -> torch.Tensor:
    """Taps and final hidden states of every token of the rollouts, bf16 [N, (m + 1) * D].

    Tokens beyond ``MAX_LENGTH`` of a conversation are never drawn and stay zero.
    """
    width = (len(K3_SMALL_DSPARK.aux_layer_ids) + 1) * K3_SMALL.hidden_size
    features = torch.zeros(len(rollouts.ids), width, dtype=torch.bfloat16)
    spans = [rollouts.conversation(index, MAX_LENGTH) for index in range(len(rollouts.offsets) - 1)]
    for low, length in ((0, 256), (256, 512), (512, 1024), (1024, MAX_LENGTH)):
        group = [span for span in spans if low < span.stop - span.start <= length]
        rows = 4096 // length
        for first in range(0, len(group), rows):
            picked = group[first : first + rows]
            padded = picked + picked[:1] * (rows - len(picked))  # one shape for every batch
            hidden, taps = target(rollouts.batch(padded, length).ids, K3_SMALL_DSPARK.aux_layer_ids)
            joined = torch.cat((*taps, hidden), -1).bfloat16()
            for row, span in enumerate(picked):
                features[span] = joined[row, : span.stop - span.start]
    return features


def sample_blocks(ids: torch.Tensor, answer: torch.Tensor, num_anchors: int, seed: int) -> Blocks:
    """Random anchors p with outputs at p and p + 1 (with replacement) and their block rows.

    The last prompt token is never an anchor: the first anchor in service is the first output.
    """
    generator = torch.Generator().manual_seed(seed)
    rows, mask_id = K3_SMALL_DSPARK.block_rows, K3_SMALL_DSPARK.mask_token_id
    eligible = (answer[:, :-1] & answer[:, 1:]).float()
    anchors = torch.multinomial(eligible, num_anchors, replacement=True, generator=generator)
    length = ids.shape[1]
    positions = anchors.unsqueeze(-1) + torch.arange(1, rows + 1)
    inside = positions < length
    positions = positions.clamp_max(length - 1).flatten(1)
    labels = ids.gather(1, positions)
    learnable = (answer.gather(1, positions).unflatten(1, (-1, rows)) & inside).cumprod(-1)
    anchor_ids = ids.gather(1, anchors).unsqueeze(-1)
    previous = torch.cat((anchor_ids, labels.unflatten(1, (-1, rows))[..., :-1]), -1)
    inputs = torch.full_like(previous, mask_id)
    inputs[..., 0] = anchor_ids.squeeze(-1)
    return Blocks(
        anchors_BA=anchors,
        inputs_BR=inputs.flatten(1),
        labels_BR=labels,
        previous_BR=previous.flatten(1),
        weights_BR=learnable.flatten(1).float(),
    )


def load_target(path: Path) -> KimiK3ForTraining:
    """The frozen target at its shipped weights (bf16, MXFP4 experts), from an exported model."""
    model = KimiK3ForTraining(K3_SMALL)
    read_target(model, path)
    return model.eval().requires_grad_(False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Losses of one batch and the teacher-forced greedy agreement per row."""

    loss: torch.Tensor
    distance: float
    agreement_BR: torch.Tensor
    weights_BR: torch.Tensor


class DrafterTrainer:
    """Frozen target, drafter, optimisers, counters."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        torch.manual_seed(1)
        self.out, self.lr = arguments.out, arguments.lr
        self.out.mkdir(parents=True, exist_ok=True)
        self.target = load_target(arguments.target)
        self.rollouts = Rollouts(arguments.rollouts)
        cached = self.out / "features.pt"
        if not cached.exists():
            torch.save(read_features(self.target, self.rollouts), cached)
        self.rollouts.features = torch.load(cached, weights_only=True)
        special = list(range(8176, 8182))
        self.draft_ids = self.rollouts.draft_vocabulary(K3_SMALL_DSPARK.draft_vocab_size, special)
        self.drafter = DSparkForTraining(K3_SMALL_DSPARK)
        matrices = [p for n, p in self.drafter.named_parameters() if n.startswith(("layers", "fc")) and p.ndim == 2]
        chosen = {id(p) for p in matrices}
        others = [p for p in self.drafter.parameters() if id(p) not in chosen]
        self.optimizers = (
            Muon(matrices, lr=self.lr, weight_decay=0.02),
            torch.optim.AdamW(others, lr=self.lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
        )
        self.step, self.seconds = 0, 0.0
        if (self.out / "checkpoint.pt").exists():
            self.load()
        elif arguments.init:
            self.draft_ids = read_drafter(self.drafter, arguments.init)
        else:
            self.seed()
        self.pinned = PinnedCopying(self.drafter)
        self.teacher_head = teacher_head(self.target.lm_head.weight, self.draft_ids)
        self.to_draft = torch.full((K3_SMALL.vocab_size,), -1, dtype=torch.int64)
        self.to_draft[self.draft_ids] = torch.arange(len(self.draft_ids))

    def seed(self) -> None:
        """Start from the target's head and from what its taps say on a sample of the rollouts."""
        with torch.no_grad():
            self.drafter.lm_head.weight.copy_(self.target.lm_head.weight[self.draft_ids])
        sample = self.rollouts.rows(np.random.default_rng(0), 512, SEED_ROWS, valid=False)
        tap_width = len(K3_SMALL_DSPARK.aux_layer_ids) * K3_SMALL.hidden_size
        seed_drafter(self.drafter, self.target, self.draft_ids, sample.ids, sample.features[..., :tap_width])

    def load(self) -> None:
        """Continue from our own checkpoint."""
        state = torch.load(self.out / "checkpoint.pt", weights_only=True)
        self.drafter.load_state_dict(state["model"])
        self.draft_ids = state["draft_ids"]
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step, self.seconds = state["step"], state["seconds"]

    def save(self) -> None:
        """Write the checkpoint in one rename."""
        state = {
            "model": self.drafter.state_dict(),
            "draft_ids": self.draft_ids,
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "step": self.step,
            "seconds": self.seconds,
        }
        torch.save(state, self.out / "checkpoint.tmp")
        (self.out / "checkpoint.tmp").replace(self.out / "checkpoint.pt")

    def forward(self, batch: Batch, num_anchors: int, seed: int) -> Step:
        """Losses of random anchors of a batch of rows."""
        blocks = sample_blocks(batch.ids, batch.answer, num_anchors, seed)
        width = len(K3_SMALL_DSPARK.aux_layer_ids) * K3_SMALL.hidden_size
        context, hidden = batch.features[..., :width], batch.features[..., width:]
        before = (blocks.anchors_BA.unsqueeze(-1) + torch.arange(K3_SMALL_DSPARK.block_rows)).flatten(1)
        before = before.clamp_max(batch.ids.shape[1] - 1)
        taught = hidden.gather(1, before.unsqueeze(-1).expand(-1, -1, hidden.shape[-1])).flatten(0, 1)
        rows = self.drafter.rows(context, blocks, self.target.embed_tokens)
        weights = blocks.weights_BR.flatten()
        weights = weights * row_decay(len(weights), K3_SMALL_DSPARK.block_rows)
        weights = weights / weights.sum().clamp_min(1e-6)
        loss, distance, agreement = DraftHeadLoss.apply(
            rows.hidden_BRD.flatten(0, 1),
            rows.previous_BRM.flatten(0, 1),
            self.drafter.lm_head.weight,
            self.drafter.markov_head.markov_w2.weight,
            taught,
            self.teacher_head,
            self.to_draft[blocks.labels_BR.flatten()],
            weights,
        )
        confidence = confidence_loss(rows.confidence_BR.flatten(), distance, weights)
        return Step(
            loss=loss + CONFIDENCE_WEIGHT * confidence,
            distance=float((distance * weights).sum()),
            agreement_BR=agreement.view_as(blocks.labels_BR),
            weights_BR=blocks.weights_BR,
        )

    def train_step(self, batch: Batch, num_anchors: int, progress: float) -> Step:
        """One optimiser step at this share of the budget."""
        scale = learning_rate_scale(progress)
        for optimizer, share in zip(self.optimizers, (1.0, 0.4), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = self.lr * scale * share
        result = self.forward(batch, num_anchors, self.step)
        result.loss.backward()
        torch.nn.utils.clip_grad_norm_(self.drafter.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.pinned.restore()
        return result

    @torch.no_grad()
    def evaluate(self, length: int = 512) -> dict[str, object]:
        """Held-out agreement per row given all rows before agreed, and expected tokens per round."""
        totals = torch.zeros(2, K3_SMALL_DSPARK.block_rows)
        for batch in range(4):
            rows = self.rollouts.rows(np.random.default_rng(99 + batch), length, 4096 // length, valid=True)
            result = self.forward(rows, 64, 7 + batch)
            agree = (result.agreement_BR.float() * result.weights_BR).unflatten(1, (-1, totals.shape[1]))
            reached = result.weights_BR.unflatten(1, (-1, totals.shape[1]))
            totals[0] += agree.cumprod(-1).sum((0, 1))
            totals[1] += reached.sum((0, 1))
        survival = totals[0] / totals[1].clamp_min(1)
        return {
            "survival": [round(value, 3) for value in survival.tolist()],
            "tokens_per_round": round(1 + float(survival.sum()), 3),
        }


def run(arguments: argparse.Namespace) -> None:
    """Train until the budget of minutes is spent."""
    trainer = DrafterTrainer(arguments)
    log = (arguments.out / "log.jsonl").open("a")
    budget, last_eval, last_save = arguments.minutes * 60, trainer.seconds, time.perf_counter()
    smooth = math.nan
    while trainer.seconds < budget:
        started = time.perf_counter()
        progress = trainer.seconds / budget
        length = next(length for until, length in LENGTHS if progress < until)
        num_rows = arguments.batch_tokens // length
        rows = trainer.rollouts.rows(np.random.default_rng(trainer.step), length, num_rows, valid=False)
        result = trainer.train_step(rows, arguments.anchors // num_rows, progress)
        trainer.step += 1
        trainer.seconds += time.perf_counter() - started
        loss = result.loss.item()
        smooth = loss if math.isnan(smooth) else 0.97 * smooth + 0.03 * loss
        record = {"step": trainer.step, "s": round(trainer.seconds, 1), "loss": round(loss, 4)}
        record |= {"smooth": round(smooth, 4), "distance": round(result.distance, 4), "length": length}
        if trainer.seconds - last_eval > 180 or trainer.seconds >= budget:
            record |= trainer.evaluate()
            last_eval = trainer.seconds
        log.write(json.dumps(record) + "\n")
        log.flush()
        if time.perf_counter() - last_save > 120:
            trainer.save()
            last_save = time.perf_counter()
    trainer.save()


def main() -> None:
    """Parse the arguments and train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("rollouts", type=Path, nargs="+")
    parser.add_argument("--init", type=Path, help="an exported drafter of the same sizes to start from")
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--batch-tokens", type=int, default=4096)
    parser.add_argument("--anchors", type=int, default=512)
    run(parser.parse_args())


if __name__ == "__main__":
    main()
