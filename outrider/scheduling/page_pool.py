"""Ids of a fixed set of equal things (cache pages, recurrent seats): allocate, free, count."""

from collections.abc import Iterable
from random import Random

from outrider.errors import EngineFault

__all__ = ["IdPool"]


class IdPool:
    """Hands out each id ``0..size-1`` to at most one owner at a time.

    The id freed last is handed out first, so memory that is warm is used again; a fresh pool hands
    out ascending ids. Which id an owner gets never enters arithmetic.

    Args:
        kind: what the ids name, for messages ("page", "state slot").
        size: number of ids.
    """

    def __init__(self, kind: str, size: int) -> None:
        self._kind = kind
        self._free = list(range(size - 1, -1, -1))
        self._is_free = bytearray(b"\x01") * size

    @property
    def size(self) -> int:
        """All ids, free or used."""
        return len(self._is_free)

    @property
    def num_free(self) -> int:
        """Ids without an owner."""
        return len(self._free)

    def shuffle(self, dice: Random) -> None:
        """Hand out free ids in another order from now on, on which nothing may depend."""
        dice.shuffle(self._free)

    def allocate(self, count: int) -> tuple[int, ...]:
        """Take ``count`` ids. The caller has checked ``num_free``; raises EngineFault otherwise."""
        if count > len(self._free):
            raise EngineFault(
                f"{count} ids of kind {self._kind} were taken with {len(self._free)} of {self.size} free; "
                "admission must check first"
            )
        taken = tuple(self._free.pop() for _ in range(count))
        for taken_id in taken:
            self._is_free[taken_id] = 0
        return taken

    def free(self, ids: Iterable[int]) -> None:
        """Give ids back; raises EngineFault for an id that is not out."""
        # Reversed, so that an owner's ids come out again in their old order.
        for freed_id in reversed(tuple(ids)):
            if not 0 <= freed_id < self.size or self._is_free[freed_id]:
                raise EngineFault(f"{self._kind} {freed_id} was freed but is not in use (of {self.size})")
            self._is_free[freed_id] = 1
            self._free.append(freed_id)
