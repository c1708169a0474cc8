"""Who proposes drafts: the Drafter protocol, one that never does, and DSpark.

The DSpark drafter keeps keys and values of every committed position at the same flat cache rows
as the target's latents, so pages shared by prefix carry its context too, and undoing a rejected
suffix is moving a length back.

Dims: S sequences, T flat tokens, A tapped layers, D model width, P pages per sequence,
L draft layers, R cache rows, J key/value heads, K head width.
"""

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

import torch

from outrider.batch import DraftBlock, DraftSampling, ForwardBatch, TargetOutput
from outrider.errors import EngineFault
from outrider.models.dspark.block import BlockAnchors, BlockPredictor
from outrider.models.dspark.recorded import RecordedBlocks, WaitingSpans
from outrider.ops.waiting import KeptSpans
from outrider.plan import ScheduledSequence

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

    def foresee(self, item: ScheduledSequence) -> Sequence[float] | None:
        """Confidence of the drafts of a decoding sequence if it will read them from its text, at no cost.

        None where a model will be asked. ``propose`` for the same anchor keeps to it.
        """

    def propose(self, anchors: Anchors) -> DraftBlock | None:
        """One block for every anchor, all in one call; None when there is nothing to verify.

        Drafts that are drawn (``anchors.sampling.coins_S``) come with what they were drawn from. A drafter
        may ignore ``sampling`` if its drafts are a function of what it has observed and of the anchor.
        """

    @property
    def lapsed(self) -> Set[int]:
        """State slots whose context was given up: no tap of theirs is needed, and no model drafts for them."""

    def lapse(self, slots: Sequence[int]) -> None:
        """Give up the context of sequences until their slots are released."""

    def observe(self, batch: ForwardBatch, output: TargetOutput, spans: ObservedSpans) -> None:
        """Take in the committed rows of one target step, prompt chunks included.

        A step has no taps where all its sequences have lapsed.
        """

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

    lapsed: frozenset[int] = frozenset()

    def lapse(self, slots: Sequence[int]) -> None:
        """Nothing to give up."""

    def foresee(self, item: ScheduledSequence) -> None:
        """Nothing to read."""

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


NUM_WAITING = 64  # rows of a slot that wait at most, or those of the longest verify span


