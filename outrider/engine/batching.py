"""From host integers to the index tensors of one step; the only place that builds them.

Host integers travel in one copy. Draft ids never visit the host: their rows are filled by an index
operation from the block that the drafter left on the device.

Dims: T flat tokens, S sequences, P pages per sequence, B slots, M longest span, N rows that need
logits, G draft positions.
"""

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


class PageTable:
    """Device copy of every slot's pages. They are reserved for life, so a row is written once.

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
    flat = torch.tensor(list(chain.from_iterable(columns)), dtype=torch.int64)
    if device.type == "cuda":
        flat = flat.pin_memory().to(device, non_blocking=True)
    return flat.split([len(column) for column in columns])


def build_batch(spans: StepSpans, drafts: StepDrafts, page_table: PageTable) -> ForwardBatch:
    """Lay the spans of one step out as a flat batch.

    Raises:
        EngineFault: a row lies outside the pages reserved for its sequence (invariant I7).
    """
    lengths = spans.lengths
    _check_reserved(spans, lengths, page_table.page_size)
    num_decodes = spans.num_decodes
    num_step_rows = sum(lengths[:num_decodes])
    starts = tuple(item.start_position for item in spans.items)
    draft_rows, draft_cells = _draft_columns(spans, drafts)
    (
        token_ids_T,
        positions_T,
        sequence_T,
        logits_rows_N,
        slots_S,
        lengths_S,
        draft_rows_N,
        draft_cells_N,
    ) = upload(
        page_table.device,
        list(chain.from_iterable((*i.query_token_ids, *[0] * d) for i, d in zip(spans.items, spans.verify_lengths))),
        list(chain.from_iterable(range(s, s + n) for s, n in zip(starts, lengths))),
        list(chain.from_iterable([index] * n for index, n in enumerate(lengths))),
        _logits_rows(spans, lengths),
        [item.state_slot for item in spans.items],
        lengths,
        draft_rows,
        draft_cells,
    )
    if draft_rows:
        token_ids_T = token_ids_T.index_copy(0, draft_rows_N, drafts.token_ids_SG.flatten()[draft_cells_N])
    max_context = max((s + n for s, n in zip(starts, lengths)), default=0)
    page_table_SP = page_table.rows(slots_S, max_context)
    page_size = page_table.page_size
    rows_T = torch.arange(sum(lengths), device=page_table.device)
    return ForwardBatch(
        token_ids_T=token_ids_T,
        positions_T=positions_T,
        context_lens_T=positions_T + 1,
        sequence_T=sequence_T,
        slot_mapping_T=page_table_SP[sequence_T, positions_T // page_size] * page_size + positions_T % page_size,
        page_table_SP=page_table_SP,
        logits_rows_N=logits_rows_N,
        chunk=_span_group(
            rows_T[num_step_rows:],
            slots_S[num_decodes:],
            lengths_S[num_decodes:],
            lengths[num_decodes:],
            starts[num_decodes:],
        ),
        step=_span_group(
            rows_T[:num_step_rows],
            slots_S[:num_decodes],
            lengths_S[:num_decodes],
            lengths[:num_decodes],
            starts[:num_decodes],
        ),
        page_size=page_size,
        max_context=max_context,
    )


def _check_reserved(spans: StepSpans, lengths: tuple[int, ...], page_size: int) -> None:
    for item, length in zip(spans.items, lengths, strict=True):
        end = item.start_position + length
        if end > len(item.page_ids) * page_size:
            raise EngineFault(
                f"{item.request_id}: rows up to position {end - 1} exceed its {len(item.page_ids)} pages of "
                f"{page_size} tokens"
            )


def _draft_columns(spans: StepSpans, drafts: StepDrafts) -> tuple[list[int], list[int]]:
    """Flat batch row of every draft token, and its cell in the flattened block."""
    rows: list[int] = []
    cells: list[int] = []
    num_block_columns = drafts.token_ids_SG.shape[1]
    begin = 0
    for item, length, block_row in zip(spans.items, spans.verify_lengths, drafts.block_rows, strict=True):
        begin += len(item.query_token_ids)
        rows.extend(range(begin, begin + length))
        cells.extend(range(block_row * num_block_columns, block_row * num_block_columns + length))
        begin += length
    return rows, cells


def _logits_rows(spans: StepSpans, lengths: tuple[int, ...]) -> list[int]:
    """Every row of a decode span, and the last row of a prompt's last chunk."""
    rows: list[int] = []
    begin = 0
    for item, length in zip(spans.items, lengths, strict=True):
        if item.wants_logits:
            rows.extend(range(begin + length - 1 if item.is_prompt else begin, begin + length))
        begin += length
    return rows


def _span_group(
    rows_T: torch.Tensor,
    slots_S: torch.Tensor,
    lengths_S: torch.Tensor,
    lengths: tuple[int, ...],
    starts: tuple[int, ...],
) -> SpanGroup:
    offsets_M = torch.arange(max(lengths, default=0), device=rows_T.device)
    valid_SM = offsets_M < lengths_S[:, None]
    firsts_S = lengths_S.cumsum(0) - lengths_S
    return SpanGroup(
        rows_T=rows_T,
        state_slots_S=slots_S,
        lengths=lengths,
        starts=starts,
        padded_rows_SM=torch.where(valid_SM, firsts_S[:, None] + offsets_M, 0),
        valid_SM=valid_SM,
    )
