"""Commands from the line to the output, on toy checkpoints without a tokenizer."""

import json
from pathlib import Path

import pytest
import torch

from outrider.cli import main
from outrider.testing.toy import ToyOptions, write_toy_checkpoint
from outrider.testing.toy_dspark import ToyDrafterOptions, write_toy_drafter

PROMPT = "5,9,2,40,7,7,31,12,3"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("pair")
    options = ToyOptions(num_layers=4, mla_layers=(2, 3), attn_res_block_size=3)
    write_toy_checkpoint(folder / "target", options)
    drafter = ToyDrafterOptions(hidden_size=options.hidden_size, num_target_layers=4, aux_layer_ids=(0, 1, 2))
    write_toy_drafter(folder / "drafter", drafter, dtype=torch.bfloat16)
    return str(folder / "target"), str(folder / "drafter")


def json_of(capsys: pytest.CaptureFixture[str], *line: str) -> dict:
    assert main(line) == 0
    return json.loads(capsys.readouterr().out)


def test_generate_gives_the_same_ids_at_every_draft_length(pair, capsys: pytest.CaptureFixture[str]) -> None:
    target, drafter = pair
    line = ["generate", target, "--prompt-ids", PROMPT, "--max-tokens", "12", "--json"]
    plain = json_of(capsys, *line)
    assert plain.keys() >= {"token_ids", "finish_reason", "rounds", "drafted", "accepted"}
    assert (plain["drafted"], plain["finish_reason"]) == (0, "length")
    assert len(plain["token_ids"]) == 12
    for speculation, drafts in (("off", False), ("0", False), ("2", True), ("auto", True)):
        spec = json_of(capsys, *line, "--drafter", drafter, "--speculation", speculation)
        assert spec["token_ids"] == plain["token_ids"]
        assert (spec["drafted"] > 0) is drafts


def test_logits_of_the_last_position_lead_to_the_next_token(pair, tmp_path: Path, capsys) -> None:
    target, _ = pair
    for dtype in ("auto", "float64"):
        out = tmp_path / "new" / f"{dtype}.json"
        assert main(["logits", target, "--prompt-ids", PROMPT, "--json", str(out), "--dtype", dtype]) == 0
        written = json.loads(out.read_text(encoding="utf-8"))
        assert len(written["logits"]) == ToyOptions().vocab_size
        flags = ["--prompt-ids", PROMPT, "--max-tokens", "1", "--json", "--dtype", dtype]
        first = json_of(capsys, "generate", target, *flags)["token_ids"][0]
        assert written["logits"].index(max(written["logits"])) == first


def test_inspect_needs_nothing_but_the_config(pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target, _ = pair
    (tmp_path / "config.json").write_bytes((Path(target) / "config.json").read_bytes())
    assert main(["inspect", str(tmp_path)]) == 0
    assert "layers" in capsys.readouterr().out
    bare, whole = (json_of(capsys, "inspect", path, "--json") for path in (str(tmp_path), target))
    assert bare["num_parameters"] == whole["num_parameters"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("generate absent --prompt x", "no checkpoint 'absent'"),
        ("generate {target} --prompt x", "no tokenizer"),
        ("generate {target}", "--prompt and --prompt-ids"),
        ("generate {target} --prompt x --prompt-ids 1", "exactly one"),
        ("generate {target} --chat --prompt-ids 1", "--chat renders a text"),
        ("generate {target} --prompt-ids 1 --speculation 3", "needs a drafter"),
        ("generate {target} --prompt-ids 1 --drafter {drafter} --speculation 99", "speculation=99"),
        ("generate {target} --prompt-ids 1 --drafter {drafter} --speculation fast", "speculation='fast'"),
        ("generate {target} --prompt-ids 5000 --json", "5000"),
        ("generate {target} --prompt-ids 1", "no text; add --json"),
        ("generate {target} --prompt-ids 1 --json --max-tokens -1", "max_tokens=-1"),
        ("generate {target} --prompt-ids 1 --threads -1", "--threads -1"),
        ("generate {target} --prompt-ids 1 --device moon", "device='moon'"),
        ("inspect {drafter}/absent", "no checkpoint"),
        ("logits {target} --prompt-ids 5000 --json {target}/../out.json", "5000"),
        ("logits {target} --prompt-ids 1 --json {target}/config.json/out.json", "cannot be written"),
        ("bench ab {target} --drafter {drafter} --prompts absent.jsonl", "absent.jsonl"),
        ("bench ab {target} --drafter {drafter} --prompts absent.jsonl --repeats 0", "repeats=0"),
    ],
)
def test_what_a_user_can_cause_is_one_line_and_status_2(pair, line: str, words: str, capsys) -> None:
    target, drafter = pair
    assert main(line.format(target=target, drafter=drafter).split()) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    last = printed.err.strip().splitlines()[-1]
    assert last.startswith("outrider: ")
    assert words in last
    assert "Traceback" not in printed.err
