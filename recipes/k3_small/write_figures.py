"""Put measured figures into the model cards and the results page, between their markers.

A marked section of a Markdown file stands between ``<!-- figures: NAME -->`` and ``<!-- end -->``;
prose outside is never touched. FIGURES holds ``held_out.json`` (``held_out.py``), ``plain.json``,
``pair.json`` and ``pair_256.json``, ``pair_1k.json``, ``pair_2k.json`` (``evaluate.py``), and ``ab.json``
(``outrider bench ab``); a section whose file is missing stays as it is.

Usage: ``python recipes/k3_small/write_figures.py FIGURES FILE.md...``
"""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

TIERS = ("low_entropy", "mixed", "high_entropy")
LENGTHS = ("256", "1k", "2k")
SECTION = re.compile(r"(<!-- figures: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


class Figures:
    """The JSON files of one folder, read when asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def read(self, name: str) -> Any:
        """Contents of ``name``.json."""
        return json.loads((self.folder / f"{name}.json").read_text())


def table(header: list[str], rows: list[list[str]], text_columns: int = 1) -> str:
    """A Markdown table, right-aligned from column ``text_columns`` on."""
    rule = ["---"] * text_columns + ["---:"] * (len(header) - text_columns)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (header, rule, *rows)) + "\n"


def number(value: float | None) -> str:
    """Two decimals, or a dash for nothing measured."""
    return "-" if value is None else f"{value:.2f}"


def held_out(figures: Figures) -> str:
    """Held-out losses of the target."""
    values = figures.read("held_out")
    titles = (
        ("Text by kind", "text_by_kind"),
        ("Text by position in the context", "text_by_position"),
        ("Answers by task", "answers_by_task"),
    )
    lines = [
        f"- {title}: " + ", ".join(f"{kind} {loss:.2f}" for kind, loss in values[key].items()) + "."
        for title, key in titles
    ]
    return "\n".join(lines) + "\n"


def answers(figures: Figures) -> str:
    """What the target's greedy answers are like."""
    values = figures.read("plain")
    rows = []
    for tier in TIERS:
        of = values[tier]
        right = "none has one" if of["right_share"] is None else f"{of['right_share']:.0%} of {of['graded']}"
        rows.append([tier, f"{of['entropy_nats']:.2f}", f"{of['looping_share']:.0%}", right])
    return table(["tier", "next-token entropy, nats", "looping outputs", "right answers (where there is one)"], rows)


def acceptance(figures: Figures) -> str:
    """Tokens per round by tier, by prompt length and by task."""
    values = figures.read("pair")
    rows = [
        [
            tier,
            number(values[tier]["tokens_per_round"]),
            number(values[tier]["tokens_per_round_clean"]),
            f"{values[tier]['long_non_looping']} of {values[tier]['prompts']}",
        ]
        for tier in TIERS
    ]
    parts = [table(["tier", "tokens/round, all outputs", "clean", "clean outputs"], rows)]
    by_length = [figures.read(f"pair_{length}") for length in LENGTHS]
    rows = [
        [
            tier,
            *(
                f"{number(of[tier]['tokens_per_round'])} / {number(of[tier]['tokens_per_round_clean'])}"
                for of in by_length
            ),
        ]
        for tier in TIERS
    ]
    parts.append("By prompt length (`throughput_*.jsonl`, all outputs / clean):\n")
    parts.append(table(["tier", *(f"about {length} tokens" for length in LENGTHS)], rows))
    parts.append("By task:\n")
    parts.append(
        "\n".join(
            f"- {tier}: "
            + ", ".join(f"{kind} {number(value)}" for kind, value in values[tier]["tokens_per_round_by_task"].items())
            + "."
            for tier in TIERS
        )
        + "\n"
    )
    return "\n".join(parts)


def speed(figures: Figures) -> str:
    """The paired A/B, a row a cell."""
    rows = []
    for cell in figures.read("ab")["cells"]:
        plain, auto = cell["arms"]["plain"], cell["arms"]["auto"]
        rows.append(
            [
                f"c{cell['concurrency']} {cell['tier']}",
                f"{plain['tpot_mean_ms']:.1f}",
                f"{auto['tpot_mean_ms']:.1f}",
                f"{plain['steady_tokens_per_s']:.0f}",
                f"{auto['steady_tokens_per_s']:.0f}",
                number(cell["tokens_per_round"]),
                f"{number(cell['ratio'])} ({number(cell['ratio_low'])} to {number(cell['ratio_high'])})",
            ]
        )
    header = ["cell", "TPOT plain, ms", "TPOT auto, ms", "tokens/s plain", "tokens/s auto", "tokens/round"]
    return table([*header, "ratio (95 %)"], rows)


def phases(figures: Figures) -> str:
    """Mean time of a round's phases by concurrency, tiers pooled, in ms and in plain rounds."""
    cells = figures.read("ab")["cells"]
    rows = []
    for concurrency in sorted({cell["concurrency"] for cell in cells}):
        plain_round = 0.0
        for arm in ("plain", "auto"):
            arms = [cell["arms"][arm] for cell in cells if cell["concurrency"] == concurrency]
            steps = sum(of["num_decode_steps"] for of in arms)
            names = arms[0]["phase_s"]
            mean = {name: 1000 * sum(of["phase_s"][name] for of in arms) / steps for name in names}
            total = sum(mean.values())
            plain_round = plain_round or total
            row = [f"c{concurrency} {arm}", *(f"{mean[name]:.2f}" for name in names), f"{total:.2f}"]
            rows.append([*row, f"{total / plain_round:.2f}"])
    return table(["round", *(f"{name}, ms" for name in names), "whole, ms", "in plain rounds"], rows)


SECTIONS: dict[str, Callable[[Figures], str]] = {
    "held_out": held_out,
    "answers": answers,
    "acceptance": acceptance,
    "speed": speed,
    "phases": phases,
}


def fill(text: str, figures: Figures) -> str:
    """``text`` with every marked section made anew."""

    def section(match: re.Match[str]) -> str:
        try:
            return match[1] + SECTIONS[match[2]](figures) + match[3]
        except FileNotFoundError as missing:
            print(f"section {match[2]} left as it is: no {missing.filename}", file=sys.stderr)
            return match[0]

    return SECTION.sub(section, text)


def main() -> None:
    """Fill every named file."""
    figures = Figures(Path(sys.argv[1]))
    for name in sys.argv[2:]:
        path = Path(name)
        path.write_text(fill(path.read_text(encoding="utf8"), figures), encoding="utf8")


if __name__ == "__main__":
    main()
