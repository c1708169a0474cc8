"""`--record-rounds`, `outrider replay` and `outrider calibrate` on a toy pair."""

import json
from pathlib import Path

import pytest
import torch

from outrider.cli import main
from outrider.speculative.calibration import CALIBRATION_FILE, GREEDY, Condition, load_calibration
from outrider.testing.toy import ToyOptions, write_byte_tokenizer, write_toy_checkpoint
from outrider.testing.toy_dspark import ToyDrafterOptions, write_toy_drafter

BLOCK, MAX_TOKENS = 3, 12


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("pair")
    options = ToyOptions(num_layers=3, mla_layers=(1, 2), attn_res_block_size=2, vocab_size=600, num_experts=4)
    target = write_toy_checkpoint(folder / "target", options)
    drafter = ToyDrafterOptions(
        hidden_size=64, num_layers=1, num_target_layers=3, aux_layer_ids=(0, 1), vocab_size=600, block_rows=BLOCK
    )
    write_toy_drafter(folder / "drafter", drafter, dtype=torch.bfloat16)
    write_byte_tokenizer(target, eos_token_id=511)
    return [str(target), "--drafter", str(folder / "drafter")]


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> str:
    rows = [
        {"question_id": f"{tier}{index}", "category": tier, "sub_category": "s", "turns": [f"{tier} {index}"]}
        for tier in ("a", "b")
        for index in range(3)
    ]
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def replayed(file: Path, policy: str, tmp_path: Path, *flags: str) -> dict:
    out = tmp_path / f"{policy}.json"
    assert main(["replay", str(file), "--policy", policy, "--json", str(out), *flags]) == 0
    return json.loads(out.read_text())


def test_a_recorded_bench_is_replayed_as_it_was_and_as_plain(pair, prompts, tmp_path: Path, capsys):
    flags = ["--prompts", prompts, "--tiers", "a,b", "--concurrency", "1", "--max-tokens", str(MAX_TOKENS)]
    recorded = ["--arms", f"plain,fixed{BLOCK}", "--repeats", "1", "--max-repeats", "1"]
    recorded += ["--record-rounds", str(tmp_path / "rounds.jsonl")]
    assert main(["bench", "ab", *pair, *flags, *recorded]) == 0
    spec, plain = tmp_path / f"rounds.fixed{BLOCK}.jsonl", tmp_path / "rounds.plain.jsonl"
    same = replayed(spec, f"fixed{BLOCK}", tmp_path)
    for name in ("num_output_tokens", "num_spans", "tokens_per_round"):
        assert same[name] == same["source"][name]
    assert same["stand_in_share"] == 0
    as_plain = replayed(spec, "plain", tmp_path, "--costs", str(plain))
    # The plain arm ran the same texts.
    assert (as_plain["num_output_tokens"], as_plain["num_spans"]) == _recorded_facts(plain)
    auto = replayed(spec, "auto", tmp_path, "--costs", str(plain), "--repeats", "2")
    assert auto["num_output_tokens"] == same["num_output_tokens"]
    assert auto["ratio_to_plain"]["low"] <= auto["ratio_to_plain"]["mean"] <= auto["ratio_to_plain"]["high"]
    capsys.readouterr()


def _recorded_facts(path: Path) -> tuple[int, int]:
    """Tokens and spans of decoding."""
    rounds = [json.loads(line) for line in path.read_text().splitlines()[1:]]
    spans = [span for line in rounds for span in line["sequences"] if "prompt_rows" not in span]
    return sum(span["emitted"] for span in spans), len(spans)


def test_generate_records(pair, tmp_path: Path, capsys):
    path = tmp_path / "one.jsonl"
    flags = ["--prompt", "hello", "--max-tokens", "8", "--speculation", str(BLOCK), "--record-rounds", str(path)]
    assert main(["generate", *pair, *flags]) == 0
    assert sum(1 for line in path.read_text().splitlines() if '"record":"round"' in line) >= 2
    capsys.readouterr()
    assert main(["replay", str(path), "--policy", "plain"]) == 0
    assert json.loads(capsys.readouterr().out)["num_spans"] == 7


def test_calibrate_writes_a_fit_that_loads(pair, prompts, tmp_path: Path, capsys):
    out, errors, plot = tmp_path / CALIBRATION_FILE, tmp_path / "errors.json", tmp_path / "plot.svg"
    flags = ["--prompts", prompts, "--held-out", prompts, "--max-tokens", str(MAX_TOKENS), "--temperatures", "0,1"]
    files = ["--rules", "match,block", "--out", str(out), "--json", str(errors), "--plot", str(plot)]
    assert main(["calibrate", *pair, *flags, *files]) == 0
    printed = capsys.readouterr().out
    assert "match, T 0.85+" in printed
    fitted = load_calibration(tmp_path)
    assert set(fitted.conditions) == {GREEDY, Condition("match", "0.85+"), Condition("block", "0.85+")}
    assert fitted.fitted_on["num_prompts"] == 48
    rows = json.loads(errors.read_text())["conditions"]
    for row in rows:
        assert row["num_reached"][0] == row["num_proposals"]
        assert row["survival_error_after"][0] <= row["survival_error_before"][0] + 0.02
    assert plot.read_text().count("<g ") == BLOCK * len(rows)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--temperatures ,", "is empty"),
        ("--rules luck", "acceptance='luck'"),
        ("--max-tokens 1", "no draft was judged"),
        ("--concurrency 0", "concurrency=0"),
        ("--prompts absent", "cannot read prompts"),
    ],
)
def test_usage_errors_of_calibrate(pair, prompts, flags: str, words: str, tmp_path: Path, capsys):
    line = ["calibrate", *pair, "--prompts", prompts, "--out", str(tmp_path / "out.json")]
    assert main([*line, *flags.split()]) == 2
    assert words in capsys.readouterr().err.strip().splitlines()[-1]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("absent --policy plain", "cannot read rounds"),
        ("FILE --policy best", "policy 'best' is unknown"),
        ("FILE --policy fixed9", "have 3 drafts"),
        ("FILE --policy plain --repeats 0", "repeats=0"),
        ("FILE --policy plain --costs absent", "cannot read rounds"),
    ],
)
def test_usage_errors_of_replay(pair, flags: str, words: str, tmp_path: Path, capsys):
    path = tmp_path / "one.jsonl"
    recorded = ["--prompt", "hi", "--max-tokens", "6", "--speculation", str(BLOCK), "--record-rounds", str(path)]
    assert main(["generate", *pair, *recorded]) == 0
    capsys.readouterr()
    assert main(["replay", *flags.replace("FILE", str(path)).split()]) == 2
    printed = capsys.readouterr()
    assert not printed.out
    assert words in printed.err.strip().splitlines()[-1]
