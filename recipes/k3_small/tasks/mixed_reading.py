"""Mixed tier: sentences to quote, words and documentation to explain, passages to summarise."""

import re

from tasks.corpus import sentences, word_count
from tasks.passages import NOVELS, SCRIPTURE, SENTENCE_PROSE, SPEECHES, continuation, framed, keywords, passage
from tasks.world import Example, World

__all__ = ["definition", "explain_docs", "explain_entry", "quote_sentence", "summary"]


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
    question = rng.choice(
        [
            f"Which sentence of the text speaks of the {word}?",
            f"What does the text say about the {word}?",
            f'Find the sentence with the word "{word}".',
            f"Quote the sentence that mentions the {word}.",
        ]
    )
    quoted = sentence if '"' in sentence else f'"{sentence}"'
    answer = rng.choice(
        [
            f"The text says: {quoted}",
            f"It is this sentence: {quoted}",
            quoted,
            f"About the {word} the text says: {quoted}",
        ]
    )
    body = f"{text}\n\nQuestion: {question}" if rng.random() < 0.6 else f"{text}\n\n{question}"
    return Example(
        framed(
            rng, rng.choice(["Read this text.", "Answer the question about the passage.", "Here is a passage."]), body
        ),
        answer,
        False,
    )


def definition(world: World, long: bool) -> Example | None:
    rng = world.rng
    gloss = world.glosses.draw()
    if not gloss:
        return None
    word, part, text = gloss
    part = {"adj": "adjective", "adv": "adverb"}.get(part, part)
    meaning, *examples = [piece.strip() for piece in text.split(";") if piece.strip()]
    if '"' in meaning or word_count(meaning) < 3:
        return None
    uses = [example for example in examples if re.fullmatch(r'"[^"]+"', example) and word in example]
    answer = rng.choice(
        [
            f"{word} ({part}): {meaning}.",
            f'The {part} "{word}" means: {meaning}.',
            f'"{word}" is {"an" if part[0] == "a" else "a"} {part}. It means: {meaning}.',
        ]
    )
    if uses:
        answer += f" For example: {uses[0]}."
    question = rng.choice(
        [
            f'What does "{word}" mean?',
            f"What does {word} mean?",
            f'Define the {part} "{word}".',
            f"Explain the word {word}.",
            f'Give the meaning of "{word}" and its part of speech.',
        ]
    )
    return Example(question, answer, False)


def explain_entry(world: World, long: bool) -> Example | None:
    rng = world.rng
    entry = world.entries.draw()
    if not entry:
        return None
    word, text = entry
    answer = continuation([text], 120) or (text if word_count(text) < 120 and text[-1] in '.!?"' else None)
    question = rng.choice(
        [
            f"What is {word}?",
            f'Explain "{word}".',
            f"Write a witty definition of {word}.",
            f'Tell me what "{word}" means, with some humor.',
            f"Can you explain the term {word}?",
        ]
    )
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
        question = rng.choice(
            [
                f'Explain "{heading}".',
                f'What does the documentation say about "{heading}"?',
                f'Can you explain "{heading}" in a few sentences?',
                f"{heading}: what is it about?",
            ]
        )
        return Example(question, lead, False)
    body = "\n\n".join(paragraphs)[:1500]
    body = body[: body.rfind(".") + 1]
    if len(body) < len(lead) + 100:
        return None
    instruction = rng.choice(
        [
            "Explain this section of the documentation briefly.",
            "What is this section about?",
            "Explain in one or two sentences what this documentation says.",
        ]
    )
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
    instruction = rng.choice(
        [
            "Summarize this passage in two or three sentences.",
            "Summarize this passage in two or three sentences.",
            "Give a short summary of this text.",
            "What are the main points of the passage below?",
            "Sum up the following text briefly.",
            "Write a brief summary.",
        ]
    )
    return Example(framed(rng, instruction, text), answer, False)
