"""How many drafts of each sequence go to the target: what a policy is asked, and the simplest one.

The choice moves tokens between rounds, never their values: with every acceptance rule but those with coins a
token is what the target's own row says. Lengths of sequences that accept by coins must be chosen without looking
at the proposal that they cut, because a length that depends on a later draft would bias what is kept.

Dims: S sequences, G draft positions.
"""

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import Protocol

from outrider.plan import DraftReason, RoundTimings, ScheduledSequence, SpeculationReport

__all__ = ["NOBODY", "AllDrafts", "Foresee", "LengthPolicy", "RoundRecord", "by_coins", "no_draft_reason", "unforeseen"]

NOBODY: frozenset[int] = frozenset()
Foresee = Callable[[ScheduledSequence], Sequence[float] | None]  # Drafter.foresee


def unforeseen(item: ScheduledSequence) -> None:
    """Of a drafter that reads nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundRecord:
    """What a finished round did, for the policy to learn from."""

    scheduled: tuple[ScheduledSequence, ...]
    verify_lengths: tuple[int, ...]
    num_accepted: tuple[int, ...]
    proposed: frozenset[int]  # indices of the sequences that proposed
    read: frozenset[int] = frozenset()  # those of them whose drafts were read from the text, see DraftBlock
    num_steps: int
    timings: RoundTimings


class LengthPolicy(Protocol):
    """Who proposes in a round, and how much of each proposal is verified."""

    @property
    def reads_confidence(self) -> bool:
        """Whether ``choose`` wants the confidence on the host."""

    def gives_up(self, item: ScheduledSequence, num_sequences: int) -> bool:
        """Whether no model will draft for a sequence that begins now, among so many, as long as it lives."""

    def proposing(
        self,
        scheduled: Sequence[ScheduledSequence],
        foresee: Foresee = unforeseen,
        lapsed: Set[int] = NOBODY,
    ) -> list[int]:
        """Indices, ascending, of the sequences that propose; a subset of those with a draft budget.

        ``foresee`` tells whose drafts would be read from the text, at no cost, see Drafter. For the state slots of
        ``lapsed`` no model drafts.
        """

    def choose(
        self,
        scheduled: Sequence[ScheduledSequence],
        proposing: Sequence[int],
        num_proposed: int,
        confidence_SG: Sequence[Sequence[float]] | None,
        read: Set[int] = NOBODY,
    ) -> tuple[int, ...]:
        """Drafts to verify of each scheduled sequence; at most its budget, 0 where nothing was proposed.

        ``read`` are the indices of sequences whose drafts were read from the text, see DraftBlock.
        """

    def observe(self, record: RoundRecord) -> None:
        """Learn from a finished round."""

    def report(self) -> SpeculationReport | None:
        """How the last round was decided; None if no sequence decoded."""


def no_draft_reason(item: ScheduledSequence) -> DraftReason | None:
    """Why a decoding sequence can have no draft; None if it can."""
    if item.speculation in ("off", 0):
        return DraftReason.OFF
    return DraftReason.NO_ROOM if item.draft_budget == 0 else None


def by_coins(item: ScheduledSequence) -> bool:
    """Whether drafts are accepted by drawing, not by equality with the target's own token."""
    return item.choice is not None and item.choice.params.acceptance != "match"


class AllDrafts:
    """Every proposed draft that may still be emitted."""

    reads_confidence = False

    def __init__(self) -> None:
        self._scheduled: Sequence[ScheduledSequence] = ()

    def gives_up(self, item: ScheduledSequence, num_sequences: int) -> bool:
        """Never."""
        return False

    def proposing(
        self,
        scheduled: Sequence[ScheduledSequence],
        foresee: Foresee = unforeseen,
        lapsed: Set[int] = NOBODY,
    ) -> list[int]:
        """All that may use a draft; nobody has lapsed where nobody was given up."""
        self._scheduled = scheduled
        return [index for index, item in enumerate(scheduled) if item.draft_budget > 0]

    def choose(
        self,
        scheduled: Sequence[ScheduledSequence],
        proposing: Sequence[int],
        num_proposed: int,
        confidence_SG: Sequence[Sequence[float]] | None,
        read: Set[int] = NOBODY,
    ) -> tuple[int, ...]:
        """Whole budgets. Sees no draft content."""
        chosen = set(proposing)
        return tuple(min(item.draft_budget, num_proposed) if i in chosen else 0 for i, item in enumerate(scheduled))

    def observe(self, record: RoundRecord) -> None:
        """Nothing to learn."""

    def report(self) -> SpeculationReport | None:
        """See LengthPolicy."""
        decodes = [item for item in self._scheduled if not item.is_prompt]
        if not decodes:
            return None
        return SpeculationReport(reasons=tuple(no_draft_reason(item) or DraftReason.FIXED for item in decodes))
