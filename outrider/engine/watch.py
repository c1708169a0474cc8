"""Shows every finished round, and what was known when it was decided, to somebody who wants to see it.

Nobody watches by default, and then nothing of this runs. A watcher cannot harm serving: it gets copies of host
integers after the round, and if it fails, that is logged once and nobody watches any more.
"""

import logging
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

from outrider.plan import ScheduledSequence, SpeculationReport, StepPlan, StepResult
from outrider.request import RequestUpdate
from outrider.speculative.calibration import Calibration
from outrider.speculative.confidence import SurvivalEstimator
from outrider.speculative.lengths import NOBODY, Foresee, LengthPolicy, RoundRecord, unforeseen

__all__ = ["Proposed", "RoundWatch", "WatchedRound"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposed:
    """What was known of one proposal before any of it was verified."""

    confidence_G: tuple[float, ...] | None  # of the head, before calibration; None without a head
    survival_G: tuple[float, ...]  # as calibrated


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedRound:
    """One finished round."""

    plan: StepPlan
    result: StepResult
    updates: tuple[RequestUpdate, ...]
    round_s: float  # all of it, scheduling and bookkeeping included
    proposals: Mapping[int, Proposed]  # by index of the scheduled sequence


class RoundWatch:
    """Collects the two halves of a round, the decision and the outcome, for a sink.

    Args:
        sink: gets every finished round.
    """

    def __init__(self, sink: Callable[[WatchedRound], None]) -> None:
        self._sink: Callable[[WatchedRound], None] | None = sink
        self._lengths: _WatchedLengths | None = None

    def wrap(self, policy: LengthPolicy, num_draft_tokens: int, calibration: Calibration | None) -> LengthPolicy:
        """The same policy, seen; it chooses what it would have chosen."""
        self._lengths = _WatchedLengths(policy, SurvivalEstimator(num_draft_tokens, calibration))
        return self._lengths

    def finish(self, plan: StepPlan, result: StepResult, updates: Sequence[RequestUpdate], round_s: float) -> None:
        """Show a round; a failure of the sink is its last."""
        if self._sink is None or self._lengths is None:
            return
        try:
            self._sink(
                WatchedRound(
                    plan=plan,
                    result=result,
                    updates=tuple(updates),
                    round_s=round_s,
                    proposals=self._lengths.proposals,
                )
            )
        except Exception:
            logger.exception("rounds are no longer watched, because the watcher failed; serving goes on")
            self._sink = None


class _WatchedLengths:
    """A length policy that also keeps what it was shown."""

    reads_confidence = True

    def __init__(self, policy: LengthPolicy, survival: SurvivalEstimator) -> None:
        self._policy = policy
        self._survival = survival
        self.proposals: dict[int, Proposed] = {}

    def gives_up(self, item: ScheduledSequence, num_sequences: int) -> bool:
        """See LengthPolicy."""
        return self._policy.gives_up(item, num_sequences)

    def proposing(
        self,
        scheduled: Sequence[ScheduledSequence],
        foresee: Foresee = unforeseen,
        lapsed: Set[int] = NOBODY,
    ) -> list[int]:
        """See LengthPolicy."""
        self.proposals = {}
        return self._policy.proposing(scheduled, foresee, lapsed)

    def choose(
        self,
        scheduled: Sequence[ScheduledSequence],
        proposing: Sequence[int],
        num_proposed: int,
        confidence_SG: Sequence[Sequence[float]] | None,
        read: Set[int] = NOBODY,
    ) -> tuple[int, ...]:
        """See LengthPolicy."""
        shown = confidence_SG if self._policy.reads_confidence else None
        lengths = self._policy.choose(scheduled, proposing, num_proposed, shown, read)
        survivals = self._survival.survivals([scheduled[index] for index in proposing], confidence_SG)
        for row, index in enumerate(proposing):
            if confidence_SG is not None and index in read:
                survivals[row] = list(accumulate(confidence_SG[row], mul))
        self.proposals = {
            index: Proposed(
                confidence_G=None if confidence_SG is None else tuple(confidence_SG[row]),
                survival_G=tuple(survivals[row][:num_proposed]),
            )
            for row, index in enumerate(proposing)
        }
        return lengths

    def observe(self, record: RoundRecord) -> None:
        """See LengthPolicy."""
        self._policy.observe(record)
        for index, proposed in self.proposals.items():
            if index in record.read:
                continue
            self._survival.observe(
                record.scheduled[index],
                proposed.confidence_G,
                record.verify_lengths[index],
                record.num_accepted[index],
            )

    def report(self) -> SpeculationReport | None:
        """See LengthPolicy."""
        return self._policy.report()
