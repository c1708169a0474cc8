"""What proposals of each request bring, and how much may be lost on finding out.

Two levels: a request starts from the mean of all requests and is judged more and more by its own proposals. What a
proposal brings depends on the price of a row, because only drafts worth their row are verified; so survivals are
kept as a curve over prices, which stays true when a batch grows or empties.
"""

from bisect import bisect_left
from collections.abc import Sequence

from outrider.speculative.decide import Candidate

__all__ = ["Doubt", "GainCurve", "LossBudget", "Outcomes", "Track", "spread"]

PRICES = (0.03, 0.08, 0.15, 0.25, 0.4, 0.6)  # tokens that a row may cost
MEMORY = 0.12  # weight of the last proposal in the curve of its request
MEAN_MEMORY = 0.03  # and in the mean of all requests
PROBE_MEMORY = 0.4  # of a proposal after a pause: what came before is old
MEAN_WEIGHT = 3.0  # proposals that the mean counts for in a new request, once it rests on as many
OUTCOME_PRIOR = 3.0  # accepted drafts that speak for the estimate before there are any
LARGEST_RATIO = 1.1
FIRST_PAUSE, LONGEST_PAUSE = 4, 64  # rounds between probes, in powers of two
STAYING, RETURNING = 1.02, 0.95  # factors of a gain: at break-even nobody flips every round


class GainCurve:
    """Mean tokens and rows of a proposal, by the price below which a draft is not verified."""

    __slots__ = ("gains", "num_seen", "rows")

    def __init__(self, gains: Sequence[float], rows: Sequence[float], num_seen: float) -> None:
        self.gains, self.rows, self.num_seen = list(gains), list(rows), num_seen

    @classmethod
    def of(cls, survivals: Sequence[float], num_seen: float) -> "GainCurve":
        """The curve of one proposal."""
        gains, rows = [], []
        total, count = sum(survivals), len(survivals)
        for price in PRICES:
            while count and survivals[count - 1] < price:
                count -= 1
                total -= survivals[count]
            gains.append(total)
            rows.append(float(count))
        return cls(gains, rows, num_seen)

    @classmethod
    def mean(cls, curves: Sequence["GainCurve"]) -> "GainCurve":
        """Of several proposals."""
        count = len(curves)
        gains = [sum(column) / count for column in zip(*[curve.gains for curve in curves], strict=True)]
        rows = [sum(column) / count for column in zip(*[curve.rows for curve in curves], strict=True)]
        return cls(gains, rows, count)

    @classmethod
    def level(cls, gain: float, rows: float, num_seen: float) -> "GainCurve":
        """The same at every price: drafts that are verified all or not at all."""
        return cls([gain] * len(PRICES), [rows] * len(PRICES), num_seen)

    def copied(self, num_seen: float) -> "GainCurve":
        """The same values, resting on so many proposals."""
        return GainCurve(self.gains, self.rows, num_seen)

    def learn(self, curve: "GainCurve", least_share: float) -> None:
        """Move towards the curve of a new proposal."""
        share = max(1 / (self.num_seen + 1), least_share)
        keep = 1 - share
        self.gains = [keep * old + share * new for old, new in zip(self.gains, curve.gains, strict=True)]
        self.rows = [keep * old + share * new for old, new in zip(self.rows, curve.rows, strict=True)]
        self.num_seen += curve.num_seen

    def at(self, price: float) -> tuple[float, float]:
        """Tokens and rows at the nearest price that is kept, from below."""
        place = min(bisect_left(PRICES, price), len(PRICES) - 1)
        return self.gains[place], self.rows[place]


class Outcomes:
    """Whether as many drafts stand as was expected, lately.

    Luck alone makes the count of one proposal vary by as much as its mean, so only what exceeds one standard
    deviation of the sum counts as a difference.

    Args:
        memory: factor of what came before, per proposal.
    """

    __slots__ = ("_excess", "_expected", "_memory", "_variance", "ratio")

    def __init__(self, memory: float) -> None:
        self._memory = memory
        self._expected = self._excess = self._variance = 0.0
        self.ratio = 1.0  # of outcomes to expectation

    def add(self, expected: float, variance: float, accepted: int) -> None:
        """One proposal."""
        self._expected = self._memory * self._expected + expected
        self._variance = self._memory * self._variance + variance
        self._excess = self._memory * self._excess + accepted - expected
        believed = max(abs(self._excess) - self._variance**0.5, 0.0)
        change = believed / (self._expected + OUTCOME_PRIOR)
        self.ratio = min(1 + change, LARGEST_RATIO) if self._excess > 0 else 1 - change


