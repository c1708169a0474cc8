"""What `outrider verify` tells people and programs."""

import dataclasses
import json
import math
from collections import Counter
from dataclasses import dataclass

from rich.table import Table

from outrider.bench.ledger import environment
from outrider.cli.arguments import Verify
from outrider.testing.equivalence import CellResult, Difference, VerifyPrompt
from outrider.testing.faults import Fault
from outrider.testing.grid import Cell
from outrider.tokenizer import IncrementalDetokenizer, Tokenizer

__all__ = ["Acceptance", "Report", "TapArm", "acceptance_of", "difference_table", "grid_table", "to_json", "verdict"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceptance:
    """Drafts of one cell."""

    cell: Cell
    num_drafted: int
    num_accepted: int
    tokens_per_round: float

    def __str__(self) -> str:
        return f"{self.num_accepted} of {self.num_drafted} drafts ({self.tokens_per_round:.2f} tokens per round)"


@dataclass(frozen=True, slots=True, kw_only=True)
class TapArm:
    """Drafts with every tap of the drafter moved by some layers."""

    shift: int  # 0 = as its config says
    aux_layer_ids: tuple[int, ...]
    acceptance: Acceptance


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Everything that was found."""

    prompts: tuple[VerifyPrompt, ...]
    results: tuple[CellResult, ...]
    differences: tuple[Difference, ...]
    fault: Fault | None  # that was planted
    clean: Acceptance | None  # of one cell without it
    taps: tuple[TapArm, ...]  # by shift; () unless asked for
    seconds: float

    @property
    def identical(self) -> bool:
        """No stream differs and no invariant broke."""
        return not self.differences and all(result.fault is None for result in self.results)

    @property
    def injected(self) -> Acceptance | None:
        """Acceptance of the cell of ``clean``, with the fault."""
        if self.clean is None:
            return None
        return next(acceptance_of(result) for result in self.results if result.cell == self.clean.cell)

    @property
    def num_tokens(self) -> int:
        """Output tokens of all cells."""
        return sum(len(stream.token_ids) for result in self.results for stream in result.streams)


def acceptance_of(result: CellResult) -> Acceptance:
    """The drafts of one cell."""
    return Acceptance(
        cell=result.cell,
        num_drafted=result.num_drafted,
        num_accepted=result.num_accepted,
        tokens_per_round=result.tokens_per_round,
    )


def grid_table(report: Report) -> Table:
    """One row per cell."""
    num_prompts = len(report.prompts)
    table = Table(title=f"{num_prompts} prompts, each against its plain run alone", title_justify="left")
    for heading in ("drafts", "concur-\nrency"):
        table.add_column(heading, justify="right")
    table.add_column("prompts and steps")
    table.add_column("decoding")
    table.add_column("seats and\nwho drafts")
    for heading in ("steps", "tokens/\nround", "accepted/\ndrafted", "s"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("streams")
    differing = Counter(difference.cell for difference in report.differences)
    for result in report.results:
        cell, num_differing = result.cell, differing[result.cell]
        outcome = f"{num_differing} of {num_prompts} DIFFER" if num_differing else "identical"
        table.add_row(
            str(cell.num_drafts),
            str(cell.concurrency),
            cell.split.name,
            cell.decoding.label,
            _disturbance(result),
            str(result.num_steps),
            f"{result.tokens_per_round:.2f}",
            f"{result.num_accepted}/{result.num_drafted}" if cell.num_drafts else "-",
            f"{result.seconds:.1f}",
            outcome if result.fault is None else f"{outcome}; engine stopped",
        )
    return table


def _disturbance(result: CellResult) -> str:
    """What was unusual about the seats and who drafted."""
    disturbance = result.cell.disturbance
    return disturbance if result.cell.preemption == "none" else f"{disturbance}, {result.num_preempted} lost"


def difference_table(report: Report, tokenizer: Tokenizer) -> Table:
    """One row per prompt that differs anywhere: the cell in which it leaves its plain run first."""
    table = Table(title="First difference of each prompt", title_justify="left")
    table.add_column("prompt")
    table.add_column("position", justify="right")
    table.add_column("plain")
    table.add_column("here")
    table.add_column("margin", justify="right")
    table.add_column("cell")
    table.add_column("cells", justify="right")
    by_prompt: dict[str, list[Difference]] = {}
    for difference in report.differences:
        by_prompt.setdefault(difference.prompt, []).append(difference)
    for name, found in by_prompt.items():
        first = min(found, key=lambda difference: difference.position)
        table.add_row(
            name,
            str(first.position),
            _show(first.plain_token, first.plain_end, tokenizer),
            _show(first.token, first.end, tokenizer),
            "-" if first.margin is None else f"{first.margin:.4g}",
            first.cell.label,
            f"{len(found)}/{len(report.results)}",
        )
    return table


def _show(token_id: int | None, end: str, tokenizer: Tokenizer) -> str:
    if token_id is None:
        return f"ended ({end})"
    detokenizer = IncrementalDetokenizer(tokenizer)  # unlike decode, it takes every id that a model can emit
    text = detokenizer.push((token_id,)) + detokenizer.flush()
    return f"{token_id} {text!r}".replace("[", "\\[")


def verdict(report: Report) -> list[str]:
    """The last lines of the report."""
    lines = [f"engine stopped: {result.cell.label}: {result.fault}" for result in report.results if result.fault]
    lines.extend(_idle_lines(report))
    outcome = "identical" if report.identical else "DIFFERENT"
    num_differing = len({difference.prompt for difference in report.differences})
    detail = "" if report.identical else f", {num_differing} prompts differ"
    lines.append(
        f"{outcome}: {len(report.prompts)} prompts in {len(report.results)} cells, "
        f"{report.num_tokens} tokens compared{detail}, {report.seconds:.0f} s"
    )
    if report.fault is not None:
        found = "was found" if not report.identical else "changed no output"
        expected = "as it must" if report.fault.changes_output is not report.identical else "which must NOT happen"
        lines.append(f"planted {report.fault.name} ({report.fault.summary}): {found}, {expected}")
        lines.append(_acceptance_line(report))
    return lines + _tap_lines(report.taps)


def _tap_lines(taps: tuple[TapArm, ...]) -> list[str]:
    """Acceptance of each convention, and which one the config probably means."""
    names = {-1: "one layer earlier", 0: "as the config says", 1: "one layer later"}
    lines = [
        f"taps {names[arm.shift]}, after layers {', '.join(map(str, arm.aux_layer_ids))}: {arm.acceptance}"
        for arm in taps
    ]
    if taps:
        best = max(taps, key=lambda arm: (arm.acceptance.tokens_per_round, arm.shift == 0))
        lines.append(
            "the config's taps are accepted best"
            if best.shift == 0
            else f"taps {names[best.shift]} are accepted better: check aux_layer_convention in the drafter's config"
        )
    return lines


def _idle_lines(report: Report) -> list[str]:
    """Cells in which what they are there for did not happen, so that they prove less than they seem to."""
    idle = [(result, "drafted") for result in report.results if result.cell.num_drafts and not result.num_drafted]
    calm = [(r, "preempted") for r in report.results if r.cell.preemption != "none" and not r.num_preempted]
    return [
        f"note: nothing was {verb} in: {result.cell.label}; give more prompts or raise --max-tokens"
        for result, verb in idle + calm
    ]


def _acceptance_line(report: Report) -> str:
    clean, injected = report.clean, report.injected
    assert clean is not None and injected is not None, "a planted fault comes with a cell that was run without it"
    changed = (
        "unchanged"
        if (clean.num_drafted, clean.num_accepted) == (injected.num_drafted, injected.num_accepted)
        else "changed"
    )
    return f"acceptance {changed} ({clean.cell.label}): {clean} without the fault, {injected} with it"


def to_json(report: Report, command: Verify, prompts_sha256: str) -> str:
    """The whole report; fields are in docs/reference/cli.md."""
    row = {
        "identical": report.identical,
        "environment": environment(),
        "settings": dataclasses.asdict(command),
        "prompts_sha256": prompts_sha256,
        "prompts": [prompt.name for prompt in report.prompts],
        "num_tokens": report.num_tokens,
        "seconds": report.seconds,
        "cells": [_cell_row(result, report) for result in report.results],
        "differences": [_difference_row(difference) for difference in report.differences],
        "injected": _fault_row(report),
        "taps": [_tap_row(arm) for arm in report.taps],
    }
    return json.dumps(row, indent=1, allow_nan=False)


def _tap_row(arm: TapArm) -> dict[str, object]:
    return {
        "shift": arm.shift,
        "aux_layer_ids": list(arm.aux_layer_ids),
        "cell": _cell_key(arm.acceptance.cell),
        "num_drafted": arm.acceptance.num_drafted,
        "num_accepted": arm.acceptance.num_accepted,
        "tokens_per_round": arm.acceptance.tokens_per_round,
    }


def _cell_key(cell: Cell) -> dict[str, object]:
    return {
        "num_drafts": cell.num_drafts,
        "concurrency": cell.concurrency,
        "split": cell.split.name,
        "temperature": cell.decoding.temperature,
        "seed": cell.decoding.seed,
        "preemption": cell.preemption,
        "speculating": cell.speculating,
    }


def _cell_row(result: CellResult, report: Report) -> dict[str, object]:
    return _cell_key(result.cell) | {
        "num_rounds": result.num_rounds,
        "num_steps": result.num_steps,
        "num_drafted": result.num_drafted,
        "num_accepted": result.num_accepted,
        "num_preempted": result.num_preempted,
        "tokens_per_round": result.tokens_per_round,
        "seconds": result.seconds,
        "num_differing": sum(difference.cell == result.cell for difference in report.differences),
        "fault": result.fault,
    }


def _difference_row(difference: Difference) -> dict[str, object]:
    margin = difference.margin
    return _cell_key(difference.cell) | {
        "prompt": difference.prompt,
        "position": difference.position,
        "plain_token": difference.plain_token,
        "token": difference.token,
        "margin": margin if margin is not None and math.isfinite(margin) else None,
        "plain_end": difference.plain_end,
        "end": difference.end,
        "error": difference.error,
    }


def _fault_row(report: Report) -> dict[str, object] | None:
    if report.fault is None or report.clean is None or report.injected is None:
        return None
    acceptance = {
        name: {"num_drafted": one.num_drafted, "num_accepted": one.num_accepted}
        for name, one in (("clean", report.clean), ("injected", report.injected))
    }
    return {
        "name": report.fault.name,
        "changes_output": report.fault.changes_output,
        "cell": _cell_key(report.clean.cell),
        "acceptance": acceptance,
    }
