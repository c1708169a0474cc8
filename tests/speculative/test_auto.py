"""Auto on simulated machines: near the best fixed length where drafts pay, never worth avoiding where they do not."""

import random
from collections import Counter

import pytest

from outrider.plan import DraftReason, RoundTimings
from outrider.speculative.auto import AutoLengths
from outrider.speculative.cost import RoundCosts
from outrider.speculative.gains import Doubt, LossBudget, Outcomes, Track
from outrider.speculative.lengths import AllDrafts, RoundRecord, unforeseen
from outrider.testing.machine import NUM_DRAFTS, Costs, Drafts, SimulatedMachine, decoding, steady

MACHINES = {  # sequences and costs: a small model, one whose rows are dear, tiles, and one bound by its weights
    "c1": (1, Costs(step=1.3e-3, per_row=1e-4, propose=5.5e-4)),
    "c4": (4, Costs(step=1.2e-3, per_row=1.5e-4, propose=3e-4, per_proposal=3e-4)),
    "c8 tiles": (8, Costs(step=1.2e-3, per_row=2e-4, propose=3e-4, per_proposal=3e-4, tile=8)),
    "c16 tiles": (16, Costs(step=1e-2, per_row=1e-4, propose=2e-3, per_proposal=1e-4, tile=16)),
    "c1 weights": (1, Costs(step=3e-2, per_row=5e-4, propose=4e-3)),
}


class Fixed(AllDrafts):
    """So many drafts in every round."""

    def __init__(self, num_drafts: int) -> None:
        super().__init__()
        self.num_drafts = num_drafts

    def proposing(self, scheduled, foresee=unforeseen, lapsed=frozenset()):  # type: ignore[no-untyped-def]
        return super().proposing(scheduled, foresee) if self.num_drafts else []

    def choose(self, scheduled, proposing, num_proposed, confidence_SG, read=frozenset()):  # type: ignore[no-untyped-def]
        whole = super().choose(scheduled, proposing, num_proposed, confidence_SG, read)
        return tuple(min(length, self.num_drafts) for length in whole)


