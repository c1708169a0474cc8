"""How many drafts of each sequence go to the target: all of them, or as many as pay.

The choice moves tokens between rounds, never their values: with every acceptance rule but those with coins a
token is what the target's own row says. Sequences that accept by coins always verify all of their drafts,
because a length that depends on a later draft would bias what is kept.

A round of ``S`` sequences that verifies drafts with survivals ``s`` (probability that a draft and all before it
stand) yields ``S + sum(s)`` tokens in ``host + propose(m) + step(S, rows)`` seconds. ``AdaptiveLengths`` takes the
drafts, likeliest first, that make this rate largest, and lets a sequence propose only while its recent gain
makes the rate larger than without. Source: dspark sections 3.4 to 3.7; costs are measured while serving.

Dims: S sequences, G draft positions.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Protocol

import numpy as np

from outrider.plan import RoundTimings, ScheduledSequence
from outrider.speculative.calibration import Calibration
from outrider.speculative.confidence import SurvivalEstimator

__all__ = ["AdaptiveLengths", "AllDrafts", "LengthPolicy", "MachineSpeed", "MeasuredCost", "RoundRecord"]

PLAIN_ROUNDS = 2  # first rounds without drafts: what a plain step costs must be known
SPEED_MEMORY = 0.1  # exponent of a measurement in the speed of the machine
MEMORY = 0.05  # weight of a new measurement once there are many
OUTLIER = 2.5  # a measurement counts as at most so many times what was expected
TRUST = 8.0  # measurements of one shape that weigh as much as the fit through all shapes
REFIT = 32  # measurements between two fits
PRIOR_SLOPE = 0.05  # of a step's time, per further row or sequence, before enough was measured
FIRST_GAIN = 1.2  # drafts accepted per proposal, until a drafter has shown what it is worth
GAIN_MEMORY = 0.07  # weight of the last proposal in what a sequence's proposals gain
TRY_MEMORY = 0.3  # the same of a try, which are few
FIRST_PAUSE, LONGEST_PAUSE = 4, 32  # rounds without a proposal before one is tried again, powers of two
MARGIN = 1.02  # by which proposing must look better than not: estimates err, and pauses are cheap


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundRecord:
    """What a finished round did, for the policy to learn from."""

    scheduled: tuple[ScheduledSequence, ...]
    verify_lengths: tuple[int, ...]
    num_accepted: tuple[int, ...]
    proposed: frozenset[int]  # indices of the sequences that proposed
    num_steps: int
    timings: RoundTimings


class LengthPolicy(Protocol):
    """Who proposes in a round, and how much of each proposal is verified."""

    @property
    def reads_confidence(self) -> bool:
        """Whether ``choose`` wants the confidence on the host."""

    def proposing(self, scheduled: Sequence[ScheduledSequence]) -> list[int]:
        """Indices, ascending, of the sequences that propose; a subset of those with a draft budget."""

    def choose(
        self,
        scheduled: Sequence[ScheduledSequence],
        proposing: Sequence[int],
        num_proposed: int,
        confidence_SG: Sequence[Sequence[float]] | None,
    ) -> tuple[int, ...]:
        """Drafts to verify of each scheduled sequence; at most its budget, 0 where nothing was proposed."""

    def observe(self, record: RoundRecord) -> None:
        """Learn from a finished round."""

    def explain(self) -> Mapping[str, object]:
        """Why the last round was decided as it was, in plain values; called only while somebody watches."""


class AllDrafts:
    """Every proposed draft that may still be emitted."""

    reads_confidence = False

    def proposing(self, scheduled: Sequence[ScheduledSequence]) -> list[int]:
        """All that may use a draft."""
        return [index for index, item in enumerate(scheduled) if item.draft_budget > 0]

    def choose(
        self,
        scheduled: Sequence[ScheduledSequence],
        proposing: Sequence[int],
        num_proposed: int,
        confidence_SG: Sequence[Sequence[float]] | None,
    ) -> tuple[int, ...]:
        """Whole budgets. Sees no draft content."""
        chosen = set(proposing)
        return tuple(min(item.draft_budget, num_proposed) if i in chosen else 0 for i, item in enumerate(scheduled))

    def observe(self, record: RoundRecord) -> None:
        """Nothing to learn."""

    def explain(self) -> Mapping[str, object]:
        """The one reason there is."""
        return {"reason": "all_drafts"}


class MachineSpeed:
    """How much slower the machine is now than when the costs were first measured.

    A shape that was last seen when the machine was faster would look cheap for ever: costs are kept as of one
    speed, and every measurement moves the speed that all share. Only ratios of costs matter to the choice.
    """

    def __init__(self) -> None:
        self.factor = 1.0

    def follow(self, measured: float, expected: float) -> None:
        """Move towards what a measurement says of a cost expected at the present speed."""
        if expected > 0:
            self.factor *= min(max(measured / expected, 1 / OUTLIER), OUTLIER) ** SPEED_MEMORY


class MeasuredCost:
    """Seconds of an operation over a few counts, as measured: each shape's own mean, drawn to a fit through all.

    The fit is ``a + b . counts`` by least squares, with a prior for the slopes; costs that climb in stairs stay
    stairs, because a shape that was often measured is taken at its own mean.
    """

    def __init__(self, num_counts: int, speed: MachineSpeed) -> None:
        self._speed = speed
        self._means: dict[tuple[int, ...], list[float]] = {}  # counts -> [mean seconds, weight]
        self._level, self._slopes = 0.0, (0.0,) * num_counts
        self._num_new, self._num_seen = 0, 0  # measurements since the fit, and in all

    def add(self, counts: tuple[int, ...], seconds: float) -> None:
        """Take in one measurement."""
        if self._means:
            self._speed.follow(seconds, self(counts) * self._speed.factor)
        seconds /= self._speed.factor
        entry = self._means.setdefault(counts, [seconds, 0.0])
        if entry[1] >= 2:
            seconds = min(seconds, OUTLIER * entry[0])
        entry[0] += max(1 / (entry[1] + 1), MEMORY) * (seconds - entry[0])
        entry[1] += 1
        self._num_new += 1
        self._num_seen += 1
        if self._num_new >= min(self._num_seen // 2, REFIT):  # a fit costs as much as many estimates
            self._refit()

    def __call__(self, counts: tuple[int, ...]) -> float:
        """Expected seconds at the first speed; 0 before anything was measured."""
        fitted = self._level
        for slope, count in zip(self._slopes, counts, strict=True):
            fitted += slope * count
        fitted = max(fitted, 0.0)
        entry = self._means.get(counts)
        if entry is None:
            return fitted
        mean, weight = entry
        return (weight * mean + TRUST * fitted) / (weight + TRUST)

    def _refit(self) -> None:
        shapes = np.array(list(self._means), dtype=float)
        means, weights = np.array(list(self._means.values())).T
        weights = np.minimum(weights, 1 / MEMORY)
        level = float(np.average(means, weights=weights))
        # The prior is a slope of PRIOR_SLOPE around the centre of what was measured, worth one measurement.
        centre = np.average(shapes, axis=0, weights=weights)
        offsets = shapes - centre
        gram = (offsets * weights[:, None]).T @ offsets + np.eye(shapes.shape[1])
        right = (offsets * weights[:, None]).T @ (means - level) + PRIOR_SLOPE * level
        slopes = np.maximum(np.linalg.solve(gram, right), 0.0)
        self._level, self._slopes = float(level - slopes @ centre), tuple(slopes.tolist())
        self._num_new = 0


@dataclass(slots=True)
class _Track:
    """What is known of one sequence's proposals."""

    request_id: str
    gain: float  # drafts accepted per proposal
    rows: float  # drafts verified per proposal
    paused: bool = False
    pause: int = FIRST_PAUSE  # rounds between tries while it is paused


