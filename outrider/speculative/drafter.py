"""Who proposes drafts: the Drafter protocol, one that never does, and DSpark.

The DSpark drafter keeps keys and values of every committed position at the same flat cache rows
as the target's latents, so pages shared by prefix carry its context too, and undoing a rejected
suffix is moving a length back.

Dims: S sequences, T flat tokens, A tapped layers, D model width, P pages per sequence,
L draft layers, R cache rows, J key/value heads, K head width.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from outrider.batch import DraftBlock, DraftSampling, ForwardBatch, TargetOutput
from outrider.errors import EngineFault
from outrider.models.dspark.block import BlockAnchors, BlockPredictor

__all__ = ["Anchors", "DSparkDrafter", "Drafter", "NullDrafter", "ObservedSpans"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Anchors:
    """The last committed token of each sequence; its own target forward has not happened yet."""

    token_ids_S: torch.Tensor  # int64
    positions_S: torch.Tensor  # int64, absolute
    page_table_SP: torch.Tensor  # int64, covers at least positions_S tokens
    page_size: int
    slots: tuple[int, ...]  # host: state slot of each sequence
    positions: tuple[int, ...]  # host copy of positions_S
    sampling: DraftSampling | None = None  # None = greedy drafts for all


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedSpans:
    """Who owns the rows of a finished step, in the order of the batch's span groups."""

    chunk_slots: tuple[int, ...]  # state slots of batch.chunk; all their rows are committed
    step_slots: tuple[int, ...]  # state slots of batch.step
    step_committed: tuple[int, ...]  # committed rows of each: 1 + accepted drafts


