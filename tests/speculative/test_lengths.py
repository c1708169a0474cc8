"""How many drafts are verified: what pays by measured cost and confidence, and never more than may be used."""

import itertools
import random

import pytest

from outrider.plan import RoundTimings, ScheduledSequence, SequenceChoice
from outrider.request import SamplingParams
from outrider.speculative.lengths import AdaptiveLengths, AllDrafts, MachineSpeed, MeasuredCost, RoundRecord

G = 7


def decoding(slot: int, budget: int = G, acceptance: str = "match") -> ScheduledSequence:
    choice = None
    if acceptance != "match":
        params = SamplingParams(temperature=1.0, seed=1, acceptance=acceptance)
        choice = SequenceChoice(
            params=params, sample_index=0, num_prompt_tokens=3, stop_token_ids=frozenset(), history=()
        )
    return ScheduledSequence(
        request_id=f"r{slot}",
        state_slot=slot,
        page_ids=(slot,),
        start_position=5,
        query_token_ids=(9,),
        draft_budget=budget,
        is_prompt=False,
        wants_logits=True,
        is_first=False,
        choice=choice,
    )


class World:
    """A machine whose costs are known, and drafts that stand with given probabilities."""

    def __init__(self, *, step: float, per_row: float, propose: float, seed: int = 0) -> None:
        self.step, self.per_row, self.propose = step, per_row, propose
        self.now, self.dice = 0.0, random.Random(seed)
        self.policy = AdaptiveLengths(G, clock=lambda: self.now)
        self.slowdown = 1.0

    def round(self, scheduled, rates, confidence=None):
        """One round; ``rates[i]`` is the probability of each draft of sequence i, its confidence unless given."""
        self.now += 1e-4
        proposing = self.policy.proposing(scheduled)
        shown = [[(confidence or rates)[i]] * G for i in proposing]
        lengths = self.policy.choose(scheduled, proposing, G, shown) if proposing else (0,) * len(scheduled)
        accepted = tuple(
            next((k for k in range(length) if self.dice.random() >= rates[i]), length)
            for i, length in enumerate(lengths)
        )
        rows = len(scheduled) + sum(lengths)
        forward = (self.step + self.per_row * rows) * self.slowdown
        timings = RoundTimings(propose_s=self.propose * bool(proposing) * self.slowdown, forward_s=forward)
        self.now += timings.total_s
        self.policy.observe(
            RoundRecord(
                scheduled=tuple(scheduled),
                verify_lengths=lengths,
                num_accepted=accepted,
                proposed=frozenset(proposing),
                num_steps=1,
                timings=timings,
            )
        )
        return proposing, lengths, accepted

    def rate(self, num_rounds, scheduled, rates, confidence=None):
        """Tokens a second over many rounds."""
        began, tokens = self.now, 0
        for _ in range(num_rounds):
            _, _, accepted = self.round(scheduled, rates, confidence)
            tokens += len(scheduled) + sum(accepted)
        return tokens / (self.now - began)


def plain_rate(world: World, num_sequences: int) -> float:
    return num_sequences / (1e-4 + (world.step + world.per_row * num_sequences) * world.slowdown)


def test_all_drafts_takes_every_budget():
    scheduled = [decoding(0), decoding(1, 3), decoding(2, 0)]
    policy = AllDrafts()
    assert policy.proposing(scheduled) == [0, 1]
    assert policy.choose(scheduled, [0, 1], G, None) == (7, 3, 0)


def test_cheap_rows_and_sure_drafts_are_all_verified():
    world = World(step=3e-3, per_row=2e-5, propose=5e-4)
    world.rate(40, [decoding(0)], [0.95])
    assert world.round([decoding(0)], [0.95])[1] == (7,)


