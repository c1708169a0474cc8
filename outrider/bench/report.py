"""Tables for people and JSON for programs, from the same summaries."""

import dataclasses
import json
import math
from collections.abc import Sequence

from rich.table import Table

from outrider.bench.records import PHASES
from outrider.bench.summary import ArmSummary, CellSummary

__all__ = ["cell_table", "cells_to_json", "round_table", "summary_line"]

ARM_TITLES = {"plain": "plain", "spec": "speculative"}


def _number(value: float, digits: int = 2) -> str:
    return f"{value:.{digits}f}" if math.isfinite(value) else "-"


def cell_table(cells: Sequence[CellSummary]) -> Table:
    """One row per cell and arm; the ratio stands in the row of the speculative arm."""
    table = Table(title="Speculation off and on, same prompts, same tokens", title_justify="left")
    for heading in ("cell", "arm"):
        table.add_column(heading, no_wrap=True)
    table.add_column("TPOT ms\nmean", justify="right")
    table.add_column("\nmedian", justify="right")
    for heading in ("steady\ntok/s", "tokens/\nround", "ratio\n(95 %)", "same\nbytes"):
        table.add_column(heading, justify="right", no_wrap=True)
    for cell in cells:
        for name, arm in cell.arms.items():
            is_spec = name == "spec"
            table.add_row(
                f"c{cell.concurrency} {cell.tier}",
                ARM_TITLES.get(name, name),
                _number(arm.tpot_mean_ms),
                _number(arm.tpot_median_ms),
                _number(arm.steady_tokens_per_s, 1),
                _number(arm.tokens_per_round),
                f"{_number(cell.ratio)} ({_number(cell.ratio_low)}-{_number(cell.ratio_high)})" if is_spec else "",
                ("yes" if cell.identical else "NO") if is_spec else "",
                end_section=name == list(cell.arms)[-1],
            )
    return table


def round_table(cells: Sequence[CellSummary]) -> Table:
    """Where the decode time of the speculative arm goes: ms per round and share, one column per cell.

    Below it the part that no model takes, of both arms.
    """
    table = Table(title="Where a speculative round's time goes: ms per round (share)", title_justify="left")
    table.add_column("part")
    arms: list[ArmSummary] = []
    for cell in cells:
        if "spec" in cell.arms:
            arms.append(cell.arms["spec"])
            table.add_column(f"c{cell.concurrency} {cell.tier}", justify="right")
    for part in PHASES:
        table.add_row(part, *(_phase(arm, arm.phase_s[part]) for arm in arms))
    table.add_section()
    table.add_row("round", *(_phase(arm, sum(arm.phase_s.values())) for arm in arms))
    table.add_row("all but propose, forward, observe", *(_number(arm.host_ms, 3) for arm in arms))
    plain = [cell.arms["plain"] for cell in cells if {"plain", "spec"} <= cell.arms.keys()]
    if plain:
        table.add_row("the same of a plain round", *(_number(arm.host_ms, 3) for arm in plain))
    return table


def _phase(arm: ArmSummary, seconds: float) -> str:
    if arm.num_decode_steps == 0 or arm.decode_s <= 0:
        return "-"
    return f"{_number(1e3 * seconds / arm.num_decode_steps)} ({100 * seconds / arm.decode_s:3.0f} %)"


def cells_to_json(cells: Sequence[CellSummary]) -> list[dict[str, object]]:
    """The cells as JSON values; what could not be measured is null."""
    return [_finite(dataclasses.asdict(cell)) for cell in cells]


def _finite(values: dict[str, object]) -> dict[str, object]:
    """NaN is no JSON: replace it with None at any depth."""
    return {
        key: _finite(value)
        if isinstance(value, dict)
        else None
        if isinstance(value, float) and not math.isfinite(value)
        else value
        for key, value in values.items()
    }


def summary_line(cells: Sequence[CellSummary]) -> str:
    """One JSON object in one line: the last line of stdout, for scripts."""
    brief = [
        {
            "cell": f"c{cell.concurrency} {cell.tier}",
            "ratio": None if math.isnan(cell.ratio) else round(cell.ratio, 4),
            "tokens_per_round": None if math.isnan(cell.tokens_per_round) else round(cell.tokens_per_round, 4),
            "identical": cell.identical,
        }
        for cell in cells
    ]
    return json.dumps({"cells": brief})
