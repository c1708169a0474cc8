"""The fit of confidence: planted temperatures and biases are found, errors are what they are by hand."""

import numpy as np
import pytest

from outrider.bench.calibrate import (
    Outcomes,
    ReliabilityBin,
    calibration_error,
    confidence_errors,
    fit_positions,
    reliability_bins,
    survival_error,
    survivals,
)
from outrider.bench.reliability_plot import ReliabilityPanel, reliability_plot
from outrider.speculative.calibration import PositionFit

G = 4


def planted(num: int, temperatures: list[float], biases: list[float], seed: int = 0, short: bool = False) -> Outcomes:
    """Proposals whose drafts stand as planted; with ``short``, many are verified only in part."""
    dice = np.random.default_rng(seed)
    logits = dice.normal(1.5, 2.0, (num, G))
    stands = dice.random((num, G)) < 1 / (1 + np.exp(-logits / temperatures - biases))
    accepted = stands.cumprod(1).sum(1)
    verified = dice.integers(1, G + 1, num) if short else np.full(num, G)
    return Outcomes(logits_NG=logits, verified_N=verified, accepted_N=np.minimum(accepted, verified))


@pytest.mark.parametrize("short", [False, True])
def test_planted_temperatures_and_biases_are_found(short: bool):
    temperatures, biases = [2.0, 0.5, 1.0, 3.0], [0.0, 0.0, -1.0, 0.5]
    fits = fit_positions(planted(40_000, temperatures, biases, short=short))
    for fit, temperature, bias in zip(fits, temperatures, biases, strict=True):
        assert np.log(fit.temperature / temperature) == pytest.approx(0, abs=0.2)
        assert fit.bias == pytest.approx(bias, abs=0.15)


def test_a_true_head_stays_as_it_is():
    for fit in fit_positions(planted(40_000, [1.0] * G, [0.0] * G)):
        assert fit.temperature == pytest.approx(1, abs=0.15)
        assert fit.bias == pytest.approx(0, abs=0.1)


def test_a_fit_lowers_the_errors_of_other_proposals():
    temperatures, biases = [3.0] * G, [-0.5] * G
    fits = fit_positions(planted(4000, temperatures, biases, seed=1))
    other, neutral = planted(4000, temperatures, biases, seed=2), (PositionFit(),) * G
    for errors in (confidence_errors, survival_error):
        before, after = errors(other, neutral), errors(other, fits)
        assert all(late < early / 2 for early, late in zip(before, after, strict=True))


def test_few_outcomes_take_the_fit_of_the_position_before():
    outcomes = planted(60, [1.0] * G, [-1.0] * G)
    first, *others = fit_positions(outcomes)
    assert first.num_reached == 60
    assert [fit.num_reached for fit in others] == [int(outcomes.reached(k).sum()) for k in range(1, G)]
    assert {(fit.temperature, fit.bias) for fit in others} == {(first.temperature, first.bias)}


@pytest.mark.parametrize("accepted", [0, G])
def test_drafts_that_always_or_never_stand_have_a_finite_fit(accepted: int):
    outcomes = Outcomes(
        logits_NG=np.full((100, G), 20.0), verified_N=np.full(100, G), accepted_N=np.full(100, accepted)
    )
    for fit in fit_positions(outcomes):
        assert 0.125 <= fit.temperature <= 8.000001
        assert abs(fit.bias) < 20


def test_the_calibration_error_by_hand():
    predicted = np.array([0.91, 0.93, 0.12, 0.12, 0.12, 1.0])
    stood = np.array([True, False, False, True, False, True])
    # Bins of a twentieth: two at 0.92 of which half stood, three at 0.12 of which a third stood, one at 1 that stood.
    expected = (2 * abs(0.92 - 1 / 2) + 3 * abs(0.12 - 1 / 3) + 0) / 6
    assert calibration_error(predicted, stood) == pytest.approx(expected)
    assert calibration_error(np.array([]), np.array([], dtype=bool)) == 0
    assert [item.count for item in reliability_bins(predicted, stood)] == [3, 2, 1]


def test_what_counts_as_reached_judged_and_stood():
    outcomes = Outcomes(
        logits_NG=np.zeros((4, 3)), verified_N=np.array([3, 3, 1, 0]), accepted_N=np.array([3, 1, 1, 0])
    )
    assert outcomes.judged(1).tolist() == [True, True, False, False]
    assert outcomes.reached(1).tolist() == [True, True, False, False]
    assert outcomes.reached(2).tolist() == [True, False, False, False]
    assert outcomes.stood(0).tolist() == [True, True, True, False]
    assert survivals(outcomes, (PositionFit(),) * 3)[0] == pytest.approx([1 / 2, 1 / 4, 1 / 8])
    assert survival_error(outcomes, (PositionFit(),) * 3)[1] == pytest.approx(1 / 4)  # one of two against a quarter


def test_the_plot_draws_every_panel_once():
    bins = [ReliabilityBin(predicted=0.2, stood=0.3, count=40), ReliabilityBin(predicted=0.8, stood=0.7, count=9)]
    panels = [
        ReliabilityPanel(row=row, column=f"draft {column}", before=bins, after=bins[:1])
        for row in ("greedy", "match, T 0.5-0.85")
        for column in (1, 2)
    ]
    svg = reliability_plot(panels, "a < b")
    assert svg.count("<g ") == 4
    assert svg.count("<circle") == 8  # the bin of nine outcomes is noise
    assert "a &lt; b" in svg
