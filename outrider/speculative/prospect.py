"""Whether it is worth keeping a drafter's context for a request at all.

A request whose drafts hardly ever pay pauses, but its taps are still captured and kept, in case they pay again: on a
small model that is a good part of a step. Where typical drafts are far from paying, a request that begins is given
up for its life, and costs what it costs without a drafter. One of many is not, so that the typical draft stays known.
"""

from collections.abc import Sequence

from outrider.speculative.decide import Candidate, decide_proposals
from outrider.speculative.gains import GainCurve

__all__ = ["Prospect"]

LIKELY = 0.9  # of the plain rate: if typical drafts reach it, some texts will pay
SCOUTS = 32  # of so many requests that would be given up, one is not
SEEN = 32  # proposals that the mean must rest on before requests are given up, where nothing was measured before


class Prospect:
    """Decides for requests that begin.

    Args:
        is_measured: whether the mean says something of this pair from the start.
    """

    def __init__(self, *, is_measured: bool) -> None:
        self._is_measured = is_measured
        self._num_hopeless = 0

    def gives_up(self, mean: GainCurve, step_s: Sequence[float], beside_s: Sequence[float], num_sequences: int) -> bool:
        """Whether nothing will be drafted for a request that begins.

        Args:
            mean: what proposals of all requests bring.
            step_s: seconds of the step with 0, 1, 2, ... drafts.
            beside_s: of the rest of a round when 0, 1, 2, ... propose.
            num_sequences: that run, this one included.
        """
        if not self._is_measured and mean.num_seen < SEEN:
            return False
        if _is_likely(mean, step_s, beside_s, num_sequences):
            return False
        self._num_hopeless += 1
        return self._num_hopeless % SCOUTS > 0


def _is_likely(mean: GainCurve, step_s: Sequence[float], beside_s: Sequence[float], num_sequences: int) -> bool:
    """Whether drafts for some typical sequences pay, or those for all come near the plain rate."""
    plain_s = step_s[0] + beside_s[0]
    price = num_sequences / plain_s * (step_s[-1] - step_s[0]) / (len(step_s) - 1)
    candidates = [Candidate(*mean.at(price))] * num_sequences
    choice = decide_proposals(candidates, beside_s, step_s, tokens=float(num_sequences), price=price)
    return bool(choice.chosen) or choice.all_rate > LIKELY * choice.plain_rate
