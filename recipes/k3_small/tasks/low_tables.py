"""Low tier: tables to convert, forms to fill in, values to look up and to extract."""

import csv
import io
import json
import random
from collections.abc import Callable, Sequence
from typing import Any

from tasks.passages import framed, short_date
from tasks.words import CITIES, COLORS, DEPARTMENTS, ITEMS, MONTHS, NAMES
from tasks.world import Example, Row, World

__all__ = ["extraction", "fill_template", "reformat", "table_lookup"]


def columns(world: World) -> list[tuple[str, Callable[[int], Any]]]:
    """Names of columns, each with a function from the number of the row to a value."""
    rng = world.rng
    start = rng.choice([1, 1, 100, 1000, rng.randint(2, 9000)])
    usual: list[tuple[str, Callable[[int], Any]]] = [
        ("id", lambda i: start + i),
        ("name", lambda i: rng.choice(NAMES)),
        ("city", lambda i: rng.choice(CITIES)),
        ("dept", lambda i: rng.choice(DEPARTMENTS)),
        ("age", lambda i: rng.randint(18, 80)),
        ("score", lambda i: round(rng.uniform(1, 99), 1)),
    ]
    if rng.random() < 0.4:
        return usual
    word, other = rng.sample(world.words, 2)
    more: list[tuple[str, Callable[[int], Any]]] = [
        ("price", lambda i: round(rng.uniform(1, 500), 2)),
        ("quantity", lambda i: rng.randint(1, 60)),
        ("date", lambda i: short_date(rng)),
        ("color", lambda i: rng.choice(COLORS)),
        ("item", lambda i: rng.choice(world.words)),
        ("year", lambda i: rng.randint(1900, 2030)),
        (rng.choice(["status", "state"]), lambda i: rng.choice(["open", "closed", "new", "done", "late"])),
        ("code", lambda i: f"{rng.choice('ABCDEFGHKLMNPRST')}{rng.randint(10, 999)}"),
        (word, lambda i: rng.choice(world.words)),
        (other, lambda i: rng.randint(0, 999)),
    ]
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

    return "\n".join(
        f"INSERT INTO {name} ({', '.join(row)}) VALUES ({', '.join(map(literal, row.values()))});" for row in rows
    )


def as_json_source(rng: random.Random, rows: Sequence[Row]) -> str:
    return rng.choice([json.dumps(rows, indent=1), json.dumps(rows), as_json_array(rows), json.dumps(rows, indent=2)])


def conversions(rng: random.Random, rows: Sequence[Row], name: str) -> list[tuple[tuple[str, ...], str, str]]:
    """(instructions, before, after) of every change of format; the first three are the most common."""
    return [
        (
            (
                "Convert this CSV to a JSON array of objects, one object per line.",
                "Turn the CSV below into a JSON array, with one object on each line.",
                "Write these CSV rows as JSON objects in an array, one per line.",
            ),
            as_csv(rows),
            as_json_array(rows),
        ),
        (
            (
                "Convert this JSON array to CSV with a header line.",
                "Rewrite this JSON as CSV. Begin with a header line.",
                "Make a CSV table from the following JSON.",
            ),
            as_json_source(rng, rows),
            as_csv(rows),
        ),
        (
            (
                f"Turn each CSV line into a SQL INSERT statement for the table {name}.",
                f"Write SQL INSERT statements that put these CSV rows into the table {name}.",
            ),
            as_csv(rows),
            as_sql(rows, name),
        ),
        (
            ("Convert this CSV to JSON lines.", "Write one JSON object per line for each row of this CSV."),
            as_csv(rows),
            "\n".join(map(json.dumps, rows)),
        ),
        (("Convert this markdown table to CSV.", "Rewrite the table below as CSV."), as_markdown(rows), as_csv(rows)),
        (
            ("Convert this CSV to a markdown table.", "Show this CSV as a markdown table."),
            as_csv(rows),
            as_markdown(rows),
        ),
        (
            (
                "Write these records as a JSON array of objects, one object per line.",
                "Convert the key: value records below to a JSON array, one object per line.",
            ),
            as_pairs(rows),
            as_json_array(rows),
        ),
        (
            ("Write this JSON as key: value lines, with an empty line between records.",),
            as_json_source(rng, rows),
            as_pairs(rows),
        ),
        (
            (f"Turn this JSON into SQL INSERT statements for the table {name}.",),
            as_json_source(rng, rows),
            as_sql(rows, name),
        ),
    ]