class Drafter(Protocol):
    """Proposes tokens from what it has observed; may not look at target logits."""

    @property
    def num_draft_tokens(self) -> int:
        """Drafts per round; 0 for a drafter that never proposes."""

    @property
    def aux_layer_ids(self) -> tuple[int, ...]:
        """Target layers to tap, "output of layer t", ascending; empty for none."""

    @property
    def aux_hidden_stream(self) -> str:
        """Which stream to tap: "mixture" or "prefix"."""

    def propose(self, anchors: Anchors) -> DraftBlock | None:
        """One block for every anchor, all in one call; None when there is nothing to verify.

        Drafts that are drawn (``anchors.sampling.coins_S``) come with what they were drawn from. A drafter
        may ignore ``sampling`` if its drafts are a function of what it has observed and of the anchor.
        """

    def observe(self, batch: ForwardBatch, output: TargetOutput, spans: ObservedSpans) -> None:
        """Take in the committed rows of one target step, prompt chunks included."""

    def reset(self, slots: Sequence[int]) -> None:
        """Start sequences in ``slots``."""

    def release(self, slots: Sequence[int]) -> None:
        """Forget the sequences in ``slots``."""

    def snapshot(self, slot: int, rows_R: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Host copy of all that is known of the sequence in ``slot``, which stays there.

        ``rows_R`` (int64) are the cache rows of its committed positions, in order.
        """

    def restore(self, slot: int, rows_R: torch.Tensor, snapshot: tuple[torch.Tensor, ...]) -> None:
        """Start the sequence of a snapshot in an empty ``slot``, its positions at cache rows ``rows_R``."""


class NullDrafter:
    """Proposes nothing, observes nothing, holds nothing: plain decoding is a round without drafts."""

    num_draft_tokens = 0
    aux_layer_ids: tuple[int, ...] = ()
    aux_hidden_stream = "mixture"

    def propose(self, anchors: Anchors) -> None:
        """No drafts."""

    def observe(self, batch: ForwardBatch, output: TargetOutput, spans: ObservedSpans) -> None:
        """Nothing to take in."""

    def reset(self, slots: Sequence[int]) -> None:
        """Nothing to start."""

    def release(self, slots: Sequence[int]) -> None:
        """Nothing to forget."""

    def snapshot(self, slot: int, rows_R: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Nothing to copy."""
        return ()

    def restore(self, slot: int, rows_R: torch.Tensor, snapshot: tuple[torch.Tensor, ...]) -> None:
        """Nothing to start."""


class DSparkDrafter:
    """A DSpark model, its context keys and values, and the observed length of each sequence.

    Args:
        predictor: the model prepared for inference.
        num_cache_rows: rows of the target's paged cache, num_pages * page_size.
    """

    def __init__(self, predictor: BlockPredictor, *, num_cache_rows: int) -> None:
        config = predictor.config
        self._predictor = predictor
        self._context = predictor.allocate_context(num_cache_rows)
        self._observed: dict[int, int] = {}  # slot -> context tokens taken in
        self.num_draft_tokens = predictor.num_draft_tokens
        self.aux_layer_ids = config.aux_layer_ids
        self.aux_hidden_stream = config.aux_hidden_stream.value

    @property
    def context_bytes_per_token(self) -> int:
        """Bytes of the keys and values of one context token, all draft layers."""
        return self._context.rows_2LRJK[:, :, 0].nbytes

    def observed_tokens(self, slot: int) -> int:
        """Context tokens of the sequence in ``slot``."""
        if slot not in self._observed:
            raise EngineFault(f"drafter slot {slot} holds no sequence; reset it first")
        return self._observed[slot]

    def reset(self, slots: Sequence[int]) -> None:
        """See Drafter; a slot that still holds a sequence is an engine fault."""
        for slot in slots:
            if slot in self._observed:
                raise EngineFault(f"drafter slot {slot} is reset while it holds a sequence; release it")
            self._observed[slot] = 0

    def release(self, slots: Sequence[int]) -> None:
        """See Drafter. Cached rows stay; the length gates every read of them."""
        for slot in slots:
            self.observed_tokens(slot)
            del self._observed[slot]

    def snapshot(self, slot: int, rows_R: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """See Drafter: keys and values of the context, ``[2, L, R, J, K]``. The slot must have observed R tokens."""
        self._check_continues(slot, rows_R.shape[0], "copy")
        return (self._context.rows_2LRJK.index_select(2, rows_R).cpu(),)

    def restore(self, slot: int, rows_R: torch.Tensor, snapshot: tuple[torch.Tensor, ...]) -> None:
        """See Drafter; a slot that still holds a sequence is an engine fault."""
        (context_2LRJK,) = snapshot
        self.reset((slot,))
        rows_2LRJK = self._context.rows_2LRJK
        rows_2LRJK.index_copy_(2, rows_R, context_2LRJK.to(rows_2LRJK.device))
        self._observed[slot] = context_2LRJK.shape[2]

    @torch.inference_mode()
    def propose(self, anchors: Anchors) -> DraftBlock | None:
        """One batched block for all anchors; nothing is copied to the host.

        Raises:
            EngineFault: a slot is given twice, or an anchor is not the token right after the
                observed context of its slot (invariant I1).
        """
        if not anchors.slots:
            return None
        if len(set(anchors.slots)) != len(anchors.slots):
            raise EngineFault(f"a slot proposes twice in one round: {anchors.slots}")
        for slot, position in zip(anchors.slots, anchors.positions, strict=True):
            self._check_continues(slot, position, "anchor")
        return self._predictor.predict(
            self._context,
            BlockAnchors(
                token_ids_S=anchors.token_ids_S,
                positions_S=anchors.positions_S,
                page_table_SP=anchors.page_table_SP,
                page_size=anchors.page_size,
                max_position=max(anchors.positions),
                sampling=anchors.sampling,
            ),
        ).block

    @torch.inference_mode()
    def observe(self, batch: ForwardBatch, output: TargetOutput, spans: ObservedSpans) -> None:
        """Project committed tap rows and store their keys and values for every draft layer.

        Rejected rows are dropped before anything is computed from them.

        Raises:
            EngineFault: the target captured no taps, or a span does not continue its slot's context.
        """
        counts = (*batch.chunk.lengths, *spans.step_committed)
        starts = (*batch.chunk.starts, *batch.step.starts)
        slots = (*spans.chunk_slots, *spans.step_slots)
        for slot, start in zip(slots, starts, strict=True):
            self._check_continues(slot, start, "span")
        for count, length in zip(spans.step_committed, batch.step.lengths, strict=True):
            if not 0 <= count <= length:
                raise EngineFault(f"{count} committed rows of a span of {length}")
        if not slots:
            return
        if output.aux_hidden_TAD is None:
            raise EngineFault(f"the target captured no taps; set_aux_layers({self.aux_layer_ids}) first")
        aux_hidden_TAD, positions_T, rows_T = output.aux_hidden_TAD, batch.positions_T, batch.slot_mapping_T
        if sum(counts) != batch.num_tokens:
            committed = _committed_rows(batch, spans.step_committed)
            aux_hidden_TAD = aux_hidden_TAD.index_select(0, committed)
            positions_T = positions_T.index_select(0, committed)
            rows_T = rows_T.index_select(0, committed)
        self._predictor.store_context(
            self._context, aux_hidden_TAD, positions_T, rows_T, max_position=_last_position(starts, counts)
        )
        for slot, count in zip(slots, counts, strict=True):
            self._observed[slot] += count

    def _check_continues(self, slot: int, position: int, what: str) -> None:
        observed = self.observed_tokens(slot)
        if position != observed:
            raise EngineFault(f"{what} at position {position} of slot {slot}, whose context has {observed} tokens")


def _committed_rows(batch: ForwardBatch, step_committed: tuple[int, ...]) -> torch.Tensor:
    """Flat rows of all chunk spans and of the committed prefix of each step span."""
    offsets: list[int] = []
    begin = 0
    for length, count in zip(batch.step.lengths, step_committed, strict=True):
        offsets.extend(range(begin, begin + count))
        begin += length
    index = torch.tensor(offsets, dtype=torch.int64).to(batch.step.rows_T.device, non_blocking=True)
    step_rows = batch.step.rows_T.index_select(0, index)
    return torch.cat((batch.chunk.rows_T, step_rows)) if batch.chunk.lengths else step_rows


def _last_position(starts: tuple[int, ...], counts: tuple[int, ...]) -> int:
    return max(start + count for start, count in zip(starts, counts, strict=True)) - 1
