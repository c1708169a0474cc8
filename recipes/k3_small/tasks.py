"""Deterministic generator of chat-form training tasks for the small K3 language model.

Reads the training corpus (one JSON object a line: kind, source, text) and writes one task a line:
kind, tier (low, mixed, high), turns (user and assistant) and, where one answer is right, reference.
The mix is set by bytes: at every step the kind that is furthest behind its share is made next.

    python recipes/k3_small/tasks.py CORPUS.jsonl OUT.jsonl --megabytes 40 --seed 1
    python recipes/k3_small/tasks.py VALID.jsonl OUT.jsonl --valid 350 --seed 2
"""
from __future__ import annotations

import argparse
import ast
import csv
import io
import json
import random
import re
import sys
import textwrap
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

Item = TypeVar("Item")
Row = dict[str, Any]

TIERS = ("low", "mixed", "high")
SHORT_LIMIT, LONG_LIMIT, ANSWER_LIMIT = 3500, 8000, 2600
LONG_SHARE = 0.2
ENOUGH_FAILURES = 3000
NOVELS = ("austen", "moby-dick")
SPEECHES = ("sotu",)
SCRIPTURE = ("web-bible", "kjv-bible")
SENTENCE_PROSE = NOVELS + SPEECHES + SCRIPTURE


def split_words(text: str) -> list[str]:
    """The words of a constant below."""
    return text.split()


NAMES = split_words(
    "Abel Agnes Alma Amos Anton Arlo Astrid Basil Bea Bruno Camille Carlo Cecil Clara Cyrus Daphne Dario Delia "
    "Dora Edgar Edith Elias Elsa Emil Enid Esther Ezra Fay Felix Fiona Flora Frank Greta Gus Hana Hazel Helen "
    "Henry Hilda Ida Igor Irene Iris Ivan Jack Jane Jasper Joan Jonas Judith Julia Kamal Kira Lars Leo Lily Louis "
    "Lucia Luna Mabel Marco Maria Martha Max Mina Miriam Mona Nadia Ned Nina Noel Olga Omar Oscar Otis Paula "
    "Percy Peter Priya Ralph Ravi Rita Robin Ruth Sami Sara Simon Sofia Stella Tariq Tess Theo Tilda Toby Uma "
    "Ursula Vera Victor Viola Walter Wanda Willa Yusuf Yvonne Zara Zelda Ada Cora Finn Hugo Ines Karl Lena Milo "
    "Nora Otto Pia Rosa Sven Tara")
CITIES = split_words(
    "Accra Aden Ankara Athens Baku Bath Berlin Bern Bogota Boston Bristol Brno Bruges Bucharest Cadiz Cali "
    "Chicago Cologne Cork Crete Dallas Denver Derby Dover Dublin Dundee Durban Exeter Fargo Florence Galway "
    "Geneva Genoa Graz Hamburg Havana Helsinki Hobart Houston Kiel Kobe Krakow Lagos Leipzig Lisbon London Lyon "
    "Madrid Manila Memphis Milan Minsk Monaco Nairobi Naples Nice Odessa Oxford Palermo Paris Parma Pisa Plymouth "
    "Prague Reno Riga Rome Salem Santos Seville Siena Sofia Sparta Sydney Tokyo Toledo Toronto Trieste Turku "
    "Utrecht Valencia Vienna Vigo Warsaw York Zagreb Zurich Oslo Lima Cairo Quito Delhi Osaka Porto Bergen Ghent "
    "Dakar Hanoi Leeds Perth")
DEPARTMENTS = split_words(
    "sales support legal design finance research marketing security training logistics planning purchasing "
    "testing accounts production kitchen library")
COLORS = split_words(
    "red blue green yellow black white brown orange purple grey pink silver golden crimson violet")
ITEMS = split_words(
    "apples pears books pencils marbles stamps coins shells cards stickers buttons oranges cookies eggs tickets "
    "bottles candles flowers balloons postcards beads lemons plums stones cups plates")
ORDINALS = split_words("first second third fourth fifth sixth seventh eighth ninth tenth")
MONTHS = split_words(
    "January February March April May June July August September October November December")
QUOTES = str.maketrans({"\u2018": "'", "\u2019": "'", "\u201c": '"', "\u201d": '"', "\u2013": "-", "\u2014": "--",
                        "\u2026": "...", "\u00a0": " "})
SENTENCE_END = re.compile(r"(?:(?<=[.!?])|(?<=[.!?][\"')]))"
                          r"(?<!\bMr\.)(?<!\bMrs\.)(?<!\bDr\.)(?<!\bSt\.)\s+(?=[A-Z\"'(])")

NOUN_PLACE = re.compile(r"\b(?:the|a|an|his|her|my|our|their|your|no|this) ([a-z]{4,12})"
                        r"(?=[.,;:!?]| (?:of|and|in|to|was|were|is|on|with|for|that|which|had|has|at|from|by)\b)")


class Deck(Generic[Item]):
    """Draws items in shuffled rounds, so that nothing comes again before everything has come once."""

    def __init__(self, items: Iterable[Item], rng: random.Random) -> None:
        self.items = list(items)
        self.rng = rng
        self.waiting: list[int] = []

    def draw(self) -> Item | None:
        if not self.items:
            return None
        if not self.waiting:
            self.waiting = list(range(len(self.items)))
            self.rng.shuffle(self.waiting)
        return self.items[self.waiting.pop()]


@dataclass(frozen=True)
class Function:
    """A function of the corpus: its text, parameters, assigned names and the end of its docstring."""

    name: str
    text: str
    parameters: tuple[str, ...]
    variables: tuple[str, ...]
    head_lines: int


@dataclass(frozen=True)
class Module:
    """The lines of a module and what each becomes without docstrings (None: dropped)."""

    lines: tuple[str, ...]
    stripped: tuple[str | None, ...]


@dataclass
class World:
    """Everything the tasks draw from."""

    rng: random.Random
    prose: dict[str, Deck[list[str]]]
    scenes: Deck[list[str]]
    functions: Deck[Function]
    modules: Deck[Module]
    sections: Deck[tuple[str, list[str]]]
    glosses: Deck[tuple[str, str, str]]
    entries: Deck[tuple[str, str]]
    words: list[str]
    counts: Counter[str]
    nouns: set[str]


@dataclass(frozen=True)
class Example:
    """One question and its answer; exact says that no other answer is right."""

    question: str
    answer: str
    exact: bool = True


# ---------------------------------------------------------------------------------------------- reading the corpus


def flow(text: str) -> str:
    """A paragraph on one line, with plain quotation marks."""
    return re.sub(r"\s*\n\s*", " ", text).strip().translate(QUOTES)


def sentences(text: str) -> list[str]:
    return [part.strip() for part in SENTENCE_END.split(text) if part.strip()]


def word_count(text: str) -> int:
    return len(text.split())


def repeats_itself(text: str) -> bool:
    """True if many runs of four words come twice."""
    words = text.lower().split()
    runs = [tuple(words[i: i + 4]) for i in range(len(words) - 3)]
    return len(runs) > 8 and len(set(runs)) < 0.93 * len(runs)


def prose_paragraphs(text: str) -> list[str]:
    """ASCII paragraphs on one line each; very long ones are cut into groups of sentences."""
    paragraphs: list[str] = []
    for raw in re.split(r"\n\s*\n", text):
        paragraph = flow(raw)
        if not paragraph.isascii() or len(paragraph) < 2 or "....." in paragraph:
            continue
        if len(paragraph) <= 1400:
            paragraphs.append(paragraph)
            continue
        group = ""
        for sentence in sentences(paragraph):
            group = f"{group} {sentence}".strip()
            if len(group) >= 450:
                paragraphs.append(group)
                group = ""
        if group:
            paragraphs.append(group)
    return paragraphs


def speeches_of_play(text: str) -> list[str]:
    """The speeches of a play, each with its speaker on the first line."""
    text = text.translate(QUOTES).replace("]]", "]")
    parts = re.split(r"\n\n(?=[A-Z][A-Z ]+\n)", text)
    return [part.strip() for part in parts if re.match(r"[A-Z][A-Z ]+\n\S", part.strip()) and part.isascii()]


