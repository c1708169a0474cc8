"""Reliability diagrams as SVG text, without a plotting library: predicted survival against what came true."""

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.bench.calibrate import ReliabilityBin

__all__ = ["ReliabilityPanel", "reliability_plot"]

SIDE, GAP, LEFT, TOP = 104, 14, 92, 56
BEFORE, AFTER = "#d62728", "#1f77b4"
FEWEST = 10  # outcomes below which a bin is noise and not drawn


@dataclass(frozen=True, slots=True, kw_only=True)
class ReliabilityPanel:
    """One condition and draft position."""

    row: str
    column: str
    before: Sequence[ReliabilityBin]
    after: Sequence[ReliabilityBin]


def reliability_plot(panels: Sequence[ReliabilityPanel], title: str) -> str:
    """A grid of panels, a row per condition and a column per draft position; the diagonal is a true prediction."""
    rows, columns = list(dict.fromkeys(p.row for p in panels)), list(dict.fromkeys(p.column for p in panels))
    width = LEFT + len(columns) * (SIDE + GAP) + GAP
    height = TOP + len(rows) * (SIDE + GAP) + 34
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="{LEFT}" y="18" font-size="13">{_escaped(title)}</text>',
        f'<text x="{LEFT}" y="34" fill="{BEFORE}">as the head says</text>',
        f'<text x="{LEFT + 110}" y="34" fill="{AFTER}">calibrated</text>',
        f'<text x="{LEFT}" y="{height - 10}">across: predicted survival 0 to 1; up: share that stood</text>',
    ]
    for index, column in enumerate(columns):
        x = LEFT + index * (SIDE + GAP) + SIDE / 2
        parts.append(f'<text x="{x:.0f}" y="{TOP - 6}" text-anchor="middle">{_escaped(column)}</text>')
    for index, row in enumerate(rows):
        y = TOP + index * (SIDE + GAP) + SIDE / 2
        for line, text in enumerate(row.split(", ")):
            parts.append(f'<text x="8" y="{y + 14 * line:.0f}">{_escaped(text)}</text>')
    for panel in panels:
        x, y = LEFT + columns.index(panel.column) * (SIDE + GAP), TOP + rows.index(panel.row) * (SIDE + GAP)
        parts.append(f'<g transform="translate({x},{y})">')
        parts.append(f'<rect width="{SIDE}" height="{SIDE}" fill="none" stroke="#999999"/>')
        parts.append(f'<path d="M0 {SIDE}L{SIDE} 0" stroke="#cccccc"/>')
        parts += [*_curve(panel.before, BEFORE), *_curve(panel.after, AFTER), "</g>"]
    return "\n".join([*parts, "</svg>", ""])


def _curve(bins: Sequence[ReliabilityBin], colour: str) -> list[str]:
    """A line through the bins, with dots whose area grows with the outcomes."""
    kept = [item for item in bins if item.count >= FEWEST]
    most = max((item.count for item in kept), default=1)
    places = [(SIDE * item.predicted, SIDE * (1 - item.stood), item.count) for item in kept]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in places)
    dots = [
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{1 + 3 * (count / most) ** 0.5:.1f}" fill="{colour}" '
        'fill-opacity="0.6"/>'
        for x, y, count in places
    ]
    return [f'<polyline points="{path}" fill="none" stroke="{colour}"/>', *dots]


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
