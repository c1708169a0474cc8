"""Watching rounds changes no token, shows all of them, and cannot harm serving; the log keeps its limits."""

import json
import logging
from pathlib import Path

import pytest
import torch

from outrider.engine.llm import LLM
from outrider.engine.round_log import RoundLog
from outrider.engine.watch import RoundWatch, WatchedRound
from outrider.errors import CheckpointError, ConfigError
from outrider.models.dspark.checkpoint import confidence_digest
from outrider.request import SamplingParams
from outrider.speculative.calibration import CALIBRATION_FILE, GREEDY, Calibration, PositionFit, write_calibration
from outrider.testing.toy import ToyOptions, write_toy_checkpoint
from outrider.testing.toy_dspark import ToyDrafterOptions, write_toy_drafter

BLOCK = 3
PROMPTS = [[1, 2, 3, 4, 5, 6, 7], [9, 8, 7]]
SAMPLING = SamplingParams(max_tokens=9)


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    options = ToyOptions(num_layers=3, mla_layers=(1, 2), attn_res_block_size=2, vocab_size=97, num_experts=4)
    target = write_toy_checkpoint(tmp_path / "target", options)
    drafter = ToyDrafterOptions(
        hidden_size=64, num_layers=1, num_target_layers=3, aux_layer_ids=(0, 1), vocab_size=97, block_rows=BLOCK
    )
    write_toy_drafter(tmp_path / "drafter", drafter, dtype=torch.bfloat16)
    return target, tmp_path / "drafter"


def answers(pair, **changes) -> list[tuple[int, ...]]:
    with LLM(pair[0], pair[1], **{"speculation": BLOCK, "max_model_len": 64, **changes}) as llm:
        return [tuple(output.token_ids) for output in llm.generate(PROMPTS, SAMPLING)]


@pytest.mark.parametrize("speculation", [BLOCK, "auto", "off"])
def test_watching_changes_no_token_and_sees_every_one(pair, speculation):
    seen: list[WatchedRound] = []
    watched = answers(pair, speculation=speculation, watch=RoundWatch(seen.append))
    assert watched == answers(pair, speculation=speculation)
    emitted: dict[str, list[int]] = {}
    for one in seen:
        for update in one.updates:
            emitted.setdefault(update.request_id, []).extend(update.new_token_ids)
        for index, proposed in one.proposals.items():
            assert proposed.confidence_G is not None
            assert len(proposed.confidence_G) == len(proposed.survival_G) == BLOCK
            assert one.result.num_drafted[index] <= BLOCK
        assert one.round_s >= one.result.timings.total_s
    assert sorted(map(tuple, emitted.values())) == sorted(watched)
    assert any(one.proposals for one in seen) == (speculation != "off")


def test_a_watcher_that_fails_is_dropped_and_serving_goes_on(pair, caplog):
    calls = []

    def fail(watched: WatchedRound) -> None:
        calls.append(watched)
        raise OSError("no space left")

    with caplog.at_level(logging.ERROR):
        assert answers(pair, watch=RoundWatch(fail)) == answers(pair)
    assert len(calls) == 1
    assert caplog.text.count("no longer watched") == 1


def lines_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_round_is_a_line(pair, tmp_path: Path):
    path = tmp_path / "new" / "rounds.jsonl"
    outputs = answers(pair, watch=RoundWatch(RoundLog(path, {"name": "toy"})))
    header, *rounds = lines_of(path)
    assert header == {"record": "header", "format": "outrider-rounds", "version": 1, "settings": {"name": "toy"}}
    assert [line["round"] for line in rounds] == list(range(len(rounds)))
    spans = [span for line in rounds for span in line["sequences"]]
    assert sum(span["emitted"] for span in spans) == sum(map(len, outputs))
    assert sum(span["finished"] is not None for span in spans) == len(PROMPTS)
    decodes = [span for span in spans if "prompt_rows" not in span]
    assert sum(span["prompt_rows"] for span in spans if "prompt_rows" in span) == sum(map(len, PROMPTS))
    assert all(span["accepted"] <= span["verified"] <= span["budget"] for span in decodes)
    assert all(len(span["survival"]) == BLOCK for span in decodes if span["verified"])
    decided = [line["decision"] for line in rounds if any("prompt_rows" not in span for span in line["sequences"])]
    assert {reason for decision in decided for reason in decision["reasons"]} <= {"fixed", "no_room"}


@pytest.mark.parametrize(("limits", "reason"), [({"max_rounds": 2}, "max_rounds"), ({"max_bytes": 1500}, "max_bytes")])
def test_a_full_log_says_so_and_stays_within_its_limit(pair, tmp_path: Path, limits: dict, reason: str, caplog):
    path = tmp_path / "rounds.jsonl"
    with caplog.at_level(logging.WARNING):
        answers(pair, watch=RoundWatch(RoundLog(path, {}, **limits)))
    *rounds, end = lines_of(path)
    assert end == {"record": "end", "reason": reason}
    assert len(rounds) == 3 if reason == "max_rounds" else path.stat().st_size < 1600
    assert caplog.text.count("is full") == 1


def test_a_log_that_cannot_be_written_is_refused_at_once(tmp_path: Path):
    with pytest.raises(ConfigError, match="--record-rounds"):
        RoundLog(tmp_path, {})


def survivals(pair) -> set[tuple[float, ...]]:
    seen: list[WatchedRound] = []
    answers(pair, watch=RoundWatch(seen.append))
    first = next(one for one in seen if one.proposals)
    return {proposed.survival_G for proposed in first.proposals.values()}


def test_a_calibration_beside_the_weights_is_used(pair):
    neutral = survivals(pair)
    fits = {GREEDY: (PositionFit(bias=-5.0, num_reached=9),) * BLOCK}
    calibration = Calibration(confidence_head=confidence_digest(pair[1]), conditions=fits)
    write_calibration(calibration, pair[1] / CALIBRATION_FILE)
    assert max(values[0] for values in survivals(pair)) < min(values[0] for values in neutral) / 10


def test_a_calibration_of_other_weights_is_not_used(pair, caplog):
    neutral = survivals(pair)
    fits = {GREEDY: (PositionFit(bias=-5.0, num_reached=9),) * BLOCK}
    write_calibration(Calibration(confidence_head="0" * 64, conditions=fits), pair[1] / CALIBRATION_FILE)
    with caplog.at_level(logging.WARNING):
        assert survivals(pair) == neutral
    assert "outrider calibrate" in caplog.text


def test_a_broken_calibration_is_refused(pair):
    (pair[1] / CALIBRATION_FILE).write_text("{}")
    with pytest.raises(CheckpointError, match="outrider calibrate"):
        answers(pair)
