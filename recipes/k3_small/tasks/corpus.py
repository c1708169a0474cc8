"""Reading the corpus: prose, plays, code, documentation and dictionaries, each cut into pieces for the tasks."""

import ast
import json
import random
import re
import textwrap
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from tasks.words import ITEMS
from tasks.world import Deck, Function, Module, World

__all__ = ["build_world", "repeats_itself", "sentences", "word_count"]

QUOTES = str.maketrans(
    {
        "\u2018": "'",
        "\u2019": "'",
        "\u201c": '"',
        "\u201d": '"',
        "\u2013": "-",
        "\u2014": "--",
        "\u2026": "...",
        "\u00a0": " ",
    }
)
SENTENCE_END = re.compile(
    r"(?:(?<=[.!?])|(?<=[.!?][\"')]))"
    r"(?<!\bMr\.)(?<!\bMrs\.)(?<!\bDr\.)(?<!\bSt\.)\s+(?=[A-Z\"'(])"
)

NOUN_PLACE = re.compile(
    r"\b(?:the|a|an|his|her|my|our|their|your|no|this) ([a-z]{4,12})"
    r"(?=[.,;:!?]| (?:of|and|in|to|was|were|is|on|with|for|that|which|had|has|at|from|by)\b)"
)


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
    runs = [tuple(words[i : i + 4]) for i in range(len(words) - 3)]
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
    text = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno]))
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
    world = World(
        rng,
        {name: Deck(docs, rng) for name, docs in prose.items()},
        Deck(scenes, rng),
        Deck(functions, rng),
        Deck(modules, rng),
        Deck(sections, rng),
        Deck(glosses, rng),
        Deck(entries, rng),
        words,
        counts,
        set(),
    )
    common = {word for word, _ in counts.most_common(250)}
    world.nouns = {word for word, count in noun_counts.items() if count >= max(2, 0.15 * counts[word])} - common
    return world