class _Costs:
    """Seconds of the parts of a round, all as of one speed of the machine."""

    def __init__(self) -> None:
        self.speed = MachineSpeed()
        self.step = MeasuredCost(2, self.speed)  # of sequences and rows
        self.propose = MeasuredCost(1, self.speed)  # of proposing sequences
        self.host = MeasuredCost(1, self.speed)  # between rounds, of sequences

    def beside(self, num_sequences: int, num_proposing: int) -> float:
        """All of a round but its step."""
        return self.host((num_sequences,)) + (self.propose((num_proposing,)) if num_proposing else 0.0) + 1e-9


class AdaptiveLengths:
    """Verifies what measured cost and calibrated confidence say will pay.

    Args:
        num_draft_tokens: drafts of a whole proposal.
        calibration: of the drafter's confidence, fitted offline; None starts from the head's own word.
        clock: seconds; replaced in tests.
    """

    reads_confidence = True

    def __init__(
        self,
        num_draft_tokens: int,
        calibration: Calibration | None = None,
        *,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self._clock = clock
        self._costs = _Costs()
        self._tracks: dict[int, _Track] = {}  # by state slot
        self._survival = SurvivalEstimator(num_draft_tokens, calibration)
        self._confidence: dict[int, Sequence[float] | None] = {}  # of the current round, by index
        self._typical_gain, self._typical_rows = min(FIRST_GAIN, num_draft_tokens), num_draft_tokens / 2
        self._num_rounds = 0
        self._finished: float | None = None

    def proposing(self, scheduled: Sequence[ScheduledSequence]) -> list[int]:
        """See LengthPolicy: those whose recent gain pays, and now and then one that paused."""
        self._measure_host(len(scheduled))
        able = [index for index, item in enumerate(scheduled) if item.draft_budget > 0]
        always = [index for index in able if _by_coins(scheduled[index])]
        if not able or (self._num_rounds < PLAIN_ROUNDS and not always):
            return always
        judged = [index for index in able if not _by_coins(scheduled[index])]
        tracks = {index: self._track(scheduled[index]) for index in judged}
        # Tries fall on common rounds: a proposal for many costs little more than for one.
        trying = [i for i in judged if not tracks[i].paused or self._num_rounds % tracks[i].pause == 0]
        paying = set(self._paying(scheduled, always, sorted(judged, key=lambda i: -tracks[i].gain)))
        for index in trying:
            track, pays = tracks[index], index in paying
            if pays:
                track.pause = FIRST_PAUSE
            elif track.paused:
                track.pause = min(2 * track.pause, LONGEST_PAUSE)
            track.paused = not pays
        tried = [index for index in trying if tracks[index].paused and self._num_rounds % FIRST_PAUSE == 0]
        return sorted({*always, *paying, *tried})

    def _paying(self, scheduled: Sequence[ScheduledSequence], always: list[int], ordered: list[int]) -> list[int]:
        """The first of ``ordered`` (best gain first) that make the rate of tokens largest."""
        num_sequences = len(scheduled)
        rows = float(sum(len(item.query_token_ids) for item in scheduled))
        rows += sum(scheduled[index].draft_budget for index in always)
        tokens = float(sum(item.wants_logits for item in scheduled)) + self._typical_gain * len(always)
        costs = self._costs
        seconds = costs.beside(num_sequences, len(always)) + costs.step((num_sequences, round(rows)))
        best, best_rate = 0, MARGIN * tokens / seconds
        for count, index in enumerate(ordered, 1):
            track = self._track(scheduled[index])
            tokens += track.gain
            rows += min(track.rows, scheduled[index].draft_budget)
            seconds = costs.beside(num_sequences, len(always) + count) + costs.step((num_sequences, round(rows)))
            rate = tokens / seconds
            if rate > best_rate:
                best, best_rate = count, rate
        return ordered[:best]

    def choose(
        self,
        scheduled: Sequence[ScheduledSequence],
        proposing: Sequence[int],
        num_proposed: int,
        confidence_SG: Sequence[Sequence[float]] | None,
    ) -> tuple[int, ...]:
        """See LengthPolicy; without a confidence head each position's own rate stands for it."""
        lengths = [0] * len(scheduled)
        drafts: list[tuple[float, int]] = []  # (survival, sequence), each sequence's in order
        survivals_SG = self._survival.survivals([scheduled[index] for index in proposing], confidence_SG)
        self._confidence = {}
        for row, index in enumerate(proposing):
            budget = min(scheduled[index].draft_budget, num_proposed)
            if _by_coins(scheduled[index]):
                lengths[index] = budget
                continue
            self._confidence[index] = None if confidence_SG is None else confidence_SG[row]
            drafts += [(survival, index) for survival in survivals_SG[row][:budget]]
        drafts.sort(key=lambda draft: -draft[0])
        num_sequences = len(scheduled)
        rows = sum(len(item.query_token_ids) for item in scheduled) + sum(lengths)
        tokens = float(sum(item.wants_logits for item in scheduled)) + self._typical_gain * sum(map(bool, lengths))
        beside, step = self._costs.beside(num_sequences, len(proposing)), self._costs.step
        best, best_rate = 0, tokens / (beside + step((num_sequences, rows)))
        for count, (survival, _) in enumerate(drafts, 1):
            tokens += survival
            rate = tokens / (beside + step((num_sequences, rows + count)))
            if rate > best_rate:
                best, best_rate = count, rate
        for _, index in drafts[:best]:
            lengths[index] += 1
        return tuple(lengths)

    def observe(self, record: RoundRecord) -> None:
        """See LengthPolicy. Rounds with prompt rows say nothing about the cost of a decode round."""
        num_rows = len(record.scheduled) + sum(record.verify_lengths)
        pure = record.num_steps == 1 and not any(item.is_prompt for item in record.scheduled)
        timings = record.timings
        if pure:
            self._num_rounds += 1
            self._costs.step.add((len(record.scheduled), num_rows), timings.total_s - timings.propose_s)
            if record.proposed:
                self._costs.propose.add((len(record.proposed),), timings.propose_s)
        for index in record.proposed:
            self._learn(record, index)
        self._finished = self._clock() if pure else None

    def explain(self) -> Mapping[str, object]:
        """Recent gain of the sequences, and those that pause."""
        tracks = self._tracks.values()
        return {
            "reason": "rate",
            "gain": {track.request_id: track.gain for track in tracks},
            "paused": [track.request_id for track in tracks if track.paused],
        }

    def _learn(self, record: RoundRecord, index: int) -> None:
        item, length, accepted = record.scheduled[index], record.verify_lengths[index], record.num_accepted[index]
        if _by_coins(item):
            return
        self._survival.observe(item, self._confidence[index], length, accepted)
        track = self._track(item)
        memory = TRY_MEMORY if track.paused else GAIN_MEMORY
        track.gain += memory * (accepted - track.gain)
        track.rows += memory * (length - track.rows)
        self._typical_gain += MEMORY * (accepted - self._typical_gain)
        self._typical_rows += MEMORY * (length - self._typical_rows)

    def _track(self, item: ScheduledSequence) -> _Track:
        """The record of the sequence; a new one, as good as a typical sequence, where the slot changed hands."""
        track = self._tracks.get(item.state_slot)
        if track is None or track.request_id != item.request_id:
            track = _Track(item.request_id, self._typical_gain, self._typical_rows)
            self._tracks[item.state_slot] = track
        return track

    def _measure_host(self, num_sequences: int) -> None:
        """Seconds since the round before, if nothing but scheduling happened in between."""
        if self._finished is None:
            return
        self._costs.host.add((num_sequences,), self._clock() - self._finished)
        self._finished = None


def _by_coins(item: ScheduledSequence) -> bool:
    """Whether drafts are accepted by drawing, not by equality with the target's own token."""
    return item.choice is not None and item.choice.params.acceptance != "match"
