"""Low tier: texts and lines to copy, replace, reorder and sort."""

import re
from collections.abc import Callable
from typing import Any

from tasks.corpus import sentences
from tasks.passages import NOVELS, SCRIPTURE, SENTENCE_PROSE, SPEECHES, framed, keywords, passage, short_date
from tasks.words import CITIES, NAMES, ORDINALS
from tasks.world import Example, World

__all__ = ["line_edit", "reorder_parts", "repetition", "replace_word", "sorting"]

REPEAT = (
    "Repeat the following text exactly, word for word.",
    "Repeat this text word for word.",
    "Copy the text below without changing anything.",
    "Write out the following passage again, exactly as it stands.",
    "Reproduce the text below verbatim.",
    "Say this again, word for word.",
    "Type the following exactly as written.",
    "Please echo the following back to me, exactly.",
    "Give me back the same text, with no changes.",
    "Write the text below once more. Do not add or leave out anything.",
    "Repeat after me:",
    "Copy this:",
    "Output the following text unchanged and nothing else.",
    "Quote the text below in full.",
)


def random_lines(world: World) -> str:
    """Words, numbers or codes that no language model could guess: only copying gives them."""
    rng = world.rng
    style = rng.randrange(4)
    if style == 0:
        return " ".join(rng.sample(world.words, rng.randint(6, 30)))
    if style == 1:
        return "\n".join(rng.sample(world.words, rng.randint(4, 14)))
    if style == 2:
        return " ".join(str(rng.randint(1, 9999)) for _ in range(rng.randint(5, 25)))
    return "\n".join(f"{rng.choice(world.words)}: {rng.randint(1, 999)}" for _ in range(rng.randint(3, 10)))


def any_text(world: World, low: int, high: int) -> str | None:
    """A piece of prose, a function, a documentation paragraph or random lines."""
    rng = world.rng
    draw = rng.random()
    if draw < 0.68:
        return passage(world, SENTENCE_PROSE + ("moby-dick",) * 2, low, high, rng.choice(["\n\n", " "]))
    if draw < 0.83:
        function = world.functions.draw()
        return function.text if function and low <= len(function.text) <= high else None
    if draw < 0.93:
        section = world.sections.draw()
        text = "\n\n".join(section[1])[:high] if section else ""
        return text[: text.rfind(". ") + 1] if text.rfind(". ") >= low else None
    return random_lines(world)


def repetition(world: World, long: bool) -> Example | None:
    rng = world.rng
    low = rng.choice([40, 150, 300, 500])
    text = any_text(world, 1200, 2500) if long else any_text(world, low, max(2 * low, 300))
    return Example(framed(rng, rng.choice(REPEAT), text), text) if text else None


def replace_word(world: World, long: bool) -> Example | None:
    rng = world.rng
    text = passage(world, SENTENCE_PROSE, 150, 900)
    chosen = keywords(world, text, 1) if text else None
    if not text or not chosen:
        return None
    old, new = chosen[0], rng.choice(world.words)
    instruction = rng.choice(
        [
            f'Replace the word "{old}" by "{new}" everywhere in this text. Return the whole text.',
            f"Write this text again, but with {new} instead of {old}.",
            f'Copy the following text and change every "{old}" to "{new}".',
            f"Substitute `{new}` for `{old}` in the passage below and leave the rest as it is.",
        ]
    )
    return Example(framed(rng, instruction, text), re.sub(rf"\b{old}\b", new, text))


