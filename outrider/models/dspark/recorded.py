"""Proposals from programs: what waits is stored, then the block runs, each recorded once per number of sequences.

See docs/decisions/0010-recorded-steps.md. Anchors, pages and waiting spans of so many sequences are written to where
those of the last proposal for as many lay, so the recorded operations compute this one. Drafts that are drawn, and
drafters whose operations are not all native, run eagerly.

Dims: S sequences, P pages, B slots, R rows of a ring, W values of a row of taps.
"""

import ctypes
import logging
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

import torch

from outrider.batch import DraftBlock
from outrider.config import recorded_steps_wanted
from outrider.models.dspark.block import BlockAnchors, BlockPredictor
from outrider.models.dspark.context import ContextCache
from outrider.ops.native.library import library_for
from outrider.ops.native.program import NotRecordableError, Program, record
from outrider.ops.native.scratch import Scratch

__all__ = ["RecordedBlocks", "WaitingSpans", "num_stored_rows"]

logger = logging.getLogger(__name__)

# Recorded when it comes again: recording costs about as much as five runs.
FIRST_RECORDED_RUN = 2
BLOCK = 0  # key of a block's program; that of a store is its number of rows


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingSpans:
    """Tap rows that wait, per anchor; host integers."""

    slots: Sequence[int]
    starts: Sequence[int]  # position of the first row
    counts: Sequence[int]  # may be 0

    def upload(self, device: torch.device) -> torch.Tensor:
        """``[3, S]`` int64, as ``outrider.ops.waiting.take_rows`` wants it."""
        return torch.tensor((self.slots, self.starts, self.counts), dtype=torch.int64, device=device)


@dataclass(slots=True, kw_only=True, eq=False)
class _Place:
    """Where the inputs of proposals for as many sequences lie, and the programs that read them there."""

    anchors: BlockAnchors
    spans_3S: torch.Tensor
    num_runs: dict[int, int] = field(default_factory=dict)  # by key of the program
    programs: dict[int, Program] = field(default_factory=dict)


