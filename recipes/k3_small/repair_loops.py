"""Teach the trained target not to run into loops: unlikelihood on its own repetitions.

Takes the place of the last part of ``train_target.py``'s falling learning rate: start it from a run
stopped there, at the rate it had reached, so that ordinary loss and loops come down together.

A small model's greedy output falls into loops that its training text never shows. Each round lets
the model answer training prompts greedily, marks the tokens by which an output repeats itself, and
takes a few steps that push those tokens' probability down (Welleck et al. 2020, sequence-level
unlikelihood) beside ordinary batches. Resumes like ``train_target.py``.

Usage: ``python recipes/k3_small/repair_loops.py DATA_DIR TASKS.jsonl CORPUS.jsonl TOKENIZER_DIR OUT_DIR
--init TARGET/checkpoint.pt --minutes 5``
"""

import argparse
import json
import random
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parent))

from rollouts import PromptSource
from train_target import Mixture, Trainer, weighted_loss

from outrider.engine.loops import MAX_PERIOD, MIN_REPEATS
from outrider.tokenizer import Tokenizer, load_tokenizer
from outrider.training.lockstep import LockstepModel, answer_all

LENGTH, ANSWER_LENGTH, SEATS, STEPS_PER_ROUND = 384, 160, 96, 24
SHORTEST_RUN = 5  # repeated tokens before a loop is one: "1000" is not
ROWS = 6  # looping rows per step; always as many, so that shapes never change
ORDINARY_LENGTHS = (512, 1024, 1024, 2048)  # in turn, until the last part
LONG_FROM = 0.6  # share of the minutes after which every ordinary row is as long as the longest


def repeated(token_ids: list[int]) -> list[bool]:
    """Tokens that belong to the second or a later copy of a block written three times in a row."""
    marks = [False] * len(token_ids)
    for period in range(1, MAX_PERIOD + 1):
        run = 0
        for index in range(period, len(token_ids)):
            run = run + 1 if token_ids[index] == token_ids[index - period] else 0
            if run >= max(period * (MIN_REPEATS - 1), SHORTEST_RUN):
                marks[index - run + 1 : index + 1] = [True] * run
    return marks


def answers(trainer: Trainer, asked: list[list[int]], stop_ids: tuple[int, ...]) -> list[list[int]]:
    """Greedy outputs of the current weights."""
    trainer.model.eval()
    lockstep = LockstepModel(trainer.model, SEATS, LENGTH)
    prompts = [(prompt, 0.0) for prompt in asked]
    generator = torch.Generator()
    found = answer_all(lockstep, prompts, max_tokens=ANSWER_LENGTH, stop_ids=stop_ids, generator=generator)
    outputs = {answer.index: answer.token_ids for answer in found}
    trainer.model.train()
    return [outputs[index] for index in range(len(asked))]


def unlikelihood(trainer: Trainer, rows: list[tuple[list[int], list[bool]]]) -> torch.Tensor:
    """Mean of -log(1 - p) over the marked tokens of rows of ``LENGTH``."""
    ids = torch.zeros(len(rows), LENGTH + 1, dtype=torch.int64)
    marks = torch.zeros(len(rows), LENGTH + 1, dtype=torch.bool)
    for row, (token_ids, repeats) in enumerate(rows):
        size = min(len(token_ids), LENGTH + 1)
        ids[row, :size] = torch.tensor(token_ids[:size])
        marks[row, :size] = torch.tensor(repeats[:size])
    hidden, _ = trainer.model(ids[:, :-1].contiguous())
    picked = marks[:, 1:]
    log_probabilities = F.log_softmax(trainer.model.lm_head(hidden[picked]), -1)
    repeats_log = log_probabilities.gather(1, ids[:, 1:][picked].unsqueeze(1))
    return -torch.log1p(-repeats_log.exp().clamp_max(0.9999)).mean()


def run(arguments: argparse.Namespace) -> None:
    """Rounds of answering and stepping until the minutes are spent."""
    trainer = Trainer(arguments.out, arguments.lr)
    if trainer.step == 0:
        trainer.load(arguments.init)
        trainer.step, trainer.seconds = 0, 0.0
    tokenizer: Tokenizer = load_tokenizer(arguments.tokenizer)
    stop_ids = (tokenizer.special_token_id("<|close|>"), tokenizer.special_token_id("[EOS]"))
    mixture = Mixture(arguments.data, arguments.text_share)
    source = PromptSource(arguments.tasks, arguments.corpus, tokenizer)
    log = (arguments.out / "log.jsonl").open("a")
    started, before = time.monotonic(), trainer.seconds
    while time.monotonic() - started + before < arguments.minutes * 60:
        asked = source.draw(f"repair/{trainer.step}", SEATS, LENGTH - ANSWER_LENGTH)
        outputs = answers(trainer, asked, stop_ids)
        rows = [
            (prompt + output, [False] * len(prompt) + repeated(output))
            for prompt, output in zip(asked, outputs, strict=True)
        ]
        looping = [row for row in rows if any(row[1][: LENGTH + 1])]
        for _ in range(STEPS_PER_ROUND):
            picked = random.Random(trainer.step).sample(looping, min(ROWS, len(looping)))
            progress = min(1.0, (time.monotonic() - started + before) / (arguments.minutes * 60))
            length = ORDINARY_LENGTHS[-1 if progress > LONG_FROM else trainer.step % len(ORDINARY_LENGTHS)]
            ordinary = mixture.batch(500_000 + trainer.step, length, 4096)
            loss = weighted_loss(trainer.model, ordinary)
            if picked and trainer.step % 2 == 0:
                padded = (picked * ROWS)[:ROWS]
                loss = loss + arguments.weight * unlikelihood(trainer, padded)
            value = trainer.apply(loss, 1.0 - 0.95 * progress)
            trainer.step += 1
        trainer.seconds = time.monotonic() - started + before
        record = {"step": trainer.step, "s": round(trainer.seconds), "loss": round(value, 4)}
        log.write(json.dumps(record | {"looping": len(looping), "of": len(rows)}) + "\n")
        log.flush()
        trainer.save()


def main() -> None:
    """Parse the arguments and run."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("data", "tasks", "corpus", "tokenizer", "out"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--init", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--lr", type=float, default=0.006)
    parser.add_argument("--text-share", type=float, default=0.3)
    parser.add_argument("--weight", type=float, default=1.0)
    run(parser.parse_args())


if __name__ == "__main__":
    main()