def reformat(world: World, long: bool) -> Example | None:
    rng = world.rng
    rows = table(world, 8, 14) if long else table(world)
    name = rng.choice(["people", "people", "items", "records", "orders", "data"])
    options = conversions(rng, rows, name)
    instructions, before, after = rng.choice(options[:3] * 2 + options)
    return Example(framed(rng, rng.choice(instructions), before), after)


def fill_template(world: World, long: bool) -> Example | None:
    rng = world.rng
    values = {
        "name": rng.choice(NAMES),
        "city": rng.choice(CITIES),
        "item": rng.choice(ITEMS),
        "date": short_date(rng),
        "number": str(rng.randint(2, 900)),
        "department": rng.choice(DEPARTMENTS),
        "color": rng.choice(COLORS),
    }
    lines = rng.sample(
        [
            "Dear {name}, thank you for your order of {number} {color} {item}.",
            "It will leave {city} on {date}.",
            "If anything is missing, please ask the {department} office.",
            "Your customer number is {number}.",
            "We hope to see you in {city} soon.",
            "{name} from {department} will call you on {date}.",
            "The {color} box holds {number} {item}.",
            "Please bring {item} to {city}.",
            "On {date} the {department} team moves to {city}.",
        ],
        rng.randint(2, 5),
    )
    template = "\n".join(lines)
    used = [key for key in values if "{" + key + "}" in template]
    rng.shuffle(used)
    pairs = "\n".join(f"{key}: {values[key]}" for key in used)
    instruction = rng.choice(
        [
            "Fill in the template with the values below.",
            "Complete this template.",
            "Replace every placeholder in the template by its value.",
        ]
    )
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
    question = rng.choice(
        [
            f"What is the {wanted} of the row whose {key} is {row[key]}?",
            f"Which {wanted} belongs to {key} {row[key]}?",
            f"Look up the {wanted} where {key} is {row[key]}.",
        ]
    )
    answer = rng.choice(
        [
            f"{row[wanted]}",
            f"The {wanted} is {row[wanted]}. It is in the row where {key} is {row[key]}.",
            f"It is {row[wanted]}: in the row with {key} {row[key]}, the {wanted} is {row[wanted]}.",
        ]
    )
    return Example(
        framed(
            rng,
            rng.choice(["Use this table to answer the question.", "Here is a table."]),
            f"{shown}\n\nQuestion: {question}",
        ),
        answer,
        False,
    )


def contact_sentences(rng: random.Random, number: int) -> tuple[list[str], dict[str, list[str]]]:
    """Sentences about people, and what they hold in order: e-mail addresses, names, dates, numbers, cities."""
    held: dict[str, list[str]] = {"e-mail address": [], "name": [], "date": [], "number": [], "city": []}
    lines: list[str] = []
    domain = rng.choice(["example.org", "example.net", "example.com", "mail.example", "post.example"])
    uniform = rng.randrange(6) if rng.random() < 0.5 else None
    for name in rng.sample(NAMES, number):
        city, department, number_ = rng.choice(CITIES), rng.choice(DEPARTMENTS), rng.randint(100, 9999)
        date = rng.choice([short_date(rng), f"{rng.randint(1, 28)} {rng.choice(MONTHS)} {rng.randint(1950, 2029)}"])
        address = rng.choice(
            [f"{name.lower()}.{number_}@{domain}", f"{name.lower()}@{domain}", f"{department}.{name.lower()}@{domain}"]
        )
        style = uniform if uniform is not None else rng.randrange(6)
        lines.append(
            (
                f"{name} ({department}, {city}) can be reached at {address}.",
                f"On {date} {name} moved to {city}; write to {address}.",
                f"{name} works in {city} and sold {number_} tickets.",
                f"The address of {name} in {city} is {address}.",
                f"{name} was born in {city} on {date}.",
                f"Room {number_} in {city} is kept for {name} until {date}.",
            )[style]
        )
        held["name"].append(name)
        held["city"].append(city)
        for what, value, styles in (
            ("e-mail address", address, (0, 1, 3)),
            ("date", date, (1, 4, 5)),
            ("number", str(number_), (2, 5)),
        ):
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
    instruction = rng.choice(
        [
            f"List every {what} in this text in the order they appear, one per line.",
            f"List every {what} in this text in the order they appear, one per line.",
            f"Extract all the {plural} from the text below. Write one per line.",
            f"Find the {plural} in the following text and list them in order.",
            f"Which {plural} does this text contain? Give them one per line and nothing else.",
        ]
    )
    return Example(framed(rng, instruction, rng.choice([" ", " ", "\n"]).join(lines)), "\n".join(found))