class DSparkDrafter:
    """A DSpark model, its context keys and values, and the observed length of each sequence.

    Tap rows are only copied when they are observed. They wait in a ring of their slot, and are projected and stored
    all at once before the slot proposes, when the ring is full, or when the sequence is copied out. So a round that
    proposes nothing pays for a copy, and a sequence that ends without another proposal never pays more.

    Args:
        predictor: the model prepared for inference.
        num_cache_rows: rows of the target's paged cache, num_pages * page_size.
    """

    def __init__(self, predictor: BlockPredictor, *, num_cache_rows: int) -> None:
        config = predictor.config
        self._predictor = predictor
        self._context = predictor.allocate_context(num_cache_rows)
        self._blocks = RecordedBlocks(predictor, self._context)
        self._num_waiting = max(NUM_WAITING, 1 + predictor.num_draft_tokens)
        self._ring_BRW = predictor.context.allocate_rings(1, self._num_waiting)
        self._observed: dict[int, int] = {}  # slot -> context tokens taken in
        self._stored: dict[int, int] = {}  # slot -> those of them whose keys and values are in the cache
        self._lapsed: set[int] = set()
        self.num_draft_tokens = predictor.num_draft_tokens
        self.aux_layer_ids = config.aux_layer_ids
        self.aux_hidden_stream = config.aux_hidden_stream.value

    @property
    def lapsed(self) -> Set[int]:
        """See Drafter."""
        return self._lapsed

    def lapse(self, slots: Sequence[int]) -> None:
        """See Drafter."""
        for slot in slots:
            self.observed_tokens(slot)
            self._lapsed.add(slot)

    @property
    def context_bytes_per_token(self) -> int:
        """Bytes of the keys and values of one context token, all draft layers."""
        return self._context.rows_2LRJK[:, :, 0].nbytes

    @property
    def waiting_bytes_per_slot(self) -> int:
        """Bytes of the taps of one sequence that may wait."""
        return self._ring_BRW[0].nbytes

    def observed_tokens(self, slot: int) -> int:
        """Context tokens of the sequence in ``slot``."""
        if slot not in self._observed:
            raise EngineFault(f"drafter slot {slot} holds no sequence; reset it first")
        return self._observed[slot]

    def stored_tokens(self, slot: int) -> int:
        """Those of them whose keys and values are in the cache; the others wait."""
        self.observed_tokens(slot)
        return self._stored[slot]

    def reserve(self, num_slots: int) -> None:
        """Make room for the taps of so many slots; otherwise that is done when slots are used."""
        before_BRW = self._ring_BRW
        if num_slots > before_BRW.shape[0]:
            self._ring_BRW = self._predictor.context.allocate_rings(num_slots, self._num_waiting)
            self._ring_BRW[: before_BRW.shape[0]] = before_BRW

    def reset(self, slots: Sequence[int]) -> None:
        """See Drafter; a slot that still holds a sequence is an engine fault."""
        for slot in slots:
            if slot in self._observed:
                raise EngineFault(f"drafter slot {slot} is reset while it holds a sequence; release it")
            self._observed[slot] = self._stored[slot] = 0
        num_slots = 1 + max(slots, default=-1)
        if num_slots > self._ring_BRW.shape[0]:
            self.reserve(max(2 * self._ring_BRW.shape[0], num_slots))

    def release(self, slots: Sequence[int]) -> None:
        """See Drafter. Cached rows stay; the length gates every read of them. Waiting rows are dropped."""
        for slot in slots:
            self.observed_tokens(slot)
            del self._observed[slot], self._stored[slot]
            self._lapsed.discard(slot)

    @torch.inference_mode()
    def snapshot(self, slot: int, rows_R: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """See Drafter: keys and values of the context, ``[2, L, R, J, K]``; nothing of a sequence that has lapsed.

        The slot must have observed R tokens.
        """
        self._check_continues(slot, rows_R.shape[0], "copy")
        if slot in self._lapsed:
            return ()
        begin, end = self._stored[slot], self._observed[slot]
        if begin < end:
            positions_T = torch.arange(begin, end, device=rows_R.device)
            taps_TW = self._ring_BRW[slot].index_select(0, positions_T % self._num_waiting)
            self._predictor.store_context(
                self._context, self._predictor.context.as_taps(taps_TW), positions_T, rows_R[begin:],
                max_position=end - 1,
            )  # fmt: skip
            self._stored[slot] = end
        return (self._context.rows_2LRJK.index_select(2, rows_R).cpu(),)

    def restore(self, slot: int, rows_R: torch.Tensor, snapshot: tuple[torch.Tensor, ...]) -> None:
        """See Drafter; a slot that still holds a sequence is an engine fault."""
        self.reset((slot,))
        if not snapshot:
            self._observed[slot] = self._stored[slot] = rows_R.shape[0]
            self._lapsed.add(slot)
            return
        (context_2LRJK,) = snapshot
        rows_2LRJK = self._context.rows_2LRJK
        rows_2LRJK.index_copy_(2, rows_R, context_2LRJK.to(rows_2LRJK.device))
        self._observed[slot] = self._stored[slot] = context_2LRJK.shape[2]

    def foresee(self, item: ScheduledSequence) -> None:
        """See Drafter; the model is always asked."""

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
        if not self._lapsed.isdisjoint(anchors.slots):
            raise EngineFault(f"slots {sorted(self._lapsed.intersection(anchors.slots))} propose without a context")
        slots = anchors.slots
        starts = [self._stored[slot] for slot in slots]
        counts = [position - start for position, start in zip(anchors.positions, starts, strict=True)]
        block = self._blocks.propose(
            BlockAnchors(
                token_ids_S=anchors.token_ids_S,
                positions_S=anchors.positions_S,
                page_table_SP=anchors.page_table_SP,
                page_size=anchors.page_size,
                max_position=max(anchors.positions),
                sampling=anchors.sampling,
            ),
            WaitingSpans(slots=slots, starts=starts, counts=counts),
            self._ring_BRW,
        )
        for slot, position in zip(slots, anchors.positions, strict=True):
            self._stored[slot] = position
        return block

    def observe(self, batch: ForwardBatch, output: TargetOutput, spans: ObservedSpans) -> None:
        """Let the tap rows of committed tokens wait; a span that its ring has no room for is stored at once.

        Nothing is computed from rejected rows.

        Raises:
            EngineFault: the target captured no taps, or a span does not continue its slot's context.
        """
        # This runs in every round, also where nobody drafts: one pass, and no object per span.
        lapsed = self._lapsed
        slots: list[int] = []
        begins, starts, counts, full, begin = [], [], [], [], 0
        for slot, start, length, count in zip(
            spans.step_slots + spans.chunk_slots,
            batch.step.starts + batch.chunk.starts,
            batch.step.lengths + batch.chunk.lengths,
            spans.step_committed + batch.chunk.lengths,
            strict=True,
        ):
            if self._observed.get(slot) != start:
                self._check_continues(slot, start, "span")
            if not 0 <= count <= length:
                raise EngineFault(f"{count} committed rows of a span of {length}")
            if slot in lapsed:
                self._observed[slot] = self._stored[slot] = start + count
            else:
                if start + count - self._stored[slot] > self._num_waiting:
                    full.append(len(slots))
                slots.append(slot)
                begins.append(begin)  # rows of step spans come first
                starts.append(start)
                counts.append(count)
            begin += length
        if not slots:
            return
        if output.aux_hidden_TAD is None:
            raise EngineFault(f"the target captured no taps; set_aux_layers({self.aux_layer_ids}) first")
        kept = KeptSpans(slots=slots, begins=begins, starts=starts, counts=counts)
        if full:
            kept = self._store_full(batch, output.aux_hidden_TAD, kept, full)
        if kept.slots:
            self._predictor.context.keep_waiting(self._ring_BRW, output.aux_hidden_TAD, kept)
        for slot, start, count in zip(slots, starts, counts, strict=True):
            self._observed[slot] = start + count

    @torch.inference_mode()
    def _store_full(
        self, batch: ForwardBatch, aux_hidden_TAD: torch.Tensor, spans: KeptSpans, full: list[int]
    ) -> KeptSpans:
        """Store what waits in rings without room, and spans longer than a ring; the spans that are left to wait."""
        full_slots = [spans.slots[i] for i in full]
        starts = [self._stored[slot] for slot in full_slots]
        counts = [self._observed[slot] - start for slot, start in zip(full_slots, starts, strict=True)]
        if sum(counts):
            self._blocks.store(
                WaitingSpans(slots=full_slots, starts=starts, counts=counts),
                self._ring_BRW,
                batch.page_table_SP[batch.sequence_T[[spans.begins[i] for i in full]]],
                batch.page_size,
            )
        for slot in full_slots:
            self._stored[slot] = self._observed[slot]
        for first, last in _neighbours([i for i in full if spans.counts[i] > self._num_waiting]):
            begin, end = spans.begins[first], spans.begins[last] + spans.counts[last]
            self._predictor.store_context(
                self._context,
                aux_hidden_TAD[begin:end],
                batch.positions_T[begin:end],
                batch.slot_mapping_T[begin:end],
                max_position=max(spans.starts[i] + spans.counts[i] for i in range(first, last + 1)) - 1,
            )
            for i in range(first, last + 1):
                self._stored[spans.slots[i]] = spans.starts[i] + spans.counts[i]
        left = [i for i, count in enumerate(spans.counts) if count <= self._num_waiting]
        return KeptSpans(
            slots=[spans.slots[i] for i in left],
            begins=[spans.begins[i] for i in left],
            starts=[spans.starts[i] for i in left],
            counts=[spans.counts[i] for i in left],
        )

    def _check_continues(self, slot: int, position: int, what: str) -> None:
        observed = self.observed_tokens(slot)
        if position != observed:
            raise EngineFault(f"{what} at position {position} of slot {slot}, whose context has {observed} tokens")


def _neighbours(indices: list[int]) -> Iterator[tuple[int, int]]:
    """First and last of each run of successive numbers."""
    for _, run in groupby(enumerate(indices), key=lambda pair: pair[1] - pair[0]):
        numbers = [index for _, index in run]
        yield numbers[0], numbers[-1]
