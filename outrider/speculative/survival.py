"""How likely drafts are to stand: what a length policy asks, and the simplest answer."""

from collections.abc import Sequence
from typing import Protocol

from outrider.plan import ScheduledSequence

__all__ = ["RatioSurvival", "SurvivalModel"]

PRIOR_WEIGHT = 8.0  # pseudo-outcomes of a position
MEMORY = 0.98
SUREST = 0.999
HEADLESS = 0.6  # that a draft stands, of a drafter without a confidence head before anything was seen


class SurvivalModel(Protocol):
    """Probability that each draft of a proposal and all drafts before it stand."""

    def survival(self, item: ScheduledSequence, confidence_G: Sequence[float] | None) -> list[float]:
        """One number per draft, not increasing; ``confidence_G`` is the head's word, None without a head."""

    def observe(
        self, item: ScheduledSequence, confidence_G: Sequence[float] | None, num_verified: int, num_accepted: int
    ) -> None:
        """Learn from a judged proposal: the accepted drafts stood, the next one fell if it was verified."""


class RatioSurvival:
    """Confidence times the ratio of outcomes to confidence at that position, over reached positions only.

    Args:
        num_draft_tokens: drafts of a whole proposal.
    """

    def __init__(self, num_draft_tokens: int) -> None:
        self._predicted = [PRIOR_WEIGHT] * num_draft_tokens
        self._stood = [PRIOR_WEIGHT] * num_draft_tokens
        self._headless = [HEADLESS] * num_draft_tokens

    def survival(self, item: ScheduledSequence, confidence_G: Sequence[float] | None) -> list[float]:
        """See SurvivalModel."""
        survival, survivals = 1.0, []
        for confidence, stood, predicted in zip(
            confidence_G or self._headless, self._stood, self._predicted, strict=False
        ):
            survival *= min(confidence * stood / predicted, SUREST)
            survivals.append(survival)
        return survivals

    def observe(
        self, item: ScheduledSequence, confidence_G: Sequence[float] | None, num_verified: int, num_accepted: int
    ) -> None:
        """See SurvivalModel."""
        confidences = confidence_G or self._headless
        for index in range(min(num_accepted + 1, num_verified)):
            self._predicted[index] = max(self._predicted[index] * MEMORY + confidences[index], 1e-6)
            self._stood[index] = self._stood[index] * MEMORY + (index < num_accepted)
