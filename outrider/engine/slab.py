"""The index tensors of one step in one piece of memory, filled by array operations.

Dims: T flat tokens, S sequences, P pages per sequence, M longest span of a group, N rows that need logits, B slots,
G draft positions, F draft rows.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from operator import add
from typing import Any, NamedTuple

import numpy as np
import torch

from outrider.batch import BatchPlace, ForwardBatch, SpanGroup
from outrider.ops.native.library import Library
from outrider.ops.native.slab import SlabFiller
from outrider.plan import ScheduledSequence

__all__ = ["Integers", "Slab", "SlabShape"]

Integers = np.ndarray[Any, np.dtype[np.int64]]
GroupShape = tuple[int, int, int]  # sequences, rows of the longest, rows


class SlabShape(NamedTuple):
    """Sizes of the index tensors of a step; a tuple, as it is looked up in every step."""

    step: GroupShape
    chunk: GroupShape
    num_logits: int
    num_drafts: int
    num_pages: int  # of a row of the page table
    wants_taps: bool = True  # a step without taps computes less, so it has a place of its own

    @property
    def is_step(self) -> bool:
        """Whether there are decode and verify rows only."""
        return self.chunk[0] == 0 and self.step[0] > 0

    @property
    def num_rows(self) -> int:
        """Rows of both groups."""
        return self.step[2] + self.chunk[2]

    @property
    def num_sequences(self) -> int:
        """Sequences of both groups."""
        return self.step[0] + self.chunk[0]

    @property
    def num_cells(self) -> int:
        """Rows and padding of both groups."""
        return self.step[0] * self.step[1] + self.chunk[0] * self.chunk[1]

    @property
    def sizes(self) -> list[int]:
        """Words of each part of a slab, in the order of ``_Parts``."""
        rows, sequences, cells = self.num_rows, self.num_sequences, self.num_cells
        columns = [rows] * 6 + [sequences] * 2 + [self.num_logits] + [self.num_drafts] * 2
        return [*columns, sequences * self.num_pages, cells, cells, -(-cells // 8)]


@dataclass(frozen=True, slots=True)
class _Parts:
    """Parts of a slab: arrays on the host, or tensors on the device."""

    token_ids_T: Any
    positions_T: Any
    context_lens_T: Any
    sequence_T: Any
    slot_mapping_T: Any
    ascending_T: Any
    slots_S: Any
    num_keys_S: Any
    logits_rows_N: Any
    draft_rows_F: Any
    draft_cells_F: Any  # in the flattened block
    pages: Any  # the rest flat: page table, and of both groups one after the other padded rows, limits, ...
    padded: Any
    limits: Any
    valid: Any  # ... and truth values, one byte each


class _Group:
    """Index arrays of one span group, and the views of the device that all its batches share."""

    def __init__(
        self, shape: GroupShape, sequences: slice, rows: slice, cells: slice, parts: _Parts, tensors: _Parts
    ) -> None:
        num_sequences, longest, num_rows = shape
        self.shape, self.sequences, self.rows, self.cells = (num_sequences, longest), sequences, rows, cells
        self.is_rectangular = num_rows == num_sequences * longest
        self._padded_rows_SM: Integers = parts.padded[cells].reshape(self.shape)
        self._limits_SM: Integers = parts.limits[cells].reshape(self.shape)
        self._valid_SM: np.ndarray[Any, np.dtype[np.bool_]] = parts.valid.view(np.bool_)[cells].reshape(self.shape)
        self._ahead_M = np.arange(1, longest + 1)
        self._views = SpanGroup(
            rows_T=tensors.ascending_T[rows],
            state_slots_S=tensors.slots_S[sequences],
            lengths=(),
            starts=(),
            padded_rows_SM=tensors.padded[cells].view(self.shape),
            valid_SM=tensors.valid.view(torch.bool)[cells].view(self.shape),
            limits_SM=tensors.limits[cells].view(self.shape),
            num_keys_S=tensors.num_keys_S[sequences],
        )

    @property
    def limits_SM(self) -> Integers:
        """Keys that each row may see."""
        return self._limits_SM

    def arrange(self, lengths_S: Integers, firsts_S: Integers) -> None:
        """What follows from the lengths alone; ``firsts_S`` counts rows of the whole batch."""
        offsets_M = self._ahead_M - 1
        firsts_S1 = firsts_S[self.sequences, None] - self.rows.start
        np.less(offsets_M, lengths_S[self.sequences, None], out=self._valid_SM)
        self._padded_rows_SM[...] = np.where(self._valid_SM, firsts_S1 + offsets_M, 0)

    def fill(self, starts_S: Integers) -> None:
        """Keys that each row may see."""
        np.add(starts_S[self.sequences, None], self._ahead_M, out=self._limits_SM)
        if not self.is_rectangular:
            self._limits_SM[~self._valid_SM] = 1

    def spans(self, lengths: tuple[int, ...], starts: tuple[int, ...]) -> SpanGroup:
        """The group of a batch whose sequences have these lengths and starts."""
        views = self._views
        if self.shape[0] == 0:
            return views
        return SpanGroup(
            rows_T=views.rows_T,
            state_slots_S=views.state_slots_S,
            lengths=lengths[self.sequences],
            starts=starts[self.sequences],
            padded_rows_SM=views.padded_rows_SM,
            valid_SM=views.valid_SM,
            limits_SM=views.limits_SM,
            num_keys_S=views.num_keys_S,
        )


class Slab:
    """The memory of the batches of one shape.

    Args:
        shape: sizes.
        page_size: tokens per page.
        device: where the tensors of a batch lie.
        place: set where the slab is used again.
        native: fills steps on a CPU by one call; None does it by array operations.
    """

    def __init__(
        self,
        shape: SlabShape,
        page_size: int,
        device: torch.device,
        place: BatchPlace | None = None,
        native: Library | None = None,
    ) -> None:
        self.shape, self.place, self._page_size = shape, place, page_size
        self._host = torch.empty(sum(shape.sizes), dtype=torch.int64, pin_memory=device.type == "cuda")
        self._device = self._host if device.type == "cpu" else torch.empty_like(self._host, device=device)
        self._parts = parts = _Parts(*np.split(self._host.numpy(), np.cumsum(shape.sizes[:-1])))
        self._tensors = tensors = _Parts(*self._device.split_with_sizes(shape.sizes))
        self._page_table_SP: Integers = parts.pages.reshape(shape.num_sequences, shape.num_pages)
        self._page_table_tensor_SP = tensors.pages.view(self._page_table_SP.shape)
        (step_S, step_M, step_T), (chunk_S, _, _) = shape.step, shape.chunk
        step_cells = step_S * step_M
        self._step = _Group(shape.step, slice(0, step_S), slice(0, step_T), slice(0, step_cells), parts, tensors)
        self._chunk = _Group(
            shape.chunk,
            slice(step_S, step_S + chunk_S),
            slice(step_T, shape.num_rows),
            slice(step_cells, shape.num_cells),
            parts,
            tensors,
        )
        self._groups = [group for group in (self._step, self._chunk) if group.shape[0]]
        parts.ascending_T[:] = np.arange(shape.num_rows)
        # What the parts are laid out for at the moment.
        self._arranged: tuple[tuple[int, ...], list[bool]] | None = None
        self._drafts_of: tuple[tuple[int, ...], int] | None = None
        self._lengths_S = np.zeros(shape.num_sequences, dtype=np.int64)
        self._firsts_S = np.zeros_like(self._lengths_S)
        self._filler = self._make_filler(native) if native is not None and shape.is_step else None

    def _make_filler(self, native: Library) -> SlabFiller:
        parts, (num_sequences, longest, _) = self._parts, self.shape.step
        arrays = {
            "token_ids_T": parts.token_ids_T,
            "positions_T": parts.positions_T,
            "context_lens_T": parts.context_lens_T,
            "slot_mapping_T": parts.slot_mapping_T,
            "slots_S": parts.slots_S,
            "num_keys_S": parts.num_keys_S,
            "pages_SP": self._page_table_SP,
            "limits_SM": self._step.limits_SM,
            "lengths_S": self._lengths_S,
            "firsts_S": self._firsts_S,
            "draft_rows_F": parts.draft_rows_F,
            "draft_cells_F": parts.draft_cells_F,
        }
        counts = {
            "num_sequences": num_sequences,
            "longest": longest,
            "num_pages": self.shape.num_pages,
            "num_drafts": self.shape.num_drafts,
            "page_size": self._page_size,
        }
        return SlabFiller(native, arrays, counts)

    def arrange(self, lengths: tuple[int, ...], wants_logits: list[bool]) -> None:
        """What follows from lengths, and from which prompts want logits; most steps find it as it must be."""
        if self._arranged == (lengths, wants_logits):
            return
        parts, num_decodes = self._parts, self.shape.step[0]
        self._lengths_S[:] = lengths
        ends_S = self._lengths_S.cumsum()
        np.subtract(ends_S, self._lengths_S, out=self._firsts_S)
        parts.sequence_T[:] = np.repeat(np.arange(len(lengths)), self._lengths_S)
        self._offsets_T = parts.ascending_T - self._firsts_S[parts.sequence_T]
        last_of_prompts = (ends_S - 1)[num_decodes:][np.array(wants_logits, dtype=np.bool_)]
        parts.logits_rows_N[:] = np.concatenate((parts.ascending_T[self._step.rows], last_of_prompts))
        parts.draft_rows_F[:] = np.flatnonzero(self._offsets_T[self._step.rows])
        for group in self._groups:
            group.arrange(self._lengths_S, self._firsts_S)
        self._arranged, self._drafts_of = (lengths, wants_logits), None

    def place_drafts(self, block_rows: tuple[int, ...], width: int) -> None:
        """Where the drafts are in a block of ``width`` drafts a row."""
        if self.shape.num_drafts == 0 or self._drafts_of == (block_rows, width):
            return
        parts = self._parts
        rows_F = np.array(block_rows, dtype=np.int64)[parts.sequence_T[parts.draft_rows_F]]
        np.add(rows_F * width, self._offsets_T[parts.draft_rows_F] - 1, out=parts.draft_cells_F)
        self._drafts_of = (block_rows, width)

    def fill(
        self, items: Sequence[ScheduledSequence], starts: list[int], table_BP: Integers, draft_ids_SG: torch.Tensor
    ) -> None:
        """What changes from step to step: the arrays, one copy to the device, and draft ids from the round's block."""
        if self._filler is not None:
            drafts_SG = draft_ids_SG.contiguous()
            assert drafts_SG.dtype == torch.int64, f"draft ids of {drafts_SG.dtype}"
            numbers = [*starts, *[item.state_slot for item in items], *[item.query_token_ids[0] for item in items]]
            self._filler.fill(numbers, table_BP.ctypes.data, drafts_SG.data_ptr())
            return
        self._fill_arrays(items, starts, table_BP)
        if self._device is not self._host:
            self._device.copy_(self._host, non_blocking=True)
        if self.shape.num_drafts:
            ids_F = draft_ids_SG.flatten().index_select(0, self._tensors.draft_cells_F)
            self._tensors.token_ids_T.index_copy_(0, self._tensors.draft_rows_F, ids_F)

    def _fill_arrays(self, items: Sequence[ScheduledSequence], starts: list[int], table_BP: Integers) -> None:
        """As src/slab.cpp, for prompts too; without the draft ids."""
        parts, (num_decodes, _, num_step_rows) = self._parts, self.shape.step
        starts_S = np.array(starts, dtype=np.int64)
        parts.slots_S[:] = [item.state_slot for item in items]
        parts.token_ids_T[self._firsts_S[:num_decodes]] = [item.query_token_ids[0] for item in items[:num_decodes]]
        if num_step_rows < self.shape.num_rows:
            queries = chain.from_iterable(item.query_token_ids for item in items[num_decodes:])
            parts.token_ids_T[num_step_rows:] = array("q", queries)
        np.add(starts_S[parts.sequence_T], self._offsets_T, out=parts.positions_T)
        np.add(parts.positions_T, 1, out=parts.context_lens_T)
        np.add(starts_S, self._lengths_S, out=parts.num_keys_S)
        self._page_table_SP[...] = table_BP[parts.slots_S]
        page_T, in_page_T = np.divmod(parts.positions_T, self._page_size)
        page_ids_T = self._page_table_SP[parts.sequence_T, page_T]
        np.add(page_ids_T * self._page_size, in_page_T, out=parts.slot_mapping_T)
        for group in self._groups:
            group.fill(starts_S)

    def batch(self, lengths: tuple[int, ...], starts: tuple[int, ...]) -> ForwardBatch:
        """The batch, after ``fill``."""
        tensors = self._tensors
        if self.place is not None:
            self.place.num_batches += 1
        return ForwardBatch(
            token_ids_T=tensors.token_ids_T,
            positions_T=tensors.positions_T,
            context_lens_T=tensors.context_lens_T,
            sequence_T=tensors.sequence_T,
            slot_mapping_T=tensors.slot_mapping_T,
            page_table_SP=self._page_table_tensor_SP,
            logits_rows_N=tensors.logits_rows_N,
            chunk=self._chunk.spans(lengths, starts),
            step=self._step.spans(lengths, starts),
            page_size=self._page_size,
            max_context=max(map(add, starts, lengths), default=0),
            wants_taps=self.shape.wants_taps,
            place=self.place,
        )
