"""Which steps are measured, which are listed as skipped, what is refused."""

import pytest

from outrider.bench.step_grid import StepPoint, one_row, step_grid
from outrider.errors import ConfigError


def test_rows_are_spread_evenly_and_all_of_them() -> None:
    assert StepPoint(rows=14, slots=4, context=1).spans == (4, 4, 3, 3)
    assert StepPoint(rows=16, slots=16, context=1).spans == (1,) * 16
    assert StepPoint(rows=7, slots=1, context=1).spans == (7,)


def test_fewer_rows_than_slots_are_listed_and_one_row_is_always_measured() -> None:
    grid = step_grid([8, 2], [4, 8], [16, 5], limit=16, model="m")
    asked = [(point.context, point.slots, point.rows) for point in grid.measured if point in grid.asked]
    assert asked == [(5, 4, 8), (5, 8, 8), (16, 4, 8), (16, 8, 8)]
    assert {(point.context, point.slots, point.rows) for point in grid.skipped} == {
        (5, 4, 2), (5, 8, 2), (16, 4, 2), (16, 8, 2),
    }  # fmt: skip
    assert all("cannot give" in point.reason for point in grid.skipped)
    assert {one_row(5), one_row(16)} <= set(grid.measured) and one_row(5) not in grid.asked
    assert (grid.max_slots, grid.max_rows, grid.max_span, grid.contexts) == (8, 8, 2, (5, 16))


@pytest.mark.parametrize(
    ("rows", "slots", "contexts", "words"),
    [
        ([1], [1], [16, 17], "context=17 exceeds the 16 positions of m"),
        ([0], [1], [4], "rows=0"),
        ([1], [], [4], "slots="),
        ([1], [1], [-2], "context=-2"),
        ([1, 2], [3, 4], [4], "fewer rows than slots"),
    ],
)
def test_what_is_refused(rows: list[int], slots: list[int], contexts: list[int], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        step_grid(rows, slots, contexts, limit=16, model="m")
