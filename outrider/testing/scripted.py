"""Drafters that follow a script, to drive every accept count through the engine on purpose.

A script sees the committed tokens of one sequence and returns drafts, so its output depends on
nothing else: not on neighbours, slots, pages or the history of the engine.
"""

import random
from collections.abc import Callable, Iterable, Sequence

import torch

from outrider.batch import DraftBlock, ForwardBatch, TargetOutput
from outrider.errors import EngineFault
from outrider.models.protocol import AuxStream
from outrider.plan import ScheduledSequence
from outrider.speculative.drafter import Anchors, ObservedSpans

__all__ = ["Script", "ScriptedDrafter", "garbage", "oracle", "random_drafts", "wrong_at"]

Script = Callable[[tuple[int, ...], int], Sequence[int]]  # (committed tokens with the anchor, count) -> drafts


class ScriptedDrafter:
    """A drafter without a model. It keeps each sequence's tokens and checks that none is skipped.

    Args:
        num_draft_tokens: drafts per round.
        script: gives exactly that many drafts.
    """

    aux_layer_ids: tuple[int, ...] = ()
    aux_hidden_stream: AuxStream = "mixture"

    def __init__(self, num_draft_tokens: int, script: Script) -> None:
        self.num_draft_tokens = num_draft_tokens
        self._script = script
        self._token_ids: dict[int, list[int]] = {}
        self.num_proposed = 0

    lapsed: frozenset[int] = frozenset()

    def lapse(self, slots: Sequence[int]) -> None:
        """Nothing to give up."""

    def foresee(self, item: ScheduledSequence) -> None:
        """See Drafter; nothing is read."""

    def propose(self, anchors: Anchors) -> DraftBlock:
        """One row of scripted drafts per anchor."""
        rows = []
        for slot, position, anchor in zip(anchors.slots, anchors.positions, anchors.token_ids_S.tolist(), strict=True):
            self._check_continues(slot, position)
            drafts = self._script((*self._token_ids[slot], anchor), self.num_draft_tokens)
            assert len(drafts) == self.num_draft_tokens, f"{len(drafts)} drafts of {self.num_draft_tokens}"
            rows.append(list(drafts))
        self.num_proposed += len(rows)
        token_ids_SG = torch.tensor(rows, dtype=torch.int64, device=anchors.token_ids_S.device)
        return DraftBlock(token_ids_SG=token_ids_SG, confidence_SG=None)

    def observe(self, batch: ForwardBatch, output: TargetOutput, spans: ObservedSpans) -> None:
        """Append the committed tokens."""
        token_ids = batch.token_ids_T.tolist()
        groups = (
            (batch.step, spans.step_slots, spans.step_committed),
            (batch.chunk, spans.chunk_slots, batch.chunk.lengths),
        )
        for group, slots, counts in groups:
            rows = iter(group.rows_T.tolist())
            for slot, count, start, length in zip(slots, counts, group.starts, group.lengths, strict=True):
                self._check_continues(slot, start)
                span = [token_ids[next(rows)] for _ in range(length)]
                self._token_ids[slot].extend(span[:count])

    def reset(self, slots: Sequence[int]) -> None:
        """Start empty sequences."""
        for slot in slots:
            if slot in self._token_ids:
                raise EngineFault(f"drafter slot {slot} is reset while it holds a sequence")
            self._token_ids[slot] = []

    def release(self, slots: Sequence[int]) -> None:
        """Forget sequences; an empty slot is a fault."""
        for slot in slots:
            if slot not in self._token_ids:
                raise EngineFault(f"drafter slot {slot} is released twice")
            del self._token_ids[slot]

    def snapshot(self, slot: int, rows_R: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The tokens of a sequence."""
        self._check_continues(slot, rows_R.shape[0])
        return (torch.tensor(self._token_ids[slot], dtype=torch.int64),)

    def restore(self, slot: int, rows_R: torch.Tensor, snapshot: tuple[torch.Tensor, ...]) -> None:
        """Go on with the tokens of a snapshot."""
        (token_ids,) = snapshot
        self.reset((slot,))
        self._token_ids[slot] = token_ids.tolist()

    @property
    def occupied_slots(self) -> frozenset[int]:
        """Slots that hold a sequence."""
        return frozenset(self._token_ids)

    def _check_continues(self, slot: int, position: int) -> None:
        if slot not in self._token_ids or position != len(self._token_ids[slot]):
            raise EngineFault(f"position {position} of slot {slot} does not continue {self._token_ids.get(slot)}")


def oracle(streams: Iterable[Sequence[int]]) -> Script:
    """Drafts that are always right: the tokens that follow in the stream with the same beginning."""
    known = [tuple(stream) for stream in streams]

    def script(token_ids: tuple[int, ...], count: int) -> Sequence[int]:
        for stream in known:
            if stream[: len(token_ids)] == token_ids:
                following = stream[len(token_ids) : len(token_ids) + count]
                return following + (0,) * (count - len(following))
        raise AssertionError(f"no stream begins with {token_ids}")

    return script


def wrong_at(index: int, right: Script, vocab_size: int) -> Script:
    """The drafts of ``right`` with draft ``index`` replaced by another token."""

    def script(token_ids: tuple[int, ...], count: int) -> Sequence[int]:
        drafts = list(right(token_ids, count))
        if index < count:
            drafts[index] = (drafts[index] + 1) % vocab_size
        return drafts

    return script


def garbage(token_id: int) -> Script:
    """The same token everywhere."""

    def script(token_ids: tuple[int, ...], count: int) -> Sequence[int]:
        return (token_id,) * count

    return script


def random_drafts(right: Script, vocab_size: int, chance: float, seed: int) -> Script:
    """Each draft of ``right`` kept with probability ``chance``, else any token; a function of the context."""

    def script(token_ids: tuple[int, ...], count: int) -> Sequence[int]:
        dice = random.Random(repr((seed, token_ids)))
        return [t if dice.random() < chance else dice.randrange(vocab_size) for t in right(token_ids, count)]

    return script
