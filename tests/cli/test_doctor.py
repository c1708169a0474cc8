"""Checkpoints made wrong on purpose from the shipped pair: each is caught, named and corrected."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.cli import main

MODELS = Path(__file__).resolve().parents[2] / "models"
TARGET, DRAFTER = MODELS / "k3-small", MODELS / "k3-small-dspark"
State = dict[str, torch.Tensor]
Change = Callable[[dict[str, Any], State], object]


def examine(directory: Path, change: Change | None, *flags: str) -> tuple[int, dict[str, Any]]:
    """Status and report of the command on a changed copy of the shipped drafter."""
    drafter, out = directory / "drafter", directory / "out.json"
    shutil.copytree(DRAFTER, drafter)
    if change is not None:
        config = json.loads((drafter / "config.json").read_text())
        state = load_file(drafter / "model.safetensors")
        change(config, state)
        (drafter / "config.json").write_text(json.dumps(config))
        save_file(state, drafter / "model.safetensors")
    status = main(["doctor", str(TARGET), "--drafter", str(drafter), "--json", str(out), *flags])
    return status, json.loads(out.read_text())


def shifted_taps(config: dict[str, Any], by: int) -> None:
    config["aux_hidden_state_layer_ids"] = [a + by for a in config["aux_hidden_state_layer_ids"]]


def shifted_map(state: State, by: int) -> None:
    state["d2t"] += by
    del state["t2d"]


def swapped(state: State, one: str, other: str) -> None:
    state[one], state[other] = state[other], state[one]


def untrained(state: State) -> None:
    generator = torch.Generator().manual_seed(0)
    for name, tensor in state.items():
        if tensor.is_floating_point() and tensor.dim() == 2:
            state[name] = (torch.randn(tensor.shape, generator=generator) * 0.05).to(tensor.dtype)


LAYER = "layers.0.mlp."
WRONG: dict[str, tuple[str, Change]] = {
    "taps later": ("taps_shifted", lambda config, state: shifted_taps(config, 1)),
    "taps earlier": ("taps_shifted", lambda config, state: shifted_taps(config, -1)),
    "layout": ("anchor_layout", lambda config, state: config.update(sample_from_anchor=False)),
    "theta": ("rope", lambda config, state: config["transformer_layer_config"].update(rope_theta=10000.0)),
    "mask above": ("mask_id", lambda config, state: config.update(mask_token_id=8189)),
    "mask below": ("mask_id", lambda config, state: config.update(mask_token_id=8187)),
    "map": ("vocab_map", lambda config, state: shifted_map(state, 1)),
    "gate and up": ("tensor", lambda c, state: swapped(state, f"{LAYER}gate_proj.weight", f"{LAYER}up_proj.weight")),
    "tap order": ("tensor", lambda c, state: state.update({"fc.weight": state["fc.weight"].roll(192, 1)})),
}
# Before anything is measured: the files contradict themselves or the target.
UNLOADABLE: dict[str, tuple[str, Change]] = {
    "mask outside": ("mask_id", lambda config, state: config.update(mask_token_id=8192)),
    "taps outside": ("taps_shifted", lambda config, state: shifted_taps(config, 2)),
    "taps before the first": ("taps_shifted", lambda config, state: shifted_taps(config, -2)),
    "no theta": ("rope", lambda config, state: config["transformer_layer_config"].pop("rope_theta")),
    "map of ids": ("vocab_map", lambda c, state: state.update(d2t=state["d2t"] + torch.arange(len(state["d2t"])))),
    "map without marks": ("vocab_map", lambda config, state: state["t2d"].logical_not_()),
    "other vocabulary": ("tensor", lambda c, state: c["transformer_layer_config"].update(vocab_size=8191)),
    "missing tensor": ("tensor", lambda config, state: state.pop("layers.1.mlp.up_proj.weight")),
    "misshapen tensor": ("tensor", lambda config, state: state.update({"norm.weight": torch.ones(3)})),
}


@pytest.mark.parametrize("name", UNLOADABLE)
def test_files_that_contradict_each_other_are_wrong(name: str, tmp_path: Path, capsys) -> None:
    code, change = UNLOADABLE[name]
    status, report = examine(tmp_path, change, "--anchors", "20")
    assert (status, report["verdict"], report["acceptance_per_position"]) == (1, "wrong", [])
    (problem,) = report["problems"]
    assert problem["code"] == code and problem["found"] and problem["remedy"]
    assert f"problem {code}" in capsys.readouterr().out


def test_a_shift_of_the_taps_is_named_on_few_anchors(tmp_path: Path, capsys) -> None:
    status, report = examine(tmp_path, WRONG["taps earlier"][1], "--anchors", "150", "--max-tokens", "32")
    assert (status, report["verdict"]) == (1, "wrong")
    (problem,) = report["problems"]
    assert problem["code"] == "taps_shifted" and "set aux_hidden_state_layer_ids to [2, 3, 6]" in problem["remedy"]
    assert problem["expected"].startswith("taps after layers [1, 2, 5]")
    assert len(report["acceptance_per_position"]) == 7
    assert report["corrected"]["tokens_per_round"] > report["given"]["tokens_per_round"] + 0.5
    assert report["cost"]["plain_ms"] > 0 and report["given"]["num_anchors"] >= 150
    assert capsys.readouterr().out.splitlines()[-1].startswith("verdict: wrong")


def test_a_zeroed_tensor_is_one_problem(tmp_path: Path) -> None:
    def change(config: dict[str, Any], state: State) -> None:
        state["layers.0.self_attn.o_proj.weight"].zero_()

    status, report = examine(tmp_path, change, "--anchors", "30", "--max-tokens", "16")
    assert (status, [problem["code"] for problem in report["problems"]]) == (1, ["tensor"])
    assert report["problems"][0]["found"] == "layers.0.self_attn.o_proj.weight is all zeros"


def test_wrong_input_is_no_verdict(tmp_path: Path, capsys) -> None:
    assert main(["doctor", str(TARGET), "--drafter", str(DRAFTER), "--anchors", "0"]) == 2
    assert "anchors=0 is out of range" in capsys.readouterr().err
    assert main(["doctor", str(TARGET), "--drafter", str(DRAFTER), "--max-tokens", "8"]) == 2
    assert "max_tokens=8 holds no anchor with a whole block of 7 drafts; use 9 or more" in capsys.readouterr().err
    assert main(["doctor", str(TARGET), "--drafter", str(tmp_path / "none")]) == 2


@pytest.mark.slow
def test_the_shipped_pair_is_ok(tmp_path: Path) -> None:
    status, report = examine(tmp_path, None)
    assert (status, report["verdict"], report["problems"]) == (0, "ok", [])
    assert report["given"]["num_anchors"] >= 2000 and report["given"]["tokens_per_round"] > 2
    assert {row["code"] for row in report["readings"]} == {
        "taps_shifted", "anchor_layout", "rope", "mask_id", "vocab_map", "tensor",
    }  # fmt: skip
    acceptance = report["acceptance_per_position"]
    assert sorted(acceptance, reverse=True) == acceptance and acceptance[0] > 0.5


@pytest.mark.slow
@pytest.mark.parametrize("name", WRONG)
def test_checkpoints_wrong_by_one_are_caught_and_named(name: str, tmp_path: Path) -> None:
    code, change = WRONG[name]
    status, report = examine(tmp_path, change)
    assert (status, report["verdict"]) == (1, "wrong")
    assert [problem["code"] for problem in report["problems"]] == [code]
    assert report["corrected"]["tokens_per_round"] > report["given"]["tokens_per_round"]


@pytest.mark.slow
def test_two_wrong_conventions_are_both_named(tmp_path: Path) -> None:
    def change(config: dict[str, Any], state: State) -> None:
        shifted_taps(config, -1)
        config["sample_from_anchor"] = False

    _, report = examine(tmp_path, change)
    assert {problem["code"] for problem in report["problems"]} == {"taps_shifted", "anchor_layout"}


@pytest.mark.slow
def test_an_untrained_drafter_is_degraded_not_wrong(tmp_path: Path) -> None:
    status, report = examine(tmp_path, lambda config, state: untrained(state))
    assert (status, report["verdict"], report["problems"]) == (0, "degraded", [])
