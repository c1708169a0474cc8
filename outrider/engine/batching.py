"""From host integers to the index tensors of one step; the only place that builds them.

Host integers travel in one copy. Draft ids never visit the host: their rows are filled by an index
operation from the block that the drafter left on the device.

Dims: T flat tokens, S sequences, P pages per sequence, B slots, M longest span, N rows that need
logits, G draft positions.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch

from outrider.batch import ForwardBatch, SpanGroup
from outrider.errors import EngineFault
from outrider.plan import ScheduledSequence

__all__ = ["PageTable", "StepDrafts", "StepSpans", "build_batch", "upload"]


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
    """Device copy of every slot's pages. A row is written when a sequence takes its seat or gets more pages.

    Args:
        num_slots: rows.
        max_pages: pages of the longest sequence.
        page_size: tokens per page.
        device: where the table lives.
    """

    def __init__(self, *, num_slots: int, max_pages: int, page_size: int, device: torch.device) -> None:
        self.page_size = page_size
        self._table_BP = torch.zeros((num_slots, max_pages), dtype=torch.int64, device=device)

    @property
    def device(self) -> torch.device:
        """Device of the table and of everything built from it."""
        return self._table_BP.device

    def assign(self, slot: int, page_ids: Sequence[int]) -> None:
        """Give ``slot`` its pages; entries beyond them are 0."""
        (ids_P,) = upload(self.device, page_ids)
        self._table_BP[slot] = 0
        self._table_BP[slot, : len(page_ids)] = ids_P

    def rows(self, slots_S: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """Pages ``[S, P]`` of slots, wide enough for ``num_tokens`` tokens and never empty."""
        num_pages = max(1, -(-num_tokens // self.page_size))
        return self._table_BP[:, :num_pages].index_select(0, slots_S)


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


def build_batch(spans: StepSpans, drafts: StepDrafts, page_table: PageTable) -> ForwardBatch:
    """Lay the spans of one step out as a flat batch.

    Cache rows come from the pages of the plan, which the page table has a copy of.

    Raises:
        EngineFault: a row lies outside the pages reserved for its sequence (invariant I7).
    """
    page_size = page_table.page_size
    host = _host_columns(spans, drafts, page_size)
    (
        token_ids_T,
        positions_T,
        context_lens_T,
        sequence_T,
        slot_mapping_T,
        logits_rows_N,
        draft_rows,
        draft_cells,
        slots_S,
        lengths_S,
    ) = upload(
        page_table.device,
        host.token_ids,
        host.positions,
        host.context_lens,
        host.sequence,
        host.slot_mapping,
        host.logits_rows,
        host.draft_rows,
        host.draft_cells,
        [item.state_slot for item in spans.items],
        host.lengths,
    )
    if host.draft_rows:
        token_ids_T = token_ids_T.index_copy(0, draft_rows, drafts.token_ids_SG.flatten()[draft_cells])
    max_context = max(host.context_lens, default=0)
    num_decodes = spans.num_decodes
    lengths, starts = tuple(host.lengths), tuple(item.start_position for item in spans.items)
    num_step_rows = sum(lengths[:num_decodes])
    ascending_T = torch.arange(len(host.positions), device=page_table.device)
    return ForwardBatch(
        token_ids_T=token_ids_T,
        positions_T=positions_T,
        context_lens_T=context_lens_T,
        sequence_T=sequence_T,
        slot_mapping_T=slot_mapping_T,
        page_table_SP=page_table.rows(slots_S, max_context),
        logits_rows_N=logits_rows_N,
        chunk=_span_group(
            ascending_T[num_step_rows:],
            slots_S[num_decodes:],
            lengths_S[num_decodes:],
            lengths[num_decodes:],
            starts[num_decodes:],
        ),
        step=_span_group(
            ascending_T[:num_step_rows],
            slots_S[:num_decodes],
            lengths_S[:num_decodes],
            lengths[:num_decodes],
            starts[:num_decodes],
        ),
        page_size=page_size,
        max_context=max_context,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class HostColumns:
    """The host side of a flat batch."""

    token_ids: list[int]  # 0 where a draft id goes
    positions: list[int]
    context_lens: list[int]
    sequence: list[int]
    slot_mapping: list[int]
    logits_rows: list[int]
    draft_rows: list[int]  # flat row of every draft token
    draft_cells: list[int]  # its cell in the flattened block
    lengths: list[int]


def _host_columns(spans: StepSpans, drafts: StepDrafts, page_size: int) -> HostColumns:
    host = HostColumns(
        token_ids=[],
        positions=[],
        context_lens=[],
        sequence=[],
        slot_mapping=[],
        logits_rows=[],
        draft_rows=[],
        draft_cells=[],
        lengths=[],
    )
    width = drafts.token_ids_SG.shape[1]
    columns = zip(spans.items, spans.verify_lengths, drafts.block_rows, strict=True)
    for index, (item, num_drafts, block_row) in enumerate(columns):
        begin = len(host.token_ids)
        length = len(item.query_token_ids) + num_drafts
        end_position = item.start_position + length
        if end_position > len(item.page_ids) * page_size:
            raise EngineFault(
                f"{item.request_id}: rows up to position {end_position - 1} exceed its {len(item.page_ids)} "
                f"pages of {page_size} tokens"
            )
        host.token_ids.extend(item.query_token_ids)
        host.token_ids.extend([0] * num_drafts)
        positions = range(item.start_position, end_position)
        host.positions.extend(positions)
        host.context_lens.extend(range(item.start_position + 1, end_position + 1))
        page_ids = item.page_ids
        host.slot_mapping.extend([page_ids[at // page_size] * page_size + at % page_size for at in positions])
        host.sequence.extend([index] * length)
        host.draft_rows.extend(range(begin + length - num_drafts, begin + length))
        host.draft_cells.extend(range(block_row * width, block_row * width + num_drafts))
        host.lengths.append(length)
        if item.wants_logits:
            # A prompt needs its last row only, to sample the first token; a decode span needs all.
            host.logits_rows.extend(range(begin + length - 1 if item.is_prompt else begin, begin + length))
    return host


def _span_group(
    rows_T: torch.Tensor,
    slots_S: torch.Tensor,
    lengths_S: torch.Tensor,
    lengths: tuple[int, ...],
    starts: tuple[int, ...],
) -> SpanGroup:
    """The group of successive sequences that own rows ``rows_T`` of the step."""
    num_rows, shape = sum(lengths), (len(lengths), max(lengths, default=0))
    if num_rows == shape[0] * shape[1]:  # equal spans: nothing is padded, so nothing is masked
        padded_rows_SM = torch.arange(num_rows, device=rows_T.device).view(shape)
        valid_SM = torch.ones(shape, dtype=torch.bool, device=rows_T.device)
    else:
        offsets_M = torch.arange(shape[1], device=rows_T.device)
        valid_SM = offsets_M < lengths_S[:, None]
        firsts_S = lengths_S.cumsum(0) - lengths_S
        padded_rows_SM = torch.where(valid_SM, firsts_S[:, None] + offsets_M, 0)
    return SpanGroup(
        rows_T=rows_T,
        state_slots_S=slots_S,
        lengths=lengths,
        starts=starts,
        padded_rows_SM=padded_rows_SM,
        valid_SM=valid_SM,
    )
