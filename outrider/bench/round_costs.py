"""What a round of a shape costs, from recorded rounds: the shape's own mean, or what lies between its neighbours."""

from collections import defaultdict
from collections.abc import Iterable
from statistics import fmean, median

import numpy as np

from outrider.bench.round_file import RecordedRound
from outrider.errors import RequestError

__all__ = ["RoundCosts"]

FEWEST = 3  # rounds of a shape whose mean is trusted
OUTLIER = 5.0  # a round counts as at most so many times the median of its shape: a pause of the machine is not its cost


class RoundCosts:
    """Seconds of the parts of a round.

    A shape, (sequences, rows), that was recorded often enough costs its mean, so that a replay of the recorded policy
    takes the recorded time. Between two recorded numbers of rows of as many sequences costs are interpolated; elsewhere
    a plane fitted through all means says them. A prompt row adds what all of them added on average.

    Args:
        rounds: at least one without prompt rows.

    Raises:
        RequestError: there is none.
    """

    def __init__(self, rounds: Iterable[RecordedRound]) -> None:
        steps, proposals, hosts = (defaultdict[tuple[int, ...], list[float]](list) for _ in range(3))
        mixed: list[RecordedRound] = []
        for item in rounds:
            if item.num_steps != 1:
                continue
            if item.prompts:
                mixed.append(item)
                continue
            steps[len(item.anchors), item.num_rows].append(item.step_s)
            hosts[(len(item.anchors),)].append(item.host_s)
            if item.num_proposals:
                proposals[(item.num_proposals,)].append(item.propose_s)
        if not steps:
            raise RequestError("no round without prompt rows was recorded, so nothing is known of costs; record more")
        self._steps, self._proposals, self._hosts = (_Means(part) for part in (steps, proposals, hosts))
        self.num_shapes = self._steps.num_shapes
        self._prompt_row_s = _prompt_row_seconds(mixed, self._steps)
        self.num_known = self.num_asked = 0  # steps asked for, and those among them whose shape was recorded

    def step(self, num_sequences: int, num_rows: int, num_prompt_rows: int = 0) -> float:
        """Everything from the batch to the observation of its taps."""
        self.num_asked += 1
        self.num_known += (num_sequences, num_rows) in self._steps
        decode_s = self._steps((num_sequences, num_rows)) if num_sequences else 0.0
        return decode_s + self._prompt_row_s * num_prompt_rows

    def propose(self, num_proposals: int) -> float:
        """One batched proposal."""
        return self._proposals((num_proposals,)) if num_proposals else 0.0

    def host(self, num_sequences: int) -> float:
        """Scheduling and bookkeeping."""
        return self._hosts((num_sequences,))


class _Means:
    """Means by shape; the last count of a shape is interpolated over."""

    def __init__(self, seconds: dict[tuple[int, ...], list[float]]) -> None:
        enough = {shape: values for shape, values in seconds.items() if len(values) >= FEWEST} or seconds
        self._means = {shape: _mean(values) for shape, values in enough.items()}
        self.num_shapes = len(self._means)
        self._plane: tuple[float, ...] | None = None
        if self._means:
            # Weak pull of the slopes to 0, for shapes that lie on a line.
            shapes = np.array([(1, *shape) for shape in self._means], dtype=float)
            values = np.array(list(self._means.values()))
            gram = shapes.T @ shapes + np.diag([0.0, *[1e-3] * (shapes.shape[1] - 1)])
            self._plane = tuple(np.linalg.lstsq(gram, shapes.T @ values, rcond=None)[0].tolist())

    def __contains__(self, shape: tuple[int, ...]) -> bool:
        return shape in self._means

    def __call__(self, shape: tuple[int, ...]) -> float:
        known = self._means.get(shape)
        if known is not None:
            return known
        if self._plane is None:
            return 0.0
        *fixed, last = shape
        beside = sorted(other[-1] for other in self._means if other[:-1] == tuple(fixed))
        below, above = [count for count in beside if count < last], [count for count in beside if count > last]
        if below and above:
            low, high = self._means[*fixed, below[-1]], self._means[*fixed, above[0]]
            return low + (high - low) * (last - below[-1]) / (above[0] - below[-1])
        level, *slopes = self._plane
        return max(level + sum(slope * count for slope, count in zip(slopes, shape, strict=True)), 0.0)


def _mean(values: list[float]) -> float:
    limit = OUTLIER * median(values)
    return fmean(min(value, limit) for value in values)


def _prompt_row_seconds(mixed: Iterable[RecordedRound], steps: _Means) -> float:
    """Seconds that a prompt row adds to a round, on average over all of them."""
    added_s, num_rows = 0.0, 0
    for item in mixed:
        added_s += item.step_s - (steps((len(item.anchors), item.num_rows)) if item.anchors else 0.0)
        num_rows += item.num_prompt_rows
    return max(added_s, 0.0) / num_rows if num_rows else 0.0
