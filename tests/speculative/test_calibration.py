"""The calibration file: what is written is read, and what is broken is named."""

import copy
import json
from pathlib import Path

import pytest

from outrider.errors import CheckpointError
from outrider.models.dspark.checkpoint import confidence_digest
from outrider.models.dspark.config_json import read_config
from outrider.request import SamplingParams
from outrider.speculative.calibration import (
    CALIBRATION_FILE,
    GREEDY,
    Calibration,
    Condition,
    PositionFit,
    condition_of_params,
    load_calibration,
    parse_calibration,
    write_calibration,
)

SHIPPED = Path(__file__).resolve().parents[2] / "models" / "k3-small-dspark"
FITS = (PositionFit(temperature=1.5, bias=-0.25, num_reached=100), PositionFit(temperature=0.5, num_reached=9))
GOOD = {
    "format": "outrider-calibration",
    "version": 1,
    "confidence_head": "abc",
    "fitted_on": {"prompts": "some"},
    "conditions": [
        {"rule": "greedy", "band": "0", "positions": [{"temperature": 1.5, "bias": -0.25, "num_reached": 100}]},
        {"rule": "match", "band": "0.85+", "positions": [{"temperature": 1}]},
    ],
}


def test_a_written_file_is_read_back(tmp_path: Path):
    conditions = {GREEDY: FITS, Condition("block", "0.5-0.85"): FITS}
    written = Calibration(confidence_head="abc", conditions=conditions, fitted_on={"n": 3})
    write_calibration(written, tmp_path / CALIBRATION_FILE)
    assert load_calibration(tmp_path) == written


def test_positions_that_were_never_reached_are_left_out(tmp_path: Path):
    fits = (*FITS, PositionFit(), PositionFit())
    write_calibration(
        Calibration(conditions={GREEDY: fits, Condition("match", "0-0.5"): (PositionFit(),)}),
        tmp_path / CALIBRATION_FILE,
    )
    assert load_calibration(tmp_path).conditions == {GREEDY: FITS}


def test_the_shipped_drafter_is_calibrated_for_the_weights_that_it_has():
    calibration = load_calibration(SHIPPED)
    assert calibration.confidence_head == confidence_digest(SHIPPED)
    sampled = {Condition(rule, band) for rule in ("match", "rejection", "block") for band in ("0.5-0.85", "0.85+")}
    assert set(calibration.conditions) == {GREEDY, *sampled}
    num_drafts = read_config(SHIPPED).num_draft_tokens
    survival = calibration.typical_survival(num_drafts)
    assert survival is not None
    assert sorted(survival, reverse=True) == list(survival)


def test_an_absent_file_is_neutral(tmp_path: Path):
    assert load_calibration(tmp_path) == Calibration()
    assert Calibration().positions(GREEDY, 3) == (PositionFit(),) * 3


def test_what_a_typical_proposal_survives_comes_from_how_many_were_reached():
    def of(*counts: int) -> Calibration:
        return Calibration(conditions={GREEDY: tuple(PositionFit(num_reached=count) for count in counts)})

    assert of(100, 60, 30).typical_survival(2) == (0.6, 0.3)
    assert of(100, 60, 30).typical_survival(3) == (0.6, 0.3, 0.15)  # nothing says how often the last one stood
    assert of(100, 60, 30).typical_survival(4) is None
    assert of(100).typical_survival(1) is None
    assert of(100, 0, 0).typical_survival(2) is None
    assert Calibration().typical_survival(2) is None


@pytest.mark.parametrize(
    ("temperature", "rule", "condition"),
    [
        (0.0, "block", GREEDY),
        (0.3, "match", Condition("match", "0-0.5")),
        (0.5, "match", Condition("match", "0-0.5")),
        (0.7, "block", Condition("block", "0.5-0.85")),
        (1.0, "rejection", Condition("rejection", "0.85+")),
        (5.0, "match", Condition("match", "0.85+")),
    ],
)
def test_every_temperature_has_a_band(temperature: float, rule: str, condition: Condition):
    assert condition_of_params(SamplingParams(temperature=temperature, acceptance=rule)) == condition


def broken(path: str, value: object) -> dict:
    """GOOD with the value at a path such as conditions.0.rule replaced; removed where the value is ``...``."""
    content = copy.deepcopy(GOOD)
    place, *names = content, *path.split(".")
    for name in names[:-1]:
        place = place[int(name)] if isinstance(place, list) else place[name]
    last = int(names[-1]) if isinstance(place, list) else names[-1]
    if value is ...:
        del place[last]
    else:
        place[last] = value
    return content


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("format", "other", "format='other'"),
        ("version", 2, "version=2"),
        ("confidence_head", ..., "confidence_head must be a text"),
        ("conditions", {}, "conditions a list"),
        ("conditions.0", 3, "conditions[0] is no JSON object"),
        ("conditions.0.rule", "luck", "conditions[0]: rule='luck'"),
        ("conditions.0.rule", [], "conditions[0]: rule=[]"),
        ("conditions.0.band", "0.85+", "band='0.85+'"),
        ("conditions.1.band", "0", "conditions[1]: rule='match', band='0'"),
        ("conditions.0.positions", [], "positions must be a list that is not empty"),
        ("conditions.0.positions.0", 1, "positions[0] is no JSON object"),
        ("conditions.0.positions.0.temperature", ..., "temperature=None"),
        ("conditions.0.positions.0.temperature", 0, "temperature=0"),
        ("conditions.0.positions.0.temperature", True, "temperature=True"),
        ("conditions.0.positions.0.temperature", float("nan"), "temperature=nan"),
        ("conditions.0.positions.0.bias", 99, "bias=99"),
        ("conditions.0.positions.0.bias", "0", "bias='0'"),
        ("conditions.0.positions.0.num_reached", -1, "num_reached=-1"),
        ("conditions.1", GOOD["conditions"][0], "a second one of greedy"),
        ("fitted_on", 3, "fitted_on is no JSON object"),
    ],
)
def test_a_broken_file_is_named(path: str, value: object, words: str):
    with pytest.raises(CheckpointError) as caught:
        parse_calibration(broken(path, value), "there")
    assert words in str(caught.value)
    assert "outrider calibrate" in str(caught.value)


def test_the_good_file_of_these_tests_is_good():
    assert parse_calibration(GOOD, "there").positions(GREEDY, 1)[0].temperature == 1.5


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, json.dumps([]), "\xff"])
def test_a_file_that_is_no_object_is_named(text: str, tmp_path: Path):
    (tmp_path / CALIBRATION_FILE).write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointError, match=CALIBRATION_FILE):
        load_calibration(tmp_path)


def test_a_huge_file_is_refused_unread(tmp_path: Path):
    (tmp_path / CALIBRATION_FILE).write_text(" " * 1_000_001)
    with pytest.raises(CheckpointError, match="1000001 bytes"):
        load_calibration(tmp_path)
