"""Let the trained target answer training prompts: the data a drafter learns from.

A part of the prompts is answered greedily and a part at each given temperature; outputs that
loop are dropped. Sampling adds Gumbel noise to the logits in front of the greedy engine, which
draws exactly from softmax(logits / T).

Usage: ``python recipes/k3_small/rollouts.py models/k3-small TASKS.jsonl CORPUS.jsonl OUT_DIR
--minutes 12``, again to go on after an interruption
"""

import argparse
import json
import random
import sys
import time
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from answering import answer_all, plain_engine

from outrider.batch import ForwardBatch, TargetOutput
from outrider.bench.loops import ends_in_loop
from outrider.cache.cache_set import CacheSet
from outrider.models.registry import load_target
from outrider.request import SamplingParams
from outrider.tokenizer import Tokenizer, load_tokenizer

CONTINUATION_SHARE = 0.08  # raw text prompts, no chat form
TEMPERATURES = (0.0, 0.7, 0.0, 1.0)  # half greedy
MAX_PROMPT = 2048


class SampledTarget:
    """A target whose greedy choice is a draw at ``temperature``."""

    def __init__(self, target, temperature: float, seed: int) -> None:  # type: ignore[no-untyped-def]
        self.target, self.temperature = target, temperature
        self.generator = torch.Generator().manual_seed(seed)
        self.vocab_size, self.cache_layouts = target.vocab_size, target.cache_layouts
        self.set_aux_layers = target.set_aux_layers

    def forward(self, batch: ForwardBatch, caches: CacheSet) -> TargetOutput:
        """The target's logits over the temperature plus Gumbel noise."""
        output = self.target.forward(batch, caches)
        if self.temperature == 0:
            return output
        uniform = torch.rand(output.logits_NV.shape, generator=self.generator).clamp_(1e-9, 1 - 1e-7)
        noisy = output.logits_NV.float() / self.temperature - (-uniform.log()).log()
        return TargetOutput(logits_NV=noisy, aux_hidden_TAD=output.aux_hidden_TAD)


class PromptSource:
    """Training prompts: chat tasks, now and then the start of a text."""

    def __init__(self, tasks: Path, corpus: Path, tokenizer: Tokenizer) -> None:
        self.tasks = tasks.read_text(encoding="utf8").splitlines()
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
        turns = json.loads(rng.choice(self.tasks))["turns"]
        return self.tokenizer.render_chat([{"role": "user", "content": turns[0]["content"]}])


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


def roll(arguments: argparse.Namespace) -> None:
    """Answer prompts in batches, the temperatures in turn, until the minutes are spent."""
    torch.set_num_threads(arguments.threads)
    tokenizer = load_tokenizer(arguments.model)
    target = load_target(arguments.model, dtype=torch.bfloat16, device=torch.device("cpu"))
    source = PromptSource(arguments.tasks, arguments.corpus, tokenizer)
    writer = Writer(arguments.out)
    started = time.monotonic() - writer.counts["seconds"]
    stop_ids = tuple(sorted({tokenizer.special_token_id("<|end_of_msg|>"), tokenizer.special_token_id("[EOS]")}))
    limit = SamplingParams(max_tokens=arguments.max_tokens, stop_token_ids=stop_ids)
    while time.monotonic() - started < arguments.minutes * 60:
        number = writer.counts["batches"]
        sampled = SampledTarget(target, TEMPERATURES[number % len(TEMPERATURES)], seed=number)
        engine = plain_engine(
            sampled,
            chunk_multiple=target.chunk_multiple,
            num_seats=arguments.seats,
            max_model_len=MAX_PROMPT + 512,
        )
        asked = source.draw(f"{arguments.seed}/{number}", arguments.batch, MAX_PROMPT)
        for prompt, answer in zip(asked, answer_all(engine, asked, limit), strict=True):
            writer.add(prompt, answer.token_ids, answer.stop_id)
        writer.finish_batch(round(time.monotonic() - started))
        print(writer.counts, file=sys.stderr, flush=True)


def main() -> None:
    """Parse the arguments and roll."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("tasks", type=Path)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--minutes", type=float, default=12)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--seats", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=320)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=7)
    roll(parser.parse_args())


if __name__ == "__main__":
    main()
