"""Held-out loss of the trained target by kind of text or task, and by position in the context.

Usage: ``python recipes/k3_small/held_out.py TARGET/checkpoint.pt TOKENIZER.json VALID_TEXT.jsonl
VALID_TASKS.jsonl OUT.json`` (about 10 minutes on one core)
"""

import argparse
import json
import sys
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

sys.path.insert(0, str(Path(__file__).parent))

from config import K3_SMALL
from prepare_data import ChatEncoder

from outrider.training.kda import KdaAttention
from outrider.training.kimi_k3 import KimiK3ForTraining

LENGTH = 2048
POSITION_EDGES = (0, 64, 256, 512, 1024, 2048)
MAX_PER_KIND = 5
TEXT_STRIDE = 3  # every third held-out document is enough


def token_losses(model: KimiK3ForTraining, ids: list[int]) -> torch.Tensor:
    """Loss of every token but the first, nats."""
    ids = ids[: LENGTH + 1]
    padding = -(len(ids) - 1) % KdaAttention.chunk
    inputs = torch.tensor([ids[:-1] + [0] * padding])
    hidden, _ = model(inputs)
    logits = model.lm_head(hidden[0, : len(ids) - 1])
    return F.cross_entropy(logits, torch.tensor(ids[1:]), reduction="none")


def read(path: Path) -> list[dict]:
    """Rows of a JSONL file."""
    return [json.loads(line) for line in path.read_text(encoding="utf8").splitlines()]


@torch.no_grad()
def measure(arguments: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Mean losses: text by kind, answers by task, text by position."""
    model = KimiK3ForTraining(K3_SMALL)
    model.load_state_dict(torch.load(arguments.checkpoint, weights_only=True)["model"])
    model.eval()
    tokenizer = Tokenizer.from_file(str(arguments.tokenizer))
    encoder = ChatEncoder(tokenizer)
    by_kind: dict[str, list[torch.Tensor]] = defaultdict(list)
    by_task: dict[str, list[torch.Tensor]] = defaultdict(list)
    by_position: dict[str, list[torch.Tensor]] = defaultdict(list)
    for row in read(arguments.text)[::TEXT_STRIDE]:
        losses = token_losses(model, tokenizer.encode(row["text"]).ids)
        by_kind[row["kind"]].append(losses)
        for begin, end in pairwise(POSITION_EDGES):
            by_position[f"{begin}-{end}"].append(losses[begin:end])
    for row in read(arguments.tasks):
        if len(by_task[row["kind"]]) < MAX_PER_KIND:
            texts = [tokenizer.encode(turn["content"]).ids for turn in row["turns"]]
            ids, answer = encoder.encode([turn["role"] for turn in row["turns"]], texts)
            losses = token_losses(model, ids)
            by_task[row["kind"]].append(losses[torch.tensor(answer[1 : len(losses) + 1]) == 1])
    groups = {"text_by_kind": by_kind, "answers_by_task": by_task, "text_by_position": by_position}
    return {
        name: {key: round(float(torch.cat(parts).mean()), 3) for key, parts in group.items()}
        for name, group in groups.items()
    }


def main() -> None:
    """Parse the arguments, measure, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("checkpoint", "tokenizer", "text", "tasks", "out"):
        parser.add_argument(name, type=Path)
    arguments = parser.parse_args()
    with torch.compiler.set_stance("force_eager"):
        result = measure(arguments)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
