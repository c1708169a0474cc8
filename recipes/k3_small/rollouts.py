"""Let the trained target answer training prompts: the data a drafter learns from.

A part of the prompts is answered greedily and a part at each given temperature; outputs that
loop are dropped.

Usage: ``python recipes/k3_small/rollouts.py models/k3-small TASKS.jsonl CORPUS.jsonl OUT_DIR
--minutes 12``, again to go on after an interruption
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from train_drafter import load_target

from outrider.engine.loops import ends_in_loop
from outrider.tokenizer import Tokenizer, load_tokenizer
from outrider.training.lockstep import LockstepModel, answer_all

CONTINUATION_SHARE = 0.08  # raw text prompts, no chat form
TEMPERATURES = (0.0, 0.7, 0.0, 1.0)  # half greedy
LONGEST_SHARE = 800  # characters: about as much as an answer may have tokens
LOOP_CHECK = 16  # output tokens between two looks for a loop


class PromptSource:
    """Training prompts: chat tasks, now and then the start of a text."""

    def __init__(self, tasks: Path, corpus: Path, tokenizer: Tokenizer) -> None:
        rows = (json.loads(line)["turns"] for line in tasks.read_text(encoding="utf8").splitlines())
        self.questions, lengths = zip(*((turns[0]["content"], len(turns[1]["content"])) for turns in rows), strict=True)
        # By what they will say, not by row: else short answers (sums, sorting) crowd out copying and prose.
        self.shares = list(accumulate(min(length, LONGEST_SHARE) for length in lengths))
        self.texts = corpus.read_text(encoding="utf8").splitlines()
        self.tokenizer = tokenizer

    def draw(self, seed: str, num_prompts: int, max_tokens: int) -> list[list[int]]:
        """``num_prompts`` prompts of at most ``max_tokens``, the same for the same seed."""
        rng, drawn = random.Random(seed), []
        while len(drawn) < num_prompts:
            ids = self._continuation(rng) if rng.random() < CONTINUATION_SHARE else self._question(rng)
            if 0 < len(ids) <= max_tokens:
                drawn.append(ids)
        return drawn

    def _continuation(self, rng: random.Random) -> list[int]:
        text = json.loads(rng.choice(self.texts))["text"]
        start = rng.randrange(max(1, len(text) - 400))
        return self.tokenizer.encode(text[start : start + rng.randint(60, 400)])

    def _question(self, rng: random.Random) -> list[int]:
        (question,) = rng.choices(self.questions, cum_weights=self.shares)
        return self.tokenizer.render_chat([{"role": "user", "content": question}])


class Writer:
    """Appends conversations to the arrays ``train_drafter.py`` reads."""

    def __init__(self, out: Path) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self.out, self.offsets = out, [0]
        self.counts = {"batches": 0, "seconds": 0, "kept": 0, "looping": 0, "short": 0, "output_tokens": 0}
        if (out / "counts.json").exists():
            self.counts = json.loads((out / "counts.json").read_text())
            self.offsets = np.load(out / "rollouts.offsets.npy").tolist()
        self.ids, self.answer = self._open("ids", 2), self._open("answer", 1)

    def _open(self, name: str, item_bytes: int) -> BinaryIO:
        """The array to append to, cut back to the last whole batch."""
        path = self.out / f"rollouts.{name}.bin"
        path.touch()
        file = path.open("r+b")
        file.truncate(self.offsets[-1] * item_bytes)
        file.seek(0, 2)
        return file

    def add(self, prompt: list[int], output: list[int], stop_id: int | None) -> None:
        """Keep a conversation unless it loops or says next to nothing."""
        if ends_in_loop(output):
            self.counts["looping"] += 1
            return
        if len(output) < 14:
            self.counts["short"] += 1
            return
        # The stop token is an output too: the drafter should see the end coming.
        answer = output if stop_id is None else [*output, stop_id]
        np.array(prompt + answer, dtype=np.uint16).tofile(self.ids)
        np.array([0] * len(prompt) + [1] * len(answer), dtype=np.uint8).tofile(self.answer)
        self.offsets.append(self.offsets[-1] + len(prompt) + len(answer))
        self.counts["kept"] += 1
        self.counts["output_tokens"] += len(answer)

    def finish_batch(self, seconds: int) -> None:
        """Make everything so far survive an interruption."""
        self.counts["batches"] += 1
        self.counts["seconds"] = seconds
        self.ids.flush()
        self.answer.flush()
        np.save(self.out / "rollouts.offsets.npy", np.array(self.offsets, dtype=np.int64))
        (self.out / "counts.json").write_text(json.dumps(self.counts) + "\n")


def hopeless(output: list[int]) -> bool:
    """Whether an output has run into a loop; looked at now and then only."""
    return len(output) % LOOP_CHECK == 0 and ends_in_loop(output)


def roll(arguments: argparse.Namespace) -> None:
    """Answer prompts in batches, the temperatures mixed, until the minutes are spent."""
    torch.set_num_threads(arguments.threads)
    tokenizer = load_tokenizer(arguments.model)
    model = load_target(arguments.model)
    source = PromptSource(arguments.tasks, arguments.corpus, tokenizer)
    writer = Writer(arguments.out)
    started = time.monotonic() - writer.counts["seconds"]
    stop_ids = tuple(sorted({tokenizer.special_token_id("<|end_of_msg|>"), tokenizer.special_token_id("[EOS]")}))
    # Several batches share the seats: a batch's last long answers would leave most of them idle.
    number = writer.counts["batches"]

    def prompts() -> Iterator[tuple[list[int], float]]:
        batch = number
        while time.monotonic() - started < arguments.minutes * 60:
            asked = source.draw(f"{arguments.seed}/{batch}", arguments.seats, arguments.max_prompt)
            for index, prompt in enumerate(asked):
                yield prompt, TEMPERATURES[index % len(TEMPERATURES)]
            batch += 1

    lockstep = LockstepModel(model, arguments.seats, arguments.max_prompt + arguments.max_tokens)
    generator = torch.Generator().manual_seed(arguments.seed * 100_003 + number)
    answers = answer_all(
        lockstep,
        prompts(),
        max_tokens=arguments.max_tokens,
        stop_ids=stop_ids,
        generator=generator,
        give_up=hopeless,
    )
    for count, answer in enumerate(answers, 1):
        writer.add(answer.prompt, answer.token_ids, answer.stop_id)
        if count % arguments.seats == 0:
            writer.finish_batch(round(time.monotonic() - started))
            print(writer.counts, file=sys.stderr, flush=True)
    writer.finish_batch(round(time.monotonic() - started))


def main() -> None:
    """Parse the arguments and roll."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("tasks", type=Path)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--minutes", type=float, default=12)
    parser.add_argument("--seats", type=int, default=128, help="prompts answered side by side")
    parser.add_argument("--max-prompt", type=int, default=1024)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=7)
    roll(parser.parse_args())


if __name__ == "__main__":
    main()