def reorder_parts(world: World, long: bool) -> Example | None:
    rng = world.rng
    size = rng.randint(1500, 2500) if long else rng.randint(300, 1500)
    text = passage(world, NOVELS * 3 + SPEECHES + SCRIPTURE, size, size + 300)
    if not text:
        return None
    number = rng.choice([4, 4, 4, 3, 5])
    if rng.random() < 0.65:
        step = -(-len(text) // number)
        parts = [text[i * step : (i + 1) * step] for i in range(number)]
    else:
        pieces = sentences(text)
        step = -(-len(pieces) // number)
        parts = [" ".join(pieces[i * step : (i + 1) * step]) for i in range(number)]
        text = " ".join(pieces)
    order = rng.sample(range(number), number)
    if order == sorted(order) or not all(part.strip() for part in parts):
        return None
    count = ("three", "four", "five")[number - 3]
    instruction = rng.choice(
        [
            f"These {count} parts of a book are in random order. Write all the parts in the correct order and do not "
            "change the text.",
            f"The {count} parts below belong to one text but were mixed up. Put them in the right order and write out "
            "the whole text.",
            f"Here are {count} pieces of a passage, shuffled. Join them again in the order in which they belong.",
            "Restore the order of these parts. Write the text only.",
        ]
    )
    label = rng.choice(["Part", "Part", "Piece"])
    body = "\n\n".join(f"{label} {k + 1}: {parts[o].strip()}" for k, o in enumerate(order))
    tail = rng.choice(["\n\nAnswer:", "\n\nAnswer:", ""])
    return Example(framed(rng, instruction, body + tail), text)


def plain_items(world: World) -> list[str]:
    rng = world.rng
    number = rng.randint(3, 14)
    kind = rng.randrange(4)
    if kind == 3:
        return rng.sample(NAMES, number)
    return rng.sample(CITIES if kind == 2 else world.words, number)


def record_items(world: World) -> tuple[list[str], str, Callable[[str], Any]]:
    """Lines with several fields, how to sort them, and the key."""
    rng = world.rng
    number = rng.randint(3, 10)
    rows = [(rng.choice(NAMES), rng.randint(10, 99), rng.choice(CITIES)) for _ in range(number)]
    separator = rng.choice([",", ",", ", ", ";", " | "])
    position = rng.randrange(3)
    field_name = ORDINALS[position]
    lines = [separator.join(map(str, row)) for row in rows]
    if position == 1:
        how = rng.choice(["by the second field, smallest first", "by the number, from small to large", "by age"])
        return lines, how, lambda line: int(line.split(separator)[1])
    how = rng.choice([f"by the {field_name} field", f"alphabetically by the {field_name} field"])
    return lines, how, lambda line: line.split(separator)[position]


def dated_items(world: World) -> list[str]:
    rng = world.rng
    return [f"{short_date(rng)} {word}" for word in rng.sample(world.words, rng.randint(3, 11))]


def sorting(world: World, long: bool) -> Example | None:
    rng = world.rng
    kind = rng.randrange(4)
    key: Callable[[str], Any] = str
    reverse = False
    if kind == 0:
        items = plain_items(world)
        reverse = rng.random() < 0.12
        how = (
            "in reverse alphabetical order"
            if reverse
            else rng.choice(["alphabetically", "alphabetically", "in alphabetical order", "from A to Z"])
        )
    elif kind == 1:
        items = [str(n) for n in rng.sample(range(1, rng.choice([100, 1000, 1000, 10000])), rng.randint(3, 14))]
        key, reverse = int, rng.random() < 0.2
        how = (
            "in decreasing numeric order"
            if reverse
            else rng.choice(
                [
                    "in increasing numeric order",
                    "in increasing numeric order",
                    "from smallest to largest",
                    "numerically",
                ]
            )
        )
    elif kind == 2:
        items, how, key = record_items(world)
    else:
        items = dated_items(world)
        how = rng.choice(["by date", "by date", "from the oldest to the newest", "in chronological order"])
    instruction = rng.choice(
        [
            f"Sort these lines {how}. Write one item per line and nothing else.",
            f"Sort these lines {how}. Write one item per line and nothing else.",
            f"Sort the following list {how}.",
            f"Put these lines in order: {how}.",
            f"Please sort this {how}, one a line.",
            f"Arrange the items below {how}. Give only the sorted list.",
        ]
    )
    answer = "\n".join(sorted(items, key=key, reverse=reverse))
    return Example(framed(rng, instruction, "\n".join(items)), answer)


LINE_EDITS: tuple[tuple[str, Callable[[list[str]], list[str]]], ...] = (
    ("Write these lines in reverse order, the last one first.", lambda lines: lines[::-1]),
    ("Reverse the order of the lines below.", lambda lines: lines[::-1]),
    ("Number these lines.", lambda lines: [f"{i + 1}. {line}" for i, line in enumerate(lines)]),
    ("Put a number before each line, starting at 1.", lambda lines: [f"{i + 1}. {l}" for i, l in enumerate(lines)]),
    ("Write the following in capital letters.", lambda lines: [line.upper() for line in lines]),
    ("Change this text to upper case.", lambda lines: [line.upper() for line in lines]),
    ("Make everything lower case.", lambda lines: [line.lower() for line in lines]),
    ("Turn these lines into a bulleted list.", lambda lines: [f"- {line}" for line in lines]),
    ("Put quotation marks around each line.", lambda lines: [f'"{line}"' for line in lines]),
    ("Join these lines with commas.", lambda lines: [", ".join(lines)]),
    ("Write every second line, starting with the first.", lambda lines: lines[::2]),
    ("Give only the first three lines.", lambda lines: lines[:3]),
    ("Remove the duplicates from this list and keep the order.", lambda lines: list(dict.fromkeys(lines))),
)


def line_edit(world: World, long: bool) -> Example | None:
    rng = world.rng
    instruction, edit = rng.choice(LINE_EDITS)
    if rng.random() < 0.3:
        text = passage(world, SENTENCE_PROSE, 150, 600)
        lines = sentences(text) if text else []
    else:
        lines = plain_items(world)
    if "duplicates" in instruction:
        lines = [rng.choice(lines[:5]) if rng.random() < 0.3 else line for line in lines]
    if len(lines) < 3:
        return None
    return Example(framed(rng, instruction, "\n".join(lines)), "\n".join(edit(lines)))
