"""The demo of a model that ships without a drafter."""

from pathlib import Path

import pytest

from outrider.cli import main
from outrider.cli.checkpoints import shipped_drafter

MODELS = Path(__file__).resolve().parents[2] / "models"


def test_a_model_without_a_drafter_answers_plainly_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "undrafted"
    model.symlink_to(MODELS / "k3-small")
    assert main(["demo", "--model", str(model), "--max-tokens", "6"]) == 0
    out = capsys.readouterr().out
    assert f"no drafter ships with {model}" in out.replace("\n", "")
    assert out.count("tokens in") == 3 and "low_entropy: prompt" in out and "speculation on" not in out


def test_shipped_drafters_are_found_by_name_and_by_path(tmp_path: Path) -> None:
    for model in ("k3-small", "models/k3-small", str(MODELS / "k3-small")):
        assert shipped_drafter(model, checkout=MODELS.parent) == "k3-small-dspark"
    assert shipped_drafter("qwen3-4b", checkout=MODELS.parent) == ""


def test_a_drafter_that_is_not_here_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert shipped_drafter("k3-small", checkout=tmp_path) == ""