def mixture(slot: int, number: int, dice: random.Random) -> Drafts:
    """Easy and hard stretches, each of its own length per sequence."""
    easy = random.Random(slot * 1_000_003 + number // (20 + 3 * slot)).random() < 0.4
    stands = 0.95 if easy else 0.1
    return Drafts(stands=stands, shown=stands)


def turns(before: Drafts, after: Drafts, at: int):  # type: ignore[no-untyped-def]
    return lambda slot, number, dice: before if number < at else after


GOOD, GARBAGE, LYING = (Drafts(stands=s, shown=c) for s, c in ((0.9, 0.9), (0.0, 0.1), (0.0, 0.9)))


def machine_of(name, text, *, profiled=False, **changes):  # type: ignore[no-untyped-def]
    num_sequences, costs = MACHINES[name]
    settings = {"noise": 0.1, "spikes": 0.02, "tokens_per_request": 96, "dice": random.Random(3)}
    machine = SimulatedMachine(costs=costs, text=text, **(settings | changes))  # type: ignore[arg-type]
    known = known_costs(num_sequences, costs) if profiled else None
    machine.policy = AutoLengths(NUM_DRAFTS, clock=machine.clock, costs=known)
    return machine, num_sequences


def known_costs(num_sequences: int, costs: Costs) -> RoundCosts:
    known = RoundCosts()
    for rows in range(num_sequences, num_sequences * (1 + NUM_DRAFTS) + 1):
        known.step.put((num_sequences, rows), costs.step_s(num_sequences, rows), 0, 2.0)
    for count in range(1, num_sequences + 1):
        known.propose.put((count,), costs.propose_s(count), 0, 2.0)
    known.step.refit()
    known.propose.refit()
    known.is_profiled = True
    return known


def plain_rate(name: str) -> float:
    num_sequences, costs = MACHINES[name]
    return num_sequences / (costs.host + costs.step_s(num_sequences, num_sequences))


def fixed_rate(name: str, text, num_drafts: int, num_rounds: int) -> float:  # type: ignore[no-untyped-def]
    num_sequences, costs = MACHINES[name]
    machine = SimulatedMachine(costs=costs, text=text, tokens_per_request=96, dice=random.Random(3))
    machine.policy = Fixed(num_drafts)
    return machine.run(num_rounds, num_sequences)


@pytest.mark.parametrize("drift", [False, True])
@pytest.mark.parametrize("stands", [0.1, 0.3, 0.5, 0.7, 0.9])
@pytest.mark.parametrize("name", MACHINES)
def test_it_never_loses_and_is_near_the_best_fixed_length(name, stands, drift):
    """From the first round on, costs unknown; with drift the machine turns half as fast and back again."""
    slowdown = (lambda number: 2.0 if number // 150 % 2 else 1.0) if drift else (lambda number: 1.0)
    machine, num_sequences = machine_of(name, steady(stands), slowdown=slowdown)
    reached = machine.run(1000, num_sequences)
    best = max(fixed_rate(name, steady(stands), count, 300) for count in (1, 2, 3, 5, 7))
    assert reached > 0.975 * plain_rate(name)
    if best > 1.3 * plain_rate(name):
        assert reached > 0.94 * best


@pytest.mark.parametrize("name", MACHINES)
def test_it_gains_on_text_that_changes(name):
    machine, num_sequences = machine_of(name, mixture)
    reached = machine.run(1000, num_sequences)
    assert reached > 0.98 * max(plain_rate(name), 0.93 * fixed_rate(name, mixture, NUM_DRAFTS, 1000))


@pytest.mark.parametrize("text", [GARBAGE, LYING])
@pytest.mark.parametrize("with_confidence", [True, False])
@pytest.mark.parametrize("name", MACHINES)
def test_garbage_costs_at_most_three_percent_from_the_first_token_on(name, with_confidence, text):
    machine, num_sequences = machine_of(
        name, steady(text.stands, text.shown), with_confidence=with_confidence, profiled=True
    )
    assert machine.run(500, num_sequences) > 0.97 * plain_rate(name)


@pytest.mark.parametrize("name", MACHINES)
def test_a_drafter_that_turns_to_garbage_costs_at_most_three_percent_from_there_on(name):
    machine, num_sequences = machine_of(name, turns(GOOD, LYING, 300), profiled=True)
    machine.run(300, num_sequences)
    assert machine.run(500, num_sequences) > 0.97 * plain_rate(name)


def test_it_comes_back_when_text_turns_easy():
    machine, num_sequences = machine_of("c1", turns(GARBAGE, GOOD, 400), profiled=True, tokens_per_request=10**9)
    machine.run(400, num_sequences)
    machine.run(150, num_sequences)
    assert machine.run(100, num_sequences) > 0.9 * fixed_rate("c1", steady(0.9), NUM_DRAFTS, 300)


def test_a_good_request_drafts_beside_a_bad_one():
    machine, _ = machine_of("c4", lambda slot, number, dice: GOOD if slot else GARBAGE, profiled=True)
    machine.run(200, 4)
    totals: Counter[int] = Counter()
    for _ in range(50):
        _, lengths, _ = machine.round(machine.scheduled(4))
        totals.update(dict(enumerate(lengths)))
    assert totals[1] > 10 * max(totals[0], 1)


def test_rows_are_not_spent_where_they_are_dear():
    costs = Costs(step=1e-3, per_row=1e-3, propose=1e-4)
    machine = SimulatedMachine(costs=costs, text=steady(0.6))
    machine.policy = AutoLengths(NUM_DRAFTS, clock=machine.clock)
    machine.run(100, 1)
    assert max(machine.round(machine.scheduled(1))[1][0] for _ in range(50)) <= 2


def test_probes_lose_at_most_what_the_budget_earns():
    """The bound of LossBudget: START + EARNED per round, whatever the probes bring."""
    budget, lost = LossBudget(), 0.0
    dice = random.Random(0)
    for number in range(1, 2000):
        loss = dice.uniform(0.1, 0.9)
        probed = loss if budget.allows(loss) else 0.0
        lost += probed
        budget.record(probed, expected=False, probed=probed)
        assert lost <= LossBudget.START + LossBudget.EARNED * number
    assert lost > 0.5 * LossBudget.EARNED * 2000, "nothing is ever tried"


def test_time_lost_on_belief_puts_probes_off():
    budget = LossBudget()
    for _ in range(5):
        budget.record(0.5, expected=True, probed=0.0)
    budget.record(0.0, expected=False, probed=0.0)
    assert budget.balance == LossBudget.LEAST


def test_luck_is_no_difference_but_garbage_is():
    honest, lying = Outcomes(0.98), Outcomes(0.98)
    dice = random.Random(0)
    for _ in range(100):
        honest.add(1.0, 1.5, dice.choice([0, 0, 1, 3]))
        lying.add(3.0, 4.0, 0)
    assert honest.ratio > 0.9
    assert lying.ratio < 0.4


def test_doubt_is_settled_by_few_outcomes_of_sure_drafts_and_not_by_unsure_ones():
    sure, unsure = Doubt(), Doubt()
    for _ in range(3):
        sure.add(0.9, False)
        unsure.add(0.4, False)
    assert sure.ratio < 0.2
    assert unsure.ratio > 0.8
    sure.add(0.9, True)
    sure.add(0.9, True)
    assert sure.ratio > 0.9


def test_pauses_double_and_a_sign_of_life_shortens_them():
    machine, _ = machine_of("c1", steady(0.0))
    policy = machine.policy
    assert isinstance(policy, AutoLengths)
    track = Track("r", policy._mean)
    gaps, gap = [], 0
    for _ in range(200):
        gap += 1
        if track.settle(pays=False):
            gaps.append(gap)
            gap = 0
            track.probe()
    assert gaps[1:4] == [5, 9, 17]
    track.learn(track.curve, accepted=2)
    assert track.pause == 4


def observe(policy: AutoLengths, scheduled, proposing, lengths, accepted) -> None:  # type: ignore[no-untyped-def]
    policy.observe(
        RoundRecord(
            scheduled=tuple(scheduled),
            verify_lengths=lengths,
            num_accepted=accepted,
            proposed=frozenset(proposing),
            num_steps=1,
            timings=RoundTimings(propose_s=5e-4 * bool(proposing), forward_s=2e-3 + 1e-4 * sum(lengths)),
        )
    )


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_no_confidence_of_a_request_that_accepts_by_coins_moves_its_lengths(rule):
    """What is kept is only unbiased if a length does not depend on the drafts that it cuts: the flow of data.

    Two policies see the same history but for the confidence of the request that accepts by coins, which depends on
    its drafts. Who proposes, and how much of it is verified, must be the same in every round.
    """
    dice = random.Random(0)
    policies = [AutoLengths(NUM_DRAFTS, costs=known_costs(2, MACHINES["c4"][1]), clock=lambda: 0.0) for _ in range(2)]
    coins = [0, 0]
    for number in range(300):
        scheduled = [decoding(0, acceptance=rule), decoding(1)]
        shared = [dice.random()] * NUM_DRAFTS
        own = [[dice.random() for _ in range(NUM_DRAFTS)] for _ in policies]
        stands = number // 100 % 2 == 0
        seen = []
        for policy, confidence in zip(policies, own, strict=True):
            proposing = policy.proposing(scheduled)
            rows = [confidence if index == 0 else shared for index in proposing]
            lengths = policy.choose(scheduled, proposing, NUM_DRAFTS, rows) if proposing else (0, 0)
            accepted = tuple(length if stands else 0 for length in lengths)
            observe(policy, scheduled, proposing, lengths, accepted)
            seen.append((proposing, lengths))
        assert seen[0] == seen[1]
        assert seen[0][1][0] in (0, NUM_DRAFTS), "a block is verified whole or not at all"
        coins[bool(seen[0][1][0])] += 1
    assert min(coins) > 10, "it never stopped, or never drafted"


def test_a_fixed_number_is_always_drafted_and_off_never():
    machine, _ = machine_of("c4", steady(0.0), profiled=True)
    policy = machine.policy
    scheduled = [decoding(0, 3, speculation=3), decoding(1, 0, speculation="off"), decoding(2, 0), decoding(3)]
    for _ in range(60):
        proposing, lengths, _ = machine.round(scheduled)
        assert 0 in proposing
        assert lengths[:3] == (3, 0, 0)
    report = policy.report()  # type: ignore[union-attr]
    assert report is not None
    assert report.reasons[:3] == (DraftReason.FIXED, DraftReason.OFF, DraftReason.NO_ROOM)
    assert report.reasons[3] in (DraftReason.TOO_DEAR, DraftReason.PROBE)


def test_the_break_even_is_what_a_round_with_drafts_costs():
    machine, _ = machine_of("c1", steady(0.95), profiled=True, noise=0.0, spikes=0.0)
    machine.run(200, 1)
    costs = MACHINES["c1"][1]
    _, (length,), _ = machine.round(machine.scheduled(1))
    report = machine.policy.report()  # type: ignore[union-attr]
    assert length == NUM_DRAFTS
    assert report is not None
    plain = costs.host + costs.step_s(1, 1)
    assert report.break_even == pytest.approx((plain + costs.propose_s(1) + 7 * costs.per_row) / plain, rel=0.05)
    assert report.expected_rate > 1.5 * report.plain_rate > 0


def test_a_slot_that_changes_hands_starts_from_the_mean():
    machine, _ = machine_of("c4", lambda slot, number, dice: GOOD if slot else GARBAGE, profiled=True)
    machine.run(100, 4)
    policy = machine.policy
    assert isinstance(policy, AutoLengths)
    fresh = policy._track(decoding(0, request_id="another"))
    assert fresh.curve.gains == policy._mean.gains
    assert not fresh.is_paused


def test_a_prior_of_the_pair_decides_the_first_rounds():
    _, costs = MACHINES["c4"]
    for prior, drafts in (([0.05] * 7, False), ([0.95**count for count in range(1, 8)], True)):
        policy = AutoLengths(NUM_DRAFTS, costs=known_costs(4, costs), prior=prior, clock=lambda: 0.0)
        assert bool(policy.proposing([decoding(slot) for slot in range(4)])) == drafts or not drafts
        assert (policy.report().reasons[0] is DraftReason.PAYS) == drafts  # type: ignore[union-attr]
