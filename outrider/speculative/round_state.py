"""What a policy knows of a round while it runs."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from outrider.plan import DraftReason
from outrider.speculative.decide import Candidate
from outrider.speculative.lengths import RoundRecord

__all__ = ["RoundState"]

MOST_LEARNERS = 16  # proposals of a round that are learnt from, or up to twice as many


@dataclass(slots=True)
class RoundState:
    """What is known while a round runs."""

    num_decodes: int
    context: float
    step_s: list[float]  # of the step, by drafts verified
    beside_s: list[float]  # of the rest, by sequences that propose
    reasons: dict[int, DraftReason] = field(default_factory=dict)  # by index of decoding sequences
    forced: list[int] = field(default_factory=list)
    num_forced_rows: int = 0
    coins: list[int] = field(default_factory=list)  # of those that propose, who accept by coins
    probes: list[int] = field(default_factory=list)
    probe_loss: float = 0.0  # plain rounds that their proposals took
    expected: bool = False  # whether somebody proposes because it is expected to pay
    confidence: dict[int, Sequence[float] | None] = field(default_factory=dict)
    survivals: dict[int, list[float]] = field(default_factory=dict)
    seconds: float = 0.0  # expected, of the whole round
    break_even: float = 0.0
    rate: float = 0.0

    @property
    def plain_s(self) -> float:
        """Expected seconds without any draft."""
        return self.beside_s[0] + self.step_s[0]

    def learners(self, record: RoundRecord, turn: int) -> Collection[int]:
        """Whose proposals are learnt from: of very many a different part in every round, and every probe."""
        parts = len(record.proposed) // MOST_LEARNERS
        if parts < 2:
            return record.proposed
        return [index for index in record.proposed if index % parts == turn % parts or index in self.probes]

    def row_loss(self, num_rows: int) -> float:
        """Plain rounds that each of so many verified drafts took."""
        return (self.step_s[num_rows] - self.step_s[0]) / num_rows / self.plain_s if num_rows else 0.0

    def note_nobody(self, candidates: Sequence[Candidate], beside_s: float, step_s: Sequence[float]) -> None:
        """Nobody drafts in this round: what it would have taken if all had."""
        rows = min(round(sum([candidate.rows for candidate in candidates])), len(step_s) - 1)
        longer = (beside_s + step_s[rows]) / self.plain_s - 1
        self.break_even = 1 + longer * self.num_decodes / len(candidates)
        self.rate = self.num_decodes / self.plain_s
