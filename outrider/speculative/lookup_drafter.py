"""A drafter that reads on where the text repeats itself, and asks another one where it does not.

Dims: S sequences, A of them that the other drafter is asked for, G draft positions, R cache rows, V vocabulary.
"""

import dataclasses
from array import array
from collections.abc import Sequence, Set
from itertools import accumulate, chain
from operator import mul

import torch

from outrider.batch import DraftBlock, ForwardBatch, TargetOutput
from outrider.errors import EngineFault
from outrider.plan import ScheduledSequence
from outrider.speculative.drafter import Anchors, Drafter, ObservedSpans
from outrider.speculative.lookup import TokenHistory

__all__ = ["LookupDrafter"]

LEAST_GAIN = 0.8  # drafts that must be expected to stand: a sequence whose matches mislead is drafted by the other


class LookupDrafter:
    """Drafts of a sequence come from its own text while they are expected to stand, else from ``inner``.

    Which it is, and the tokens read, follow from the committed tokens of the sequence alone: not from other
    sequences, verify lengths or clocks. So a read draft may be judged as certain under every rule of acceptance,
    and the text of a request that tosses coins is the same in any company.

    Args:
        inner: drafts the other sequences; it observes everything and may be asked again at any time.
    """

    def __init__(self, inner: Drafter) -> None:
        self.inner = inner
        self.num_draft_tokens = inner.num_draft_tokens
        self.aux_layer_ids = inner.aux_layer_ids
        self.aux_hidden_stream = inner.aux_hidden_stream
        self._histories: dict[int, TokenHistory] = {}  # by slot; with the anchor where one proposed since
        # Observed spans that no history has taken in yet: position, tokens, whether they answer.
        self._waiting: dict[int, list[tuple[int, list[int], bool]]] = {}

    @property
    def lapsed(self) -> Set[int]:
        """See Drafter: only the inner drafter needs a context; text is read without."""
        return self.inner.lapsed

    def lapse(self, slots: Sequence[int]) -> None:
        """See Drafter."""
        self.inner.lapse(slots)

    def foresee(self, item: ScheduledSequence) -> list[float] | None:
        """See Drafter."""
        history = self._take(item.state_slot, item.start_position, item.query_token_ids, is_answer=True)
        return self._readable(history)

    def propose(self, anchors: Anchors) -> DraftBlock | None:
        """See Drafter. Only sequences that do not read are given to the inner drafter, if any is."""
        if not anchors.slots:
            return None
        if len(set(anchors.slots)) != len(anchors.slots):
            raise EngineFault(f"a slot proposes twice in one round: {anchors.slots}")
        token_ids = anchors.token_ids_S.tolist()
        histories = [
            self._take(slot, position, (token_id,), is_answer=True)
            for slot, position, token_id in zip(anchors.slots, anchors.positions, token_ids, strict=True)
        ]
        confidences = [self._readable(history) for history in histories]
        reading = [row for row, confidence in enumerate(confidences) if confidence is not None]
        if not reading:
            return self.inner.propose(anchors)
        device = anchors.token_ids_S.device
        shape = (len(reading), self.num_draft_tokens)
        # The tensors are the arrays: torch.tensor looks at every number of a list by itself.
        ids = array("q", chain.from_iterable([histories[row].drafts(self.num_draft_tokens) for row in reading]))
        sure = array("f", chain.from_iterable([confidences[row] or () for row in reading]))
        read = DraftBlock(
            token_ids_SG=torch.frombuffer(ids, dtype=torch.int64).view(shape).to(device),
            confidence_SG=torch.frombuffer(sure, dtype=torch.float32).view(shape).to(device),
            read_rows=frozenset(range(len(reading))),
        )
        if len(reading) == len(histories):
            return read
        rows = torch.tensor(reading, device=device)
        if anchors.sampling is not None:  # parameters of sampling are not cut by sequence: all are asked for
            block = self.inner.propose(anchors)
            return None if block is None else _replaced(block, rows, read)
        chosen = set(reading)
        asked = [row for row in range(len(histories)) if row not in chosen]
        block = self.inner.propose(_some(anchors, asked))
        if block is None:
            return None
        merged = _merged(block, torch.tensor(asked, device=device), read, rows)
        return dataclasses.replace(merged, read_rows=frozenset(reading))

    def observe(self, batch: ForwardBatch, output: TargetOutput, spans: ObservedSpans) -> None:
        """See Drafter. The tokens wait until somebody asks what their sequence could read."""
        self.inner.observe(batch, output, spans)
        # After a step its ids are no secret to the host: those of accepted drafts have been read as output.
        token_ids, waiting, begin = batch.token_ids_T.tolist(), self._waiting, 0
        step, chunk = batch.step, batch.chunk
        for slot, start, length, count in zip(
            spans.step_slots, step.starts, step.lengths, spans.step_committed, strict=True
        ):
            waiting[slot].append((start, token_ids[begin : begin + count], True))
            begin += length
        for slot, start, length in zip(spans.chunk_slots, chunk.starts, chunk.lengths, strict=True):
            waiting[slot].append((start, token_ids[begin : begin + length], False))
            begin += length

    def reset(self, slots: Sequence[int]) -> None:
        """See Drafter."""
        self.inner.reset(slots)
        for slot in slots:
            self._histories[slot], self._waiting[slot] = TokenHistory(), []

    def release(self, slots: Sequence[int]) -> None:
        """See Drafter."""
        self.inner.release(slots)
        for slot in slots:
            del self._histories[slot], self._waiting[slot]

    def snapshot(self, slot: int, rows_R: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """See Drafter: the tokens and the state of their history before what the inner drafter copies."""
        history = self._history(slot)
        if len(history) != rows_R.shape[0]:
            raise EngineFault(f"slot {slot} is copied at {rows_R.shape[0]} tokens, but {len(history)} were observed")
        token_ids_R = torch.tensor(history.token_ids(), dtype=torch.int64)
        state = torch.tensor(history.state(), dtype=torch.float64)
        return (token_ids_R, state, *self.inner.snapshot(slot, rows_R))

    def restore(self, slot: int, rows_R: torch.Tensor, snapshot: tuple[torch.Tensor, ...]) -> None:
        """See Drafter."""
        token_ids_R, state, *inner = snapshot
        self.inner.restore(slot, rows_R, tuple(inner))
        self._histories[slot], self._waiting[slot] = TokenHistory.restored(token_ids_R.tolist(), state.tolist()), []

    def _history(self, slot: int) -> TokenHistory:
        if slot not in self._histories:
            raise EngineFault(f"drafter slot {slot} holds no sequence; reset it first")
        history, waiting = self._histories[slot], self._waiting[slot]
        if waiting:
            for start, token_ids, is_answer in waiting:
                self._extend(history, slot, start, token_ids, is_answer=is_answer)
            waiting.clear()
        return history

    def _readable(self, history: TokenHistory) -> list[float] | None:
        """Confidence of the drafts that would be read; None where too few are expected to stand."""
        if not history.match_length:
            return None
        confidence = history.confidence(self.num_draft_tokens)
        return confidence if sum(accumulate(confidence, mul)) >= LEAST_GAIN else None

    def _take(self, slot: int, start: int, token_ids: Sequence[int], *, is_answer: bool) -> TokenHistory:
        """Add committed tokens from position ``start`` on; an anchor that has proposed is there already."""
        history = self._history(slot)
        self._extend(history, slot, start, token_ids, is_answer=is_answer)
        return history

    @staticmethod
    def _extend(history: TokenHistory, slot: int, start: int, token_ids: Sequence[int], *, is_answer: bool) -> None:
        num_known = len(history) - start
        if num_known not in (0, 1):
            raise EngineFault(f"position {start} of slot {slot}, whose history has {len(history)} tokens")
        if is_answer:
            for token_id in token_ids[num_known:]:
                history.append(token_id)
        else:
            history.extend(token_ids[num_known:])


def _some(anchors: Anchors, rows: list[int]) -> Anchors:
    """The greedy anchors of some rows."""
    index = torch.tensor(rows, device=anchors.token_ids_S.device)
    return dataclasses.replace(
        anchors,
        token_ids_S=anchors.token_ids_S.index_select(0, index),
        positions_S=anchors.positions_S.index_select(0, index),
        page_table_SP=anchors.page_table_SP.index_select(0, index),
        slots=tuple([anchors.slots[row] for row in rows]),
        positions=tuple([anchors.positions[row] for row in rows]),
    )


def _merged(asked: DraftBlock, asked_A: torch.Tensor, read: DraftBlock, rows: torch.Tensor) -> DraftBlock:
    """One block of greedy drafts: those of ``asked`` at rows ``asked_A``, those of ``read`` at ``rows``."""
    num_sequences = asked_A.shape[0] + rows.shape[0]
    token_ids_SG = read.token_ids_SG.new_empty((num_sequences, read.token_ids_SG.shape[1]))
    token_ids_SG[asked_A] = asked.token_ids_SG
    confidence_SG = None
    if asked.confidence_SG is not None:
        confidence_SG = asked.confidence_SG.new_empty(token_ids_SG.shape)
        confidence_SG[asked_A] = asked.confidence_SG
    whole = DraftBlock(token_ids_SG=token_ids_SG, confidence_SG=confidence_SG)
    return _replaced(whole, rows, read)


def _replaced(block: DraftBlock, rows: torch.Tensor, read: DraftBlock) -> DraftBlock:
    """``block`` with ``read`` at ``rows``; what was read is certain."""
    token_ids_SG = block.token_ids_SG.index_copy(0, rows, read.token_ids_SG)
    confidence_SG, probs_SGV = block.confidence_SG, block.probs_SGV
    if confidence_SG is not None and read.confidence_SG is not None:
        confidence_SG = confidence_SG.index_copy(0, rows, read.confidence_SG.to(confidence_SG.dtype))
    if probs_SGV is not None:
        certain = torch.zeros_like(probs_SGV[rows])
        certain.scatter_(2, read.token_ids_SG[:, :, None], 1.0)
        probs_SGV = probs_SGV.index_copy(0, rows, certain)
    return DraftBlock(token_ids_SG=token_ids_SG, confidence_SG=confidence_SG, probs_SGV=probs_SGV)
