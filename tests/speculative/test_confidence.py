"""Survival follows what comes of drafts: planted temperatures, garbage, truncation, rules apart, no head at all."""

import dataclasses
import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.plan import ScheduledSequence, SequenceChoice
from outrider.request import SamplingParams
from outrider.speculative.calibration import GREEDY, Calibration, Condition, PositionFit
from outrider.speculative.confidence import PRIOR, SurvivalEstimator

G = 5
ITEM = ScheduledSequence(
    request_id="r",
    state_slot=0,
    page_ids=(0,),
    start_position=5,
    query_token_ids=(9,),
    draft_budget=G,
    is_prompt=False,
    wants_logits=True,
    is_first=False,
)


def sampled(rule: str, temperature: float) -> ScheduledSequence:
    params = SamplingParams(temperature=temperature, seed=1, acceptance=rule)
    choice = SequenceChoice(params=params, sample_index=0, num_prompt_tokens=3, stop_token_ids=frozenset(), history=())
    return dataclasses.replace(ITEM, choice=choice)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


class Head:
    """Logits, and drafts that stand as a planted temperature and bias say."""

    def __init__(self, temperature: float, bias: float = 0.0, seed: int = 0) -> None:
        self.temperature, self.bias, self.dice = temperature, bias, random.Random(seed)

    def proposal(self) -> tuple[list[float], int]:
        logits = [self.dice.gauss(1.0, 2.0) for _ in range(G)]
        stands = [self.dice.random() < sigmoid(logit / self.temperature + self.bias) for logit in logits]
        return [sigmoid(logit) for logit in logits], next((k for k in range(G) if not stands[k]), G)


def train(estimator: SurvivalEstimator, head: Head, num_rounds: int, num_verified: int = G, item=ITEM) -> None:
    for _ in range(num_rounds):
        confidence, accepted = head.proposal()
        estimator.observe(item, confidence, num_verified, min(accepted, num_verified))


def test_without_a_fit_survival_is_the_running_product_of_the_heads_word():
    confidence = [0.9, 0.5, 0.8, 1.0, 0.0]
    survivals = SurvivalEstimator(G).survival(ITEM, confidence)
    assert survivals == pytest.approx([0.9, 0.45, 0.36, 0.36, 0.0], abs=1e-5)


def test_a_fit_is_applied_by_rule_and_band_and_the_nearest_one_stands_in():
    fits = {
        GREEDY: (PositionFit(temperature=2.0),) * G,
        Condition("match", "0.5-0.85"): (PositionFit(bias=1.0),) * G,
    }
    estimator = SurvivalEstimator(G, Calibration(conditions=fits))
    logit = 1.5
    confidence = [sigmoid(logit)] * G
    expected = [
        (ITEM, logit / 2),
        (sampled("match", 0.7), logit + 1),
        (sampled("match", 1.5), logit + 1),  # the nearest band of the rule
        (sampled("rejection", 0.7), logit / 2),  # no band of the rule: greedy
        (sampled("match", 0.0), logit / 2),  # temperature 0 is greedy whatever the rule
    ]
    for item, first in expected:
        assert estimator.survival(item, confidence)[0] == pytest.approx(sigmoid(first))


def test_many_proposals_at_once_are_what_they_are_one_by_one():
    dice = random.Random(3)
    estimator = SurvivalEstimator(G)
    train(estimator, Head(2.0), 100)
    mixed = [ITEM, ITEM, sampled("match", 0.7), ITEM, sampled("block", 1.0)]
    for items in (mixed, [ITEM] * 6, [ITEM], []):
        rows = [[dice.choice([0.0, 1.0, dice.random()]) for _ in range(G)] for _ in items]
        assert [x for row in estimator.survivals(items, rows) for x in row] == pytest.approx(
            [x for item, row in zip(items, rows, strict=True) for x in estimator.survival(item, row)], rel=1e-9
        )
        assert estimator.survivals(items, None) == [estimator.survival(item, None) for item in items]


def test_missing_positions_of_a_fit_are_neutral():
    estimator = SurvivalEstimator(2, Calibration(conditions={GREEDY: (PositionFit(bias=9.0),)}))
    first, second = estimator.survival(ITEM, [0.5, 0.5])
    assert second / first == pytest.approx(0.5)


@pytest.mark.parametrize("temperature", [0.5, 2.5])
def test_a_planted_temperature_is_found_while_serving(temperature: float):
    estimator = SurvivalEstimator(G)
    train(estimator, Head(temperature), 12_000)
    for fit in estimator.fits(GREEDY)[:3]:
        assert math.log(fit.temperature / temperature) == pytest.approx(0, abs=0.35)
        assert fit.bias == pytest.approx(0, abs=0.45)


def test_a_right_fit_stays_right():
    estimator = SurvivalEstimator(G, Calibration(conditions={GREEDY: (PositionFit(temperature=2.0, bias=-0.5),) * G}))
    head = Head(2.0, -0.5)
    predicted = stood = 0.0
    for _ in range(3000):
        confidence, accepted = head.proposal()
        predicted += sum(estimator.survival(ITEM, confidence))
        stood += accepted
        estimator.observe(ITEM, confidence, G, accepted)
    assert predicted == pytest.approx(stood, rel=0.05)


