"""How likely each draft is to be kept: the confidence head, calibrated offline and corrected while serving.

The survival of a draft is the probability that it and all drafts before it stand: the running product of calibrated
confidences, ``sigmoid(logit / temperature + bias)`` (dspark sections 3.4 and 3.5). Temperature and bias of each
position start from the offline fit and follow what comes of drafts by projected steps along the gradient of the log
loss. Only drafts that were reached (all before them stood, and they were verified) say anything, so a short verify
length never looks like a rejection. Each rule of acceptance and band of temperatures keeps its own.

The steps are small while predictions are right on average and grow with the mean error of late: a drafter that turns
to garbage loses its credit within a few dozen drafts, while luck moves a good one little. Values stay in a box, so
nothing can run away; memory is a few numbers per rule, band and position.
"""

import math
from collections.abc import Sequence
from math import exp, log

import numpy as np

from outrider.plan import ScheduledSequence
from outrider.speculative.calibration import Calibration, Condition, PositionFit, condition_of

__all__ = ["SurvivalEstimator"]

PRIOR = 0.6  # that a draft stands, of a drafter without a confidence head before anything was seen
CALM_STEP = 0.02  # step along the gradient while the mean error is 0
ALARMED_STEP = 0.5  # added to it, times the squared mean error
ERROR_MEMORY = 1 / 16  # weight of a new error in the mean of late
SLOPE_STEP = 1 / 16  # of a step, for the inverse temperature: logits reach 8, so its gradient is that much larger
LARGEST_BIAS = 12.0
LEAST_SLOPE, LARGEST_SLOPE = 1 / 8, 8.0  # inverse temperatures of the 0.125..8 that the offline fit tries
LARGEST_LOGIT = 12.0
MOST_SURE = 1 / (1 + math.exp(-LARGEST_LOGIT))
LEAST_SURE = 1 - MOST_SURE
MANY = 4  # proposals from which on arrays cost less than a loop


class _Position:
    """One draft position under one condition."""

    __slots__ = ("bias", "mean_error", "slope")

    def __init__(self, fit: PositionFit) -> None:
        self.slope, self.bias = 1 / fit.temperature, fit.bias
        self.mean_error = 0.0


class _Track:
    """All positions under one condition, and the bias that they share.

    Deep positions are seldom reached, least of all when drafts are bad: the alarmed part of a step goes to all
    positions, so that what the first ones show is known of the others too.
    """

    __slots__ = ("positions", "shared_bias")

    def __init__(self, fits: Sequence[PositionFit]) -> None:
        self.positions = [_Position(fit) for fit in fits]
        self.shared_bias = 0.0

    def learn(self, index: int, logit: float, stood: bool) -> None:
        """One step along the gradient of the log loss of one outcome."""
        position = self.positions[index]
        error = stood - 1 / (1 + exp(-position.slope * logit - position.bias - self.shared_bias))
        mean_error = position.mean_error = position.mean_error + ERROR_MEMORY * (error - position.mean_error)
        alarmed_step = ALARMED_STEP * mean_error * mean_error * error
        position.bias = _boxed(position.bias + CALM_STEP * error)
        self.shared_bias = _boxed(self.shared_bias + alarmed_step)
        slope = position.slope + SLOPE_STEP * (CALM_STEP * error + alarmed_step) * logit
        if LEAST_SLOPE < slope < LARGEST_SLOPE:
            position.slope = slope


def _boxed(bias: float) -> float:
    return bias if -LARGEST_BIAS < bias < LARGEST_BIAS else math.copysign(LARGEST_BIAS, bias)


def _logit(confidence: float) -> float:
    """Of a probability; at most LARGEST_LOGIT, because a confidence in float32 may round to 0 or 1."""
    if LEAST_SURE < confidence < MOST_SURE:
        return log(confidence / (1 - confidence))
    return LARGEST_LOGIT if confidence > 0.5 else -LARGEST_LOGIT


class SurvivalEstimator:
    """Survival of every draft of a proposal; learns from what came of earlier ones.

    Args:
        num_draft_tokens: drafts of a whole proposal.
        calibration: the offline fit; None starts from the head's own word.
    """

    def __init__(self, num_draft_tokens: int, calibration: Calibration | None = None) -> None:
        self._num_draft_tokens = num_draft_tokens
        self._calibration = calibration or Calibration()
        self._headless = [0.5] * num_draft_tokens  # stands in for confidence: logit 0 leaves the bias alone
        self._tracks: dict[tuple[Condition, bool], _Track] = {}

    def survival(self, item: ScheduledSequence, confidence_G: Sequence[float] | None) -> list[float]:
        """Probability that each draft and all before it stand.

        Args:
            item: whose drafts they are.
            confidence_G: of the head, before calibration; None without a head.
        """
        track = self._track(condition_of(item), confidence_G is not None)
        survival, survivals, shared_bias = 1.0, [], track.shared_bias
        for position, confidence in zip(track.positions, confidence_G or self._headless, strict=False):
            survival /= 1 + exp(-position.slope * _logit(confidence) - position.bias - shared_bias)
            survivals.append(survival)
        return survivals

    def survivals(
        self, items: Sequence[ScheduledSequence], confidence_SG: Sequence[Sequence[float]] | None
    ) -> list[list[float]]:
        """``survival`` of several proposals, which for many under one condition costs less than one by one."""
        rows: Sequence[Sequence[float] | None] = confidence_SG or [None] * len(items)
        conditions = {condition_of(item) for item in items} if len(items) >= MANY and confidence_SG else ()
        if len(conditions) != 1 or confidence_SG is None:
            return [self.survival(item, row) for item, row in zip(items, rows, strict=True)]
        track = self._track(next(iter(conditions)), with_head=True)
        confidence = np.array(confidence_SG).clip(LEAST_SURE, MOST_SURE)
        slopes, biases = np.array([(position.slope, position.bias) for position in track.positions]).T
        against = np.exp(-track.shared_bias - biases - slopes * np.log(confidence / (1 - confidence)))
        listed: list[list[float]] = np.cumprod(1 / (1 + against), axis=1).tolist()
        return listed

    def observe(
        self, item: ScheduledSequence, confidence_G: Sequence[float] | None, num_verified: int, num_accepted: int
    ) -> None:
        """Learn from one judged proposal: all accepted drafts stood, the next one fell if it was verified."""
        track = self._track(condition_of(item), confidence_G is not None)
        confidences = confidence_G or self._headless
        for index in range(min(num_accepted + 1, num_verified)):
            track.learn(index, _logit(confidences[index]), index < num_accepted)

    def fits(self, condition: Condition, *, with_head: bool = True) -> tuple[PositionFit, ...]:
        """Temperature and bias of each position as they are now."""
        track = self._track(condition, with_head)
        return tuple(
            PositionFit(temperature=1 / position.slope, bias=position.bias + track.shared_bias)
            for position in track.positions
        )

    def _track(self, condition: Condition, with_head: bool) -> _Track:
        track = self._tracks.get((condition, with_head))
        if track is None:
            fits = self._calibration.positions(condition, self._num_draft_tokens) if with_head else self._prior()
            track = self._tracks[condition, with_head] = _Track(fits)
        return track

    def _prior(self) -> tuple[PositionFit, ...]:
        return (PositionFit(bias=math.log(PRIOR / (1 - PRIOR))),) * self._num_draft_tokens
