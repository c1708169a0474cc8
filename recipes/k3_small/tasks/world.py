"""What the tasks draw from, and what they make."""

import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

__all__ = ["ANSWER_LIMIT", "Deck", "Example", "Function", "Module", "Row", "World"]

Item = TypeVar("Item")
Row = dict[str, Any]

ANSWER_LIMIT = 2600


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