def num_stored_rows(num_rows: int) -> int:
    """Rows of the program that stores ``num_rows``: at most an eighth more, so that few programs serve all numbers."""
    step = 1 << max(0, num_rows.bit_length() - 4)
    return -(-num_rows // step) * step


def _copy(address: int, out: torch.Tensor) -> None:
    """Integers at an address of the host; a quarter of the time of a copy by torch."""
    ctypes.memmove(out.data_ptr(), address, out.nbytes)


class RecordedBlocks:
    """Runs the proposals of one drafter.

    Args:
        predictor: the drafter.
        cache: its context.
    """

    def __init__(self, predictor: BlockPredictor, cache: ContextCache) -> None:
        self._predictor, self._cache = predictor, cache
        rows_2LRJK = cache.rows_2LRJK
        library = library_for(rows_2LRJK.dtype, rows_2LRJK.device)
        self._library = library if recorded_steps_wanted() and predictor.context.takes_spare_rows else None
        self._scratch = Scratch()
        self._places: dict[int, _Place] = {}
        self._recorded_under: object = None
        self.refusal: str | None = None  # why proposals of this drafter are not recorded
        self.num_replayed = 0  # programs run so far

    def propose(self, anchors: BlockAnchors, waiting: WaitingSpans, ring_BRW: torch.Tensor) -> DraftBlock:
        """Store the rows that wait in the rings of the anchors' slots, then ``BlockPredictor.predict``."""
        self._predictor.check_position(anchors.max_position)
        num_rows = sum(waiting.counts)
        if self._library is None or self.refusal is not None or anchors.sampling is not None:
            if num_rows:
                self.store(waiting, ring_BRW, anchors.page_table_SP, anchors.page_size)
            return self._predictor.predict(self._cache, anchors).block
        place = self._arrange(anchors, waiting, ring_BRW)
        if num_rows:
            padded = num_stored_rows(num_rows)
            self._run(place, padded, lambda: self._store_in(place, ring_BRW, padded))
        results = self._run(place, BLOCK, lambda: self._block_in(place))
        return DraftBlock(token_ids_SG=results[0], confidence_SG=results[1] if len(results) > 1 else None)

    def store(self, waiting: WaitingSpans, ring_BRW: torch.Tensor, page_table_SP: torch.Tensor, page_size: int) -> None:
        """Store the rows that wait, eagerly.

        Args:
            waiting: at least one row.
            ring_BRW: where they wait.
            page_table_SP: pages of each span's sequence.
            page_size: tokens per page.
        """
        self._predictor.context.store_waiting(
            self._cache,
            ring_BRW,
            waiting.upload(ring_BRW.device),
            page_table_SP,
            page_size=page_size,
            num_rows=sum(waiting.counts),
        )

    def _arrange(self, anchors: BlockAnchors, waiting: WaitingSpans, ring_BRW: torch.Tensor) -> _Place:
        """Write the inputs to where those of the last proposal for as many sequences lay."""
        recorded_under = (ring_BRW.data_ptr(), torch.get_num_threads(), anchors.page_size)
        if recorded_under != self._recorded_under:
            self._places.clear()
            self._recorded_under = recorded_under
        num_sequences, num_pages = anchors.page_table_SP.shape
        assert anchors.token_ids_S.is_contiguous() and anchors.positions_S.is_contiguous()
        place = self._places.get(num_sequences)
        if place is None or place.anchors.page_table_SP.shape[1] < num_pages:
            # Twice the pages: a longer context rarely needs another place.
            page_table_SP = anchors.page_table_SP.new_zeros(num_sequences, 2 * num_pages)
            place = self._places[num_sequences] = _Place(
                anchors=replace(
                    anchors,
                    token_ids_S=torch.empty_like(anchors.token_ids_S),
                    positions_S=torch.empty_like(anchors.positions_S),
                    page_table_SP=page_table_SP,
                ),
                spans_3S=anchors.positions_S.new_empty(3, num_sequences),
            )
        mine = place.anchors
        _copy(anchors.token_ids_S.data_ptr(), mine.token_ids_S)
        _copy(anchors.positions_S.data_ptr(), mine.positions_S)
        mine.page_table_SP[:, :num_pages].copy_(anchors.page_table_SP)
        columns = array("q", chain(waiting.slots, waiting.starts, waiting.counts))
        _copy(columns.buffer_info()[0], place.spans_3S)
        return place

    def _store_in(self, place: _Place, ring_BRW: torch.Tensor, num_rows: int) -> tuple[torch.Tensor, ...]:
        self._predictor.context.store_waiting(
            self._cache,
            ring_BRW,
            place.spans_3S,
            place.anchors.page_table_SP,
            page_size=place.anchors.page_size,
            num_rows=num_rows,
        )
        return ()

    def _block_in(self, place: _Place) -> tuple[torch.Tensor, ...]:
        block = self._predictor.predict(self._cache, place.anchors).block
        return (block.token_ids_SG,) if block.confidence_SG is None else (block.token_ids_SG, block.confidence_SG)

    def _run(
        self, place: _Place, key: int, function: Callable[[], tuple[torch.Tensor, ...]]
    ) -> tuple[torch.Tensor, ...]:
        """What ``function`` gives, from its program where there is one."""
        program = place.programs.get(key)
        if program is not None:
            self.num_replayed += 1
            return program.run()
        place.num_runs[key] = place.num_runs.get(key, 0) + 1
        if place.num_runs[key] < FIRST_RECORDED_RUN or self.refusal is not None or self._library is None:
            return function()
        try:
            program, results = record(self._library, self._scratch, function)
            self._scratch.poison()
            # Nothing that a proposal writes is read by it, so run again it is the same.
            if not all(map(torch.equal, program.run(), results)):
                raise NotRecordableError("run again, the proposal is another")
        except NotRecordableError as reason:
            self.refusal = str(reason)
            logger.info("proposals run eagerly, as they cannot be recorded: %s", reason)
            return function()
        place.programs[key] = program
        return results
