"""The decision is the best one: compared with trying everything, on costs of any shape."""

import itertools
import random

import pytest

from outrider.speculative.decide import Candidate, decide_proposals, decide_rows


def stairs(dice: random.Random, count: int) -> list[float]:
    """Seconds that never fall, with flat stretches and jumps."""
    seconds, level = [], dice.uniform(1, 3)
    for _ in range(count):
        level += dice.choice([0.0, 0.0, 0.05, 0.3, 1.0])
        seconds.append(level)
    return seconds


def falling(dice: random.Random, count: int) -> list[float]:
    survival, drafts = 1.0, []
    for _ in range(count):
        survival *= dice.choice([0.2, 0.5, 0.5, 0.9, 1.0])
        drafts.append(survival)
    return drafts


@pytest.mark.parametrize("seed", range(200))
def test_rows_are_those_of_exhaustive_search(seed):
    dice = random.Random(seed)
    survivals = [falling(dice, dice.randint(0, 4)) for _ in range(dice.randint(1, 3))]
    seconds = stairs(dice, 1 + sum(map(len, survivals)))
    tokens, worth = float(len(survivals)), dice.choice([0.0, 0.5, 1.0, 2.0])
    values = {}
    for lengths in itertools.product(*[range(len(drafts) + 1) for drafts in survivals]):
        gained = tokens + sum(sum(drafts[:length]) for drafts, length in zip(survivals, lengths, strict=True))
        values[lengths] = gained, seconds[sum(lengths)]
    best_rate = max(gained / duration for gained, duration in values.values())
    rate = max(best_rate, worth)
    best = max(gained - rate * duration for gained, duration in values.values())
    choice = decide_rows(survivals, seconds, tokens=tokens, worth=worth)
    gained, duration = values[choice.lengths]
    assert gained - rate * duration == pytest.approx(best, abs=1e-9)
    assert choice.rate == pytest.approx(gained / duration)
    assert choice.plain_rate == pytest.approx(tokens / seconds[0])
    assert choice.all_rate == pytest.approx(values[tuple(map(len, survivals))][0] / seconds[-1])


def test_rows_of_a_tile_that_is_paid_for_anyway_are_filled():
    seconds = [1.0, 1.4, 1.4, 1.4, 1.4, 9.0]
    choice = decide_rows([[0.9, 0.1], [0.3, 0.05, 0.01]], seconds, tokens=2.0)
    assert choice.lengths == (2, 2)


def test_nothing_is_verified_where_nothing_pays():
    assert decide_rows([[0.2], [0.1]], [1.0, 2.0, 3.0], tokens=2.0).lengths == (0, 0)


def test_equal_survivals_are_taken_from_the_front():
    """Of equal drafts of one request the earlier ones, or a draft would be verified without those before it."""
    assert decide_rows([[0.5, 0.5], [0.5, 0.5]], [1.0, 1.1, 1.2, 1.3, 9.0], tokens=2.0).lengths == (2, 1)


def test_a_poor_round_does_not_spend_what_the_next_one_uses_better():
    """Against its own rate the third draft pays; against what seconds have brought lately it does not."""
    drafts, seconds = [[0.5, 0.3, 0.12]], [1.0, 1.1, 1.2, 1.3]
    assert decide_rows(drafts, seconds, tokens=1.0).lengths == (2,)
    assert decide_rows(drafts, seconds, tokens=1.0, worth=4.0).lengths == (1,)


@pytest.mark.parametrize("seed", range(200))
def test_proposers_are_as_good_as_the_best_of_all_sets(seed):
    dice = random.Random(seed)
    candidates = [Candidate(gain=dice.uniform(0, 4), rows=dice.uniform(0, 7)) for _ in range(dice.randint(1, 5))]
    per_row = dice.choice([0.01, 0.05, 0.2])
    step = [1 + per_row * count for count in range(1 + 7 * len(candidates))]
    propose = [0.1, *[0.1 + cost for cost in stairs(dice, len(candidates))]]
    tokens = float(len(candidates))

    def rate(chosen):  # type: ignore[no-untyped-def]
        rows = sum(candidates[index].rows for index in chosen)
        return (tokens + sum(candidates[index].gain for index in chosen)) / (propose[len(chosen)] + 1 + per_row * rows)

    best = max(
        rate(chosen)
        for count in range(len(candidates) + 1)
        for chosen in itertools.combinations(range(len(candidates)), count)
    )
    choice = decide_proposals(candidates, propose, step, tokens=tokens, price=per_row * best)
    assert choice.rate == pytest.approx(rate(choice.chosen))
    assert choice.rate >= choice.plain_rate == pytest.approx(rate(()))
    assert choice.rate == pytest.approx(best)  # exact, because the price is that of the best set
    assert choice.all_rate == pytest.approx(rate(range(len(candidates))))
