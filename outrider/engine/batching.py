"""From host integers to the index tensors of one step; the only place that builds them.

All index tensors of a step lie in one piece of memory, its slab, which is filled by array operations on the host and
travels in one copy. Draft ids never visit the host: their rows are filled by an index operation from the block that
the drafter left on the device.

On a CPU, steps of decode and verify rows take turns in slabs: one for each shape, kept with the page table. So all
batches of a shape lie in one place, which is what recorded steps need, and nothing is allocated.

Dims: S sequences, P pages per sequence, B slots, G draft positions.
"""

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch

from outrider.batch import BatchPlace, ForwardBatch
from outrider.engine.slab import Integers, Slab, SlabShape
from outrider.errors import EngineFault
from outrider.ops.native.library import library
from outrider.plan import ScheduledSequence

__all__ = ["PageTable", "StepDrafts", "StepSpans", "build_batch", "upload"]

MAX_PLACES = 128  # shapes of steps whose slabs are kept; each takes some kilobytes, and its recorded step as much again


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSpans:
    """The sequences of one target step and how many draft rows each brings; decode spans first."""

    items: tuple[ScheduledSequence, ...]
    verify_lengths: tuple[int, ...]  # 0 for prompt chunks

    @property
    def lengths(self) -> tuple[int, ...]:
        """Rows of each sequence."""
        pairs = zip(self.items, self.verify_lengths, strict=True)
        return tuple(len(item.query_token_ids) + drafts for item, drafts in pairs)

    @property
    def num_decodes(self) -> int:
        """Decode spans, which come first."""
        return sum(not item.is_prompt for item in self.items)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDrafts:
    """Where the draft ids of a step are."""

    token_ids_SG: torch.Tensor  # int64, the whole block of the round; G may be 0
    block_rows: tuple[int, ...]  # host: row of the block for each sequence of the step; 0 without drafts
    probs_SGV: torch.Tensor | None = None  # of the whole block, see DraftBlock


class PageTable:
    """Every slot's pages, on the host and the device, and the slabs that batches over them take turns in.

    A row is written when a sequence takes its seat or gets more pages.

    Args:
        num_slots: rows.
        max_pages: pages of the longest sequence.
        page_size: tokens per page.
        device: where the table lives.
    """

    def __init__(self, *, num_slots: int, max_pages: int, page_size: int, device: torch.device) -> None:
        self.page_size = page_size
        self._table_BP = torch.zeros((num_slots, max_pages), dtype=torch.int64, device=device)
        # On a CPU the same memory.
        self._host_BP: Integers = self._table_BP.cpu().numpy()
        self._slabs: OrderedDict[SlabShape, Slab] = OrderedDict()

    @property
    def device(self) -> torch.device:
        """Device of the table and of everything built from it."""
        return self._table_BP.device

    def assign(self, slot: int, page_ids: Sequence[int]) -> None:
        """Give ``slot`` its pages; entries beyond them are 0."""
        row_P = self._host_BP[slot]
        row_P[: len(page_ids)] = page_ids
        row_P[len(page_ids) :] = 0
        if self.device.type != "cpu":
            self._table_BP[slot] = torch.from_numpy(row_P).to(self.device)

    def rows(self, slots_S: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """Pages ``[S, P]`` of slots, wide enough for ``num_tokens`` tokens and never empty."""
        num_pages = max(1, -(-num_tokens // self.page_size))
        return self._table_BP[:, :num_pages].index_select(0, slots_S)

    @property
    def host_BP(self) -> Integers:
        """The table on the host."""
        return self._host_BP

    def slab(self, shape: SlabShape) -> Slab:
        """The slab of a shape: the same one again where its batches take turns, else a new one."""
        if self.device.type != "cpu" or not shape.is_step:
            return Slab(shape, self.page_size, self.device)
        slab = self._slabs.get(shape)
        if slab is None:
            slab = self._slabs[shape] = Slab(shape, self.page_size, self.device, BatchPlace(), library())
            if len(self._slabs) > MAX_PLACES:
                self._slabs.popitem(last=False)
        else:
            self._slabs.move_to_end(shape)
        return slab


def upload(device: torch.device, *columns: Sequence[int]) -> tuple[torch.Tensor, ...]:
    """Host integers as int64 tensors on ``device``, all columns in one copy."""
    values = array("q", chain.from_iterable(columns))
    # The tensor is the array: torch.tensor looks at every number of a list by itself. It refuses an empty buffer.
    flat = torch.frombuffer(values, dtype=torch.int64) if values else torch.empty(0, dtype=torch.int64)
    if device.type != "cpu":
        if device.type == "cuda":
            flat = flat.pin_memory()
        flat = flat.to(device, non_blocking=True)
    # The method, not torch.split: that is a Python function around it which costs more than the views.
    return flat.split_with_sizes([len(column) for column in columns])


def build_batch(
    spans: StepSpans, drafts: StepDrafts, page_table: PageTable, *, wants_taps: bool = True
) -> ForwardBatch:
    """Lay the spans of one step out as a flat batch.

    Cache rows come from the page table, which has a copy of the pages of the plan. A batch with a ``place`` is valid
    until the next one of the same shape is built. ``wants_taps`` says whether anybody reads what the target taps.

    Raises:
        EngineFault: a row lies outside the pages reserved for its sequence (invariant I7).
    """
    page_size, items = page_table.page_size, spans.items
    lengths, starts, wants_logits, num_step_rows = [], [], [], 0
    for item, num_drafts in zip(items, spans.verify_lengths, strict=True):
        start, length = item.start_position, len(item.query_token_ids) + num_drafts
        if start + length > len(item.page_ids) * page_size:
            raise EngineFault(
                f"{item.request_id}: rows up to position {start + length - 1} exceed its {len(item.page_ids)} "
                f"pages of {page_size} tokens"
            )
        lengths.append(length)
        starts.append(start)
        if item.is_prompt:
            wants_logits.append(item.wants_logits)
        else:
            num_step_rows += length
    num_chunks = len(wants_logits)
    num_decodes, num_rows = len(items) - num_chunks, sum(lengths)
    slab = page_table.slab(
        SlabShape(
            step=(num_decodes, max(lengths[:num_decodes], default=0), num_step_rows),
            chunk=(num_chunks, max(lengths[num_decodes:], default=0), num_rows - num_step_rows),
            # A prompt needs its last row only, to sample the first token; a decode span needs all.
            num_logits=num_step_rows + sum(wants_logits),
            num_drafts=sum(spans.verify_lengths),
            num_pages=page_table.host_BP.shape[1],
            wants_taps=wants_taps,
        )
    )
    slab.arrange(tuple(lengths), wants_logits)
    slab.place_drafts(drafts.block_rows, drafts.token_ids_SG.shape[1])
    slab.fill(items, starts, page_table.host_BP, drafts.token_ids_SG)
    return slab.batch(tuple(lengths), tuple(starts))
