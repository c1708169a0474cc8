"""Train the k3-small target; resumable: run the same command again and it goes on.

A run is a budget of tokens (or minutes); the learning rate warms up, holds, then falls linearly
to zero over the last third, so the last tenth (2,048-token rows) is trained at a low rate.

Usage: ``python recipes/k3_small/train_target.py DATA_DIR OUT_DIR --minutes 80``
"""

import argparse
import json
import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))

from config import K3_SMALL

from outrider.training.export import read_target
from outrider.training.kimi_k3 import KimiK3ForTraining
from outrider.training.losses import HeadCrossEntropy
from outrider.training.muon import Muon
from outrider.training.seeding import PinnedLags, seed_copying

PROMPT_WEIGHT = 0.3  # loss weight of the user's tokens in a conversation
LENGTHS = ((0.35, 512), (0.88, 1024), (1.01, 2048))  # row length until this share of the budget
BALANCE_RATE = 0.002


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """One batch: inputs and next-token targets [B, T] with a loss weight for each target."""

    inputs: torch.Tensor
    targets: torch.Tensor
    weights: torch.Tensor


class Mixture:
    """Draws rows of plain text and of packed conversations, by a seed and a step number."""

    def __init__(self, data: Path, text_share: float, prefix: str = "tasks") -> None:
        self.text = np.memmap(data / "text.bin", np.uint16, mode="r")
        self.ids = np.memmap(data / f"{prefix}.ids.bin", np.uint16, mode="r")
        self.answer = np.memmap(data / f"{prefix}.answer.bin", np.uint8, mode="r")
        self.offsets = np.load(data / f"{prefix}.offsets.npy")
        self.text_share = text_share

    def text_row(self, rng: np.random.Generator, length: int) -> tuple[np.ndarray, np.ndarray]:
        """A random slice of the corpus; every target counts."""
        start = int(rng.integers(0, len(self.text) - length - 1))
        return self.text[start : start + length + 1], np.ones(length, np.float32)

    def task_row(self, rng: np.random.Generator, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Whole random conversations one after another, the last one cut at the row's end."""
        pieces, weights, missing = [], [], length + 1
        while missing > 0:
            pick = int(rng.integers(0, len(self.offsets) - 1))
            start, end = self.offsets[pick], self.offsets[pick + 1]
            end = min(end, start + missing)
            pieces.append(self.ids[start:end])
            weights.append(np.where(self.answer[start:end] == 1, 1.0, PROMPT_WEIGHT))
            missing -= end - start
        return np.concatenate(pieces), np.concatenate(weights)[1:].astype(np.float32)

    def batch(self, seed: int, length: int, num_tokens: int) -> Rows:
        """A batch of ``num_tokens`` in rows of ``length``, the same for the same seed."""
        rng = np.random.default_rng(seed)
        rows = []
        for _ in range(num_tokens // length):
            draw = self.text_row if rng.random() < self.text_share else self.task_row
            rows.append(draw(rng, length))
        ids = torch.from_numpy(np.stack([ids.astype(np.int64) for ids, _ in rows]))
        weights = torch.from_numpy(np.stack([weights for _, weights in rows]))
        return Rows(inputs=ids[:, :-1].contiguous(), targets=ids[:, 1:], weights=weights)


def weighted_loss(model: KimiK3ForTraining, rows: Rows) -> torch.Tensor:
    """Weighted mean cross entropy, in nats per token."""
    hidden, _ = model(rows.inputs)
    weights = rows.weights.flatten()
    weights = weights / weights.sum()
    return HeadCrossEntropy.apply(hidden.flatten(0, 1), model.lm_head.weight, rows.targets.flatten(), weights)


def learning_rate_scale(progress: float) -> float:
    """Warm-up over 2 %, constant, then linear to 2 % over the last 40 %."""
    if progress < 0.02:
        return max(progress / 0.02, 0.02)
    return min(1.0, max(0.02, (1.0 - progress) / 0.4))


def optimizers(model: KimiK3ForTraining) -> list[tuple[torch.optim.Optimizer, float]]:
    """Optimisers with their share of the learning rate.

    Muon for hidden matrices and experts; AdamW for embedding, head, router, vectors and conv taps;
    the forget gates move slowly, or the memory is gone before anything has learnt to use it.
    """
    matrices, gates, others = [], [], []
    for name, parameter in model.named_parameters():
        outer = name.startswith(("embed_tokens", "lm_head")) or "conv1d" in name or "gate.weight" in name
        is_matrix = parameter.ndim >= 2 and min(parameter.shape[-2:]) > 1
        if name.endswith(("f_a_proj.weight", "f_b_proj.weight", "A_log", "dt_bias")):
            gates.append(parameter)
        elif is_matrix and not outer:
            matrices.append(parameter)
        else:
            others.append(parameter)

    def adam(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=1.0, betas=(0.9, 0.95), weight_decay=0.0, fused=True)

    return [(Muon(matrices, lr=1.0, weight_decay=0.05), 1.0), (adam(others), 0.4), (adam(gates), 0.05)]


class Trainer:
    """Model, optimisers and the counters that make a run resumable."""

    def __init__(self, out: Path, lr: float) -> None:
        self.out, self.lr = out, lr
        torch.manual_seed(0)
        self.model = KimiK3ForTraining(K3_SMALL)
        seed_copying(self.model)
        self.optimizers = optimizers(self.model)
        self.step, self.tokens, self.seconds = 0, 0, 0.0
        out.mkdir(parents=True, exist_ok=True)
        self.pinned = PinnedLags(self.model)
        if (out / "checkpoint.pt").exists():
            self.load(out / "checkpoint.pt")

    def start_from(self, path: Path) -> None:
        """Take the weights of an exported model or of another run's checkpoint, and nothing else."""
        if path.is_dir():
            read_target(self.model, path)
        else:
            self.model.load_state_dict(torch.load(path, weights_only=True)["model"])
        self.pinned = PinnedLags(self.model)

    def load(self, path: Path) -> None:
        """Continue from a checkpoint of this script (our own file: tensors and numbers only)."""
        state = torch.load(path, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.pinned = PinnedLags(self.model)
        for (optimizer, _), saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step, self.tokens, self.seconds = state["step"], state["tokens"], state["seconds"]

    def save(self) -> None:
        """Write the checkpoint in one rename."""
        state = {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer, _ in self.optimizers],
            "step": self.step,
            "tokens": self.tokens,
            "seconds": self.seconds,
        }
        torch.save(state, self.out / "checkpoint.tmp")
        (self.out / "checkpoint.tmp").replace(self.out / "checkpoint.pt")

    def apply(self, loss: torch.Tensor, scale: float) -> float:
        """One optimiser step down a loss of the model; returns its value."""
        for optimizer, share in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.lr * scale * share
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer, _ in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.pinned.restore()
        for layer in self.model.walk():
            if not layer.is_dense:
                layer.block_sparse_moe.gate.balance(BALANCE_RATE * scale)
        return loss.item()


@torch.no_grad()
def evaluate(model: KimiK3ForTraining, mixture: Mixture, length: int) -> dict[str, float]:
    """Held-out loss on fixed rows, text and tasks apart."""
    model.eval()
    result = {}
    for name, share in (("text", 1.0), ("tasks", 0.0)):
        mixture.text_share = share
        rows = mixture.batch(12345, length, 8 * length)
        rows = Rows(inputs=rows.inputs, targets=rows.targets, weights=(rows.weights == 1).float())
        result[name] = round(weighted_loss(model, rows).item(), 4)
    model.train()
    return result


def run(arguments: argparse.Namespace) -> None:
    """Train until the budget of minutes is spent."""
    trainer = Trainer(arguments.out, arguments.lr)
    if arguments.init and trainer.step == 0:
        trainer.start_from(arguments.init)
    mixture = Mixture(arguments.data, arguments.text_share)
    valid = Mixture(arguments.valid, 1.0)
    log = (arguments.out / "log.jsonl").open("a")
    budget = arguments.minutes * 60
    smooth, last_save, last_eval = math.nan, time.perf_counter(), trainer.seconds
    while trainer.seconds < budget:
        started = time.perf_counter()
        progress = trainer.seconds / budget
        length = next(length for until, length in LENGTHS if progress < until)
        rows = mixture.batch(1000 + trainer.step, length, arguments.batch_tokens)
        loss = trainer.apply(weighted_loss(trainer.model, rows), learning_rate_scale(progress))
        smooth = loss if math.isnan(smooth) else 0.97 * smooth + 0.03 * loss
        trainer.step += 1
        trainer.tokens += arguments.batch_tokens
        trainer.seconds += time.perf_counter() - started
        record = {"step": trainer.step, "tokens": trainer.tokens, "s": round(trainer.seconds, 1)}
        record |= {"loss": round(loss, 4), "smooth": round(smooth, 4), "length": length}
        if trainer.seconds - last_eval > 240 or trainer.seconds >= budget:
            record |= evaluate(trainer.model, valid, 512)
            last_eval = trainer.seconds
        log.write(json.dumps(record) + "\n")
        log.flush()
        if time.perf_counter() - last_save > 180:
            trainer.save()
            last_save = time.perf_counter()
    trainer.save()


def main() -> None:
    """Parse the arguments and train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--valid", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=80)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--batch-tokens", type=int, default=4096)
    parser.add_argument("--text-share", type=float, default=0.4)
    parser.add_argument("--init", type=Path, help="weights to start from: a checkpoint.pt or an exported model")
    run(parser.parse_args())


if __name__ == "__main__":
    main()
