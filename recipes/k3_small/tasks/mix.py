"""Mixing the kinds of tasks by their shares of bytes, and writing them."""

import json
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tasks.corpus import build_world
from tasks.high import next_part, role_play, scene, write_about
from tasks.low_code import code_edit, completion, remove_docstrings
from tasks.low_tables import extraction, fill_template, reformat, table_lookup
from tasks.low_text import line_edit, reorder_parts, repetition, replace_word, sorting
from tasks.mixed_arithmetic import arithmetic
from tasks.mixed_needle import needle
from tasks.mixed_reading import definition, explain_docs, explain_entry, quote_sentence, summary
from tasks.world import ANSWER_LIMIT, Example, Row, World

__all__ = ["write_tasks"]

SHORT_LIMIT, LONG_LIMIT = 3500, 8000
LONG_SHARE = 0.2
ENOUGH_FAILURES = 3000


@dataclass(frozen=True)
class Task:
    """A kind of task: tier, weight by bytes, maker, and whether it has long examples."""

    kind: str
    tier: str
    weight: float
    make: Callable[[World, bool], Example | None]
    long: bool = False


TASKS = (
    Task("repetition", "low", 9.0, repetition, True),
    Task("sorting", "low", 6.0, sorting),
    Task("reformat", "low", 8.0, reformat, True),
    Task("extraction", "low", 4.5, extraction),
    Task("code_edit", "low", 7.0, code_edit, True),
    Task("remove_docstrings", "low", 7.0, remove_docstrings, True),
    Task("reorder_parts", "low", 5.5, reorder_parts, True),
    Task("completion", "low", 4.5, completion, True),
    Task("line_edit", "low", 1.5, line_edit),
    Task("fill_template", "low", 0.6, fill_template),
    Task("replace_word", "low", 1.9, replace_word),
    Task("needle", "mixed", 6.5, needle, True),
    Task("arithmetic", "mixed", 4.5, arithmetic),
    Task("quote_sentence", "mixed", 2.5, quote_sentence, True),
    Task("definition", "mixed", 1.2, definition),
    Task("explain_entry", "mixed", 0.5, explain_entry),
    Task("explain_docs", "mixed", 1.3, explain_docs),
    Task("summary", "mixed", 2.5, summary, True),
    Task("table_lookup", "mixed", 1.0, table_lookup),
    Task("scene", "high", 8.0, scene, True),
    Task("next_part", "high", 8.0, next_part, True),
    Task("write_about", "high", 5.5, write_about),
    Task("role_play", "high", 3.5, role_play),
)


def acceptable(example: Example, long: bool) -> bool:
    total = len(example.question) + len(example.answer)
    return (
        0 < len(example.answer) <= ANSWER_LIMIT
        and total <= (LONG_LIMIT if long else SHORT_LIMIT)
        and example.question.isascii()
        and example.answer.isascii()
    )


def as_row(task: Task, example: Example) -> Row:
    row: Row = {
        "kind": task.kind,
        "tier": task.tier,
        "turns": [{"role": "user", "content": example.question}, {"role": "assistant", "content": example.answer}],
    }
    if example.exact:
        row["reference"] = [example.answer]
    return row


def generate(world: World, even: bool) -> Iterator[tuple[Row, int]]:
    """Endless rows with their size; even gives every kind the same number of rows."""
    written = {task.kind: 0.0 for task in TASKS}
    failures: Counter[str] = Counter()
    seen: set[str] = set()
    while True:
        open_tasks = [task for task in TASKS if failures[task.kind] < ENOUGH_FAILURES]
        if not open_tasks:
            return
        task = min(open_tasks, key=lambda t: written[t.kind] / (1 if even else t.weight))
        long = task.long and world.rng.random() < LONG_SHARE
        example = task.make(world, long)
        if example is None or not acceptable(example, long) or example.question in seen:
            failures[task.kind] += 1
            continue
        failures[task.kind] = 0
        seen.add(example.question)
        size = len(example.question) + len(example.answer)
        written[task.kind] += 1 if even else size
        yield as_row(task, example), size


def report(rows: Counter[str], sizes: Counter[str]) -> None:
    total = sum(sizes.values())
    for task in TASKS:
        print(
            f"{task.tier:6}{task.kind:20}{rows[task.kind]:7} rows {sizes[task.kind]:11} bytes "
            f"{100 * sizes[task.kind] / total:5.1f} %",
            file=sys.stderr,
        )
    print(f"{sum(rows.values())} rows, {total} bytes of text", file=sys.stderr)


def write_tasks(corpus: str, out: str, megabytes: float, valid: int, seed: int) -> None:
    """Write ``megabytes`` of tasks made from ``corpus``, or ``valid`` rows of even kinds if that is not 0."""
    world = build_world(corpus, random.Random(seed))
    rows: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    with open(out, "w", encoding="utf8") as file:
        for row, size in generate(world, valid > 0):
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
            rows[row["kind"]] += 1
            sizes[row["kind"]] += size
            if sum(rows.values()) == valid or (not valid and sum(sizes.values()) >= megabytes * 1e6):
                break
    report(rows, sizes)
