"""Measured costs: stairs stay stairs, never fall with rows, and survive a machine that changes its speed."""

import itertools
import json
import random

import pytest

from outrider.speculative.cost import MachineSpeed, MeasuredCost, RoundCosts


def test_a_shape_is_a_fit_until_it_is_known_and_stairs_stay_stairs():
    cost = MeasuredCost(1, MachineSpeed())
    for _, rows in itertools.product(range(30), (1, 8, 16)):
        cost.add((rows,), 1e-3 + 1e-4 * rows)
    assert cost((12,)) == pytest.approx(2.2e-3, rel=0.1)
    for _ in range(60):
        cost.add((9,), 4e-3)  # a tile more
    cost.refit()
    assert cost((9,)) > 1.4 * cost((8,))


def test_a_table_never_falls_with_rows_and_grows_with_context():
    cost, dice = MeasuredCost(2, MachineSpeed()), random.Random(0)
    for _ in range(400):
        rows, context = dice.randint(4, 32), dice.choice([10.0, 2000.0])
        cost.add((4, rows), (2e-3 + 5e-5 * rows + 1e-5 * rows * context / 1024) * dice.lognormvariate(0, 0.1), context)
    cost.refit()
    short, long = cost.table((4,), 4, 32).at(10), cost.table((4,), 4, 32).at(2000)
    assert short == sorted(short)
    assert long == sorted(long)
    assert (long[-1] - short[-1]) / short[-1] == pytest.approx(32e-5 * 1990 / 1024 / 3.6e-3, rel=0.3)
    assert short[-1] / short[0] == pytest.approx(3.6 / 2.2, rel=0.2)


def test_the_cold_first_measurement_is_forgotten():
    cost = MeasuredCost(1, MachineSpeed())
    cost.add((1,), 30e-3)
    for _ in range(3):
        cost.add((1,), 1e-3)
    cost.refit()
    assert cost((1,)) * 1.2 > 1e-3 > cost((1,)) * 0.8


def test_something_beside_a_round_is_not_its_cost():
    quiet, disturbed = (MeasuredCost(1, MachineSpeed()) for _ in range(2))
    for number in range(200):
        quiet.add((1,), 1e-3)
        disturbed.add((1,), 8e-3 if number % 20 == 19 else 1e-3)
    assert disturbed((1,)) == pytest.approx(quiet((1,)), rel=0.1)


@pytest.mark.parametrize("slowdown", [0.5, 2.0])
def test_a_machine_that_changes_its_speed_keeps_the_ratios(slowdown):
    """Only the plain shape is seen after the change; the wide one was last seen before it."""
    costs = RoundCosts()
    for _ in range(50):
        costs.step.add((1, 1), 2e-3)
        costs.step.add((1, 8), 3e-3)
    for _ in range(100):
        costs.step.add((1, 1), 2e-3 * slowdown)
    costs.step.refit()
    assert costs.step((1, 8)) / costs.step((1, 1)) == pytest.approx(1.5, rel=0.12)
    assert costs.speed.factor == pytest.approx(slowdown, rel=0.15)


def test_costs_survive_a_file():
    costs = RoundCosts()
    for sequences, rows in itertools.product((1, 4), (4, 8, 16)):
        costs.step.put((sequences, rows), 1e-3 * rows, 40.0, 2.0)
        costs.propose.put((sequences,), 5e-4 * sequences, 40.0, 2.0)
    costs.step.refit()
    costs.propose.refit()
    again = RoundCosts.restored(json.loads(json.dumps(costs.saved())))
    assert again.is_profiled
    assert again.step((4, 9), 100.0) == pytest.approx(costs.step((4, 9), 100.0))
    assert again.propose((3,)) == pytest.approx(costs.propose((3,)))


@pytest.mark.parametrize(
    "damage",
    [
        {},
        {"step": [[1, 1, 0, 0.1, -1e-3, 2]], "propose": [], "host": []},
        {"step": [[1, 1, 0, 0.1]], "propose": [], "host": []},
        {"step": 3, "propose": [], "host": []},
    ],
)
def test_what_is_no_measurement_is_refused(damage):
    with pytest.raises((KeyError, TypeError, ValueError)):
        RoundCosts.restored(damage)
