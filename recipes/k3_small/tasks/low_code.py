"""Low tier: Python code to edit, to strip of docstrings and to complete."""

import random
import re
from collections.abc import Sequence

from tasks.passages import fenced, framed
from tasks.world import ANSWER_LIMIT, Example, World

__all__ = ["code_edit", "completion", "remove_docstrings"]


def code_edit(world: World, long: bool) -> Example | None:
    rng = world.rng
    function = world.functions.draw()
    if not function or (len(function.text) > 900 and not long):
        return None
    kinds = [("parameter", function.parameters[:2])] * 3 + [
        ("variable", function.variables),
        ("function", (function.name,)),
    ]
    kind, names = rng.choice(kinds)
    if not names:
        return None
    old = rng.choice(names)
    new = rng.choice(
        [
            f"{old}_value",
            f"{old}_value",
            f"new_{old}",
            rng.choice(world.words),
            f"{old}_",
            f"{rng.choice(world.words)}_{old.strip('_')}",
        ]
    )
    if new == old or re.search(rf"\b{re.escape(new)}\b", function.text):
        return None
    instruction = rng.choice(
        [
            f"Rename the {kind} `{old}` to `{new}` everywhere in this function. Return the whole function.",
            f"Rename the {kind} `{old}` to `{new}` everywhere in this function. Return the whole function.",
            f"In the function below, change the name of the {kind} `{old}` to `{new}`. Write the whole function.",
            f"Rewrite this Python function with `{new}` in place of `{old}`.",
            f"Please rename `{old}` to `{new}` in the following code and return all of it.",
        ]
    )
    answer = re.sub(rf"\b{re.escape(old)}\b", new, function.text)
    return Example(framed(rng, instruction, fenced(function.text)), answer)


def remove_docstrings(world: World, long: bool) -> Example | None:
    rng = world.rng
    module = world.modules.draw()
    if not module:
        return None
    size = rng.randint(3000, 5000) if long else rng.randint(500, 1900)
    starts = [
        i
        for i, line in enumerate(module.lines)
        if i
        and not module.lines[i - 1].strip()
        and line.strip()
        and (module.stripped[i] is not None or module.stripped[i - 1] is not None)
    ]
    if not starts:
        return None
    position = rng.choice(starts)
    before: list[str] = []
    after: list[str] = []
    total = 0
    while position < len(module.lines) and total + len(module.lines[position]) <= size:
        before.append(module.lines[position])
        total += len(module.lines[position]) + 1
        kept = module.stripped[position]
        after += [kept] if kept is not None else []
        position += 1
    if position < len(module.lines) and module.stripped[position] == module.lines[position] and rng.random() < 0.6:
        line = module.lines[position][: rng.randint(4, 80)]
        before.append(line)
        after.append(line)
    source, answer = "\n".join(before).rstrip(), "\n".join(after).rstrip()
    if not source.isascii() or not 100 < len(answer) < min(len(source) - 20, ANSWER_LIMIT):
        return None
    instruction = rng.choice(
        [
            "Here is a Python module. Write it out again in full, unchanged, except that every docstring is removed.",
            "Here is a Python module. Write it out again in full, unchanged, except that every docstring is removed.",
            "Remove the docstrings from this code. Leave everything else as it is.",
            "Return the following Python code without its docstrings.",
            "Copy this piece of a module but leave out all docstrings.",
        ]
    )
    return Example(framed(rng, instruction, fenced(source)), answer)


REDUCTIONS = (
    ("the sum of", "sum({0})"),
    ("the number of", "len(list({0}))"),
    ("the largest of", "max({0})"),
    ("the smallest of", "min({0})"),
    ("a list of", "list({0})"),
    ("a sorted list of", "sorted({0})"),
)
FILTERS = (
    ("all the {0}", ""),
    ("the even {0}", " if {1} % 2 == 0"),
    ("the odd {0}", " if {1} % 2 == 1"),
    ("the positive {0}", " if {1} > 0"),
    ("the negative {0}", " if {1} < 0"),
    ("the {0} above {2}", " if {1} > {2}"),
    ("the {0} divisible by {2}", " if {1} % {2} == 0"),
)
MAPPINGS = (("", "{0}"), ("squares of ", "{0} ** 2"), ("doubles of ", "2 * {0}"), ("absolute values of ", "abs({0})"))


def simple_function(rng: random.Random, words: Sequence[str]) -> tuple[str, str]:
    """Head (signature and docstring) and body of a small made-up function on a list of numbers."""
    reduction, filter_, mapping = rng.choice(REDUCTIONS), rng.choice(FILTERS), rng.choice(MAPPINGS)
    values, item = rng.choice(["numbers", "values", "items", "nums"]), rng.choice(["x", "n", "value", "number"])
    limit = rng.randint(2, 20)
    what = f"{reduction[0]} {mapping[0] and 'the ' + mapping[0]}{filter_[0].format(values, item, limit)}"
    condition = filter_[1].format(values, item, limit)
    expression = reduction[1].format(f"{mapping[1].format(item)} for {item} in {values}{condition}")
    name = rng.choice(["compute", "get", "find", "make", "count", rng.choice(words)]) + "_" + rng.choice(words)
    hint = rng.random() < 0.4
    signature = f"def {name}({values}{': List[int]' if hint else ''}):"
    quote = rng.choice(["'''", '"""'])
    text = rng.choice([f"Write a function to return {what}.", f"Return {what}.", f"Find {what} in the given list."])
    head = f"{signature}\n    {quote}\n    {text}\n    {quote}"
    return ("from typing import List\n\n\n" if hint else "") + head, f"    return {expression}"


def completion(world: World, long: bool) -> Example | None:
    rng = world.rng
    if rng.random() < 0.15:
        head, body = simple_function(rng, world.words)
        answer = f"{head}\n{body}"
    else:
        function = world.functions.draw()
        if not function or function.head_lines < 2 or (len(function.text) > 1100 and not long):
            return None
        lines = function.text.split("\n")
        head, answer = "\n".join(lines[: function.head_lines]), function.text
        if len(answer) - len(head) > 800:
            return None
    instruction = rng.choice(
        [
            "Complete the following Python function. Return the whole function.",
            "Write the body of this Python function. Return the whole function.",
            "Complete the following Python function. Return the whole function.",
            "Finish this function.",
            "Implement the Python function below as its docstring says.",
            "Here are the head and docstring of a function. Write the complete function.",
        ]
    )
    return Example(framed(rng, instruction, fenced(head)), answer, False)
