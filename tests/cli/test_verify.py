"""`outrider verify` on a toy pair: it passes what is right, finds every planted fault, and says what it saw."""

import json
from pathlib import Path

import pytest
import torch

from outrider.cli import main
from outrider.models.kimi_k3.model import KimiK3Model
from outrider.models.protocol import AuxStream
from outrider.testing.faults import FAULTS
from outrider.testing.grid import default_grid
from outrider.testing.toy import ToyOptions, write_byte_tokenizer, write_toy_checkpoint
from outrider.testing.toy_dspark import ToyDrafterOptions, write_toy_drafter

NUM_PROMPTS, MAX_TOKENS, BLOCK = 5, 6, 2
LONGER = 20  # more than two pages, so that sequences outgrow what they entered with


@pytest.fixture(scope="module")
def line(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The command on a pair with a byte tokenizer and a file of prompts of different lengths."""
    folder = tmp_path_factory.mktemp("pair")
    options = ToyOptions(num_layers=3, mla_layers=(1, 2), attn_res_block_size=2, vocab_size=600, num_experts=4)
    target = write_toy_checkpoint(folder / "target", options)
    drafter = ToyDrafterOptions(
        hidden_size=64, num_layers=1, num_target_layers=3, aux_layer_ids=(0, 1), vocab_size=600, block_rows=BLOCK
    )
    write_toy_drafter(folder / "drafter", drafter, dtype=torch.bfloat16)
    write_byte_tokenizer(target, eos_token_id=511)
    texts = [f"question {index} " * (1 + index) for index in range(NUM_PROMPTS)]
    rows = [{"question_id": f"q{i}", "category": "a", "sub_category": "s", "turns": [t]} for i, t in enumerate(texts)]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    command = f"verify {target} --drafter {folder / 'drafter'} --prompts {folder / 'prompts.jsonl'}"
    return [*command.split(), "--max-tokens", str(MAX_TOKENS)]


def test_a_sound_engine_is_identical(line: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    assert main([*line, "--json", str(out), "--max-tokens", str(LONGER)]) == 0
    last = capsys.readouterr().out.strip().splitlines()[-1]
    written = json.loads(out.read_text())
    assert last.startswith(f"identical: {NUM_PROMPTS} prompts in {len(default_grid(BLOCK))} cells")
    assert written["identical"] is True
    assert (written["differences"], written["injected"]) == ([], None)
    assert written["prompts"] == [f"q{index}" for index in range(NUM_PROMPTS)]
    assert written["num_tokens"] > len(written["cells"]) * NUM_PROMPTS
    assert [cell["num_drafts"] for cell in written["cells"]] == [cell.num_drafts for cell in default_grid(BLOCK)]
    for cell in written["cells"]:
        assert (cell["num_drafted"] > 0) == (cell["num_drafts"] > 0)
        assert (cell["num_differing"], cell["fault"]) == (0, None)
    assert any(cell["num_steps"] > cell["num_rounds"] for cell in written["cells"]), "no round was split"
    for cell in written["cells"]:
        assert (cell["num_preempted"] > 0) == (cell["preemption"] != "none")
    whole, half = (
        next(cell["num_drafted"] for cell in written["cells"] if want(cell))
        for want in (
            lambda cell: (cell["num_drafts"], cell["concurrency"], cell["seed"]) == (BLOCK, 8, 2),
            lambda cell: cell["speculating"] == "half",
        )
    )
    assert 0 < half < whole


def test_a_cell_that_tests_nothing_is_named(line: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*line, "--max-tokens", "1"]) == 0
    notes = [text for text in capsys.readouterr().out.splitlines() if text.startswith("note: ")]
    num_drafting = sum(cell.num_drafts > 0 for cell in default_grid(BLOCK))
    assert sum("nothing was drafted" in note for note in notes) == num_drafting


@pytest.mark.parametrize("name", [name for name, fault in FAULTS.items() if fault.changes_output])
def test_every_planted_fault_is_found(line: list[str], name: str, tmp_path: Path, capsys) -> None:
    out = tmp_path / "out.json"
    assert main([*line, "--json", str(out), "--inject", name]) == 1
    printed, written = capsys.readouterr().out, json.loads(out.read_text())
    assert "First difference of each prompt" in printed
    assert f"planted {name}" in printed and "was found, as it must" in printed
    assert written["identical"] is False
    assert written["injected"]["name"] == name
    for found in written["differences"]:
        assert found["prompt"] in written["prompts"]
        assert 0 <= found["position"] <= MAX_TOKENS
        assert found["plain_token"] != found["token"]
        assert found["margin"] is None or found["margin"] >= 0
    margins = [found["margin"] for found in written["differences"] if found["position"] < MAX_TOKENS]
    assert margins and None not in margins


def test_the_control_changes_no_output(line: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*line, "--inject", "shifted-tap"]) == 0
    printed = capsys.readouterr().out
    assert "planted shifted-tap" in printed and "changed no output, as it must" in printed
    assert "without the fault" in printed


def test_taps_of_the_neighbouring_conventions_are_compared(
    line: list[str], tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B02: layers (0, 1) of three can also be tapped one later, not one earlier; no token changes."""
    out, tapped, set_taps = tmp_path / "out.json", [], KimiK3Model.set_aux_layers

    def watch(self: KimiK3Model, layer_ids: tuple[int, ...], stream: AuxStream) -> None:
        tapped.append(layer_ids)
        set_taps(self, layer_ids, stream)

    monkeypatch.setattr(KimiK3Model, "set_aux_layers", watch)
    assert main([*line, "--taps", "--json", str(out)]) == 0
    printed, taps = capsys.readouterr().out, json.loads(out.read_text())["taps"]
    assert [(arm["shift"], arm["aux_layer_ids"]) for arm in taps] == [(0, [0, 1]), (1, [1, 2])]
    assert "taps as the config says, after layers 0, 1:" in printed
    assert "taps one layer later, after layers 1, 2:" in printed
    cells = json.loads(out.read_text())["cells"]
    (same,) = [cell for cell in cells if all(cell[key] == value for key, value in taps[0]["cell"].items())]
    assert [same[key] for key in ("num_drafted", "num_accepted")] == [taps[0]["num_drafted"], taps[0]["num_accepted"]]
    assert tapped[-2:] == [(0, 1), (1, 2)] and (1, 2) not in tapped[:-1]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--inject typo", "fault 'typo' is unknown; known are commit-off-by-one, conv-not-rolled-back, stale-page"),
        ("--max-tokens 0", "max_tokens=0"),
        ("--max-tokens 1000000", "none of the 5 prompts"),
        ("--prompts absent.jsonl", "absent.jsonl"),
        ("--drafter absent", "no checkpoint 'absent'"),
        ("--threads -1", "--threads -1"),
    ],
)
def test_usage_errors_are_one_line_and_status_2(line: list[str], flags: str, words: str, capsys) -> None:
    assert main([*line, *flags.split()]) == 2
    printed = capsys.readouterr()
    assert not printed.out
    assert words in printed.err.strip().splitlines()[-1]
