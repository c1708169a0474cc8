"""Golden runs: greedy continuations of a toy by the literal model, with the top of every logit row.

Written once and stored, so that a change of the engine and of the reference at the same time is seen too.
Run as a module to write a file anew: ``python -m outrider.testing.golden FILE.json``.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.testing.reference_k3 import reference_forward
from outrider.testing.toy import ToyOptions, deep_toy, toy_config, toy_tensors

__all__ = ["GOLDEN_PROMPTS", "GOLDEN_SEED", "GoldenRun", "GoldenStep", "golden_run", "read_golden", "write_golden"]

NUM_TOP = 5
GOLDEN_SEED = 3
# Sixteen tokens fill one chunk of the engine exactly; the others end inside one.
GOLDEN_PROMPTS: Mapping[str, tuple[int, ...]] = {
    "chunk": (12, 200, 33, 47, 5, 91, 150, 222, 18, 64, 101, 9, 240, 77, 130, 56),
    "short": (88, 3, 171),
}
NUM_TOKENS: Mapping[str, int] = {"chunk": 24, "short": 12}


@dataclass(frozen=True, slots=True, kw_only=True)
class GoldenStep:
    """The row that chose one token: its ``NUM_TOP`` largest logits, float64, ties by lower id."""

    token_ids: tuple[int, ...]
    logits: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GoldenRun:
    """One prompt and its greedy continuation; ``steps[i].token_ids[0]`` is the i-th output token."""

    prompt_token_ids: tuple[int, ...]
    steps: tuple[GoldenStep, ...]

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The continuation."""
        return tuple(step.token_ids[0] for step in self.steps)


def golden_run(options: ToyOptions, seed: int, prompt_token_ids: Sequence[int], num_tokens: int) -> GoldenRun:
    """Continue a prompt greedily by full recomputation with the literal model, float64."""
    tensors, config = toy_tensors(options, seed), toy_config(options)
    token_ids, steps = list(prompt_token_ids), []
    for _ in range(num_tokens):
        logits = reference_forward(tensors, config, token_ids).logits_TV[-1].tolist()
        ranked = sorted(range(len(logits)), key=lambda token_id: (-logits[token_id], token_id))[:NUM_TOP]
        steps.append(GoldenStep(token_ids=tuple(ranked), logits=tuple(logits[token_id] for token_id in ranked)))
        token_ids.append(ranked[0])
    return GoldenRun(prompt_token_ids=tuple(prompt_token_ids), steps=tuple(steps))


def write_golden(path: Path) -> None:
    """Compute and write the golden runs of the deep toy."""
    runs = {
        name: golden_run(deep_toy(), GOLDEN_SEED, prompt, NUM_TOKENS[name]) for name, prompt in GOLDEN_PROMPTS.items()
    }
    rows: dict[str, Any] = {
        name: {
            "prompt_token_ids": run.prompt_token_ids,
            "steps": [{"token_ids": step.token_ids, "logits": step.logits} for step in run.steps],
        }
        for name, run in runs.items()
    }
    path.write_text(json.dumps({"toy": "deep_toy", "seed": GOLDEN_SEED, "runs": rows}, indent=1), encoding="utf-8")


def read_golden(path: Path) -> dict[str, GoldenRun]:
    """The stored runs by name."""
    rows = json.loads(path.read_text(encoding="utf-8"))["runs"]
    return {
        name: GoldenRun(
            prompt_token_ids=tuple(row["prompt_token_ids"]),
            steps=tuple(
                GoldenStep(token_ids=tuple(step["token_ids"]), logits=tuple(step["logits"])) for step in row["steps"]
            ),
        )
        for name, row in rows.items()
    }


if __name__ == "__main__":
    write_golden(Path(sys.argv[1]))
