"""Mixed tier: a fact planted in a long text, to be found and explained."""

import random
from collections.abc import Sequence

from tasks.corpus import sentences
from tasks.passages import NOVELS, SCRIPTURE, SPEECHES, framed, keywords, listed, paragraphs_between, short_date
from tasks.words import CITIES, COLORS, DEPARTMENTS, ITEMS, NAMES, ORDINALS
from tasks.world import Example, World

__all__ = ["needle"]

NEEDLES = (
    ("The locker in {city} opens with the number {number}.", "which number opens the locker in {city}?", "{number}"),
    ("The locker in {city} opens with the number {number}.", "which number opens the locker in {city}?", "{number}"),
    ("The key to the {color} door is kept by {name}.", "who keeps the key to the {color} door?", "{name}"),
    ("{name} left the {color} suitcase in {city}.", "where did {name} leave the suitcase?", "{city}"),
    ("The favourite colour of {name} is {color}.", "what is the favourite colour of {name}?", "{color}"),
    ("The password for the {word} archive is {other}.", "what is the password for the {word} archive?", "{other}"),
    ("The meeting in {city} begins on {date}.", "when does the meeting in {city} begin?", "{date}"),
    ("{name} owns exactly {number} {item}.", "how many {item} does {name} own?", "{number}"),
    (
        "The train to {city} leaves from platform {small}.",
        "from which platform does the train to {city} leave?",
        "{small}",
    ),
    ("The secret word of the day is {word}.", "what is the secret word of the day?", "{word}"),
    (
        "In the {department} office, the telephone number is {number}.",
        "what is the telephone number of the {department} office?",
        "{number}",
    ),
    ("The winner of the prize in {city} was {name}.", "who won the prize in {city}?", "{name}"),
    (
        "The box of {item} is hidden behind the {color} curtain.",
        "where is the box of {item} hidden?",
        "behind the {color} curtain",
    ),
    (
        "{name} will arrive in {city} at {small} o'clock.",
        "at what hour will {name} arrive in {city}?",
        "at {small} o'clock",
    ),
)

NEEDLE_HEADS = (
    "Read the text, then answer the question and explain in two or three sentences where you found it.",
    "Read the text, then answer the question and explain in two or three sentences where you found it.",
    "Answer the question with the help of the text, and say where the answer stands.",
    "One sentence in this text answers the question below. Find it and explain your answer.",
    "Read this carefully. Then answer the question.",
)


def planted_facts(world: World) -> dict[str, str]:
    rng = world.rng
    word, other = rng.sample(world.words, 2)
    return {
        "city": rng.choice(CITIES),
        "name": rng.choice(NAMES),
        "number": str(rng.randint(1000, 9999)),
        "small": str(rng.randint(1, 12)),
        "color": rng.choice(COLORS),
        "item": rng.choice(ITEMS),
        "word": word,
        "other": other,
        "date": short_date(rng),
        "department": rng.choice(DEPARTMENTS),
    }


def neighbours(paragraphs: Sequence[str], place: int) -> str:
    """A sentence that says what stands around the paragraph."""
    if place == 0:
        return "It stands at the very beginning, before the rest of the text."
    first = " ".join(paragraphs[place - 1].split()[:6])
    return f'It comes just after the paragraph that begins with "{first}".'


def needle_answer(rng: random.Random, fact: str, sentence: str, paragraphs: Sequence[str], place: int) -> str:
    ordinal = ORDINALS[min(place, 9)]
    opening = rng.choice(
        [
            f"The answer is {fact}.",
            f"The answer is {fact}.",
            f"{fact[0].upper()}{fact[1:]}.",
            f"It is {fact}.",
            f"According to the text, it is {fact}.",
        ]
    )
    where = rng.choice(
        [
            f'The text says: "{sentence}"',
            f'I found it in the {ordinal} paragraph, which says: "{sentence}"',
            f'This is stated in the sentence "{sentence}" in the {ordinal} paragraph.',
            f'In the {ordinal} paragraph we read: "{sentence}"',
        ]
    )
    closing = rng.choice(
        [
            neighbours(paragraphs, place),
            "The rest of the text is about something else.",
            "No other sentence in the text speaks of it.",
            neighbours(paragraphs, place),
        ]
    )
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
    body = (
        f"{text}\n\nQuestion 1: {question}\nQuestion 2: what is the main subject of the text, and which sentence "
        "shows it best?"
    )
    second = rng.choice(["The main subject of the text is {0}.", "The text is mainly about {0}."]).format(
        listed(subject, "the ")
    )
    shown = rng.choice(["The sentence that shows it best is:", "This sentence shows it best:"])
    full = f'Question 1: {answer}\n\nQuestion 2: {second} {shown} "{candidates[0]}"'
    head = rng.choice(
        [
            "Read the text, then answer the questions below and explain each answer.",
            "Read the text, then answer the questions below and explain each answer.",
            "Answer both questions about this text.",
        ]
    )
    return Example(framed(rng, head, body), full, False)
