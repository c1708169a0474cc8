"""Fills the index arrays of a step by one call (``src/slab.cpp``).

Dims: T flat tokens, S sequences, P pages per sequence, M longest span, F draft rows, B slots.
"""

import ctypes
from typing import Any

import numpy as np

from outrider.ops.native.library import INT, POINTER, Library

__all__ = ["SlabFiller"]

POINTERS = (
    "token_ids_T", "positions_T", "context_lens_T", "slot_mapping_T", "slots_S", "num_keys_S", "pages_SP", "limits_SM",
    "lengths_S", "firsts_S", "draft_rows_F", "draft_cells_F", "numbers_3S",
)  # fmt: skip
COUNTS = ("num_sequences", "longest", "num_pages", "num_drafts", "page_size")


class _StepSlab(ctypes.Structure):
    """``StepSlab`` of slab.cpp."""

    _fields_ = (*((name, POINTER) for name in POINTERS), *((name, INT) for name in COUNTS))


class SlabFiller:
    """Fills one slab; holds its arrays.

    Args:
        native: library.
        arrays: int64 and contiguous, by name; ``numbers_3S`` is made here.
        counts: by name.
    """

    def __init__(self, native: Library, arrays: dict[str, "np.ndarray[Any, Any]"], counts: dict[str, int]) -> None:
        self._fill = native.function("fill_slab", [POINTER] * 3)
        self._numbers_3S = np.zeros(3 * counts["num_sequences"], dtype=np.int64)
        self._arrays = {**arrays, "numbers_3S": self._numbers_3S}
        for name, array in self._arrays.items():
            assert array.dtype == np.int64 and array.flags.c_contiguous, f"{name} is not int64 in a row"
        addresses = {name: array.ctypes.data for name, array in self._arrays.items()}
        self._record = _StepSlab(**addresses, **counts)
        self._address = ctypes.addressof(self._record)

    def fill(self, numbers: list[int], table_address: int, drafts_address: int) -> None:
        """Fill it.

        Args:
            numbers: starts, then slots, then anchors of all sequences.
            table_address: of the page table, int64 ``[B, P]``.
            drafts_address: of the block of the round, int64; not read without drafts.
        """
        self._numbers_3S[:] = numbers
        self._fill(self._address, table_address, drafts_address)
