"""`outrider bench acceptance` on a toy pair."""

import json
from pathlib import Path

import pytest
import torch

from outrider.cli import main
from outrider.testing.toy import ToyOptions, write_byte_tokenizer, write_toy_checkpoint
from outrider.testing.toy_dspark import ToyDrafterOptions, write_toy_drafter

NUM_PROMPTS, MAX_TOKENS, BLOCK = 3, 10, 3
RULES = ("match", "rejection", "block")


@pytest.fixture(scope="module")
def line(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The command on a pair whose drafter knows nothing of its target."""
    folder = tmp_path_factory.mktemp("pair")
    options = ToyOptions(num_layers=3, mla_layers=(1, 2), attn_res_block_size=2, vocab_size=600, num_experts=4)
    target = write_toy_checkpoint(folder / "target", options)
    drafter = ToyDrafterOptions(
        hidden_size=64, num_layers=1, num_target_layers=3, aux_layer_ids=(0, 1), vocab_size=600, block_rows=BLOCK
    )
    write_toy_drafter(folder / "drafter", drafter, dtype=torch.bfloat16)
    write_byte_tokenizer(target, eos_token_id=511)
    rows = [
        {"question_id": f"{tier}{index}", "category": tier, "sub_category": "s", "turns": [f"{tier} {index}"]}
        for tier in ("a", "b")
        for index in range(NUM_PROMPTS)
    ]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    command = f"bench acceptance {target} --drafter {folder / 'drafter'} --prompts {folder / 'prompts.jsonl'}"
    return [*command.split(), "--max-tokens", str(MAX_TOKENS), "--tiers", "a"]


def cells_of(line: list[str], capsys: pytest.CaptureFixture[str]) -> list[dict]:
    assert main(line) == 0
    return json.loads(capsys.readouterr().out.strip().splitlines()[-1])["cells"]


def test_a_cell_for_every_tier_temperature_and_rule(line: list[str], tmp_path: Path, capsys) -> None:
    out = tmp_path / "out.json"
    flags = f"--tiers b,a --temperatures 0.5,2 --num-prompts 2 --seed 3 --json {out}"
    cells = cells_of([*line, *flags.split()], capsys)
    names = [(cell["tier"], cell["temperature"], cell["rule"]) for cell in cells]
    assert names == [(tier, t, rule) for tier in ("b", "a") for t in (0.5, 2.0) for rule in RULES]
    for cell in cells:
        assert (cell["num_prompts"], len(cell["drafted_at"])) == (2, BLOCK)
        assert sum(cell["drafted_at"]) == cell["num_drafted"] > 0
        assert sum(cell["accepted_at"]) == cell["num_accepted"]
        assert cell["tokens_per_round_low"] <= cell["tokens_per_round"] <= cell["tokens_per_round_high"]
    written = json.loads(out.read_text())
    assert written["cells"] == cells
    assert (written["settings"]["seed"], written["prompt_set"]) == (3, "prompts")
    assert written.keys() >= {"environment", "prompts_sha256", "numerics"}


def test_rules_accept_what_the_distributions_allow(line: list[str], capsys) -> None:
    """So hot that target and drafter are nearly uniform, both rules with coins accept nearly everything; when it
    is cool, the drafter's distribution has nothing to do with the target's."""
    hot = cells_of([*line, "--temperatures", "100"], capsys)
    cool = cells_of([*line, "--temperatures", "0.1"], capsys)
    for cell in hot:
        assert cell["num_accepted"] > 0.7 * cell["num_drafted"], cell["rule"]
    for cell in cool:
        assert cell["num_accepted"] < 0.3 * cell["num_drafted"], cell["rule"]


def test_exact_numerics_give_the_same_counts_in_any_company(line: list[str], capsys) -> None:
    flags = ["--temperatures", "1.0"]
    assert cells_of([*line, *flags, "--concurrency", "1"], capsys) == cells_of([*line, *flags], capsys)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--rules match,luck", "acceptance='luck' is unknown"),
        ("--rules ,", "--rules is empty"),
        ("--temperatures 0", "greedy"),
        ("--temperatures -1", "temperature=-1"),
        ("--seed -1", "seed=-1"),
        ("--max-tokens 1", "raise --max-tokens"),
        ("--num-prompts 0", "num_prompts=0"),
        ("--concurrency 0", "concurrency=0"),
        ("--speculation off", "leaves nothing to accept"),
        ("--tiers c", "tier 'c' has no usable prompts"),
        ("--drafter absent", "no checkpoint 'absent'"),
    ],
)
def test_usage_errors_are_one_line_and_status_2(line: list[str], flags: str, words: str, capsys) -> None:
    assert main([*line, *flags.split()]) == 2
    printed = capsys.readouterr()
    assert not printed.out
    assert words in printed.err.strip().splitlines()[-1]
