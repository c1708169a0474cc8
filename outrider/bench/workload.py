"""Prompts to measure with: rows of a JSONL file, drawn the same way for every arm and concurrency."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from outrider.errors import RequestError

__all__ = ["BenchPrompt", "PromptSet", "demo_prompt_path", "draw_prompts", "load_prompt_set"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchPrompt:
    """One row of a prompt file; of several turns only the first is used."""

    question_id: str
    tier: str
    sub_category: str
    text: str
    body_span: tuple[int, int] | None = None  # characters of the text that may be cut to shorten it


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSet:
    """A prompt file: its name without the suffix, the SHA-256 of its bytes, and its rows in order."""

    name: str
    sha256: str
    prompts: tuple[BenchPrompt, ...]


def demo_prompt_path() -> Path:
    """The prompts shipped with the package: three tiers, eight of our own in each."""
    return Path(str(resources.files("outrider.bench"))) / "prompts" / "demo.jsonl"


def load_prompt_set(path: Path) -> PromptSet:
    """Read a prompt file.

    Each line is an object with `question_id`, `category` (the tier), `sub_category` and `turns`, and optionally
    `body_span`, the [start, end) of the characters of the first turn that are mere filler.

    Raises:
        RequestError: the file cannot be read, or a line lacks a field; the message names the line.
    """
    try:
        content = path.read_bytes()
        # Not str.splitlines: a text may hold U+2028 and its like as they are, and they end no JSON line.
        lines = content.decode("utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"cannot read prompts from {path}: {error}; give a UTF-8 JSONL file") from error
    prompts = [_parse_row(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()]
    return PromptSet(name=path.stem, sha256=hashlib.sha256(content).hexdigest(), prompts=tuple(prompts))


def _parse_row(line: str, where: str) -> BenchPrompt:
    try:
        row = json.loads(line)
        prompt = BenchPrompt(
            question_id=str(row["question_id"]),
            tier=str(row["category"]),
            sub_category=str(row["sub_category"]),
            text=row["turns"][0] if isinstance(row["turns"], list) else "",
            body_span=_body_span(row.get("body_span")),
        )
    except (ValueError, KeyError, IndexError, TypeError, RecursionError) as error:
        raise RequestError(
            f"{where} is no prompt row ({type(error).__name__}: {error}); "
            "it needs question_id, category, sub_category and a list of turns"
        ) from error
    if not isinstance(prompt.text, str) or not prompt.text:
        raise RequestError(f"{where}: the first turn is not a text; correct turns[0]")
    if prompt.body_span is not None and not 0 <= prompt.body_span[0] <= prompt.body_span[1] <= len(prompt.text):
        raise RequestError(
            f"{where}: body_span {prompt.body_span} is not in the {len(prompt.text)} characters of turns[0]"
        )
    return prompt


def _body_span(value: object) -> tuple[int, int] | None:
    if value is None:
        return None
    if not isinstance(value, list) or [type(item) for item in value] != [int, int]:
        raise TypeError("body_span is no pair of integers")
    return value[0], value[1]


def draw_prompts(prompts: Sequence[BenchPrompt], tier: str, num_prompts: int) -> tuple[BenchPrompt, ...]:
    """The first `num_prompts` of a tier, or all if it has fewer, taking turns over its sub-categories.

    Sub-categories take turns in the order in which they appear; within each, file order holds. The draw
    depends on nothing else, so every arm, concurrency and later run gets the same prompts.

    Raises:
        RequestError: the tier has no prompt, or none is asked for.
    """
    queues: dict[str, list[BenchPrompt]] = {}
    for prompt in prompts:
        if prompt.tier == tier:
            queues.setdefault(prompt.sub_category, []).append(prompt)
    if num_prompts < 1:
        raise RequestError(f"num_prompts={num_prompts} is out of range; use 1 or more")
    if not queues:
        tiers = ", ".join(sorted({prompt.tier for prompt in prompts})) or "none"
        raise RequestError(f"tier {tier!r} has no usable prompts (tiers here: {tiers}); name another tier")
    turns = max(len(queue) for queue in queues.values())
    drawn = [queue[turn] for turn in range(turns) for queue in queues.values() if turn < len(queue)]
    return tuple(drawn[:num_prompts])
