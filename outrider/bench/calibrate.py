"""What a drafter's confidence is worth: outcomes of drafts, a fit of them, and how far a fit is off.

Dims: N judged proposals, G draft positions.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from outrider.engine.watch import WatchedRound
from outrider.speculative.calibration import Condition, PositionFit, condition_of

__all__ = [
    "OutcomeCollector",
    "Outcomes",
    "ReliabilityBin",
    "calibration_error",
    "confidence_errors",
    "fit_positions",
    "reliability_bins",
    "survival_error",
    "survivals",
]

Reals = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
NUM_BINS = 20  # of equal width, like the recorder of the published head
TEMPERATURES = np.exp(np.linspace(np.log(0.125), np.log(8.0), 49))  # dspark section 3.5
FEWEST_REACHED = 50  # outcomes below which a position takes the fit of the one before it
TEMPERATURE_PRIOR = 0.5  # standard deviation of its logarithm around 0: few outcomes change little
BIAS_PRIOR = 3.0  # standard deviation; keeps the bias finite where all drafts stood, or none
LARGEST_LOGIT = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcomes:
    """Proposals of one condition, and what came of them."""

    logits_NG: Reals  # of the confidence head, before calibration
    verified_N: npt.NDArray[np.int64]
    accepted_N: npt.NDArray[np.int64]  # before any cut at a stop

    def judged(self, position: int) -> Flags:
        """Proposals whose draft at ``position`` was verified, reached or not, [N]."""
        return self.verified_N > position

    def reached(self, position: int) -> Flags:
        """Those of them whose earlier drafts all stood, [N]."""
        return self.judged(position) & (self.accepted_N >= position)

    def stood(self, position: int) -> Flags:
        """Whether the draft and all before it stood, [N]."""
        return self.accepted_N > position


class OutcomeCollector:
    """A sink of RoundWatch that keeps every judged proposal with a confidence."""

    def __init__(self) -> None:
        self._rows: dict[Condition, list[tuple[Sequence[float], int, int]]] = defaultdict(list)

    def __call__(self, watched: WatchedRound) -> None:
        """Take in one round."""
        for index, proposed in watched.proposals.items():
            verified = watched.result.num_drafted[index]
            if proposed.confidence_G is not None and verified:
                row = (proposed.confidence_G, verified, watched.result.num_accepted[index])
                self._rows[condition_of(watched.plan.scheduled[index])].append(row)

    def take(self) -> dict[Condition, Outcomes]:
        """Everything since the last call, by condition."""
        taken, self._rows = self._rows, defaultdict(list)
        return {condition: _outcomes(rows) for condition, rows in taken.items()}


def _outcomes(rows: Sequence[tuple[Sequence[float], int, int]]) -> Outcomes:
    confidence_NG = np.array([row[0] for row in rows], dtype=np.float64)
    with np.errstate(divide="ignore"):
        logits_NG = np.log(confidence_NG) - np.log1p(-confidence_NG)
    return Outcomes(
        logits_NG=logits_NG.clip(-LARGEST_LOGIT, LARGEST_LOGIT),
        verified_N=np.array([row[1] for row in rows]),
        accepted_N=np.array([row[2] for row in rows]),
    )


def fit_positions(outcomes: Outcomes) -> tuple[PositionFit, ...]:
    """Sequential temperature scaling: position by position, with those before it fixed.

    Of 49 temperatures the one is taken whose survivals (running products) make what came of all proposals verified up
    to the position likeliest; for each temperature the bias is the likeliest one on the proposals that reached it.
    Source: dspark section 3.5, with two changes that held-out prompts asked for. A bias, because temperatures alone
    leave a confidence of 0.5 where it is, whatever the drafts are worth. And likelihood, not the calibration error,
    which is so rough a function of the temperature that its minimum is luck.
    """
    fits: list[PositionFit] = []
    survival_N = np.ones(len(outcomes.accepted_N))
    for position in range(outcomes.logits_NG.shape[1]):
        num_reached = int(outcomes.reached(position).sum())
        if num_reached < FEWEST_REACHED:
            before = fits[-1] if fits else PositionFit()
            fit = PositionFit(temperature=before.temperature, bias=before.bias, num_reached=num_reached)
        else:
            fit = _fit_position(outcomes, position, survival_N)
        fits.append(fit)
        survival_N = survival_N * _calibrated(outcomes.logits_NG[:, position], fit)
    return tuple(fits)


def _fit_position(outcomes: Outcomes, position: int, survival_N: Reals) -> PositionFit:
    judged_N, reached_N = outcomes.judged(position), outcomes.reached(position)
    logits_N, stood_N = outcomes.logits_NG[:, position], outcomes.stood(position)
    best, best_loss = PositionFit(), np.inf
    for temperature in TEMPERATURES:
        bias = _likeliest_bias(logits_N[reached_N] / temperature, stood_N[reached_N])
        fit = PositionFit(temperature=float(temperature), bias=bias, num_reached=int(reached_N.sum()))
        predicted_N = survival_N[judged_N] * _calibrated(logits_N[judged_N], fit)
        prior_loss = 0.5 * (np.log(temperature) / TEMPERATURE_PRIOR) ** 2
        loss = _log_loss(predicted_N, stood_N[judged_N]) + prior_loss
        if loss < best_loss:
            best, best_loss = fit, loss
    return best


def _log_loss(predicted_N: Reals, stood_N: Flags) -> float:
    """Sum over outcomes, in nats."""
    predicted_N = predicted_N.clip(1e-9, 1 - 1e-9)
    return -float(np.log(predicted_N[stood_N]).sum() + np.log1p(-predicted_N[~stood_N]).sum())


def _likeliest_bias(scaled_N: Reals, stood_N: Flags) -> float:
    """Newton on the log likelihood, with a normal prior around 0; it is concave, so few steps do."""
    bias = 0.0
    for _ in range(30):
        predicted_N = _sigmoid(scaled_N + bias)
        slope = float((stood_N - predicted_N).sum()) - bias / BIAS_PRIOR**2
        curvature = float((predicted_N * (1 - predicted_N)).sum()) + 1 / BIAS_PRIOR**2
        bias += float(np.clip(slope / curvature, -1, 1))
    return bias


def survivals(outcomes: Outcomes, fits: Sequence[PositionFit]) -> Reals:
    """Running products of the calibrated confidence, [N, G]."""
    columns = [_calibrated(outcomes.logits_NG[:, position], fit) for position, fit in enumerate(fits)]
    return np.cumprod(np.stack(columns, axis=1), axis=1, dtype=np.float64)


def calibration_error(predicted_N: Reals, stood_N: Flags) -> float:
    """Expected calibration error: mean over ``NUM_BINS`` bins of equal width, by weight, of |predicted - stood|."""
    bins = reliability_bins(predicted_N, stood_N)
    total = sum(item.count for item in bins)
    return sum(item.count * abs(item.predicted - item.stood) for item in bins) / total if total else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReliabilityBin:
    """Predictions of about one size: their mean, and how often they came true."""

    predicted: float
    stood: float
    count: int


def reliability_bins(predicted_N: Reals, stood_N: Flags) -> list[ReliabilityBin]:
    """The bins that are not empty, by prediction."""
    index_N = np.minimum((predicted_N * NUM_BINS).astype(int), NUM_BINS - 1)
    counts = np.bincount(index_N, minlength=NUM_BINS)
    predicted = np.bincount(index_N, weights=predicted_N, minlength=NUM_BINS)
    stood = np.bincount(index_N, weights=stood_N.astype(float), minlength=NUM_BINS)
    return [
        ReliabilityBin(predicted=float(p / n), stood=float(s / n), count=int(n))
        for p, s, n in zip(predicted, stood, counts, strict=True)
        if n
    ]


def confidence_errors(outcomes: Outcomes, fits: Sequence[PositionFit]) -> list[float | None]:
    """Calibration error of each position's confidence over the proposals that reached it; None where none did."""
    return _by_position(
        outcomes,
        fits,
        lambda position, fit: (outcomes.reached(position), _calibrated(outcomes.logits_NG[:, position], fit)),
    )


def survival_error(outcomes: Outcomes, fits: Sequence[PositionFit]) -> list[float | None]:
    """Calibration error of each position's survival over the proposals that were verified so far."""
    survivals_NG = survivals(outcomes, fits)
    return _by_position(outcomes, fits, lambda position, _: (outcomes.judged(position), survivals_NG[:, position]))


def _by_position(
    outcomes: Outcomes, fits: Sequence[PositionFit], select: Callable[[int, PositionFit], tuple[Flags, Reals]]
) -> list[float | None]:
    errors: list[float | None] = []
    for position, fit in enumerate(fits):
        chosen_N, predicted_N = select(position, fit)
        stood_N = outcomes.stood(position)
        errors.append(calibration_error(predicted_N[chosen_N], stood_N[chosen_N]) if chosen_N.any() else None)
    return errors


def _calibrated(logits_N: Reals, fit: PositionFit) -> Reals:
    return _sigmoid(logits_N / fit.temperature + fit.bias)


def _sigmoid(x: Reals) -> Reals:
    return 1 / (1 + np.exp(-x))
