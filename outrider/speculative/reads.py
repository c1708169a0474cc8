"""Whether drafts that are read from the text are worth a round: what reading takes, beside rows, is measured.

To read costs no model, but a round that verifies anything is proposed, chosen and booked by the host. On a small model
and with several sequences that is a good part of a step.
"""

from collections.abc import Sequence
from itertools import accumulate
from operator import mul

from outrider.speculative.decide import decide_rows
from outrider.speculative.lengths import RoundRecord

__all__ = ["ReadCost", "choose_reads"]

MEMORY = 0.2  # weight of a new measurement
FORGOTTEN = 0.003  # of what reading adds, per plain round: else one slow moment would end it for ever
MOST = 2.0  # as which multiple of the mean a measurement counts: beyond, something ran beside it
MARGIN = 1.1  # by which a round of reads must look faster than a plain one: where it hardly pays, estimates err


class ReadCost:
    """Seconds that a round of reads takes beside its step, beyond those of a plain round, at the first speed."""

    def __init__(self) -> None:
        self._means: dict[bool, float] = {}  # by whether the round read
        self._last: tuple[bool, float] | None = None  # of the last round: whether it read, seconds to propose

    def begin(self, record: RoundRecord) -> None:
        """A round has ended; one in which a model was asked takes the model's time, which is another cost."""
        was_asked = len(record.proposed) > len(record.read)
        self._last = None if was_asked else (bool(record.read), record.timings.propose_s)

    def end(self, host_s: float, speed: float) -> bool:
        """What came after the round has ended too; whether it read.

        Args:
            host_s: seconds from the end of the round to the next one.
            speed: of the machine, by which seconds are divided.
        """
        if self._last is None:
            return False
        read, propose_s = self._last
        seconds = (host_s + propose_s) / speed
        if read and False not in self._means:
            self._means[False] = host_s / speed  # until a plain round is seen
        mean = self._means.setdefault(read, seconds)
        self._means[read] = mean + MEMORY * (min(seconds, MOST * mean) - mean)
        if not read and True in self._means:
            self._means[True] -= FORGOTTEN * self.seconds
        return read

    @property
    def seconds(self) -> float:
        """0 until a round of reads has been seen."""
        return max(self._means[True] - self._means[False], 0.0) if len(self._means) == 2 else 0.0


def choose_reads(
    confidences: Sequence[Sequence[float]], step_s: Sequence[float], *, beside_s: float, read_s: float, num_decodes: int
) -> tuple[int, ...]:
    """Rows that a round of reads would verify of each sequence; none if that is not faster than a plain round.

    Args:
        confidences: of the drafts of every sequence that could read, cut to its budget.
        step_s: seconds of the step with 0, 1, 2, ... drafts.
        beside_s: of the rest of a plain round.
        read_s: what reading adds to it.
        num_decodes: sequences that decode.
    """
    survivals = [list(accumulate(confidence, mul)) for confidence in confidences]
    seconds = [beside_s + read_s + step for step in step_s]
    choice = decide_rows(survivals, seconds, tokens=float(num_decodes))
    plain_rate = num_decodes / (beside_s + step_s[0])
    return choice.lengths if choice.rate > MARGIN * plain_rate else (0,) * len(confidences)