class Doubt:
    """Probability that drafts have turned to garbage, whatever confidence says: a filter over two states.

    Either first drafts stand as often as expected, or hardly ever; between rounds the state changes with
    probability ``HAZARD``. Two or three rejections of drafts that were nearly certain settle it, while the same of
    drafts that were as likely as not mean little.
    """

    __slots__ = ("probability",)

    HAZARD, REMNANT = 0.015, 0.03

    def __init__(self, probability: float = HAZARD) -> None:
        self.probability = probability

    @property
    def ratio(self) -> float:
        """Of what stands to what is expected."""
        return 1 - (1 - self.REMNANT) * self.probability

    def add(self, expected: float, stood: bool) -> None:
        """One first draft, and the probability it was given."""
        prior = self.probability + self.HAZARD * (1 - 2 * self.probability)
        remnant = self.REMNANT * expected
        garbage, honest = (remnant, expected) if stood else (1 - remnant, 1 - expected)
        self.probability = prior * garbage / max(prior * garbage + (1 - prior) * honest, 1e-9)


def spread(survivals: Sequence[float]) -> tuple[float, float]:
    """Mean and variance of how many drafts stand."""
    mean = sum(survivals)
    square = sum([(2 * index + 1) * survival for index, survival in enumerate(survivals)])
    return mean, max(square - mean * mean, 0.0)


class Track:
    """What is known of one request's proposals."""

    __slots__ = ("_was_probed", "curve", "doubt", "is_paused", "pause", "request_id", "wait")

    def __init__(self, request_id: str, mean: GainCurve, doubt: float = Doubt.HAZARD) -> None:
        self.request_id = request_id
        self.curve = mean.copied(min(mean.num_seen, MEAN_WEIGHT))
        self.doubt = Doubt(doubt)
        self.is_paused = self._was_probed = False
        self.pause = FIRST_PAUSE  # rounds between probes
        self.wait = 0  # rounds to the next one

    def candidate(self, price: float, budget: int, ratio: float) -> Candidate:
        """What the next proposal is expected to bring; biased towards staying as it is.

        Args:
            price: tokens that a row may cost.
            budget: drafts at most.
            ratio: of outcomes to expectation, of all requests.
        """
        ratio *= self.doubt.ratio * (RETURNING if self.is_paused else STAYING)
        gain, rows = self.curve.at(price / max(ratio, 1e-3))
        gain *= ratio
        return Candidate(gain if gain < budget else budget, rows if rows < budget else budget)

    def learn(self, curve: GainCurve, accepted: int) -> None:
        """Take in one judged proposal."""
        self.curve.learn(curve, PROBE_MEMORY if self.is_paused else MEMORY)
        if self.is_paused and accepted:
            self.pause = FIRST_PAUSE  # a sign of life

    def settle(self, pays: bool) -> bool:
        """Pause or go on, and whether a probe is due; one that brought nothing doubles the time to the next."""
        if pays:
            self.is_paused, self.pause, self.wait = False, FIRST_PAUSE, 0
        elif not self.is_paused:
            self.is_paused, self.wait = True, self.pause
        elif self._was_probed:
            self.wait, self.pause = self.pause, min(2 * self.pause, LONGEST_PAUSE)
        elif self.wait:
            self.wait -= 1
        self._was_probed = False
        return not pays and self.wait == 0

    def probe(self) -> None:
        """The request proposes although that is not expected to pay."""
        self._was_probed = True


class LossBudget:
    """How much drafting may lose against plain decoding, in plain rounds.

    A probe is a proposal that is not expected to pay. It costs at most what the round takes longer than a plain one,
    and is only made if the balance holds that much. So all probes of ``n`` rounds cost at most
    ``START + EARNED * n`` plain rounds. Time lost on proposals that were expected to pay and did not is charged
    afterwards, which puts further probes off.
    """

    START, EARNED, MOST, LEAST = 1.0, 0.01, 2.0, -0.75

    def __init__(self) -> None:
        self.balance = self.START
        self._streak = 0.0  # lost since proposals have been expected to pay, without a break

    def allows(self, loss: float) -> bool:
        """Whether a probe may lose so much."""
        return loss <= self.balance

    def record(self, loss: float, *, expected: bool, probed: float) -> None:
        """Take in a finished round.

        Args:
            loss: plain rounds that it took longer than plain decoding of the same tokens; negative for a gain.
            expected: whether anybody proposed because it was expected to pay.
            probed: what the probes in it lost, in plain rounds.
        """
        self.balance = min(self.balance + self.EARNED, self.MOST) - probed
        if expected:
            self._streak += loss
        elif self._streak:
            self.balance = max(self.balance - max(self._streak, 0.0), min(self.balance, self.LEAST))
            self._streak = 0.0