def test_dear_rows_are_not_spent_on_unlikely_drafts():
    world = World(step=1e-3, per_row=1e-3, propose=1e-4)
    world.rate(60, [decoding(0)], [0.6])
    _, (length,), _ = world.round([decoding(0)], [0.6])
    assert length <= 2
    assert world.rate(300, [decoding(0)], [0.6]) > 0.97 * plain_rate(world, 1)


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.3, 0.5, 0.8, 0.95])
@pytest.mark.parametrize("num_sequences", [1, 4, 8])
@pytest.mark.parametrize("per_row", [1e-5, 1e-4, 5e-4])
def test_it_is_never_much_slower_than_plain_and_near_the_best_fixed_length(rate, num_sequences, per_row):
    """Cost and gain are learnt on the way; the best length of all is found by trying each."""
    world = World(step=2e-3, per_row=per_row, propose=1e-3)
    scheduled = [decoding(slot) for slot in range(num_sequences)]
    world.rate(100, scheduled, [rate] * num_sequences)
    reached = world.rate(400, scheduled, [rate] * num_sequences)
    plain = plain_rate(world, num_sequences)
    best = plain
    for length in range(1, G + 1):
        tokens = num_sequences * (1 + sum(rate**k for k in range(1, length + 1)))
        seconds = 1e-4 + world.propose + world.step + per_row * num_sequences * (1 + length)
        best = max(best, tokens / seconds)
    assert reached > 0.98 * plain
    assert reached > 0.8 * best


def test_confidence_that_lies_is_calibrated():
    world = World(step=1e-3, per_row=6e-4, propose=1e-4)
    scheduled, rates, claimed = [decoding(0)], [0.2], [0.95]
    world.rate(300, scheduled, rates, claimed)
    assert world.rate(300, scheduled, rates, claimed) > 0.95 * plain_rate(world, 1)


def test_rows_go_to_the_sequence_whose_drafts_stand():
    world = World(step=2e-3, per_row=3e-4, propose=5e-4)
    scheduled, rates = [decoding(0), decoding(1)], [0.9, 0.05]
    world.rate(200, scheduled, rates)
    totals = [sum(column) for column in zip(*(world.round(scheduled, rates)[1] for _ in range(50)), strict=True)]
    assert totals[0] > 5 * totals[1]


def test_a_sequence_that_gains_nothing_pauses_and_comes_back_when_it_does():
    world = World(step=2e-3, per_row=2e-4, propose=1e-3)
    scheduled = [decoding(0)]
    world.rate(150, scheduled, [0.0])
    proposals = sum(bool(world.round(scheduled, [0.0])[0]) for _ in range(128))
    assert 1 <= proposals <= 6
    world.rate(150, scheduled, [0.95])
    assert sum(bool(world.round(scheduled, [0.95])[0]) for _ in range(20)) >= 19


def test_a_machine_that_turns_slower_does_not_make_the_unseen_look_cheap():
    world = World(step=2e-3, per_row=3e-5, propose=5e-4)
    scheduled = [decoding(0)]
    world.rate(100, scheduled, [0.6])
    world.slowdown = 4.0
    world.rate(100, scheduled, [0.6])
    assert sum(bool(world.round(scheduled, [0.6])[0]) for _ in range(40)) >= 30


def test_budgets_and_absent_proposals_are_respected():
    world = World(step=3e-3, per_row=1e-6, propose=1e-4)
    scheduled = [decoding(0, 2), decoding(1, 0), decoding(2, 7)]
    for _ in range(60):
        proposing, lengths, _ = world.round(scheduled, [0.99] * 3)
        assert 1 not in proposing
        assert all(length <= item.draft_budget for length, item in zip(lengths, scheduled, strict=True))
    assert lengths == (2, 0, 7)


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_acceptance_by_coins_always_verifies_everything(rule):
    """A length that depends on later drafts would bias which of them are kept."""
    world = World(step=1e-3, per_row=1e-2, propose=1e-2)
    for _ in range(50):
        proposing, lengths, _ = world.round([decoding(0, acceptance=rule), decoding(1)], [0.01, 0.01])
        assert 0 in proposing and lengths[0] == G


def test_a_slot_that_changes_hands_starts_afresh():
    world = World(step=2e-3, per_row=2e-4, propose=1e-3)
    world.rate(100, [decoding(0), decoding(1)], [0.9, 0.0])
    policy = world.policy
    newcomer = decoding(1)
    fresh = ScheduledSequence(**{**{f: getattr(newcomer, f) for f in newcomer.__slots__}, "request_id": "other"})
    assert policy._track(fresh).gain == pytest.approx(policy._typical_gain)


def test_a_measured_cost_is_a_fit_until_a_shape_is_known_and_stairs_stay_stairs():
    cost = MeasuredCost(1, MachineSpeed())
    for _, rows in itertools.product(range(30), (1, 8, 16)):
        cost.add((rows,), 1e-3 + 1e-4 * rows)
    assert cost((12,)) == pytest.approx(2.2e-3, rel=0.1)
    for _ in range(60):
        cost.add((9,), 4e-3)  # a tile more
    assert cost((9,)) > 1.4 * cost((8,))
