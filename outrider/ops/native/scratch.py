"""Memory for what recorded steps compute on the way; the programs of one owner share it.

While a step is recorded, every tensor it allocates is a block of scratch memory, and a block is free again when the
last tensor that looks at it is gone. Operations run in the order in which they were recorded, so a block may hold
another tensor from there on, and the blocks of a step of few rows stay in the nearest caches. Programs never run at the
same time and leave nothing behind but their results, which lie elsewhere; so each recording starts with all of it.
"""

import math
import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

__all__ = ["Block", "Scratch", "ScratchSession"]

ALIGNMENT = 64  # bytes: a cache line
SLAB_BYTES = 1 << 20  # it grows by at least so much
POISON = 0xFF  # as bfloat16 or float32: NaN; as int64: -1


class Scratch:
    """Slabs that only grow: about what the largest program needs at a time."""

    def __init__(self) -> None:
        self._slabs: list[np.ndarray[Any, np.dtype[np.uint8]]] = []

    @property
    def num_bytes(self) -> int:
        """Bytes held."""
        return sum(slab.nbytes for slab in self._slabs)

    @property
    def num_slabs(self) -> int:
        """Slabs held."""
        return len(self._slabs)

    def slab(self, index: int) -> "np.ndarray[Any, np.dtype[np.uint8]]":
        """One slab; new ones are appended with ``grow``."""
        return self._slabs[index]

    def grow(self, num_bytes: int) -> None:
        """One more slab, for at least ``num_bytes``."""
        memory = np.empty(max(num_bytes, SLAB_BYTES) + ALIGNMENT, dtype=np.uint8)
        begin = -memory.ctypes.data % ALIGNMENT
        self._slabs.append(memory[begin : begin + max(num_bytes, SLAB_BYTES)])

    def poison(self) -> None:
        """Overwrite everything: a program that reads what it did not write then shows it."""
        for slab in self._slabs:
            slab.fill(POISON)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """What was handed out once."""

    address: int
    num_bytes: int
    first_call: int  # calls that were recorded before it was handed out


class ScratchSession:
    """Hands out scratch memory for one recording."""

    def __init__(self, scratch: Scratch) -> None:
        self._scratch = scratch
        # Free ranges of each slab, ascending, never adjacent.
        self._free: list[list[tuple[int, int]]] = [[(0, scratch.slab(i).nbytes)] for i in range(scratch.num_slabs)]
        self._living: dict[int, weakref.ref[Any]] = {}
        self.blocks: list[Block] = []  # in order

    @property
    def num_living(self) -> int:
        """Blocks that some tensor still looks at."""
        return len(self._living)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, first_call: int) -> torch.Tensor:
        """As ``torch.empty``, from scratch memory; ``shape`` holds at least one element."""
        num_bytes = math.prod(shape) * dtype.itemsize
        room = -(-num_bytes // ALIGNMENT) * ALIGNMENT
        index, begin = self._take(room)
        memory = self._scratch.slab(index)[begin : begin + num_bytes]
        address = memory.ctypes.data
        # The storage of the tensor, and of all its views, holds `memory`: it dies with the last of them.
        self._living[address] = weakref.ref(memory, lambda _: self._give_back(address, index, begin, begin + room))
        self.blocks.append(Block(address=address, num_bytes=num_bytes, first_call=first_call))
        return torch.from_numpy(memory).view(dtype).view(shape)

    def _take(self, room: int) -> tuple[int, int]:
        """The first range that is large enough: low addresses are used again first."""
        for index, ranges in enumerate(self._free):
            for place, (begin, end) in enumerate(ranges):
                if end - begin >= room:
                    ranges[place : place + 1] = [(begin + room, end)] if end - begin > room else []
                    return index, begin
        self._scratch.grow(room)
        self._free.append([(0, self._scratch.slab(len(self._free)).nbytes)])
        return self._take(room)

    def _give_back(self, address: int, index: int, begin: int, end: int) -> None:
        del self._living[address]
        ranges = self._free[index]
        place = next((i for i, (other, _) in enumerate(ranges) if other > begin), len(ranges))
        if place < len(ranges) and ranges[place][0] == end:
            end = ranges.pop(place)[1]
        if place > 0 and ranges[place - 1][1] == begin:
            begin = ranges.pop(place - 1)[0]
            place -= 1
        ranges.insert(place, (begin, end))