def test_garbage_drags_survival_down_within_a_few_dozen_drafts_and_recovery_lifts_it():
    estimator = SurvivalEstimator(G)
    sure = [0.97] * G
    for _ in range(500):
        estimator.observe(ITEM, sure, G, G)
    assert estimator.survival(ITEM, sure)[0] > 0.95
    for _ in range(36):
        estimator.observe(ITEM, sure, G, 0)
    assert estimator.survival(ITEM, sure)[0] < 0.3
    assert sum(estimator.survival(ITEM, sure)) < 1.0  # from 4.6
    for _ in range(500):
        estimator.observe(ITEM, sure, G, 0)
    assert sum(estimator.survival(ITEM, sure)) < 0.3
    for _ in range(48):
        estimator.observe(ITEM, sure, G, G)
    assert estimator.survival(ITEM, sure)[0] > 0.7


def test_drafts_that_were_not_verified_or_not_reached_are_no_rejections():
    estimator = SurvivalEstimator(G)
    confidence, before = [0.7] * G, SurvivalEstimator(G).fits(GREEDY)
    for _ in range(50):
        estimator.observe(ITEM, confidence, 0, 0)  # nothing was verified
    assert estimator.fits(GREEDY) == before
    for _ in range(200):
        estimator.observe(ITEM, confidence, 2, 2)  # two were verified, both stood
    assert all(fit.bias > 0 for fit in estimator.fits(GREEDY))
    deep = estimator.fits(GREEDY)[2:]
    estimator.observe(ITEM, confidence, G, 0)  # the first fell: deep ones learn no more than what all share
    moves = [old.bias - new.bias for old, new in zip(deep, estimator.fits(GREEDY)[2:], strict=True)]
    assert moves == pytest.approx([moves[0]] * len(moves))
    assert [fit.temperature for fit in estimator.fits(GREEDY)[2:]] == [fit.temperature for fit in deep]


def test_short_lengths_do_not_bias_the_estimate():
    estimator = SurvivalEstimator(G)
    train(estimator, Head(2.0), 12_000, num_verified=2)
    first, second, third, *_ = estimator.fits(GREEDY)
    assert math.log(first.temperature / 2) == pytest.approx(0, abs=0.35)
    assert math.log(second.temperature / 2) == pytest.approx(0, abs=0.35)
    assert third.temperature == 1
    assert first.bias == pytest.approx(0, abs=0.45)


def test_what_first_drafts_show_is_known_of_deep_ones():
    """A head that claims 0.95 where a fifth stands: nobody has to wait for the last draft to be reached."""
    estimator, dice, claimed = SurvivalEstimator(G), random.Random(0), [0.95] * G
    for _ in range(150):
        estimator.observe(ITEM, claimed, G, next((k for k in range(G) if dice.random() >= 0.2), G))
    assert sum(estimator.survival(ITEM, claimed)) < 0.6  # 0.25 is true, 4.3 was claimed


def test_conditions_do_not_teach_each_other():
    estimator = SurvivalEstimator(G)
    confidence = [0.9] * G
    for _ in range(100):
        estimator.observe(sampled("block", 1.0), confidence, G, 0)
    assert estimator.survival(sampled("block", 1.2), confidence)[0] < 0.2
    for item in (ITEM, sampled("block", 0.7), sampled("match", 1.0)):
        assert estimator.survival(item, confidence)[0] == pytest.approx(0.9)


def test_without_a_head_each_position_has_its_own_rate():
    estimator, dice = SurvivalEstimator(3), random.Random(0)
    assert estimator.survival(ITEM, None) == pytest.approx([PRIOR, PRIOR**2, PRIOR**3])
    rates = (0.9, 0.5, 0.2)
    for _ in range(4000):
        accepted = next((k for k in range(3) if dice.random() >= rates[k]), 3)
        estimator.observe(ITEM, None, 3, accepted)
    first, second, third = estimator.survival(ITEM, None)
    assert first == pytest.approx(0.9, abs=0.06)
    assert second / first == pytest.approx(0.5, abs=0.1)
    assert third / second == pytest.approx(0.2, abs=0.1)


@given(st.lists(st.tuples(st.floats(0, 1), st.integers(0, G), st.integers(0, G)), max_size=200))
def test_nothing_can_run_away(history: list[tuple[float, int, int]]):
    estimator = SurvivalEstimator(G)
    for value, verified, accepted in history:
        estimator.observe(ITEM, [value] * G, verified, min(accepted, verified))
        survivals = [1.0, *estimator.survival(ITEM, [value] * G)]
        assert all(0 <= later <= earlier <= 1 for earlier, later in itertools.pairwise(survivals))
    for fit in estimator.fits(GREEDY):
        assert 1 / 8 <= fit.temperature <= 8
        assert abs(fit.bias) <= 12
