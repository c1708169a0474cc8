"""What the parts of a round cost on this machine: measured, kept as staircases, corrected while serving.

A round of S sequences, m of them proposing, with N rows in its step, takes ``host(S) + propose(m) + step(S, N)``
seconds. Each part is a fit through all shapes that were measured, times the deviation of the nearest measured
shapes from it, so tiles and buckets stay stairs. Context enters as work, rows times tokens of context.

All costs are as of one speed of the machine: a shared host slows down by half within a second, and a shape that was
last seen before would look cheap for ever. Only ratios of costs matter to a decision, so the speed itself is never
used but to normalise what is measured.
"""

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["CostTable", "MachineSpeed", "MeasuredCost", "RoundCosts", "context_work"]

SPEED_MEMORY = 0.04  # exponent of a measurement in the speed of the machine
JUMP_MEMORY = 0.25  # the same while the machine is jumping to another speed
MEMORY = 0.05  # weight of a new measurement of a shape once there are many
TYPICAL = 1.3  # by which measurements of a known shape are believed to deviate; beyond, it is the machine
NUM_FAR = 4  # measurements in a row that are a new speed of the machine
JUMP = 4.0  # by which the machine is believed to change at most
DISBELIEF = 0.2  # factor of MEMORY for such measurements: in the long run the shape may have changed after all
EARLY = 4.0  # measurements of a shape before which the lowest counts
COLD = 0.25  # weight of the very first measurement, which finds cold caches
TRUST = 4.0  # measurements of a shape that weigh as much as the fit through all
REFIT = 32  # measurements between two fits
PRIOR_SLOPE = 0.05  # of the mean seconds, per further row or sequence, before enough was measured
LEAST = 0.05  # of the mean seconds: no shape is cheaper, wherever the fit ends
UNSEEN_WEIGHT = 0.25  # of a shape that was never measured, where stairs are made monotone
MAX_TABLES = 256
WORK_UNIT = 1024.0


def context_work(num_rows: float, mean_context: float) -> float:
    """Rows times tokens of context, in thousands."""
    return num_rows * mean_context / WORK_UNIT


