"""How likely drafts are to stand: what a length policy asks."""

from collections.abc import Sequence
from typing import Protocol

from outrider.plan import ScheduledSequence

__all__ = ["SurvivalModel"]


class SurvivalModel(Protocol):
    """Probability that each draft of a proposal and all drafts before it stand."""

    def survival(self, item: ScheduledSequence, confidence_G: Sequence[float] | None) -> list[float]:
        """One number per draft, not increasing; ``confidence_G`` is the head's word, None without a head."""

    def observe(
        self, item: ScheduledSequence, confidence_G: Sequence[float] | None, num_verified: int, num_accepted: int
    ) -> None:
        """Learn from a judged proposal: the accepted drafts stood, the next one fell if it was verified."""
