"""A plot of step times as SVG text, without a plotting library."""

import math
from collections.abc import Callable, Sequence
from itertools import groupby

from outrider.bench.step_run import StepCell

__all__ = ["step_plot"]

PANEL_WIDTH, PANEL_HEIGHT = 360, 300
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 30, 40
COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf")

Place = Callable[[float], float]


def step_plot(cells: Sequence[StepCell], title: str) -> str:
    """One panel per context: milliseconds over rows, both logarithmic, a line per number of slots, floors dashed."""
    panels = [(context, list(group)) for context, group in groupby(cells, key=lambda cell: cell.point.context)]
    width, height = PANEL_WIDTH * len(panels), PANEL_HEIGHT + 24
    times = [ms for cell in cells for ms in (cell.median_ms, cell.floor_ms)]
    rows = [cell.point.rows for cell in cells]
    place_y = _logarithmic(min(times) / 1.2, max(times) * 1.2, PANEL_HEIGHT - BOTTOM, TOP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="{width / 2:.0f}" y="14" text-anchor="middle" font-size="13">{_escaped(title)}</text>',
    ]
    for index, (context, group) in enumerate(panels):
        place_x = _logarithmic(min(rows) / 1.1, max(rows) * 1.1, LEFT, PANEL_WIDTH - RIGHT)
        parts.append(f'<g transform="translate({index * PANEL_WIDTH},20)">')
        parts += _axes(f"context {context}", sorted(set(rows)), (min(times), max(times)), place_x, place_y)
        parts += _lines(group, place_x, place_y)
        parts.append("</g>")
    return "\n".join([*parts, "</svg>", ""])


def _logarithmic(least: float, most: float, begin: float, end: float) -> Place:
    scale = (end - begin) / (math.log(most) - math.log(least))
    return lambda value: begin + scale * (math.log(value) - math.log(least))


def _axes(name: str, rows: Sequence[int], times: tuple[float, float], place_x: Place, place_y: Place) -> list[str]:
    bottom, right = PANEL_HEIGHT - BOTTOM, PANEL_WIDTH - RIGHT
    parts = [
        f'<text x="{(LEFT + right) / 2:.0f}" y="{TOP - 8}" text-anchor="middle">{name}</text>',
        f'<path d="M{LEFT} {TOP}V{bottom}H{right}" fill="none" stroke="black"/>',
        f'<text x="{(LEFT + right) / 2:.0f}" y="{bottom + 32}" text-anchor="middle">rows of the step</text>',
        f'<text x="12" y="{(TOP + bottom) / 2:.0f}" text-anchor="middle" '
        f'transform="rotate(-90 12 {(TOP + bottom) / 2:.0f})">ms</text>',
    ]
    for tick in _spread(rows, place_x):
        parts.append(f'<text x="{place_x(tick):.1f}" y="{bottom + 15}" text-anchor="middle">{tick}</text>')
    for tick_ms in _decade_ticks(*times):
        y = place_y(tick_ms)
        parts.append(f'<path d="M{LEFT} {y:.1f}H{right}" stroke="#dddddd"/>')
        parts.append(f'<text x="{LEFT - 5}" y="{y + 4:.1f}" text-anchor="end">{tick_ms:g}</text>')
    return parts


def _spread(rows: Sequence[int], place_x: Place) -> list[int]:
    """Ticks that do not write over each other."""
    kept: list[int] = []
    for tick in rows:
        if not kept or place_x(tick) - place_x(kept[-1]) >= 16:
            kept.append(tick)
    return kept


def _decade_ticks(least: float, most: float) -> list[float]:
    """1, 2 and 5 times powers of ten between two values."""
    exponents = range(math.floor(math.log10(least)), math.ceil(math.log10(most)) + 1)
    ticks = [factor * 10.0**exponent for exponent in exponents for factor in (1, 2, 5)]
    return [tick for tick in ticks if least / 1.2 <= tick <= most * 1.2]


def _lines(cells: Sequence[StepCell], place_x: Place, place_y: Place) -> list[str]:
    parts = []
    by_slots = groupby(
        sorted(cells, key=lambda cell: (cell.point.slots, cell.point.rows)), lambda cell: cell.point.slots
    )
    for index, (slots, group) in enumerate(by_slots):
        points, colour = list(group), COLOURS[index % len(COLOURS)]
        for heights, dashes in (
            ([cell.median_ms for cell in points], ""),
            ([cell.floor_ms for cell in points], ' stroke-dasharray="4 3"'),
        ):
            path = " ".join(
                f"{place_x(cell.point.rows):.1f},{place_y(ms):.1f}" for cell, ms in zip(points, heights, strict=True)
            )
            parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}"{dashes}/>')
        parts += [
            f'<circle cx="{place_x(cell.point.rows):.1f}" cy="{place_y(cell.median_ms):.1f}" r="2.2" fill="{colour}"/>'
            for cell in points
        ]
        y = TOP + 12 + 14 * index
        parts.append(f'<text x="{LEFT + 8}" y="{y}" fill="{colour}">{slots} slots (floor dashed)</text>')
    return parts


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
