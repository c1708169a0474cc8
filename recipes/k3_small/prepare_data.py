"""Tokenise the corpus and the chat tasks of k3-small into flat arrays.

Writes ``text.bin`` (uint16 ids, documents joined by [EOS]) and, for the tasks,
``tasks.ids.bin`` (uint16), ``tasks.answer.bin`` (uint8, 1 where the token is the assistant's)
and ``tasks.offsets.npy`` (int64, one more than examples).

Usage: ``python recipes/k3_small/prepare_data.py TOKENIZER.json OUT --text CORPUS.jsonl`` or
``... --tasks TASKS.jsonl``
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

BATCH = 512


def batches(path: Path) -> Iterator[list[dict]]:
    """Rows of a JSONL file, ``BATCH`` at a time."""
    rows: list[dict] = []
    with path.open(encoding="utf8") as lines:
        for line in lines:
            rows.append(json.loads(line))
            if len(rows) == BATCH:
                yield rows
                rows = []
    if rows:
        yield rows


class ChatEncoder:
    """K3's chat form, segment by segment: structure by id, text with no special token."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        tokenizer.encode_special_tokens = True
        self.ids = {
            name: tokenizer.token_to_id(name) for name in ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>")
        }
        self.pieces = {
            name: tokenizer.encode(name).ids
            for name in ('message role="user"', 'message role="assistant"', "message", "response")
        }

    def start(self, role: str) -> list[int]:
        """``<|open|>message role="..."<|sep|>`` and, for the assistant, the response channel."""
        opened, sep = self.ids["<|open|>"], self.ids["<|sep|>"]
        head = [opened, *self.pieces[f'message role="{role}"'], sep]
        if role == "assistant":
            head += [opened, *self.pieces["response"], sep]
        return head

    def end(self, role: str) -> list[int]:
        """What closes a message of ``role``."""
        closed, sep = self.ids["<|close|>"], self.ids["<|sep|>"]
        tail = [closed, *self.pieces["response"], sep] if role == "assistant" else []
        return [*tail, closed, *self.pieces["message"], sep, self.ids["<|end_of_msg|>"]]

    def encode(self, roles: list[str], texts: list[list[int]]) -> tuple[list[int], list[int]]:
        """Ids of a conversation and 1 for each id the assistant has to produce."""
        ids: list[int] = []
        answer: list[int] = []
        for role, text in zip(roles, texts, strict=True):
            head, tail = self.start(role), self.end(role)
            ids += head + text + tail
            produced = int(role == "assistant")
            answer += [0] * len(head) + [produced] * (len(text) + len(tail))
        return ids, answer


def write_text(tokenizer: Tokenizer, corpus: Path, out: Path) -> int:
    """Tokenise the plain documents; returns the number of tokens."""
    end_of_document = tokenizer.token_to_id("[EOS]")
    tokenizer.encode_special_tokens = True
    total = 0
    with out.open("wb") as target:
        for rows in batches(corpus):
            for encoding in tokenizer.encode_batch([row["text"] for row in rows]):
                array = np.array([*encoding.ids, end_of_document], dtype=np.uint16)
                array.tofile(target)
                total += len(array)
    return total


def write_tasks(tokenizer: Tokenizer, tasks: Path, out: Path, prefix: str) -> int:
    """Tokenise the conversations; returns the number of tokens."""
    encoder, offsets = ChatEncoder(tokenizer), [0]
    with (
        (out / f"{prefix}.ids.bin").open("wb") as ids_file,
        (out / f"{prefix}.answer.bin").open("wb") as answer_file,
    ):
        for rows in batches(tasks):
            contents = [turn["content"] for row in rows for turn in row["turns"]]
            encodings = iter(tokenizer.encode_batch(contents))
            for row in rows:
                roles = [turn["role"] for turn in row["turns"]]
                ids, answer = encoder.encode(roles, [next(encodings).ids for _ in roles])
                np.array(ids, dtype=np.uint16).tofile(ids_file)
                np.array(answer, dtype=np.uint8).tofile(answer_file)
                offsets.append(offsets[-1] + len(ids))
    np.save(out / f"{prefix}.offsets.npy", np.array(offsets, dtype=np.int64))
    return offsets[-1]


def main() -> None:
    """Tokenise what the arguments name."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--tasks", type=Path)
    parser.add_argument("--prefix", default="tasks")
    arguments = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(arguments.tokenizer))
    arguments.out.mkdir(parents=True, exist_ok=True)
    if arguments.text:
        print("text tokens", write_text(tokenizer, arguments.text, arguments.out / "text.bin"))
    if arguments.tasks:
        count = write_tasks(tokenizer, arguments.tasks, arguments.out, arguments.prefix)
        print(arguments.prefix, "tokens", count)


if __name__ == "__main__":
    main()