def _bucket(mean_context: float) -> int:
    """Contexts within one bucket share a mean: up to 255 tokens, then powers of two."""
    return (int(mean_context) // 256).bit_length()


class MachineSpeed:
    """How much slower the machine is now than when the costs were first measured.

    A single measurement far off is something that ran beside it; several in a row are another speed.
    """

    def __init__(self) -> None:
        self.factor = 1.0
        self._num_far = 0  # measurements in a row far above (positive) or below (negative) what was expected

    def follow(self, measured: float, expected: float) -> None:
        """Move towards what a measurement says of a cost expected at the present speed."""
        if expected <= 0:
            return
        ratio = measured / expected
        if ratio > TYPICAL:
            self._num_far = max(self._num_far, 0) + 1
        elif ratio < 1 / TYPICAL:
            self._num_far = min(self._num_far, 0) - 1
        else:
            self._num_far = 0
        limit, memory = (TYPICAL, SPEED_MEMORY) if abs(self._num_far) < NUM_FAR else (JUMP, JUMP_MEMORY)
        self.factor *= min(max(ratio, 1 / limit), limit) ** memory


@dataclass(frozen=True, slots=True, kw_only=True)
class CostTable:
    """Seconds by the last count, from ``first`` on, at no context, and how they grow with work; never decreasing."""

    first: int
    seconds: tuple[float, ...]
    per_work: float

    def at(self, mean_context: float) -> list[float]:
        """Seconds of ``first``, ``first + 1``, ... rows whose sequences have so many tokens of context."""
        slope = self.per_work * mean_context / WORK_UNIT
        if slope == 0:
            return list(self.seconds)
        return [base + slope * count for count, base in enumerate(self.seconds, self.first)]


class _Shape:
    """Measurements of one shape at contexts of one size."""

    __slots__ = ("mean", "weight", "work")

    def __init__(self, mean: float, weight: float, work: float) -> None:
        self.mean, self.weight, self.work = mean, weight, work

    def add(self, seconds: float, work: float) -> None:
        share = max(1 / (self.weight + 1), MEMORY)
        if seconds < self.mean / TYPICAL:
            if self.weight < EARLY:  # what came before was cold, or something else ran beside it
                self.mean, self.weight = seconds, 1.0
                return
            seconds, share = self.mean / TYPICAL, share * DISBELIEF
        elif seconds > self.mean * TYPICAL:
            seconds, share = self.mean * TYPICAL, share * DISBELIEF
        self.mean += share * (seconds - self.mean)
        self.work += share * (work - self.work)
        self.weight += 1


class MeasuredCost:
    """Seconds of one operation over a few counts, the last of which comes in stairs.

    Args:
        num_counts: counts of a shape.
        speed: of the machine; shared by everything that is measured on it.
    """

    def __init__(self, num_counts: int, speed: MachineSpeed) -> None:
        self._speed = speed
        self._shapes: dict[tuple[tuple[int, ...], int], _Shape] = {}  # by counts and bucket of context
        self._level, self._slopes, self._per_work = 0.0, (0.0,) * num_counts, 0.0
        self._least = 0.0
        self._num_new, self._num_seen = 0, 0  # measurements since the fit, and in all
        self._tables: dict[tuple[tuple[int, ...], int, int], CostTable] = {}
        self._ratios: dict[tuple[int, ...], tuple[list[int], list[float], list[float]]] = {}

    @property
    def is_known(self) -> bool:
        """Whether anything was measured."""
        return self._num_seen > 0

    def weight(self, counts: tuple[int, ...]) -> float:
        """Measurements of a shape, at any context."""
        return sum(shape.weight for (known, _), shape in self._shapes.items() if known == counts)

    def add(self, counts: tuple[int, ...], seconds: float, mean_context: float = 0.0) -> None:
        """Take in one measurement."""
        if seconds <= 0:
            return
        work = context_work(counts[-1], mean_context)
        if self._num_seen:
            self._speed.follow(seconds, self(counts, mean_context) * self._speed.factor)
        seconds /= self._speed.factor
        key = counts, _bucket(mean_context)
        shape = self._shapes.get(key)
        if shape is None:
            self._shapes[key] = _Shape(seconds, 1.0 if self._num_seen else COLD, work)
        else:
            shape.add(seconds, work)
        self._num_new += 1
        self._num_seen += 1
        if self._num_new >= min(self._num_seen // 2, REFIT):  # a fit costs as much as many estimates
            self.refit()

    def put(self, counts: tuple[int, ...], seconds: float, mean_context: float, weight: float) -> None:
        """Take in what is known of a shape from so many measurements elsewhere; ``refit`` when all is in."""
        self._shapes[counts, _bucket(mean_context)] = _Shape(seconds, weight, context_work(counts[-1], mean_context))
        self._num_seen += 1

    def __call__(self, counts: tuple[int, ...], mean_context: float = 0.0) -> float:
        """Expected seconds at the first speed; 0 before anything was measured."""
        return self.table(counts[:-1], counts[-1], counts[-1]).at(mean_context)[0]

    def table(self, others: tuple[int, ...], first: int, last: int) -> CostTable:
        """Seconds over the last count, the others given."""
        key = (others, first, last)
        table = self._tables.get(key)
        if table is None:
            if len(self._tables) >= MAX_TABLES:
                self._tables.clear()
            table = self._tables[key] = self._draw(others, first, last)
        return table

    def saved(self) -> list[list[float]]:
        """All measurements as plain numbers: counts, bucket of context, work, mean seconds, weight."""
        return [
            [*counts, bucket, shape.work, shape.mean, shape.weight] for (counts, bucket), shape in self._shapes.items()
        ]

    def restore(self, rows: Iterable[Sequence[float]]) -> None:
        """Start from what ``saved`` gave."""
        for *counts, bucket, work, mean, weight in rows:
            self._shapes[tuple(int(count) for count in counts), int(bucket)] = _Shape(mean, weight, work)
            self._num_seen += 1
        if self._shapes:
            self.refit()

    def _fitted(self, counts: Sequence[int], work: float = 0.0) -> float:
        seconds = self._level + self._per_work * work
        for slope, count in zip(self._slopes, counts, strict=True):
            seconds += slope * count
        return max(seconds, self._least)

    def refit(self) -> None:
        """Least squares through the means of all shapes; slopes are not negative."""
        points = np.array([[*counts, shape.work] for (counts, _), shape in self._shapes.items()], dtype=float)
        means = np.array([shape.mean for shape in self._shapes.values()])
        weights = np.array([min(shape.weight, 1 / MEMORY) for shape in self._shapes.values()])
        level = float(np.average(means, weights=weights))
        # The prior is a slope of PRIOR_SLOPE around the centre of what was measured, worth one measurement.
        centre = np.average(points, axis=0, weights=weights)
        offsets = points - centre
        prior = np.full(points.shape[1], PRIOR_SLOPE * level)
        prior[-1] = 0.0
        gram = (offsets * weights[:, None]).T @ offsets + np.eye(points.shape[1])
        slopes = np.linalg.solve(gram, (offsets * weights[:, None]).T @ (means - level) + prior)
        slopes = np.maximum(slopes, 0.0)
        self._level, self._least = float(level - slopes @ centre), LEAST * level
        self._slopes, self._per_work = tuple(slopes[:-1].tolist()), float(slopes[-1])
        self._num_new = 0
        self._tables.clear()
        self._deviations()

    def _deviations(self) -> None:
        """How much each measured shape deviates from the fit, drawn to it while it is rare; by the other counts."""
        sums: dict[tuple[int, ...], list[float]] = {}
        for (counts, _), shape in self._shapes.items():
            total = sums.setdefault(counts, [0.0, 0.0])
            total[0] += shape.weight * shape.mean / self._fitted(counts, shape.work)
            total[1] += shape.weight
        self._ratios = {}
        for counts in sorted(sums):
            ratio, weight = sums[counts][0] / sums[counts][1], sums[counts][1]
            lasts, ratios, weights = self._ratios.setdefault(counts[:-1], ([], [], []))
            lasts.append(counts[-1])
            ratios.append(1 + (ratio - 1) * weight / (weight + TRUST))
            weights.append(weight)

    def _draw(self, others: tuple[int, ...], first: int, last: int) -> CostTable:
        lasts, ratios, seen = self._ratios.get(others, ([], [], []))
        seconds, weights = [], []
        for count in range(first, last + 1):
            ratio, weight = _between(lasts, ratios, seen, count)
            seconds.append(self._fitted((*others, count)) * ratio)
            weights.append(weight)
        return CostTable(first=first, seconds=tuple(_monotone(seconds, weights)), per_work=self._per_work)


def _between(lasts: list[int], ratios: list[float], weights: list[float], count: int) -> tuple[float, float]:
    """Ratio at ``count`` and its weight, on the line between the measured neighbours."""
    if not lasts:
        return 1.0, UNSEEN_WEIGHT
    place = bisect_left(lasts, count)
    if place < len(lasts) and lasts[place] == count:
        return ratios[place], max(weights[place], UNSEEN_WEIGHT)
    if place == 0:
        return ratios[0], UNSEEN_WEIGHT
    if place == len(lasts):
        return ratios[-1], UNSEEN_WEIGHT
    low, high = lasts[place - 1], lasts[place]
    share = (count - low) / (high - low)
    return ratios[place - 1] + share * (ratios[place] - ratios[place - 1]), UNSEEN_WEIGHT


def _monotone(values: list[float], weights: list[float]) -> list[float]:
    """The nearest sequence that never decreases, by weighted squares: pool adjacent violators."""
    blocks: list[list[float]] = []  # mean, weight, length
    for value, weight in zip(values, weights, strict=True):
        blocks.append([value, weight, 1])
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            mean, total, length = blocks.pop()
            below = blocks[-1]
            below[0] = (below[0] * below[1] + mean * total) / (below[1] + total)
            below[1] += total
            below[2] += length
    return [mean for mean, _, length in blocks for _ in range(int(length))]


class RoundCosts:
    """Seconds of the parts of a round, all as of one speed of the machine."""

    def __init__(self) -> None:
        self.speed = MachineSpeed()
        self.step = MeasuredCost(2, self.speed)  # of sequences and rows
        self.propose = MeasuredCost(1, self.speed)  # of proposing sequences
        self.host = MeasuredCost(1, self.speed)  # between rounds, of sequences
        self.is_profiled = False  # whether all shapes that will run were measured before serving

    @property
    def is_known(self) -> bool:
        """Whether a step and a proposal were measured."""
        return self.step.is_known and self.propose.is_known

    def saved(self) -> dict[str, list[list[float]]]:
        """As plain numbers, for a file."""
        return {"step": self.step.saved(), "propose": self.propose.saved(), "host": self.host.saved()}

    @classmethod
    def restored(cls, content: Mapping[str, Any]) -> "RoundCosts":
        """From what ``saved`` gave.

        Raises:
            KeyError, TypeError, ValueError: that is not what ``saved`` gives.
        """
        costs = cls()
        for name, cost, num_counts in (("step", costs.step, 2), ("propose", costs.propose, 1), ("host", costs.host, 1)):
            rows = content[name]
            if any(len(row) != num_counts + 4 or min(row) < 0 or row[-2] <= 0 or row[-1] <= 0 for row in rows):
                raise ValueError(f"{name} holds a row that is no measurement")
            cost.restore(rows)
        costs.is_profiled = costs.is_known
        return costs
