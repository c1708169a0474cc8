"""Draw the loss curves of both trainings into one SVG.

Usage: ``python recipes/k3_small/plot_training.py TARGET/log.jsonl DRAFTER/log.jsonl OUT.svg``
(needs matplotlib)
"""

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt


def read(path: str) -> list[dict]:
    """Rows of a training log."""
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def main() -> None:
    """Two panels: target loss by tokens, drafter loss and held-out tokens per round by steps."""
    target, drafter = read(sys.argv[1]), read(sys.argv[2])
    plt.rcParams["svg.hashsalt"] = "k3-small"  # the same file for the same logs
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6))
    left.plot([row["tokens"] / 1e6 for row in target], [row["smooth"] for row in target], label="training mix")
    held_out = [row for row in target if "text" in row]
    for kind in ("text", "tasks"):
        left.plot(
            [row["tokens"] / 1e6 for row in held_out], [row[kind] for row in held_out], "o-", label=f"held-out {kind}"
        )
    left.set(xlabel="million tokens", ylabel="loss, nats per token", title="target")
    left.legend()
    right.plot([row["step"] for row in drafter], [row["smooth"] for row in drafter], label="loss")
    held_out = [row for row in drafter if "tokens_per_round" in row]
    rounds = [row["tokens_per_round"] for row in held_out]
    right.plot([row["step"] for row in held_out], rounds, "o-", label="held-out tokens per round (teacher-forced)")
    right.set(xlabel="steps", title="drafter")
    right.legend()
    figure.tight_layout()
    figure.savefig(sys.argv[3], metadata={"Date": None})


if __name__ == "__main__":
    main()
