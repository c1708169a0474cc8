"""Passages of prose and the small parts that questions are put together from."""

import random
import re
from collections import Counter
from collections.abc import Sequence

from tasks.corpus import repeats_itself, sentences, word_count
from tasks.world import World

__all__ = [
    "NOVELS",
    "SCRIPTURE",
    "SENTENCE_PROSE",
    "SPEECHES",
    "continuation",
    "fenced",
    "framed",
    "keywords",
    "listed",
    "paragraphs_between",
    "passage",
    "short_date",
]

NOVELS = ("austen", "moby-dick")
SPEECHES = ("sotu",)
SCRIPTURE = ("web-bible", "kjv-bible")
SENTENCE_PROSE = NOVELS + SPEECHES + SCRIPTURE


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
    for paragraph in document[rng.randrange(len(document)) :]:
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