def docstring_of(node: ast.AST) -> ast.Expr | None:
    body = getattr(node, "body", None)
    if isinstance(body, list) and body and isinstance(body[0], ast.Expr):
        value = body[0].value
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            return body[0]
    return None


def parse_function(node: ast.FunctionDef, lines: Sequence[str]) -> Function | None:
    text = textwrap.dedent("\n".join(lines[node.lineno - 1: node.end_lineno]))
    if not 120 <= len(text) <= 1700 or not text.isascii() or not text.startswith("def "):
        return None
    body_lines = [line.strip() for line in text.split("\n") if line.strip()]
    if len(set(body_lines)) < 0.75 * len(body_lines):
        return None
    docstring = docstring_of(node)
    head = (docstring.end_lineno or 0) - node.lineno + 1 if docstring and len(node.body) > 1 else 0
    parameters = [a.arg for a in node.args.args if a.arg not in ("self", "cls") and len(a.arg) > 1]
    assigned = {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    variables = sorted(name for name in assigned if len(name) > 2 and name not in parameters)
    return Function(node.name, text, tuple(parameters), tuple(variables), head)


def parse_code(text: str) -> tuple[list[Function], Module | None]:
    """The functions of a module and its lines without docstrings."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return [], None
    lines = text.split("\n")
    stripped: list[str | None] = list(lines)
    functions: list[Function] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            function = parse_function(node, lines)
            if function:
                functions.append(function)
        if not isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        docstring = docstring_of(node)
        if docstring is None or not lines[docstring.lineno - 1].strip().startswith(("'", '"', "r", "R", "u")):
            continue
        for number in range(docstring.lineno - 1, docstring.end_lineno or docstring.lineno):
            stripped[number] = None
        if len(node.body) == 1 and not isinstance(node, ast.Module):
            stripped[docstring.lineno - 1] = " " * docstring.col_offset + "pass"
    has_docstrings = sum(line is None for line in stripped) > 2
    return functions, Module(tuple(lines), tuple(stripped)) if has_docstrings else None


def clean_markup(text: str) -> str:
    """Plain text of a paragraph of reStructuredText."""
    text = re.sub(r":[\w:+-]+:`~?([^`<]+?)\s*(?:<[^`>]*>)?`", r"\1", text)
    text = re.sub(r"`([^`<]+?)\s*<[^`>]*>`_*", r"\1", text)
    return re.sub(r"``([^`]*)``", r"\1", text).replace("**", "").rstrip(":")


def doc_sections(text: str) -> list[tuple[str, list[str]]]:
    """(heading, paragraphs) of a documentation page; only plain paragraphs are kept."""
    found: list[tuple[str, list[str]]] = []
    pieces = re.split(r"(?m)^([A-Z][^\n]{3,60})\n([=\-~^\"'*+#])\2{3,}\s*$", text)
    for heading, body in zip(pieces[1::3], pieces[3::3], strict=True):
        paragraphs: list[str] = []
        for raw in re.split(r"\n\s*\n", body):
            plain = clean_markup(flow(raw))
            simple = re.match(r"[A-Z`]", plain) and not raw.startswith((" ", "..", "*", "-")) and plain.isascii()
            if simple and word_count(plain) >= 10 and not re.search(r":\w+:|\|_|\.\. ", plain):
                paragraphs.append(plain)
        title = clean_markup(heading.strip())
        if paragraphs and title.isascii():
            found.append((title, paragraphs))
    return found


def dictionary_entries(source: str, text: str) -> list[tuple[str, str]]:
    """(word, explanation) of the two humorous dictionaries."""
    text = text.translate(QUOTES)
    if source == "jargon-file":
        found = re.findall(r"(?m)^ *:([a-z][\w -]{2,24}): [^\n]*\n\n((?: +\S[^\n]*\n)+)", text)
    else:
        found = re.findall(r"(?m)^([A-Z]{4,}), n\.  ((?:\S[^\n]*\n)+)", text)
    entries = [(word.lower(), re.sub(r"[{}_]", "", flow(body))) for word, body in found]
    return [(word, re.sub(r"^\[[^\]]*\] ", "", body)) for word, body in entries if body.isascii() and len(body) > 40]


def read_corpus(path: str) -> Iterator[tuple[str, str, str]]:
    with open(path, encoding="utf8") as file:
        for line in file:
            row = json.loads(line)
            yield row["kind"], row["source"], row["text"]


def build_world(path: str, rng: random.Random) -> World:
    prose: dict[str, list[list[str]]] = defaultdict(list)
    scenes: list[list[str]] = []
    functions: list[Function] = []
    modules: list[Module] = []
    sections: list[tuple[str, list[str]]] = []
    glosses: list[tuple[str, str, str]] = []
    entries: list[tuple[str, str]] = []
    counts: Counter[str] = Counter()
    noun_counts: Counter[str] = Counter()
    for kind, source, text in read_corpus(path):
        if kind == "code":
            found, module = parse_code(text)
            functions += found
            modules += [module] if module else []
        elif source == "shakespeare":
            scenes.append(speeches_of_play(text))
        elif source in ("jargon-file", "devils-dictionary"):
            entries += dictionary_entries(source, text)
        elif source == "wordnet-glosses":
            glosses += re.findall(r"(?m)^([A-Za-z][\w' -]+) \((noun|verb|adj|adv)\): ([ -~]+)$", text)
        elif kind == "prose":
            prose[source].append(prose_paragraphs(text))
        elif kind == "tech":
            sections += doc_sections(text)
        if kind == "prose":
            counts.update(re.findall(r"\b[a-z]{3,12}\b", text))
            noun_counts.update(NOUN_PLACE.findall(text))
    words = sorted(word for word, count in counts.items() if count >= 12 and 4 <= len(word) <= 9) or list(ITEMS)
    world = World(rng, {name: Deck(docs, rng) for name, docs in prose.items()}, Deck(scenes, rng),
                  Deck(functions, rng), Deck(modules, rng), Deck(sections, rng), Deck(glosses, rng),
                  Deck(entries, rng), words, counts, set())
    common = {word for word, _ in counts.most_common(250)}
    world.nouns = {word for word, count in noun_counts.items() if count >= max(2, 0.15 * counts[word])} - common
    return world


# ---------------------------------------------------------------------------------------------------- shared helpers


def framed(rng: random.Random, instruction: str, body: str) -> str:
    return f"{instruction}\n\n{body}" + ("\n" if rng.random() < 0.7 else "")


def fenced(text: str) -> str:
    return f"```python\n{text}\n```"


def paragraphs_between(world: World, sources: Sequence[str], low: int, high: int) -> list[str] | None:
    """Neighbouring paragraphs of one text, together low to high characters, whole sentences only."""
    rng = world.rng
    deck = world.prose.get(rng.choice([s for s in sources if s in world.prose] or [""]))
    document = deck.draw() if deck else None
    if not document:
        return None
    chosen: list[str] = []
    size = 0
    for paragraph in document[rng.randrange(len(document)):]:
        if len(paragraph) < 40 and not chosen:
            continue
        if size + len(paragraph) > high:
            cut: list[str] = []
            for sentence in sentences(paragraph):
                if size >= low or size + len(sentence) > high:
                    break
                cut.append(sentence)
                size += len(sentence) + 1
            chosen += [" ".join(cut)] if cut else []
            break
        chosen.append(paragraph)
        size += len(paragraph) + 2
        if size >= low:
            break
    return chosen if low <= size <= high + 20 and not repeats_itself(" ".join(chosen)) else None


def passage(world: World, sources: Sequence[str], low: int, high: int, joint: str = "\n\n") -> str | None:
    chosen = paragraphs_between(world, sources, low, high)
    return joint.join(chosen) if chosen else None


def continuation(paragraphs: Sequence[str], words: int) -> str | None:
    """Whole paragraphs from the start, 60 to 220 words; the last one may be cut at a sentence."""
    taken: list[str] = []
    total = 0
    for paragraph in paragraphs:
        size = word_count(paragraph)
        if total + size <= max(words, 60):
            taken.append(paragraph)
            total += size
            continue
        if total < 60:
            cut: list[str] = []
            for sentence in sentences(paragraph):
                if total >= 60 and total + word_count(sentence) > words:
                    break
                cut.append(sentence)
                total += word_count(sentence)
            taken.append(" ".join(cut))
        break
    text = "\n\n".join(part for part in taken if part)
    whole = bool(text) and text[-1] in ".!?\"')" and 60 <= total <= 220
    return text if whole and not repeats_itself(text) else None


def keywords(world: World, text: str, number: int) -> list[str] | None:
    """Content words of a passage, preferably nouns, in the order they come."""
    found = Counter(re.findall(r"\b[a-z]{4,12}\b", text))
    nouns = [w for w in found if w in world.nouns]
    nouns.sort(key=lambda w: (-found[w], world.counts[w], w))
    if len(nouns) < number:
        return None
    chosen = world.rng.sample(nouns[: number + 4], number)
    return sorted(chosen, key=text.index)


def listed(words: Sequence[str], article: str = "") -> str:
    parts = [f"{article}{word}" for word in words]
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]


def short_date(rng: random.Random) -> str:
    return f"{rng.randint(1990, 2029)}-{rng.randint(1, 12):02d}-{rng.randint(1, 28):02d}"


# ----------------------------------------------------------------------------------------------------- low: copying

REPEAT = (
    "Repeat the following text exactly, word for word.", "Repeat this text word for word.",
    "Copy the text below without changing anything.", "Write out the following passage again, exactly as it stands.",
    "Reproduce the text below verbatim.", "Say this again, word for word.", "Type the following exactly as written.",
    "Please echo the following back to me, exactly.", "Give me back the same text, with no changes.",
    "Write the text below once more. Do not add or leave out anything.", "Repeat after me:", "Copy this:",
    "Output the following text unchanged and nothing else.", "Quote the text below in full.")


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
    instruction = rng.choice([
        f'Replace the word "{old}" by "{new}" everywhere in this text. Return the whole text.',
        f"Write this text again, but with {new} instead of {old}.",
        f'Copy the following text and change every "{old}" to "{new}".',
        f"Substitute `{new}` for `{old}` in the passage below and leave the rest as it is."])
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
        parts = [text[i * step: (i + 1) * step] for i in range(number)]
    else:
        pieces = sentences(text)
        step = -(-len(pieces) // number)
        parts = [" ".join(pieces[i * step: (i + 1) * step]) for i in range(number)]
        text = " ".join(pieces)
    order = rng.sample(range(number), number)
    if order == sorted(order) or not all(part.strip() for part in parts):
        return None
    count = ("three", "four", "five")[number - 3]
    instruction = rng.choice([
        f"These {count} parts of a book are in random order. Write all the parts in the correct order and do not "
        "change the text.",
        f"The {count} parts below belong to one text but were mixed up. Put them in the right order and write out the "
        "whole text.",
        f"Here are {count} pieces of a passage, shuffled. Join them again in the order in which they belong.",
        "Restore the order of these parts. Write the text only."])
    label = rng.choice(["Part", "Part", "Piece"])
    body = "\n\n".join(f"{label} {k + 1}: {parts[o].strip()}" for k, o in enumerate(order))
    tail = rng.choice(["\n\nAnswer:", "\n\nAnswer:", ""])
    return Example(framed(rng, instruction, body + tail), text)


# ----------------------------------------------------------------------------------------------------- low: lines


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
        how = "in reverse alphabetical order" if reverse else rng.choice(
            ["alphabetically", "alphabetically", "in alphabetical order", "from A to Z"])
    elif kind == 1:
        items = [str(n) for n in rng.sample(range(1, rng.choice([100, 1000, 1000, 10000])), rng.randint(3, 14))]
        key, reverse = int, rng.random() < 0.2
        how = "in decreasing numeric order" if reverse else rng.choice(
            ["in increasing numeric order", "in increasing numeric order", "from smallest to largest", "numerically"])
    elif kind == 2:
        items, how, key = record_items(world)
    else:
        items = dated_items(world)
        how = rng.choice(["by date", "by date", "from the oldest to the newest", "in chronological order"])
    instruction = rng.choice([
        f"Sort these lines {how}. Write one item per line and nothing else.",
        f"Sort these lines {how}. Write one item per line and nothing else.",
        f"Sort the following list {how}.", f"Put these lines in order: {how}.", f"Please sort this {how}, one a line.",
        f"Arrange the items below {how}. Give only the sorted list."])
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
    ("Remove the duplicates from this list and keep the order.", lambda lines: list(dict.fromkeys(lines))))


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


# -------------------------------------------------------------------------------------------- low: tables and forms


def columns(world: World) -> list[tuple[str, Callable[[int], Any]]]:
    """Names of columns, each with a function from the number of the row to a value."""
    rng = world.rng
    start = rng.choice([1, 1, 100, 1000, rng.randint(2, 9000)])
    usual: list[tuple[str, Callable[[int], Any]]] = [
        ("id", lambda i: start + i), ("name", lambda i: rng.choice(NAMES)), ("city", lambda i: rng.choice(CITIES)),
        ("dept", lambda i: rng.choice(DEPARTMENTS)), ("age", lambda i: rng.randint(18, 80)),
        ("score", lambda i: round(rng.uniform(1, 99), 1))]
    if rng.random() < 0.4:
        return usual
    word, other = rng.sample(world.words, 2)
    more: list[tuple[str, Callable[[int], Any]]] = [
        ("price", lambda i: round(rng.uniform(1, 500), 2)), ("quantity", lambda i: rng.randint(1, 60)),
        ("date", lambda i: short_date(rng)), ("color", lambda i: rng.choice(COLORS)),
        ("item", lambda i: rng.choice(world.words)), ("year", lambda i: rng.randint(1900, 2030)),
        (rng.choice(["status", "state"]), lambda i: rng.choice(["open", "closed", "new", "done", "late"])),
        ("code", lambda i: f"{rng.choice('ABCDEFGHKLMNPRST')}{rng.randint(10, 999)}"),
        (word, lambda i: rng.choice(world.words)), (other, lambda i: rng.randint(0, 999))]
    chosen = rng.sample(usual[1:] + more, rng.randint(2, 5))
    return (usual[:1] if rng.random() < 0.5 else []) + chosen


def table(world: World, low: int = 2, high: int = 7) -> list[Row]:
    named = columns(world)
    return [{name: value(i) for name, value in named} for i in range(world.rng.randint(low, high))]


def as_csv(rows: Sequence[Row]) -> str:
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return buffer.getvalue().rstrip("\n")


def as_json_array(rows: Sequence[Row]) -> str:
    return "[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]"


def as_markdown(rows: Sequence[Row]) -> str:
    lines = [list(rows[0]), ["---"] * len(rows[0])] + [[str(value) for value in row.values()] for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def as_pairs(rows: Sequence[Row]) -> str:
    return "\n\n".join("\n".join(f"{name}: {value}" for name, value in row.items()) for row in rows)


def as_sql(rows: Sequence[Row], name: str) -> str:
    def literal(value: Any) -> str:
        return f"'{value}'" if isinstance(value, str) else str(value)
    return "\n".join(f"INSERT INTO {name} ({', '.join(row)}) VALUES ({', '.join(map(literal, row.values()))});"
                     for row in rows)


def as_json_source(rng: random.Random, rows: Sequence[Row]) -> str:
    return rng.choice([json.dumps(rows, indent=1), json.dumps(rows), as_json_array(rows), json.dumps(rows, indent=2)])


def reformat(world: World, long: bool) -> Example | None:
    rng = world.rng
    rows = table(world, 8, 14) if long else table(world)
    name = rng.choice(["people", "people", "items", "records", "orders", "data"])
    options: list[tuple[tuple[str, ...], str, str]] = [
        (("Convert this CSV to a JSON array of objects, one object per line.", "Turn the CSV below into a JSON array, "
          "with one object on each line.", "Write these CSV rows as JSON objects in an array, one per line."),
         as_csv(rows), as_json_array(rows)),
        (("Convert this JSON array to CSV with a header line.", "Rewrite this JSON as CSV. Begin with a header line.",
          "Make a CSV table from the following JSON."), as_json_source(rng, rows), as_csv(rows)),
        ((f"Turn each CSV line into a SQL INSERT statement for the table {name}.", f"Write SQL INSERT statements that "
          f"put these CSV rows into the table {name}."), as_csv(rows), as_sql(rows, name)),
        (("Convert this CSV to JSON lines.", "Write one JSON object per line for each row of this CSV."),
         as_csv(rows), "\n".join(map(json.dumps, rows))),
        (("Convert this markdown table to CSV.", "Rewrite the table below as CSV."), as_markdown(rows), as_csv(rows)),
        (("Convert this CSV to a markdown table.", "Show this CSV as a markdown table."),
         as_csv(rows), as_markdown(rows)),
        (("Write these records as a JSON array of objects, one object per line.", "Convert the key: value records "
          "below to a JSON array, one object per line."), as_pairs(rows), as_json_array(rows)),
        (("Write this JSON as key: value lines, with an empty line between records.",),
         as_json_source(rng, rows), as_pairs(rows)),
        ((f"Turn this JSON into SQL INSERT statements for the table {name}.",),
         as_json_source(rng, rows), as_sql(rows, name))]
    instructions, before, after = rng.choice(options[:3] * 2 + options)
    return Example(framed(rng, rng.choice(instructions), before), after)


def fill_template(world: World, long: bool) -> Example | None:
    rng = world.rng
    values = {"name": rng.choice(NAMES), "city": rng.choice(CITIES), "item": rng.choice(ITEMS), "date": short_date(rng),
              "number": str(rng.randint(2, 900)), "department": rng.choice(DEPARTMENTS), "color": rng.choice(COLORS)}
    lines = rng.sample([
        "Dear {name}, thank you for your order of {number} {color} {item}.", "It will leave {city} on {date}.",
        "If anything is missing, please ask the {department} office.", "Your customer number is {number}.",
        "We hope to see you in {city} soon.", "{name} from {department} will call you on {date}.",
        "The {color} box holds {number} {item}.", "Please bring {item} to {city}.",
        "On {date} the {department} team moves to {city}."], rng.randint(2, 5))
    template = "\n".join(lines)
    used = [key for key in values if "{" + key + "}" in template]
    rng.shuffle(used)
    pairs = "\n".join(f"{key}: {values[key]}" for key in used)
    instruction = rng.choice(["Fill in the template with the values below.", "Complete this template.",
                              "Replace every placeholder in the template by its value."])
    body = f"Template:\n{template}\n\nValues:\n{pairs}"
    return Example(framed(rng, instruction, body), template.format(**values))


def table_lookup(world: World, long: bool) -> Example | None:
    rng = world.rng
    rows = table(world, 4, 9)
    names = list(rows[0])
    key, wanted = rng.sample(names, 2)
    row = rng.choice(rows)
    if sum(other[key] == row[key] for other in rows) > 1:
        return None
    shown = rng.choice([as_csv, as_markdown, as_pairs])(rows)
    question = rng.choice([f"What is the {wanted} of the row whose {key} is {row[key]}?",
                           f"Which {wanted} belongs to {key} {row[key]}?",
                           f"Look up the {wanted} where {key} is {row[key]}."])
    answer = rng.choice([
        f"{row[wanted]}", f"The {wanted} is {row[wanted]}. It is in the row where {key} is {row[key]}.",
        f"It is {row[wanted]}: in the row with {key} {row[key]}, the {wanted} is {row[wanted]}."])
    return Example(framed(rng, rng.choice(["Use this table to answer the question.", "Here is a table."]),
                          f"{shown}\n\nQuestion: {question}"), answer, False)


# ---------------------------------------------------------------------------------------------------- low: extraction


def contact_sentences(rng: random.Random, number: int) -> tuple[list[str], dict[str, list[str]]]:
    """Sentences about people, and what they hold in order: e-mail addresses, names, dates, numbers, cities."""
    held: dict[str, list[str]] = {"e-mail address": [], "name": [], "date": [], "number": [], "city": []}
    lines: list[str] = []
    domain = rng.choice(["example.org", "example.net", "example.com", "mail.example", "post.example"])
    uniform = rng.randrange(6) if rng.random() < 0.5 else None
    for name in rng.sample(NAMES, number):
        city, department, number_ = rng.choice(CITIES), rng.choice(DEPARTMENTS), rng.randint(100, 9999)
        date = rng.choice([short_date(rng), f"{rng.randint(1, 28)} {rng.choice(MONTHS)} {rng.randint(1950, 2029)}"])
        address = rng.choice([f"{name.lower()}.{number_}@{domain}", f"{name.lower()}@{domain}",
                              f"{department}.{name.lower()}@{domain}"])
        style = uniform if uniform is not None else rng.randrange(6)
        lines.append((f"{name} ({department}, {city}) can be reached at {address}.",
                      f"On {date} {name} moved to {city}; write to {address}.",
                      f"{name} works in {city} and sold {number_} tickets.",
                      f"The address of {name} in {city} is {address}.",
                      f"{name} was born in {city} on {date}.",
                      f"Room {number_} in {city} is kept for {name} until {date}.")[style])
        held["name"].append(name)
        held["city"].append(city)
        for what, value, styles in (("e-mail address", address, (0, 1, 3)), ("date", date, (1, 4, 5)),
                                    ("number", str(number_), (2, 5))):
            if style in styles:
                held[what].append(value)
    return lines, held


def extraction(world: World, long: bool) -> Example | None:
    rng = world.rng
    lines, held = contact_sentences(rng, rng.randint(3, 8))
    what = rng.choice(["e-mail address", "e-mail address", "name", "date", "city", "number"])
    found = held[what]
    if len(found) < 2 or (what == "number" and (held["date"] or held["e-mail address"])):
        return None
    plural = {"e-mail address": "e-mail addresses", "city": "cities"}.get(what, what + "s")
    if what == "name":
        plural = "names of people"
    instruction = rng.choice([
        f"List every {what} in this text in the order they appear, one per line.",
        f"List every {what} in this text in the order they appear, one per line.",
        f"Extract all the {plural} from the text below. Write one per line.",
        f"Find the {plural} in the following text and list them in order.",
        f"Which {plural} does this text contain? Give them one per line and nothing else."])
    return Example(framed(rng, instruction, rng.choice([" ", " ", "\n"]).join(lines)), "\n".join(found))


# --------------------------------------------------------------------------------------------------------- low: code


def code_edit(world: World, long: bool) -> Example | None:
    rng = world.rng
    function = world.functions.draw()
    if not function or (len(function.text) > 900 and not long):
        return None
    kinds = [("parameter", function.parameters[:2])] * 3 + [("variable", function.variables),
                                                            ("function", (function.name,))]
    kind, names = rng.choice(kinds)
    if not names:
        return None
    old = rng.choice(names)
    new = rng.choice([f"{old}_value", f"{old}_value", f"new_{old}", rng.choice(world.words), f"{old}_",
                      f"{rng.choice(world.words)}_{old.strip('_')}"])
    if new == old or re.search(rf"\b{re.escape(new)}\b", function.text):
        return None
    instruction = rng.choice([
        f"Rename the {kind} `{old}` to `{new}` everywhere in this function. Return the whole function.",
        f"Rename the {kind} `{old}` to `{new}` everywhere in this function. Return the whole function.",
        f"In the function below, change the name of the {kind} `{old}` to `{new}`. Write the whole function.",
        f"Rewrite this Python function with `{new}` in place of `{old}`.",
        f"Please rename `{old}` to `{new}` in the following code and return all of it."])
    answer = re.sub(rf"\b{re.escape(old)}\b", new, function.text)
    return Example(framed(rng, instruction, fenced(function.text)), answer)


def remove_docstrings(world: World, long: bool) -> Example | None:
    rng = world.rng
    module = world.modules.draw()
    if not module:
        return None
    size = rng.randint(3000, 5000) if long else rng.randint(500, 1900)
    starts = [i for i, line in enumerate(module.lines) if i and not module.lines[i - 1].strip() and line.strip()
              and (module.stripped[i] is not None or module.stripped[i - 1] is not None)]
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
    instruction = rng.choice([
        "Here is a Python module. Write it out again in full, unchanged, except that every docstring is removed.",
        "Here is a Python module. Write it out again in full, unchanged, except that every docstring is removed.",
        "Remove the docstrings from this code. Leave everything else as it is.",
        "Return the following Python code without its docstrings.",
        "Copy this piece of a module but leave out all docstrings."])
    return Example(framed(rng, instruction, fenced(source)), answer)


REDUCTIONS = (("the sum of", "sum({0})"), ("the number of", "len(list({0}))"), ("the largest of", "max({0})"),
              ("the smallest of", "min({0})"), ("a list of", "list({0})"), ("a sorted list of", "sorted({0})"))
FILTERS = (("all the {0}", ""), ("the even {0}", " if {1} % 2 == 0"), ("the odd {0}", " if {1} % 2 == 1"),
           ("the positive {0}", " if {1} > 0"), ("the negative {0}", " if {1} < 0"),
           ("the {0} above {2}", " if {1} > {2}"), ("the {0} divisible by {2}", " if {1} % {2} == 0"))
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
    instruction = rng.choice([
        "Complete the following Python function. Return the whole function.",
        "Write the body of this Python function. Return the whole function.",
        "Complete the following Python function. Return the whole function.",
        "Finish this function.", "Implement the Python function below as its docstring says.",
        "Here are the head and docstring of a function. Write the complete function."])
    return Example(framed(rng, instruction, fenced(head)), answer, False)


# ------------------------------------------------------------------------------------------------------------- mixed

NEEDLES = (
    ("The locker in {city} opens with the number {number}.", "which number opens the locker in {city}?", "{number}"),
    ("The locker in {city} opens with the number {number}.", "which number opens the locker in {city}?", "{number}"),
    ("The key to the {color} door is kept by {name}.", "who keeps the key to the {color} door?", "{name}"),
    ("{name} left the {color} suitcase in {city}.", "where did {name} leave the suitcase?", "{city}"),
    ("The favourite colour of {name} is {color}.", "what is the favourite colour of {name}?", "{color}"),
    ("The password for the {word} archive is {other}.", "what is the password for the {word} archive?", "{other}"),
    ("The meeting in {city} begins on {date}.", "when does the meeting in {city} begin?", "{date}"),
    ("{name} owns exactly {number} {item}.", "how many {item} does {name} own?", "{number}"),
    ("The train to {city} leaves from platform {small}.", "from which platform does the train to {city} leave?",
     "{small}"),
    ("The secret word of the day is {word}.", "what is the secret word of the day?", "{word}"),
    ("In the {department} office, the telephone number is {number}.", "what is the telephone number of the "
     "{department} office?", "{number}"),
    ("The winner of the prize in {city} was {name}.", "who won the prize in {city}?", "{name}"),
    ("The box of {item} is hidden behind the {color} curtain.", "where is the box of {item} hidden?",
     "behind the {color} curtain"),
    ("{name} will arrive in {city} at {small} o'clock.", "at what hour will {name} arrive in {city}?",
     "at {small} o'clock"))

NEEDLE_HEADS = (
    "Read the text, then answer the question and explain in two or three sentences where you found it.",
    "Read the text, then answer the question and explain in two or three sentences where you found it.",
    "Answer the question with the help of the text, and say where the answer stands.",
    "One sentence in this text answers the question below. Find it and explain your answer.",
    "Read this carefully. Then answer the question.")


def planted_facts(world: World) -> dict[str, str]:
    rng = world.rng
    word, other = rng.sample(world.words, 2)
    return {"city": rng.choice(CITIES), "name": rng.choice(NAMES), "number": str(rng.randint(1000, 9999)),
            "small": str(rng.randint(1, 12)), "color": rng.choice(COLORS), "item": rng.choice(ITEMS), "word": word,
            "other": other, "date": short_date(rng), "department": rng.choice(DEPARTMENTS)}


def neighbours(paragraphs: Sequence[str], place: int) -> str:
    """A sentence that says what stands around the paragraph."""
    if place == 0:
        return "It stands at the very beginning, before the rest of the text."
    first = " ".join(paragraphs[place - 1].split()[:6])
    return f'It comes just after the paragraph that begins with "{first}".'


def needle_answer(rng: random.Random, fact: str, sentence: str, paragraphs: Sequence[str], place: int) -> str:
    ordinal = ORDINALS[min(place, 9)]
    opening = rng.choice([f"The answer is {fact}.", f"The answer is {fact}.", f"{fact[0].upper()}{fact[1:]}.",
                          f"It is {fact}.", f"According to the text, it is {fact}."])
    where = rng.choice([
        f'The text says: "{sentence}"', f'I found it in the {ordinal} paragraph, which says: "{sentence}"',
        f'This is stated in the sentence "{sentence}" in the {ordinal} paragraph.',
        f'In the {ordinal} paragraph we read: "{sentence}"'])
    closing = rng.choice([neighbours(paragraphs, place), "The rest of the text is about something else.",
                          "No other sentence in the text speaks of it.", neighbours(paragraphs, place)])
    return f"{opening} {where} {closing}"


def needle(world: World, long: bool) -> Example | None:
    rng = world.rng
    size = rng.randint(3000, 6500) if long else rng.randint(500, 2200)
    paragraphs = paragraphs_between(world, SPEECHES * 3 + NOVELS + SCRIPTURE, size, size + 700)
    if not paragraphs:
        return None
    values = planted_facts(world)
    sentence, question, fact = (part.format(**values) for part in rng.choice(NEEDLES))
    place = rng.randint(0, len(paragraphs))
    paragraphs = list(paragraphs)
    paragraphs.insert(place, sentence)
    answer = needle_answer(rng, fact, sentence, paragraphs, place)
    if rng.random() < 0.3:
        return exam(world, paragraphs, question, answer)
    text = "\n\n".join(paragraphs)
    return Example(framed(rng, rng.choice(NEEDLE_HEADS), f"{text}\n\nQuestion: {question}"), answer, False)


def exam(world: World, paragraphs: Sequence[str], question: str, answer: str) -> Example | None:
    """The planted question and one about the main subject."""
    rng = world.rng
    text = "\n\n".join(paragraphs)
    subject = keywords(world, text, 2)
    candidates = [s for s in sentences(text) if 60 < len(s) < 260 and subject and subject[0] in s]
    if not subject or not candidates:
        return None
    body = (f"{text}\n\nQuestion 1: {question}\nQuestion 2: what is the main subject of the text, and which sentence "
            "shows it best?")
    second = rng.choice(["The main subject of the text is {0}.", "The text is mainly about {0}."]).format(
        listed(subject, "the "))
    shown = rng.choice(["The sentence that shows it best is:", "This sentence shows it best:"])
    full = f'Question 1: {answer}\n\nQuestion 2: {second} {shown} "{candidates[0]}"'
    head = rng.choice(["Read the text, then answer the questions below and explain each answer.",
                       "Read the text, then answer the questions below and explain each answer.",
                       "Answer both questions about this text."])
    return Example(framed(rng, head, body), full, False)


@dataclass(frozen=True)
class Problem:
    """A word problem: question, steps and answer may use a, b, c, and r, s (results), names and items."""

    question: str
    steps: tuple[str, ...]
    answer: str
    results: Callable[[int, int, int], tuple[int, int]]


PROBLEMS = (
    Problem("{n} has {a} {i}. {m} gives {n} {b} more. How many {i} does {n} have now?",
            ("{n} starts with {a} {i} and gets {b} more.", "{a} + {b} = {r}."), "{r} {i}", lambda a, b, c: (a + b, 0)),
    Problem("{n} buys {a} boxes of {i}. Each box holds {b} {i}. {n} gives {c} {i} to {m}. How many are left?",
            ("The boxes hold {a} * {b} = {r} {i}.", "After giving away {c}, {r} - {c} = {s} are left."), "{s} {i}",
            lambda a, b, c: (a * b, a * b - c)),
    Problem("A ticket costs ${a}. How much do {b} tickets cost if {n} also pays ${c} for a drink?",
            ("The tickets cost {b} * {a} = {r} dollars.", "With the drink it is {r} + {c} = {s} dollars."), "${s}",
            lambda a, b, c: (a * b, a * b + c)),
    Problem("{n} reads {a} pages every day. How many pages does {n} read in {b} days?",
            ("Each day {n} reads {a} pages.", "In {b} days that makes {a} * {b} = {r} pages."), "{r} pages",
            lambda a, b, c: (a * b, 0)),
    Problem("{n} shares {p} {i} equally among {a} friends. How many {i} does each friend get?",
            ("There are {p} {i} for {a} friends.", "{p} / {a} = {b}."), "{b} {i}", lambda a, b, c: (a * b, 0)),
    Problem("{n} earns ${a} an hour and works {b} hours a week. How much does {n} earn in {c} weeks?",
            ("In one week {n} earns {a} * {b} = {r} dollars.", "In {c} weeks that is {r} * {c} = {s} dollars."), "${s}",
            lambda a, b, c: (a * b, a * b * c)),
    Problem("{n} is {a} years old. {m} is {b} years older than {n}. How old will {m} be in {c} years?",
            ("{m} is {a} + {b} = {r} years old now.", "In {c} years {m} will be {r} + {c} = {s}."), "{s} years old",
            lambda a, b, c: (a + b, a + b + c)),
    Problem("A train goes {a} miles an hour. How far does it go in {b} hours?",
            ("Distance is speed times time.", "{a} * {b} = {r} miles."), "{r} miles", lambda a, b, c: (a * b, 0)),
    Problem("There are {a} rows of chairs with {b} chairs in each row. {c} chairs are broken. How many can be used?",
            ("There are {a} * {b} = {r} chairs.", "{r} - {c} = {s} of them can be used."), "{s} chairs",
            lambda a, b, c: (a * b, a * b - c)),
    Problem("{n} has {a} {i}, {m} has twice as many. How many do they have together?",
            ("{m} has 2 * {a} = {r} {i}.", "Together they have {a} + {r} = {s} {i}."), "{s} {i}",
            lambda a, b, c: (2 * a, 3 * a)),
    Problem("{n} picks {a} {i} on Monday, {b} on Tuesday and {c} on Wednesday. How many {i} is that in all?",
            ("On the first two days it is {a} + {b} = {r} {i}.", "With Wednesday it is {r} + {c} = {s} {i}."),
            "{s} {i}", lambda a, b, c: (a + b, a + b + c)),
    Problem("{n} saves ${a} a week for {b} weeks and then spends ${c}. How much money is left?",
            ("{n} saves {a} * {b} = {r} dollars.", "After spending {c}, {r} - {c} = {s} dollars are left."), "${s}",
            lambda a, b, c: (a * b, a * b - c)),
    Problem("A shop has {p} {i} and sells {a} of them. The next day it gets {c} new ones. How many does it have then?",
            ("After the sale {p} - {a} = {r} {i} are left.", "With the new ones there are {r} + {c} = {s}."), "{s} {i}",
            lambda a, b, c: (a * b - a, a * b - a + c)),
    Problem("A garden is {a} feet long and {b} feet wide. What is its area, and how long is a fence around it?",
            ("The area is {a} * {b} = {r} square feet.", "The fence is 2 * ({a} + {b}) = {s} feet long."),
            "{r} square feet and {s} feet", lambda a, b, c: (a * b, 2 * (a + b))))


def chain_problem(rng: random.Random) -> tuple[str, list[str], str]:
    """Question, steps and answer of a story in which one number changes two to four times."""
    n, m = rng.sample(NAMES, 2)
    item, total = rng.choice(ITEMS), rng.randint(4, 60)
    told = [rng.choice([f"{n} has {total} {item}.", f"{n} starts with {total} {item}.", f"There are {total} {item}."])]
    steps: list[str] = []
    for _ in range(rng.randint(2, 4)):
        k = rng.randint(2, 25)
        changes = [(f"{n} finds {k} more.", f"{total} + {k} = {total + k}", total + k),
                   (f"{m} brings another {k}.", f"{total} + {k} = {total + k}", total + k),
                   ("Then the number doubles.", f"{total} * 2 = {2 * total}", 2 * total)]
        if total > k:
            changes += [(f"{n} gives {k} to {m}.", f"{total} - {k} = {total - k}", total - k),
                        (f"{k} of them get lost.", f"{total} - {k} = {total - k}", total - k)]
        if total % 2 == 0 and total > 4:
            changes.append((f"{n} gives half of them away.", f"{total} / 2 = {total // 2}", total // 2))
        sentence, sum_, total = rng.choice([c for c in changes if c[0] not in told] or changes)
        told.append(sentence)
        steps.append(rng.choice([f"{sentence[:-1]}: {sum_}.", f"{sum_}."]))
    question = rng.choice([f"How many {item} are there now?", f"How many {item} are left in the end?"])
    return " ".join([*told, question]), steps, f"{total} {item}"


def template_problem(rng: random.Random) -> tuple[str, list[str], str] | None:
    problem = rng.choice(PROBLEMS)
    a, b, c = rng.randint(2, 30), rng.randint(2, 20), rng.randint(2, 20)
    r, s = problem.results(a, b, c)
    if s < 0:
        return None
    n, m = rng.sample(NAMES, 2)
    values = {"a": a, "b": b, "c": c, "r": r, "s": s, "p": a * b, "n": n, "m": m, "i": rng.choice(ITEMS)}
    return (problem.question.format(**values), [step.format(**values) for step in problem.steps],
            problem.answer.format(**values))


def arithmetic(world: World, long: bool) -> Example | None:
    rng = world.rng
    made = chain_problem(rng) if rng.random() < 0.5 else template_problem(rng)
    if not made:
        return None
    question, steps, answer = made
    tail = rng.choice(["", "", " Explain step by step.", " Show your work.", " Think step by step."])
    style = rng.randrange(4)
    if style == 0:
        text = " ".join(steps) + f" The answer is {answer}."
    elif style == 1:
        text = "\n".join(steps) + f"\nThe answer is {answer}."
    elif style == 2:
        text = "\n".join(f"Step {i + 1}: {step}" for i, step in enumerate(steps)) + f"\nAnswer: {answer}"
    else:
        text = f"Let us work it out. {' '.join(steps)} So the answer is {answer}."
    return Example(question + tail, text, False)


def quote_sentence(world: World, long: bool) -> Example | None:
    rng = world.rng
    size = rng.randint(2500, 5500) if long else rng.randint(400, 1500)
    text = passage(world, SENTENCE_PROSE, size, size + 500)
    if not text:
        return None
    parts = sentences(text.replace("\n\n", " "))
    sentence = rng.choice(parts)
    chosen = keywords(world, sentence, 1)
    if not chosen or not 40 < len(sentence) < 400 or sum(bool(re.search(rf"\b{chosen[0]}", p)) for p in parts) > 1:
        return None
    word = chosen[0]
    question = rng.choice([f"Which sentence of the text speaks of the {word}?",
                           f"What does the text say about the {word}?", f'Find the sentence with the word "{word}".',
                           f"Quote the sentence that mentions the {word}."])
    quoted = sentence if '"' in sentence else f'"{sentence}"'
    answer = rng.choice([f"The text says: {quoted}", f"It is this sentence: {quoted}", quoted,
                         f"About the {word} the text says: {quoted}"])
    body = f"{text}\n\nQuestion: {question}" if rng.random() < 0.6 else f"{text}\n\n{question}"
    return Example(framed(rng, rng.choice(["Read this text.", "Answer the question about the passage.",
                                           "Here is a passage."]), body), answer, False)


def definition(world: World, long: bool) -> Example | None:
    rng = world.rng
    gloss = world.glosses.draw()
    if not gloss:
        return None
    word, part, text = gloss
    part = {"adj": "adjective", "adv": "adverb"}.get(part, part)
    meaning, *examples = [piece.strip() for piece in text.split(';') if piece.strip()]
    if '"' in meaning or word_count(meaning) < 3:
        return None
    uses = [example for example in examples if re.fullmatch(r'"[^"]+"', example) and word in example]
    answer = rng.choice([f"{word} ({part}): {meaning}.", f'The {part} "{word}" means: {meaning}.',
                         f'"{word}" is {"an" if part[0] == "a" else "a"} {part}. It means: {meaning}.'])
    if uses:
        answer += f" For example: {uses[0]}."
    question = rng.choice([f'What does "{word}" mean?', f"What does {word} mean?", f'Define the {part} "{word}".',
                           f"Explain the word {word}.", f'Give the meaning of "{word}" and its part of speech.'])
    return Example(question, answer, False)


def explain_entry(world: World, long: bool) -> Example | None:
    rng = world.rng
    entry = world.entries.draw()
    if not entry:
        return None
    word, text = entry
    answer = continuation([text], 120) or (text if word_count(text) < 120 and text[-1] in '.!?"' else None)
    question = rng.choice([f"What is {word}?", f'Explain "{word}".', f"Write a witty definition of {word}.",
                           f'Tell me what "{word}" means, with some humor.', f"Can you explain the term {word}?"])
    return Example(question, answer, False) if answer else None


def explain_docs(world: World, long: bool) -> Example | None:
    rng = world.rng
    section = world.sections.draw()
    if not section:
        return None
    heading, paragraphs = section
    lead = " ".join(sentences(paragraphs[0])[: rng.choice([1, 2, 2, 3])])
    if not 60 < len(lead) < 700 or lead[-1] not in ".!?":
        return None
    if rng.random() < 0.4 and word_count(heading) <= 4:
        question = rng.choice([f'Explain "{heading}".', f'What does the documentation say about "{heading}"?',
                               f'Can you explain "{heading}" in a few sentences?', f"{heading}: what is it about?"])
        return Example(question, lead, False)
    body = "\n\n".join(paragraphs)[:1500]
    body = body[: body.rfind(".") + 1]
    if len(body) < len(lead) + 100:
        return None
    instruction = rng.choice(["Explain this section of the documentation briefly.", "What is this section about?",
                              "Explain in one or two sentences what this documentation says."])
    return Example(framed(rng, instruction, f"{heading}\n\n{body}"), lead, False)


def summary(world: World, long: bool) -> Example | None:
    rng = world.rng
    size = rng.randint(2000, 5000) if long else rng.randint(500, 1400)
    text = passage(world, SPEECHES * 3 + NOVELS + SCRIPTURE, size, size + 400, rng.choice(["\n\n", " "]))
    if not text:
        return None
    parts = sentences(text.replace("\n\n", " "))
    if len(parts) < 4:
        return None
    chosen = parts[:2] if rng.random() < 0.7 else [parts[0], parts[-1]]
    answer = " ".join(chosen)
    if not 80 < len(answer) < 700:
        return None
    instruction = rng.choice(["Summarize this passage in two or three sentences.",
                              "Summarize this passage in two or three sentences.", "Give a short summary of this text.",
                              "What are the main points of the passage below?", "Sum up the following text briefly.",
                              "Write a brief summary."])
    return Example(framed(rng, instruction, text), answer, False)


# -------------------------------------------------------------------------------------------------------------- high


def scene(world: World, long: bool) -> Example | None:
    rng = world.rng
    speeches = world.scenes.draw()
    if not speeches or len(speeches) < 6:
        return None
    size = rng.randint(2500, 4500) if long else rng.choice([300, 600, 900, 900])
    start = rng.randrange(len(speeches) - 3)
    position, before = start, ""
    while position < len(speeches) and len(before) < size:
        before += speeches[position] + "\n\n"
        position += 1
    before, rest = before.strip(), ""
    if rng.random() < 0.45:
        lines = speeches[position - 1].split("\n")
        if len(lines) > 4:
            keep = rng.randint(2, len(lines) - 1)
            before, rest = before[: -len("\n".join(lines[keep:]))].rstrip(), "\n".join(lines[keep:]) + "\n\n"
    target, answer = rng.randint(60, 190), rest
    while position < len(speeches) and word_count(answer) < target:
        answer += speeches[position] + "\n\n"
        position += 1
    if not 60 <= word_count(answer) <= 220 or repeats_itself(answer):
        return None
    instruction, tail = rng.choice([
        ("Continue this scene. Be creative, and keep to the characters who have appeared.", ""),
        ("Continue this scene. Be creative, and keep to the characters who have appeared.", ""),
        ("Below is a long dialogue. Continue it with one or more of the speakers. Be coherent with what came before "
         "and be creative.", "\n\nContinuation:"),
        ("Go on with this dialogue.", ""), ("What do they say next? Write the next lines of the play.", ""),
        ("Here is part of a play. Write what follows.", "")])
    return Example(framed(rng, instruction, before + tail), answer.strip(), False)


STORY_HEADS = (
    ("Write an original story that begins just after this paragraph and takes an unexpected turn.", ""),
    ("Write an original story that begins just after this paragraph and takes an unexpected turn.", ""),
    ("Below is the start of a novel. Write the next chapter in your own words, with new events and new people.",
     "\n\nNext chapter:"),
    ("Below is the start of a novel. Write the next chapter in your own words, with new events and new people.",
     "\n\nNext chapter:"),
    ("Continue this story.", ""), ("Write the next paragraph.", ""), ("What happens next? Go on with the story.", ""))
SPEECH_HEADS = (
    ("Continue this speech.", ""), ("Write the next paragraph of this speech.", ""),
    ("Here is the beginning of an address. Go on in the same style.", "\n\nContinuation:"), ("Continue the text.", ""))


def next_part(world: World, long: bool) -> Example | None:
    rng = world.rng
    genre, heads = rng.choice([(NOVELS, STORY_HEADS)] * 5 + [(SPEECHES, SPEECH_HEADS)] * 2 +
                              [(SCRIPTURE, STORY_HEADS[4:])])
    deck = world.prose.get(rng.choice(genre))
    document = deck.draw() if deck else None
    if not document or len(document) < 4:
        return None
    size = rng.randint(2500, 5000) if long else rng.randint(250, 1500)
    start = rng.randrange(len(document) - 2)
    position = start + 1
    while position < len(document) and len("".join(document[start:position])) < size:
        position += 1
    answer = continuation(document[position:], rng.randint(70, 200))
    text = "\n\n".join(document[start:position])
    if not answer or len(text) < 150 or re.match(r"CHAPTER|Chapter|VOLUME", answer):
        return None
    if rng.random() < 0.2:
        text = text[: -rng.randint(1, 40)]
    head, tail = rng.choice(heads)
    return Example(framed(rng, head, text + tail), answer, False)


ABOUT = {
    "story": ("Write a short story about {the}.", "Tell me a story about {the}.", "Write a story with the words {all}.",
              "Describe a scene with {the}. Be creative.", "Write the opening of a novel about {the}.",
              "Compose a paragraph of a story in which {the} play a part.", "Invent a little tale about {the}."),
    "talk": ("Write a dialogue about {the}.", "Write a conversation between two people about {the}.",
             "Write a scene from a play about {the}. Include the words {all}."),
    "verse": ("Write a poem about {the}.", "Write some verse about {the}.", "Compose lines of poetry on {all}.",
              "Answer in verse: what do you think of {the}?", "Write a soliloquy about {the}.",
              "Write a poem and include the words {all}."),
    "speech": ("Write a speech about {the}.", "Write a letter to Congress about {the}.",
               "Write an essay on {all}.", "What do you think about {the}?", "Discuss the importance of {all}.",
               "Write a report on {the}.", "Make an argument about {the}.", "How are {the} connected?",
               "What should people know about {the}?", "Explain why {the} matter.", "What are the effects of {all}?"),
    "tale": ("Tell an ancient tale of {the}.", "Write a parable about {the}.", "Write a legend with {the}.",
             "Tell me, in the style of an old book, of {the}.")}


def verse_of(world: World) -> str | None:
    speeches = world.scenes.draw()
    if not speeches:
        return None
    for speech in world.rng.sample(speeches, len(speeches)):
        lines = speech.split("\n")[1:]
        verse = all(line[:1].isupper() and len(line) < 60 for line in lines)
        if verse and 60 <= word_count("\n".join(lines)) <= 220 and not any("[" in line for line in lines):
            return "\n".join(lines)
    return None


def dialogue_of(world: World) -> str | None:
    speeches = world.scenes.draw()
    if not speeches or len(speeches) < 5:
        return None
    start = world.rng.randrange(len(speeches) - 3)
    target, text = world.rng.randint(60, 190), ""
    for speech in speeches[start:]:
        text += speech + "\n\n"
        if word_count(text) >= target:
            break
    return text.strip() if 60 <= word_count(text) <= 220 and not repeats_itself(text) else None


def prose_of(world: World, sources: Sequence[str]) -> str | None:
    rng = world.rng
    deck = world.prose.get(rng.choice(sources))
    document = deck.draw() if deck else None
    if not document:
        return None
    start = rng.randrange(len(document))
    while start < len(document) and not re.match(r"[\"A-Z][a-z\w']+ ", document[start]):
        start += 1
    return continuation(document[start:], rng.randint(60, 200))


FORM_SOURCES = {"story": ("austen", "austen", "moby-dick"), "sea": ("moby-dick",), "speech": SPEECHES,
                "tale": SCRIPTURE}


def written_for(world: World, form: str) -> str | None:
    if form == "verse":
        return verse_of(world)
    if form == "talk":
        return dialogue_of(world)
    return prose_of(world, FORM_SOURCES[form])


def write_about(world: World, long: bool) -> Example | None:
    rng = world.rng
    form = rng.choice(["story", "story", "story", "talk", "verse", "verse", "speech", "speech", "tale"])
    text = written_for(world, form)
    chosen = keywords(world, text, rng.choice([2, 2, 3, 4])) if text else None
    if not text or not chosen:
        return None
    question = rng.choice(ABOUT[form]).format(the=listed(chosen, "the "), all=listed(chosen))
    if rng.random() < 0.25:
        question += rng.choice([" Use about {0} words.", " Write roughly {0} words.", " Keep it under {0} words."]
                               ).format(-(-word_count(text) // 50) * 50)
    return Example(question, text, False)


ROLES = {
    "sea": ("a sailor", "an old captain", "a harpooner", "a traveller", "a whaler", "a pirate"),
    "story": ("a storyteller", "a novelist", "a country gentleman", "a mother of five daughters", "a clergyman",
              "a young lady of fashion", "a friend who gives advice"),
    "verse": ("a poet", "a king in a play", "a lover", "a knight", "a queen", "a character of Shakespeare"),
    "talk": ("a playwright", "an actor", "a writer of comedies", "a screenwriter"),
    "speech": ("a president", "a statesman", "an orator", "a minister of finance", "a historian", "a politician"),
    "tale": ("a prophet", "a preacher", "a priest", "a wise old man", "a shepherd of old times")}


def role_play(world: World, long: bool) -> Example | None:
    rng = world.rng
    form = rng.choice(["sea", "story", "story", "verse", "talk", "speech", "speech", "tale"])
    text = written_for(world, form)
    chosen = keywords(world, text, 2) if text else None
    if not text or not chosen:
        return None
    role, topic = rng.choice(ROLES[form]), listed(chosen, "the ")
    question = rng.choice([
        f'I want you to act as {role}. I will name a subject and you will speak about it. My first request is "Tell '
        f'me about {topic}."',
        f"I want you to act as {role}. I will talk to you and you will answer as {role} would. My first sentence is "
        f'"What about {topic}?"',
        f"You are {role}. Speak about {topic}.", f"Imagine that you are {role}. What would you say about {topic}?",
        f"Pretend to be {role} and tell me of {topic}.", f"As {role}, what do you have to say about {topic}?",
        f"Take the role of {role}. Stay in character. I begin: what do you know of {topic}?"])
    return Example(question, text, False)


# ------------------------------------------------------------------------------------------------------------ mixing


@dataclass(frozen=True)
class Task:
    """A kind of task: tier, weight by bytes, maker, and whether it has long examples."""

    kind: str
    tier: str
    weight: float
    make: Callable[[World, bool], Example | None]
    long: bool = False


TASKS = (
    Task("repetition", "low", 9.0, repetition, True), Task("sorting", "low", 6.0, sorting),
    Task("reformat", "low", 8.0, reformat, True), Task("extraction", "low", 4.5, extraction),
    Task("code_edit", "low", 7.0, code_edit, True), Task("remove_docstrings", "low", 7.0, remove_docstrings, True),
    Task("reorder_parts", "low", 5.5, reorder_parts, True), Task("completion", "low", 4.5, completion, True),
    Task("line_edit", "low", 1.5, line_edit), Task("fill_template", "low", 0.6, fill_template),
    Task("replace_word", "low", 1.9, replace_word),
    Task("needle", "mixed", 6.5, needle, True), Task("arithmetic", "mixed", 4.5, arithmetic),
    Task("quote_sentence", "mixed", 2.5, quote_sentence, True), Task("definition", "mixed", 1.2, definition),
    Task("explain_entry", "mixed", 0.5, explain_entry), Task("explain_docs", "mixed", 1.3, explain_docs),
    Task("summary", "mixed", 2.5, summary, True), Task("table_lookup", "mixed", 1.0, table_lookup),
    Task("scene", "high", 8.0, scene, True), Task("next_part", "high", 8.0, next_part, True),
    Task("write_about", "high", 5.5, write_about), Task("role_play", "high", 3.5, role_play))


def acceptable(example: Example, long: bool) -> bool:
    total = len(example.question) + len(example.answer)
    return (0 < len(example.answer) <= ANSWER_LIMIT and total <= (LONG_LIMIT if long else SHORT_LIMIT)
            and example.question.isascii() and example.answer.isascii())


def as_row(task: Task, example: Example) -> Row:
    row: Row = {"kind": task.kind, "tier": task.tier,
                "turns": [{"role": "user", "content": example.question},
                          {"role": "assistant", "content": example.answer}]}
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
        print(f"{task.tier:6}{task.kind:20}{rows[task.kind]:7} rows {sizes[task.kind]:11} bytes "
              f"{100 * sizes[task.kind] / total:5.1f} %", file=sys.stderr)
    print(f"{sum(rows.values())} rows, {total} bytes of text", file=sys.stderr)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Write chat-form training tasks made from a corpus.")
    parser.add_argument("corpus", help="JSON lines with kind, source and text")
    parser.add_argument("out", help="JSON lines with kind, tier, turns and reference")
    parser.add_argument("--megabytes", type=float, default=40.0, help="text to write, in millions of bytes")
    parser.add_argument("--valid", type=int, default=0, metavar="ROWS", help="this many rows, even over the kinds")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    world = build_world(options.corpus, random.Random(options.seed))
    rows: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    with open(options.out, "w", encoding="utf8") as file:
        for row, size in generate(world, options.valid > 0):
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
            rows[row["kind"]] += 1
            sizes[row["kind"]] += size
            if sum(rows.values()) == options.valid or (not options.valid and sum(sizes.values()) >=
                                                       options.megabytes * 1e6):
                break
    report(rows, sizes)


if __name__ == "__main__":
    main()
