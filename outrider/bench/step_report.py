"""What `outrider bench step` shows and writes, from the same records."""

import dataclasses
from collections.abc import Sequence
from statistics import fmean

from rich.table import Table

from outrider.bench.anatomy import MODEL_PARTS, Anatomy
from outrider.bench.step_grid import SkippedPoint
from outrider.bench.step_run import StepCell, StepResults
from outrider.bench.synthetic import OUTSIDE_OVERHEAD, SyntheticCell

__all__ = [
    "anatomy_table",
    "part_table",
    "point_to_json",
    "results_to_json",
    "speed_table",
    "step_table",
    "synthetic_table",
    "synthetic_to_json",
]

ROWS_SHOWN = 8  # the anatomy of the step nearest to so many rows stands beside that of one row
LEAST_SHARE = 0.005  # operations below are summed up in one line


def _table(title: str, words: Sequence[str], numbers: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left")
    for heading in words:
        table.add_column(heading, no_wrap=True)
    for heading in numbers:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def step_table(cells: Sequence[StepCell]) -> Table:
    """A line per point; a section per context and number of slots."""
    table = _table(
        "One step: time, and the least time that this machine allows",
        (),
        (
            "context",
            "slots",
            "rows",
            "median ms",
            "quartiles",
            "to one row",
            "floor ms",
            "x floor",
            "host ms",
            "weights MB",
            "caches MB",
            "experts",
        ),
    )
    for index, cell in enumerate(cells):
        point, following = cell.point, cells[index + 1 :]
        ends = bool(following) and (following[0].point.context, following[0].point.slots) != (
            point.context,
            point.slots,
        )
        table.add_row(
            str(point.context),
            str(point.slots),
            str(point.rows),
            f"{cell.median_ms:.3f}",
            f"{cell.low_ms:.3f}-{cell.high_ms:.3f}",
            f"{cell.ratio_to_one_row:.2f}",
            f"{cell.floor_ms:.3f}",
            f"{cell.median_ms / cell.floor_ms:.1f}",
            f"{cell.host_ms:.3f}",
            f"{cell.bytes.weight_bytes / 1e6:.1f}",
            f"{(cell.bytes.total - cell.bytes.weight_bytes) / 1e6:.2f}",
            f"{fmean(cell.distinct_experts):.1f}" if cell.distinct_experts else "-",
            end_section=ends,
        )
    return table


def speed_table(results: StepResults) -> Table:
    """The measured speeds that the floors rest on."""
    table = _table("Fastest speeds measured in this run", ("what",), ("speed",))
    for size, rates in sorted(results.read_rates.items()):
        way = max(rates, key=lambda name: rates[name])
        table.add_row(f"streaming read of {size / 1e6:.1f} MB: {way}", f"{rates[way] / 1e9:.1f} GB/s")
    for name, rate in results.product_rates.items():
        table.add_row(f"product {name}", f"{rate / 1e9:.1f} GFLOP/s")
    return table


def _shown(cells: Sequence[StepCell]) -> list[StepCell]:
    """Of the cells that were taken apart, that with the fewest rows and that nearest to ROWS_SHOWN."""
    known = [cell for cell in cells if cell.anatomy is not None]
    if not known:
        return []
    first = min(known, key=lambda cell: cell.point.rows)
    second = min(known, key=lambda cell: (abs(cell.point.rows - ROWS_SHOWN), -cell.point.rows))
    return [first] if first is second else [first, second]


def part_table(cells: Sequence[StepCell]) -> Table:
    """Parts of a step with the least time that their bytes need; the lines add up to the step."""
    shown = _shown(cells)
    table = _table("Where a step's time goes, by part", ("part",), [])
    for cell in shown:
        table.add_column(f"{cell.point.name}\nms", justify="right")
        table.add_column("floor ms", justify="right")
    anatomies = [cell.anatomy for cell in shown if cell.anatomy is not None]
    for part in dict.fromkeys(item.part for anatomy in anatomies for item in anatomy.parts):
        columns = []
        for cell, anatomy in zip(shown, anatomies, strict=True):
            floor_ms = part_floor_ms(cell, part)
            columns += [f"{anatomy.part_ms(part):.3f}", "" if floor_ms is None else f"{floor_ms:.3f}"]
        table.add_row(part, *columns)
    _add_totals(table, anatomies, blank_after=True)
    return table


def part_floor_ms(cell: StepCell, part: str) -> float | None:
    """Milliseconds that the bytes of a part need at the speed of the step's floor; None for parts outside the model."""
    if part not in MODEL_PARTS:
        return None
    sizes = {**cell.bytes.weights, **cell.bytes.caches}
    return sum(sizes.get(kind, 0) for kind in MODEL_PARTS[part]) / cell.bandwidth_gb_s / 1e6


def anatomy_table(cells: Sequence[StepCell]) -> Table:
    """Operations of a step; the lines add up to the step."""
    shown = _shown(cells)
    table = _table("Where a step's time goes, by operation", ("part", "operation"), [])
    for cell in shown:
        table.add_column(f"{cell.point.name}\ncalls", justify="right")
        table.add_column("ms", justify="right")
    anatomies = [cell.anatomy for cell in shown if cell.anatomy is not None]
    found = [{(item.part, item.op): item for item in anatomy.parts} for anatomy in anatomies]
    small: list[float] = [0.0] * len(found)
    for part, op in sorted({key for each in found for key in each}):
        items = [each.get((part, op)) for each in found]
        times = [0.0 if item is None else item.ms for item in items]
        if all(ms < LEAST_SHARE * anatomy.step_ms for ms, anatomy in zip(times, anatomies, strict=True)):
            small = [total + ms for total, ms in zip(small, times, strict=True)]
            continue
        columns = []
        for item, ms in zip(items, times, strict=True):
            columns += ["" if item is None else str(item.calls), f"{ms:.3f}"]
        table.add_row(part, op, *columns)
    table.add_row("", "all others", *(text for ms in small for text in ("", f"{ms:.3f}")))
    _add_totals(table, anatomies, blank_after=False)
    return table


def _add_totals(table: Table, anatomies: Sequence[Anatomy], *, blank_after: bool) -> None:
    """What watching cost, and the step."""
    words = len(table.columns) - 2 * len(anatomies)
    table.add_section()
    for title, values in (
        ("without the stopwatch", [anatomy.watching_ms for anatomy in anatomies]),
        ("step", [anatomy.step_ms for anatomy in anatomies]),
    ):
        pairs = [(f"{ms:.3f}", "") if blank_after else ("", f"{ms:.3f}") for ms in values]
        table.add_row(title, *[""] * (words - 1), *(text for pair in pairs for text in pair))


def synthetic_table(cells: Sequence[SyntheticCell]) -> Table:
    """A line per arm; the ratio stands with the speculative one."""
    table = _table(
        "Rounds at a chosen acceptance, ms",
        ("slots", "context", "arm"),
        ("tokens/round", "round", "quartiles", *OUTSIDE_OVERHEAD, "overhead", "x fastest plain"),
    )
    for cell in cells:
        for name, arm in cell.arms.items():
            table.add_row(
                str(cell.slots),
                str(cell.context),
                name,
                f"{arm.tokens_per_round:.2f}",
                f"{arm.round_ms:.3f}",
                f"{arm.low_ms:.3f}-{arm.high_ms:.3f}",
                *(f"{arm.part_ms[part]:.3f}" for part in OUTSIDE_OVERHEAD),
                f"{arm.overhead_ms:.3f}",
                f"{cell.ratio:.2f}" if name == "spec" else "",
                end_section=name == list(cell.arms)[-1],
            )
    return table


def point_to_json(cell: StepCell) -> dict[str, object]:
    """One entry of ``points``; its fields are described in docs/reference/cli.md."""
    return {
        "rows": cell.point.rows,
        "slots": cell.point.slots,
        "context": cell.point.context,
        "median_ms": cell.median_ms,
        "low_ms": cell.low_ms,
        "high_ms": cell.high_ms,
        "ratio_to_one_row": cell.ratio_to_one_row,
        "ratio_low": cell.ratio_low,
        "ratio_high": cell.ratio_high,
        "floor_ms": cell.floor_ms,
        "bytes_floor_ms": cell.bytes_floor_ms,
        "operations_floor_ms": cell.operations_floor_ms,
        "weight_bytes": cell.bytes.weight_bytes,
        "cache_bytes": cell.bytes.total - cell.bytes.weight_bytes,
        "kind_bytes": {**cell.bytes.weights, **cell.bytes.caches},
        "operations": cell.operations,
        "bandwidth_gb_s": cell.bandwidth_gb_s,
        "achieved_gb_s": cell.bytes.total / cell.median_ms / 1e6,
        "distinct_experts": list(cell.distinct_experts),
        "verb_ms": dict(cell.verb_ms),
        "host_ms": cell.host_ms,
    }


def results_to_json(results: StepResults, skipped: Sequence[SkippedPoint]) -> dict[str, object]:
    """Points, what was left out, speeds and the steps that were taken apart."""
    return {
        "points": [point_to_json(cell) for cell in results.cells],
        "skipped": [dataclasses.asdict(point) for point in skipped],
        "num_repeats": results.num_repeats,
        "read_gb_s": [
            {"bytes": size, "gb_s": max(rates.values()) / 1e9, "ways": {way: rate / 1e9 for way, rate in rates.items()}}
            for size, rates in sorted(results.read_rates.items())
        ],
        "product_gflop_s": {name: rate / 1e9 for name, rate in results.product_rates.items()},
        "anatomy": [
            {
                "rows": cell.point.rows,
                "slots": cell.point.slots,
                "context": cell.point.context,
                "step_ms": cell.anatomy.step_ms,
                "watching_ms": cell.anatomy.watching_ms,
                "parts": [dataclasses.asdict(item) for item in cell.anatomy.parts],
            }
            for cell in results.cells
            if cell.anatomy is not None
        ],
    }


def synthetic_to_json(cells: Sequence[SyntheticCell]) -> list[dict[str, object]]:
    """The cells as JSON values."""
    return [dataclasses.asdict(cell) for cell in cells]
