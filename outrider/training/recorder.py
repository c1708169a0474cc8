"""A drafter that records what a real one would see: taps as they come from decoding, without a second pass.

Dims: T tokens, A tapped layers, D model width.
"""

from collections.abc import Sequence

import torch

from outrider.batch import DraftBlock, ForwardBatch, TargetOutput
from outrider.errors import EngineFault
from outrider.models.protocol import AuxStream
from outrider.plan import ScheduledSequence
from outrider.speculative.drafter import Anchors, ObservedSpans

__all__ = ["TapRecorder"]


class TapRecorder:
    """A drafter that proposes nothing and keeps the taps of every committed token, by state slot."""

    num_draft_tokens = 0
    aux_hidden_stream: AuxStream = "mixture"

    def __init__(self, aux_layer_ids: tuple[int, ...]) -> None:
        self.aux_layer_ids = aux_layer_ids
        self.finished: dict[tuple[int, ...], torch.Tensor] = {}  # taps [T, A, D] of a released sequence, by its ids
        self._ids: dict[int, list[int]] = {}
        self._taps: dict[int, list[torch.Tensor]] = {}

    lapsed: frozenset[int] = frozenset()

    def lapse(self, slots: Sequence[int]) -> None:
        """Nothing to give up: taps are what it is for."""

    def foresee(self, item: ScheduledSequence) -> None:
        """Reads nothing."""

    def propose(self, anchors: Anchors) -> DraftBlock | None:
        """Nothing."""
        return None

    def observe(self, batch: ForwardBatch, output: TargetOutput, spans: ObservedSpans) -> None:
        """Take in the rows of a step, all of them committed."""
        assert output.aux_hidden_TAD is not None, "taps were asked for"
        token_ids, taps_TAD = batch.token_ids_T.tolist(), output.aux_hidden_TAD.clone()
        for group, slots in ((batch.step, spans.step_slots), (batch.chunk, spans.chunk_slots)):
            rows, begin = group.rows_T.tolist(), 0
            for slot, length in zip(slots, group.lengths, strict=True):
                first, last = rows[begin], rows[begin + length - 1] + 1
                self._ids[slot].extend(token_ids[first:last])
                self._taps[slot].append(taps_TAD[first:last])
                begin += length

    def reset(self, slots: Sequence[int]) -> None:
        """Start sequences."""
        for slot in slots:
            self._ids[slot], self._taps[slot] = [], []

    def release(self, slots: Sequence[int]) -> None:
        """Hand sequences over."""
        for slot in slots:
            taps = self._taps.pop(slot)
            ids = tuple(self._ids.pop(slot))
            if taps:
                self.finished[ids] = torch.cat(taps)

    def snapshot(self, slot: int, rows_R: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Not offered: whoever records gives the engine room for all seats."""
        raise EngineFault("an engine that records taps was asked to preempt; give it pages for all seats")

    def restore(self, slot: int, rows_R: torch.Tensor, snapshot: tuple[torch.Tensor, ...]) -> None:
        """See ``snapshot``."""
        raise EngineFault("an engine that records taps was asked to preempt; give it pages for all seats")
