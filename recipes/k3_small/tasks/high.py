"""High tier: plays, novels and speeches to continue, and texts to write on a subject."""

import re
from collections.abc import Sequence

from tasks.corpus import repeats_itself, word_count
from tasks.passages import NOVELS, SCRIPTURE, SPEECHES, continuation, framed, keywords, listed
from tasks.world import Example, World

__all__ = ["next_part", "role_play", "scene", "write_about"]


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
    instruction, tail = rng.choice(
        [
            ("Continue this scene. Be creative, and keep to the characters who have appeared.", ""),
            ("Continue this scene. Be creative, and keep to the characters who have appeared.", ""),
            (
                "Below is a long dialogue. Continue it with one or more of the speakers. Be coherent with what came "
                "before and be creative.",
                "\n\nContinuation:",
            ),
            ("Go on with this dialogue.", ""),
            ("What do they say next? Write the next lines of the play.", ""),
            ("Here is part of a play. Write what follows.", ""),
        ]
    )
    return Example(framed(rng, instruction, before + tail), answer.strip(), False)


STORY_HEADS = (
    ("Write an original story that begins just after this paragraph and takes an unexpected turn.", ""),
    ("Write an original story that begins just after this paragraph and takes an unexpected turn.", ""),
    (
        "Below is the start of a novel. Write the next chapter in your own words, with new events and new people.",
        "\n\nNext chapter:",
    ),
    (
        "Below is the start of a novel. Write the next chapter in your own words, with new events and new people.",
        "\n\nNext chapter:",
    ),
    ("Continue this story.", ""),
    ("Write the next paragraph.", ""),
    ("What happens next? Go on with the story.", ""),
)
SPEECH_HEADS = (
    ("Continue this speech.", ""),
    ("Write the next paragraph of this speech.", ""),
    ("Here is the beginning of an address. Go on in the same style.", "\n\nContinuation:"),
    ("Continue the text.", ""),
)


def next_part(world: World, long: bool) -> Example | None:
    rng = world.rng
    genre, heads = rng.choice(
        [(NOVELS, STORY_HEADS)] * 5 + [(SPEECHES, SPEECH_HEADS)] * 2 + [(SCRIPTURE, STORY_HEADS[4:])]
    )
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
    "story": (
        "Write a short story about {the}.",
        "Tell me a story about {the}.",
        "Write a story with the words {all}.",
        "Describe a scene with {the}. Be creative.",
        "Write the opening of a novel about {the}.",
        "Compose a paragraph of a story in which {the} play a part.",
        "Invent a little tale about {the}.",
    ),
    "talk": (
        "Write a dialogue about {the}.",
        "Write a conversation between two people about {the}.",
        "Write a scene from a play about {the}. Include the words {all}.",
    ),
    "verse": (
        "Write a poem about {the}.",
        "Write some verse about {the}.",
        "Compose lines of poetry on {all}.",
        "Answer in verse: what do you think of {the}?",
        "Write a soliloquy about {the}.",
        "Write a poem and include the words {all}.",
    ),
    "speech": (
        "Write a speech about {the}.",
        "Write a letter to Congress about {the}.",
        "Write an essay on {all}.",
        "What do you think about {the}?",
        "Discuss the importance of {all}.",
        "Write a report on {the}.",
        "Make an argument about {the}.",
        "How are {the} connected?",
        "What should people know about {the}?",
        "Explain why {the} matter.",
        "What are the effects of {all}?",
    ),
    "tale": (
        "Tell an ancient tale of {the}.",
        "Write a parable about {the}.",
        "Write a legend with {the}.",
        "Tell me, in the style of an old book, of {the}.",
    ),
}


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


FORM_SOURCES = {
    "story": ("austen", "austen", "moby-dick"),
    "sea": ("moby-dick",),
    "speech": SPEECHES,
    "tale": SCRIPTURE,
}


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
        question += rng.choice(
            [" Use about {0} words.", " Write roughly {0} words.", " Keep it under {0} words."]
        ).format(-(-word_count(text) // 50) * 50)
    return Example(question, text, False)


ROLES = {
    "sea": ("a sailor", "an old captain", "a harpooner", "a traveller", "a whaler", "a pirate"),
    "story": (
        "a storyteller",
        "a novelist",
        "a country gentleman",
        "a mother of five daughters",
        "a clergyman",
        "a young lady of fashion",
        "a friend who gives advice",
    ),
    "verse": ("a poet", "a king in a play", "a lover", "a knight", "a queen", "a character of Shakespeare"),
    "talk": ("a playwright", "an actor", "a writer of comedies", "a screenwriter"),
    "speech": ("a president", "a statesman", "an orator", "a minister of finance", "a historian", "a politician"),
    "tale": ("a prophet", "a preacher", "a priest", "a wise old man", "a shepherd of old times"),
}


def role_play(world: World, long: bool) -> Example | None:
    rng = world.rng
    form = rng.choice(["sea", "story", "story", "verse", "talk", "speech", "speech", "tale"])
    text = written_for(world, form)
    chosen = keywords(world, text, 2) if text else None
    if not text or not chosen:
        return None
    role, topic = rng.choice(ROLES[form]), listed(chosen, "the ")
    question = rng.choice(
        [
            f"I want you to act as {role}. I will name a subject and you will speak about it. My first request is "
            f'"Tell me about {topic}."',
            f"I want you to act as {role}. I will talk to you and you will answer as {role} would. My first sentence "
            f'is "What about {topic}?"',
            f"You are {role}. Speak about {topic}.",
            f"Imagine that you are {role}. What would you say about {topic}?",
            f"Pretend to be {role} and tell me of {topic}.",
            f"As {role}, what do you have to say about {topic}?",
            f"Take the role of {role}. Stay in character. I begin: what do you know of {topic}?",
        ]
    )
    return Example(question, text, False)
