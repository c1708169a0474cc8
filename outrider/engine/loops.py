"""Whether an output has run into a loop."""

from collections.abc import Sequence

__all__ = ["ends_in_loop"]

MAX_PERIOD = 32
MIN_REPEATS = 3


def ends_in_loop(token_ids: Sequence[int], max_period: int = MAX_PERIOD, min_repeats: int = MIN_REPEATS) -> bool:
    """Whether the ids end in a block of at most `max_period` ids written at least `min_repeats` times."""
    for period in range(1, min(max_period, len(token_ids) // min_repeats) + 1):
        tail = token_ids[len(token_ids) - period * min_repeats :]
        if all(tail[index] == tail[index + period] for index in range(len(tail) - period)):
            return True
    return False
