"""Tables for people and JSON for programs, from the same summaries."""

import dataclasses
import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

from rich.table import Table

from outrider.bench.arm import AUTO, PLAIN, SPEC
from outrider.bench.ratios import UNMEASURED, Ratio
from outrider.bench.records import PHASES
from outrider.bench.summary import ArmSummary, CellSummary, Comparison

__all__ = ["cell_table", "cells_to_json", "draft_table", "round_table", "summary_line"]

OUTPUT_DIFFERS = "OUTPUT DIFFERS"


def _number(value: float, digits: int = 2) -> str:
    return f"{value:.{digits}f}" if math.isfinite(value) else "-"


def _interval(ratio: Ratio) -> str:
    return f"{_number(ratio.value)} ({_number(ratio.low)}-{_number(ratio.high)})"


def _table(title: str, text_columns: Sequence[str], number_columns: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left")
    for heading in text_columns:
        table.add_column(heading, no_wrap=True)
    for heading in number_columns:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _arms_of(cells: Sequence[CellSummary]) -> Iterator[tuple[CellSummary, str, ArmSummary, str]]:
    """Every arm of every cell, with the label of the cell in the first row of it only."""
    for cell in cells:
        for index, (name, arm) in enumerate(cell.arms.items()):
            yield cell, name, arm, cell.key.label if index == 0 else ""


def cell_table(cells: Sequence[CellSummary]) -> Table:
    """One row per cell and arm, and one for `auto` over each other arm; at most 120 columns wide."""
    headings = ("TPOT\nms", "steady\ntok/s", "tok/\nround", "ratio\n(95 %)", "TTFT\nms", "TTFT\nratio")
    table = _table("Same prompts, same tokens: speed of each arm over plain", ("cell", "arm"), headings)
    table.add_column("verdict", no_wrap=True)
    for cell, name, arm, label in _arms_of(cells):
        comparison = cell.comparisons.get(name)
        # The arm's own tokens, not the cell's: a row of one arm must not be blamed for another's.
        differs = cell.outputs[name] != cell.outputs[next(iter(cell.arms))]
        table.add_row(
            label,
            name,
            _number(arm.tpot_mean_ms),
            _number(arm.steady_tokens_per_s, 1),
            _number(arm.tokens_per_round),
            "" if comparison is None else _interval(comparison.ratio),
            _number(arm.ttft_mean_ms, 1),
            "" if comparison is None else _number(comparison.ttft_ratio.value),
            OUTPUT_DIFFERS if differs else "" if comparison is None else comparison.verdict,
        )
        if name == list(cell.arms)[-1]:
            _add_direct(table, cell)
            table.add_section()
    return table


def _add_direct(table: Table, cell: CellSummary) -> None:
    """Rows of `auto` over the other arms, and a word where outputs differ in a way that no row above shows."""
    for name, comparison in cell.comparisons.items():
        if name not in cell.arms:
            shown = name.replace("_over_", "/")
            ttft = _number(comparison.ttft_ratio.value)
            table.add_row("", shown, "", "", "", _interval(comparison.ratio), "", ttft, comparison.verdict)
    if not cell.identical:
        table.add_row("", "", "", "", "", "", "", "", OUTPUT_DIFFERS)


def draft_table(cells: Sequence[CellSummary]) -> Table:
    """What drafting did in every arm that drafts."""
    headings = (
        "tok/\nround",
        "drafts/\nround",
        "stood at draft 1, 2, ...\n% of those verified",
        "propose\n%",
        "paused\n%",
    )
    table = _table("Drafts", ("cell", "arm"), (*headings, "loops\n%"))
    for cell, name, arm, _ in _arms_of(cells):
        if name != PLAIN:
            table.add_row(
                cell.key.label,
                name,
                _number(arm.tokens_per_round),
                _number(arm.drafts_per_round),
                " ".join(f"{100 * share:3.0f}" for share in arm.accepted_share_at),
                _number(100 * arm.propose_share, 0),
                _number(100 * arm.paused_share, 0),
                _number(100 * cell.loop_share, 0),
            )
    return table


def round_table(cells: Sequence[CellSummary]) -> Table:
    """Where the decode time goes: ms per round of decode rows only, by part.

    `no model` is all but propose, forward and observe.
    """
    table = _table("Where a round's time goes: ms per round", ("cell", "arm"), (*PHASES, "round", "no model"))
    for cell, name, arm, label in _arms_of(cells):
        parts = [_per_round(arm, arm.phase_s[part]) for part in PHASES]
        last = name == list(cell.arms)[-1]
        whole = _per_round(arm, sum(arm.phase_s.values()))
        table.add_row(label, name, *parts, whole, _number(arm.host_ms, 3), end_section=last)
    return table


def _per_round(arm: ArmSummary, seconds: float) -> str:
    return _number(1e3 * seconds / arm.num_decode_steps) if arm.num_decode_steps else "-"


def cells_to_json(cells: Sequence[CellSummary], *, with_outputs: bool = True) -> list[dict[str, Any]]:
    """The cells as JSON values; what could not be measured is null."""
    return [_cell_to_json(cell, with_outputs) for cell in cells]


def _cell_to_json(cell: CellSummary, with_outputs: bool) -> dict[str, Any]:
    arms = {name: dataclasses.asdict(arm) for name, arm in cell.arms.items()}
    if AUTO in arms and SPEC not in arms:
        arms[SPEC] = arms[AUTO]  # its name before there were several
    values = {
        **dataclasses.asdict(cell.key),
        "num_prompts": cell.num_prompts,
        "num_output_tokens": cell.num_output_tokens,
        "num_repeats": cell.num_repeats,
        "seconds": cell.seconds,
        **_comparison_to_json(cell.main_comparison),
        **{name: _comparison_to_json(comparison) for name, comparison in cell.comparisons.items()},
        "tokens_per_round": cell.tokens_per_round,
        "loop_share": cell.loop_share,
        "identical": cell.identical,
        "differing": cell.differing,
        "window_s": cell.window_s,
        "arms": arms,
        "question_ids": cell.question_ids,
        **({"outputs": cell.outputs} if with_outputs else {}),
    }
    finite = _finite(values)
    assert isinstance(finite, dict)
    return finite


def _comparison_to_json(comparison: Comparison | None) -> dict[str, Any]:
    ratio = UNMEASURED if comparison is None else comparison.ratio
    ttft = UNMEASURED if comparison is None else comparison.ttft_ratio
    return {
        "ratio": ratio.value,
        "ratio_low": ratio.low,
        "ratio_high": ratio.high,
        "ratio_half_width": ratio.half_width,
        "ratio_prompts_low": ratio.prompts_low,
        "ratio_prompts_high": ratio.prompts_high,
        "verdict": None if comparison is None else comparison.verdict,
        "ttft_ratio": ttft.value,
        "ttft_ratio_low": ttft.low,
        "ttft_ratio_high": ttft.high,
    }


def _finite(value: Any) -> Any:
    """NaN is no JSON: None instead, at any depth."""
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def summary_line(cells: Sequence[CellSummary]) -> str:
    """One JSON object in one line: the last line of stdout, for scripts."""
    brief = []
    for cell in cells:
        comparison = cell.main_comparison
        values = {
            "cell": cell.key.label,
            "ratio": _rounded(math.nan if comparison is None else comparison.ratio.value),
            "ratio_low": _rounded(math.nan if comparison is None else comparison.ratio.low),
            "ratio_high": _rounded(math.nan if comparison is None else comparison.ratio.high),
            "verdict": None if comparison is None else comparison.verdict,
            "tokens_per_round": _rounded(cell.tokens_per_round),
            "identical": cell.identical,
        }
        brief.append(values)
    return json.dumps({"cells": brief})


def _rounded(value: float) -> float | None:
    return round(value, 4) if math.isfinite(value) else None
