"""A simulated machine and texts: rounds whose costs and acceptance are known, to run length policies against.

Time is virtual. A policy sees noisy durations; what it is judged by are the true ones.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from outrider.plan import RoundTimings, ScheduledSequence, SequenceChoice
from outrider.request import SamplingParams, Speculation
from outrider.speculative.lengths import LengthPolicy, RoundRecord

__all__ = ["Costs", "Drafts", "SimulatedMachine", "decoding", "steady"]

NUM_DRAFTS = 7


def decoding(
    slot: int,
    budget: int = NUM_DRAFTS,
    *,
    request_id: str | None = None,
    acceptance: str = "match",
    speculation: Speculation = "auto",
    start: int = 5,
) -> ScheduledSequence:
    """A sequence in its decode phase."""
    choice = None
    if acceptance != "match":
        choice = SequenceChoice(
            params=SamplingParams(temperature=1.0, seed=1, acceptance=acceptance),  # type: ignore[arg-type]
            sample_index=0,
            num_prompt_tokens=3,
            stop_token_ids=frozenset(),
            history=(),
        )
    return ScheduledSequence(
        request_id=request_id or f"r{slot}",
        state_slot=slot,
        page_ids=(slot,),
        start_position=start,
        query_token_ids=(9,),
        draft_budget=budget,
        is_prompt=False,
        wants_logits=True,
        is_first=False,
        choice=choice,
        speculation=speculation,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """True seconds of the parts of a round, at the full speed of the machine."""

    step: float
    per_row: float
    propose: float
    per_proposal: float = 0.0
    per_sequence: float = 0.0
    host: float = 1e-4
    tile: int = 1  # rows come in tiles of so many

    def step_s(self, num_sequences: int, num_rows: int) -> float:
        """Of a step."""
        tiles = -(-num_rows // self.tile)
        return self.step + self.per_sequence * num_sequences + self.per_row * tiles * self.tile

    def propose_s(self, num_proposing: int) -> float:
        """Of a proposal for so many."""
        return self.propose + self.per_proposal * num_proposing if num_proposing else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafts:
    """Drafts of a sequence in a round: probability of each if all before it stand, and the confidence shown."""

    stands: float
    shown: float


Text = Callable[[int, int, random.Random], Drafts]  # of slot, round and dice


def steady(stands: float, shown: float | None = None) -> Text:
    """Always the same; confidence is honest unless it is given."""
    drafts = Drafts(stands=stands, shown=stands if shown is None else shown)
    return lambda slot, number, dice: drafts


@dataclass(slots=True, kw_only=True)
class SimulatedMachine:
    """Runs rounds of a policy.

    ``now`` is what a clock on the machine shows, noise included; ``true_s`` and ``num_tokens`` are the score.
    """

    costs: Costs
    text: Text
    policy: LengthPolicy | None = None  # set before the first round; it may need ``clock``
    noise: float = 0.0  # standard deviation of the logarithm of a duration
    spikes: float = 0.0  # share of durations that something else triples
    slowdown: Callable[[int], float] = lambda number: 1.0  # of the whole machine, by round
    tokens_per_request: int = 10**9  # then another request takes the slot
    with_confidence: bool = True
    dice: random.Random = field(default_factory=lambda: random.Random(0))
    luck: random.Random = field(default_factory=lambda: random.Random(1))  # of durations
    now: float = 0.0
    true_s: float = 0.0
    num_tokens: int = 0
    num_rounds: int = 0
    _emitted: dict[int, int] = field(default_factory=dict)

    def clock(self) -> float:
        """Seconds on the machine."""
        return self.now

    def scheduled(self, num_sequences: int, **changes: object) -> list[ScheduledSequence]:
        """Sequences of the next round."""
        items = []
        for slot in range(num_sequences):
            emitted = self._emitted.get(slot, 0)
            request, inside = divmod(emitted, self.tokens_per_request)
            budget = min(NUM_DRAFTS, self.tokens_per_request - inside - 1)
            items.append(decoding(slot, budget, request_id=f"r{slot}.{request}", **changes))  # type: ignore[arg-type]
        return items

    def round(self, scheduled: Sequence[ScheduledSequence]) -> tuple[list[int], tuple[int, ...], tuple[int, ...]]:
        """One round: who proposed, what was verified and what was accepted."""
        policy = self.policy
        assert policy is not None, "set a policy first"
        self._pass(self.costs.host)
        proposing = policy.proposing(scheduled)
        drafts = [self.text(item.state_slot, self.num_rounds, self.dice) for item in scheduled]
        shown = [[drafts[index].shown] * NUM_DRAFTS for index in proposing] if self.with_confidence else None
        lengths = (0,) * len(scheduled)
        if proposing:
            lengths = policy.choose(scheduled, proposing, NUM_DRAFTS, shown)
        accepted = tuple(
            next((count for count in range(length) if self.dice.random() >= draft.stands), length)
            for draft, length in zip(drafts, lengths, strict=True)
        )
        num_rows = len(scheduled) + sum(lengths)
        timings = RoundTimings(
            propose_s=self._pass(self.costs.propose_s(len(proposing))),
            forward_s=self._pass(self.costs.step_s(len(scheduled), num_rows)),
        )
        policy.observe(
            RoundRecord(
                scheduled=tuple(scheduled),
                verify_lengths=lengths,
                num_accepted=accepted,
                proposed=frozenset(proposing),
                num_steps=1,
                timings=timings,
            )
        )
        self.num_rounds += 1
        for item, count in zip(scheduled, accepted, strict=True):
            self._emitted[item.state_slot] = self._emitted.get(item.state_slot, 0) + 1 + count
            self.num_tokens += 1 + count
        return proposing, lengths, accepted

    def run(self, num_rounds: int, num_sequences: int, **changes: object) -> float:
        """True tokens a second of further rounds."""
        tokens, seconds = self.num_tokens, self.true_s
        for _ in range(num_rounds):
            self.round(self.scheduled(num_sequences, **changes))
        return (self.num_tokens - tokens) / (self.true_s - seconds)

    def _pass(self, seconds: float) -> float:
        """Let time go by; what a clock beside the operation shows."""
        self.true_s += seconds
        shown = seconds * self.slowdown(self.num_rounds)
        if self.noise:
            shown *= self.luck.lognormvariate(0.0, self.noise)
        if self.spikes and self.luck.random() < self.spikes:
            shown *= 3
        self.now += shown
        return shown
