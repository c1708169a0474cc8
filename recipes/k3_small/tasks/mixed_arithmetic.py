"""Mixed tier: word problems with their steps."""

import random
from collections.abc import Callable
from dataclasses import dataclass

from tasks.words import ITEMS, NAMES
from tasks.world import Example, World

__all__ = ["arithmetic"]


@dataclass(frozen=True)
class Problem:
    """A word problem: question, steps and answer may use a, b, c, and r, s (results), names and items."""

    question: str
    steps: tuple[str, ...]
    answer: str
    results: Callable[[int, int, int], tuple[int, int]]


PROBLEMS = (
    Problem(
        "{n} has {a} {i}. {m} gives {n} {b} more. How many {i} does {n} have now?",
        ("{n} starts with {a} {i} and gets {b} more.", "{a} + {b} = {r}."),
        "{r} {i}",
        lambda a, b, c: (a + b, 0),
    ),
    Problem(
        "{n} buys {a} boxes of {i}. Each box holds {b} {i}. {n} gives {c} {i} to {m}. How many are left?",
        ("The boxes hold {a} * {b} = {r} {i}.", "After giving away {c}, {r} - {c} = {s} are left."),
        "{s} {i}",
        lambda a, b, c: (a * b, a * b - c),
    ),
    Problem(
        "A ticket costs ${a}. How much do {b} tickets cost if {n} also pays ${c} for a drink?",
        ("The tickets cost {b} * {a} = {r} dollars.", "With the drink it is {r} + {c} = {s} dollars."),
        "${s}",
        lambda a, b, c: (a * b, a * b + c),
    ),
    Problem(
        "{n} reads {a} pages every day. How many pages does {n} read in {b} days?",
        ("Each day {n} reads {a} pages.", "In {b} days that makes {a} * {b} = {r} pages."),
        "{r} pages",
        lambda a, b, c: (a * b, 0),
    ),
    Problem(
        "{n} shares {p} {i} equally among {a} friends. How many {i} does each friend get?",
        ("There are {p} {i} for {a} friends.", "{p} / {a} = {b}."),
        "{b} {i}",
        lambda a, b, c: (a * b, 0),
    ),
    Problem(
        "{n} earns ${a} an hour and works {b} hours a week. How much does {n} earn in {c} weeks?",
        ("In one week {n} earns {a} * {b} = {r} dollars.", "In {c} weeks that is {r} * {c} = {s} dollars."),
        "${s}",
        lambda a, b, c: (a * b, a * b * c),
    ),
    Problem(
        "{n} is {a} years old. {m} is {b} years older than {n}. How old will {m} be in {c} years?",
        ("{m} is {a} + {b} = {r} years old now.", "In {c} years {m} will be {r} + {c} = {s}."),
        "{s} years old",
        lambda a, b, c: (a + b, a + b + c),
    ),
    Problem(
        "A train goes {a} miles an hour. How far does it go in {b} hours?",
        ("Distance is speed times time.", "{a} * {b} = {r} miles."),
        "{r} miles",
        lambda a, b, c: (a * b, 0),
    ),
    Problem(
        "There are {a} rows of chairs with {b} chairs in each row. {c} chairs are broken. How many can be used?",
        ("There are {a} * {b} = {r} chairs.", "{r} - {c} = {s} of them can be used."),
        "{s} chairs",
        lambda a, b, c: (a * b, a * b - c),
    ),
    Problem(
        "{n} has {a} {i}, {m} has twice as many. How many do they have together?",
        ("{m} has 2 * {a} = {r} {i}.", "Together they have {a} + {r} = {s} {i}."),
        "{s} {i}",
        lambda a, b, c: (2 * a, 3 * a),
    ),
    Problem(
        "{n} picks {a} {i} on Monday, {b} on Tuesday and {c} on Wednesday. How many {i} is that in all?",
        ("On the first two days it is {a} + {b} = {r} {i}.", "With Wednesday it is {r} + {c} = {s} {i}."),
        "{s} {i}",
        lambda a, b, c: (a + b, a + b + c),
    ),
    Problem(
        "{n} saves ${a} a week for {b} weeks and then spends ${c}. How much money is left?",
        ("{n} saves {a} * {b} = {r} dollars.", "After spending {c}, {r} - {c} = {s} dollars are left."),
        "${s}",
        lambda a, b, c: (a * b, a * b - c),
    ),
    Problem(
        "A shop has {p} {i} and sells {a} of them. The next day it gets {c} new ones. How many does it have then?",
        ("After the sale {p} - {a} = {r} {i} are left.", "With the new ones there are {r} + {c} = {s}."),
        "{s} {i}",
        lambda a, b, c: (a * b - a, a * b - a + c),
    ),
    Problem(
        "A garden is {a} feet long and {b} feet wide. What is its area, and how long is a fence around it?",
        ("The area is {a} * {b} = {r} square feet.", "The fence is 2 * ({a} + {b}) = {s} feet long."),
        "{r} square feet and {s} feet",
        lambda a, b, c: (a * b, 2 * (a + b)),
    ),
)


def chain_problem(rng: random.Random) -> tuple[str, list[str], str]:
    """Question, steps and answer of a story in which one number changes two to four times."""
    n, m = rng.sample(NAMES, 2)
    item, total = rng.choice(ITEMS), rng.randint(4, 60)
    told = [rng.choice([f"{n} has {total} {item}.", f"{n} starts with {total} {item}.", f"There are {total} {item}."])]
    steps: list[str] = []
    for _ in range(rng.randint(2, 4)):
        k = rng.randint(2, 25)
        changes = [
            (f"{n} finds {k} more.", f"{total} + {k} = {total + k}", total + k),
            (f"{m} brings another {k}.", f"{total} + {k} = {total + k}", total + k),
            ("Then the number doubles.", f"{total} * 2 = {2 * total}", 2 * total),
        ]
        if total > k:
            changes += [
                (f"{n} gives {k} to {m}.", f"{total} - {k} = {total - k}", total - k),
                (f"{k} of them get lost.", f"{total} - {k} = {total - k}", total - k),
            ]
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
    return (
        problem.question.format(**values),
        [step.format(**values) for step in problem.steps],
        problem.answer.format(**values),
    )


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
