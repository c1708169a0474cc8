"""Loop detection at the end of an output."""

import pytest

from outrider.engine.loops import ends_in_loop


@pytest.mark.parametrize(
    ("token_ids", "loops"),
    [
        ([1, 2, 3, 4], False),
        ([9, 5, 5, 5], True),
        ([9, 5, 5], False),
        ([5, 5, 5, 9], False),  # the loop must stand at the end
        ([7, 1, 2, 1, 2, 1, 2], True),
        ([7, 1, 2, 1, 2, 1, 3], False),
        (list(range(32)) * 3, True),
        (list(range(33)) * 3, False),  # the period is over the limit
        (list(range(32)) * 2 + list(range(31)), False),
        ([], False),
    ],
)
def test_ends_in_loop(token_ids: list[int], loops: bool) -> None:
    assert ends_in_loop(token_ids) is loops
