"""Prompts that a target answers for its drafter: from files, or written by the target itself."""

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from outrider.errors import RequestError, UnsupportedError
from outrider.tokenizer import Tokenizer

__all__ = ["file_prompts", "read_questions", "self_prompt_prefix"]

# Stands for what a user says when a template is rendered to see what comes before it.
PLACEHOLDER = "user words"


def read_questions(paths: Sequence[Path]) -> list[list[dict[str, Any]]]:
    """Chats of JSONL files, each up to a message that wants an answer.

    A line holds ``prompt`` (text), ``messages`` (chat) or ``turns`` (texts, or chat messages; the first is the question).

    Raises:
        RequestError: a file cannot be read, or a line holds none of them; the message names the line.
    """
    chats = []
    for path in paths:
        try:
            lines = path.read_text(encoding="utf-8").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise RequestError(f"cannot read prompts from {path}: {error}; give a UTF-8 JSONL file") from error
        for number, line in enumerate(lines, 1):
            if line.strip():
                chats.append(_chat(line, f"{path}:{number}"))
    if not chats:
        raise RequestError(f"{', '.join(map(str, paths))} hold no prompt")
    return chats


def _chat(line: str, where: str) -> list[dict[str, Any]]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{where} is not JSON ({error})") from error
    if isinstance(row, dict):
        prompt, messages, turns = row.get("prompt"), row.get("messages"), row.get("turns")
        if isinstance(prompt, str):
            return [{"role": "user", "content": prompt}]
        if isinstance(messages, list) and messages:
            last = len(messages) if messages[-1].get("role") != "assistant" else len(messages) - 1
            return messages[:last]
        if isinstance(turns, list) and turns:
            first = turns[0]
            return [first if isinstance(first, dict) else {"role": "user", "content": str(first)}]
    raise RequestError(f"{where} holds none of prompt, messages and turns")


def file_prompts(
    chats: Sequence[Sequence[dict[str, Any]]], tokenizer: Tokenizer, seed: str
) -> Iterator[tuple[int, ...]]:
    """Token ids of randomly drawn chats, for ever; the same for the same seed."""
    dice = random.Random(seed)
    while True:
        yield tuple(tokenizer.render_chat(dice.choice(chats)))


def self_prompt_prefix(tokenizer: Tokenizer) -> tuple[int, ...]:
    """What the chat template writes before a user's words: an instruct model goes on with a question of its own.

    Source: Xu et al. 2024, "Magpie" (arXiv 2406.08464).

    Raises:
        UnsupportedError: the checkpoint renders no chats, or not so that the user's words stand in one piece.
    """
    words = tokenizer.encode(PLACEHOLDER)
    ids = tokenizer.render_chat([{"role": "user", "content": PLACEHOLDER}])
    for begin in range(len(ids) - len(words) + 1):
        if ids[begin : begin + len(words)] == words:
            return tuple(ids[:begin])
    raise UnsupportedError("the chat template of the target does not keep a user's words in one piece; give --prompts")
