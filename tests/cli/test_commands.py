"""Commands from the line to the output, on toy checkpoints without a tokenizer."""

import dataclasses
import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import outrider.engine.runner
from outrider.cli import main
from outrider.cli.bench import Eta
from outrider.plan import StepPlan, StepResult
from outrider.testing.toy import ToyOptions, write_byte_tokenizer, write_toy_checkpoint
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


@pytest.fixture(scope="module")
def talking_pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """With a tokenizer of 256 bytes and 256 special tokens, much less than the vocabulary of the model."""
    folder = tmp_path_factory.mktemp("talking")
    options = ToyOptions(num_layers=4, mla_layers=(2, 3), attn_res_block_size=3, vocab_size=600)
    target = write_toy_checkpoint(folder / "target", options)
    drafter = ToyDrafterOptions(hidden_size=64, num_target_layers=4, aux_layer_ids=(0, 1, 2), vocab_size=600)
    write_toy_drafter(folder / "drafter", drafter, dtype=torch.bfloat16)
    write_byte_tokenizer(target, eos_token_id=511)
    return str(target), str(folder / "drafter")


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


def test_one_seed_gives_one_text_at_every_draft_length(pair, capsys: pytest.CaptureFixture[str]) -> None:
    target, drafter = pair
    line = ["generate", target, "--prompt-ids", PROMPT, "--max-tokens", "9", "--json", "--temperature", "0.9"]
    line += ["--dtype", "float64"]
    line += "--top-p 0.95 --top-k 60 --min-p 0.001 --repetition-penalty 1.1 --presence-penalty 0.2".split()
    line += "--frequency-penalty 0.1 --logit-bias 5:-100,9:1.5 --min-tokens 2 --ignore-eos --n 2 --logprobs 2".split()
    plain = json_of(capsys, *line, "--seed", "7")
    spec = json_of(capsys, *line, "--seed", "7", "--drafter", drafter)
    assert plain["seed"] == spec["seed"] == 7
    assert (plain["drafted"], spec["drafted"] > 0) == (0, True)
    for ours, theirs in zip(spec["outputs"], plain["outputs"], strict=True):
        assert (ours["token_ids"], ours["logprobs"]) == (theirs["token_ids"], theirs["logprobs"])
        assert [entry["token_id"] for entry in ours["logprobs"]] == ours["token_ids"]
        assert all(len(entry["top"]) == 2 and entry["logprob"] < 0 for entry in ours["logprobs"])
    first, second = (output["token_ids"] for output in plain["outputs"])
    assert first != second and first == plain["token_ids"] and 5 not in first + second
    fresh = [json_of(capsys, *line) for _ in range(2)]
    assert fresh[0]["seed"] != fresh[1]["seed"]
    assert json_of(capsys, *line, "--seed", str(fresh[0]["seed"]))["outputs"] == fresh[0]["outputs"]


def test_several_texts_are_printed_one_after_the_other(talking_pair, capsys) -> None:
    target, _ = talking_pair
    line = ["generate", target, "--prompt", "hello", "--max-tokens", "6", "--n", "3"]
    line += ["--temperature", "1", "--seed", "5", "--logit-bias", "97:40", "--stop", "aaaa", "--stop", "never"]
    texts = [output["text"] for output in json_of(capsys, *line, "--json")["outputs"]]
    assert main(line) == 0
    assert capsys.readouterr().out == "".join(text + "\n" for text in texts)
    assert texts == [""] * 3, "the text ends just before the stop string"


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
        ("generate {target} --prompt-ids 1 --json --temperature -1", "temperature=-1"),
        ("generate {target} --prompt-ids 1 --json --top-p 0", "top_p=0"),
        ("generate {target} --prompt-ids 1 --json --n 0", "n=0"),
        ("generate {target} --prompt-ids 1 --json --seed -1", "seed=-1"),
        ("generate {target} --prompt-ids 1 --json --logprobs 21", "logprobs=21"),
        ("generate {target} --prompt-ids 1 --json --logit-bias 5000:1", "logit_bias contains 5000"),
        ("generate {target} --prompt-ids 1 --json --logit-bias 5:1,5:2", "--logit-bias names token 5"),
        ("generate {target} --prompt-ids 1 --logprobs 1", "use it with --json"),
        ("generate {target} --prompt-ids 1 --threads -1", "--threads -1"),
        ("generate {target} --prompt-ids 1 --device moon", "device='moon'"),
        ("inspect {drafter}/absent", "no checkpoint"),
        ("logits {target} --prompt-ids 5000 --json {target}/../out.json", "5000"),
        ("logits {target} --prompt-ids 1 --json {target}/config.json/out.json", "cannot be written"),
        ("bench numerics {target} --rows 0", "rows=0"),
        ("bench numerics {target} --context 100000", "max_model_len"),
        ("bench ab {target} --drafter {drafter} --prompts absent.jsonl", "absent.jsonl"),
        ("bench ab {target} --drafter {drafter} --prompts absent.jsonl --repeats 0", "repeats=0"),
        (
            "bench ab {target} --drafter {drafter} --prompts absent.jsonl --arms spec --speculation off",
            "without drafts",
        ),
        ("bench ab {target} --drafter {drafter} --prompts absent.jsonl --arms spec --speculation 0", "without drafts"),
        ("bench ab {target} --drafter {drafter} --arms plain,fast", "arm 'fast' is unknown"),
        ("bench ab {target} --drafter {drafter} --prompt-length 1x", "--prompt-length '1x'"),
        ("bench ab {target} --drafter {drafter} --drafter-fault slow", "--drafter-fault 'slow'"),
        ("bench ab {target} --drafter {drafter} --repeats 5 --max-repeats 4", "max_repeats=4"),
        ("bench ab {target} --drafter {drafter} --time-budget -1", "time_budget=-1"),
        ("bench ab {target} --drafter {drafter}", "no tokenizer"),
        ("bench ab {target} --drafter {drafter} --concurrency 0", "concurrency=0"),
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


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_a_token_beyond_the_tokenizer_is_no_error(talking_pair, flags: list[str], capsys) -> None:
    target, _ = talking_pair
    line = ["generate", target, "--prompt", "hello", "--max-tokens", "16"]
    answer = json_of(capsys, *line, "--json")
    assert answer["finish_reason"] == "length"
    assert max(answer["token_ids"]) >= 512, "nothing beyond the tokenizer was emitted"
    assert main([*line, *flags]) == 0
    assert not capsys.readouterr().err


def test_only_the_text_is_printed_and_a_line_end_on_a_terminal(talking_pair, capsys, monkeypatch) -> None:
    target, _ = talking_pair
    line = ["generate", target, "--prompt", "hello", "--max-tokens", "16"]
    text = json_of(capsys, *line, "--json")["text"]
    assert main(line) == 0
    assert capsys.readouterr().out == text
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert main(line) == 0
    assert capsys.readouterr().out == text + "\n"


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_a_failed_request_is_one_line_and_status_1(talking_pair, flags: list[str], capsys, monkeypatch, caplog) -> None:
    run_round = outrider.engine.runner.run_round

    def failing(parts: object, plan: StepPlan) -> StepResult:
        if plan.step_id == 2:
            raise RuntimeError("device\nfell off")
        return run_round(parts, plan)

    monkeypatch.setattr(outrider.engine.runner, "run_round", failing)
    target, _ = talking_pair
    assert main(["generate", target, "--prompt", "hello", "--max-tokens", "16", *flags]) == 1
    printed = capsys.readouterr()
    assert printed.err == "outrider: the request failed: RuntimeError: device fell off\n"
    assert "--json" not in flags or not printed.out
    assert not [record for record in caplog.records if record.exc_info]
    assert not logging.getLogger("outrider.engine.engine").filters


def write_prompts(path: Path) -> Path:
    rows = [("a", "s", "one"), ("a", "t", "two"), ("a", "s", "three"), ("b", "s", "four"), ("b", "s", "x" * 5000)]
    path.write_text(
        "\n".join(
            json.dumps({"question_id": text, "category": tier, "sub_category": sub, "turns": [text]})
            for tier, sub, text in rows
        )
    )
    return path


def test_bench_clips_the_number_of_prompts_to_what_a_tier_has(talking_pair, tmp_path: Path, capsys, caplog) -> None:
    target, drafter = talking_pair
    prompts, out = write_prompts(tmp_path / "set.jsonl"), tmp_path / "out.json"
    line = f"bench ab {target} --drafter {drafter} --prompts {prompts} --json {out} --max-tokens 6".split()
    line += ["--concurrency", "1", "--repeats", "2", "--max-repeats", "2", "--arms", "plain,fixed4"]
    assert main([*line, "--tiers", "a,b", "--num-prompts", "3"]) == 0
    written = json.loads(out.read_text())
    assert all(said.startswith("numerics exact, ") for said in written["numerics"].values())
    cells = written["cells"]
    assert [(cell["tier"], cell["num_prompts"], cell["num_repeats"]) for cell in cells] == [("a", 3, 2), ("b", 1, 2)]
    assert [r.getMessage() for r in caplog.records if "fewer than" in r.getMessage()] == [
        "b: 1 usable prompts, fewer than the 3 asked for"
    ]
    capsys.readouterr()
    assert main([*line, "--tiers", "a,c", "--num-prompts", "3"]) == 2
    assert "tier 'c' has no usable prompts" in capsys.readouterr().err


def test_bench_fails_when_an_arm_never_drafted(talking_pair, tmp_path: Path, caplog) -> None:
    """One token comes with the prompt and one more leaves no room for a draft: the arms were the same program."""
    target, drafter = talking_pair
    line = f"bench ab {target} --drafter {drafter} --prompts {write_prompts(tmp_path / 'set.jsonl')}".split()
    line += "--concurrency 1 --repeats 1 --max-repeats 1 --tiers a --num-prompts 1 --max-tokens 2".split()
    assert main([*line, "--arms", "plain,fixed4"]) == 1
    assert "arm fixed4 verified no draft in c1 a: nothing was compared" in caplog.text
    assert main([*line, "--arms", "plain,auto"]) == 0, "auto may find that drafts do not pay"
    assert "arm auto found no draft worth verifying in c1 a" in caplog.text
    assert main([*line, "--arms", "plain,off"]) == 0


def test_bench_fails_when_outputs_differ(talking_pair, tmp_path: Path, monkeypatch, caplog) -> None:
    target, drafter = talking_pair
    run_round = outrider.engine.runner.run_round

    def wrong(parts, plan: StepPlan) -> StepResult:
        result = run_round(parts, plan)
        if parts.drafter.num_draft_tokens and plan.step_id % 5 == 4:
            outputs = [(*ids[:-1], (ids[-1] + 1) % 256) if ids else ids for ids in result.output_token_ids]
            result = dataclasses.replace(result, output_token_ids=tuple(outputs))
        return result

    monkeypatch.setattr(outrider.engine.runner, "run_round", wrong)
    caplog.set_level(logging.INFO)
    out = tmp_path / "out.json"
    line = f"bench ab {target} --drafter {drafter} --prompts {write_prompts(tmp_path / 'set.jsonl')} --json {out}"
    line += " --concurrency 1,2 --repeats 1 --max-repeats 1 --tiers a --max-tokens 12 --arms plain,fixed4"
    assert main(line.split()) == 1
    cells = json.loads(out.read_text())["cells"]
    assert [cell["identical"] for cell in cells] == [False, False]
    assert all(cell["differing"] for cell in cells)
    assert "c1 a: outputs DIFFER between arms or repeats, which must not happen: " in caplog.text
    caplog.clear()
    assert main([*line.split(), "--numerics", "fast"]) == 0, "fast promises nothing"
    assert "c1 a: outputs differ between arms or repeats, as fast numerics allows" in caplog.text


def test_bench_runs_a_grid_of_lengths_with_a_faulty_drafter(talking_pair, tmp_path: Path, monkeypatch, capsys) -> None:
    target, drafter = talking_pair
    monkeypatch.chdir(tmp_path)
    prompts, out = write_prompts(tmp_path / "set.jsonl"), tmp_path / "out.json"
    line = f"bench ab {target} --drafter {drafter} --prompts {prompts} --json {out} --record --tiers a --num-prompts 2"
    line += " --concurrency 1,2 --repeats 1 --max-repeats 1 --max-tokens 8 --arms plain,fixed4,auto,off"
    line += " --prompt-length 200,300 --drafter-fault garbage"
    assert main(line.split()) == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [cell["cell"] for cell in summary["cells"]] == ["c1 a 200", "c2 a 200", "c1 a 300", "c2 a 300"]
    written = json.loads(out.read_text())
    assert [cell["prompt_length"] for cell in written["cells"]] == [200, 200, 300, 300]
    for cell in written["cells"]:
        assert cell["identical"]
        assert {"fixed4", "auto", "off", "auto_over_fixed4", "auto_over_off"} <= cell.keys()
        assert cell["arms"]["fixed4"]["num_drafted"] > 0 and cell["arms"]["off"]["num_drafted"] == 0
        assert cell["arms"]["off"]["num_proposing_rounds"] == 0
        assert cell["arms"]["fixed4"]["paused_share"] < 1
    (row,) = (tmp_path / "benchmarks/ledger.jsonl").read_text().splitlines()
    recorded = json.loads(row)
    assert recorded["settings"]["prompts"] == "set.jsonl" and recorded["environment"]["num_threads"] == 1
    assert "outputs" not in recorded["cells"][0] and recorded["cells"][0]["arms"]["plain"]["output_sha256"]
    assert main([*line.split(), "--prompt-length", "100000"]) == 2
    assert "prompts of 100000 tokens do not fit" in capsys.readouterr().err


def test_the_rest_of_a_grid_is_estimated_from_the_cells_that_are_done() -> None:
    said: list[str] = []
    now = [0.0]
    eta = Eta(4, said.append, clock=lambda: now[0])
    eta("first")
    now[0] = 100.0
    eta.finish_cell()
    eta("second")
    now[0] = 130.0
    eta("second")
    now[0] = 900.0
    eta("second")
    for _ in range(2):
        eta.finish_cell()
    eta("last")
    assert said == [
        "cell 1 of 4: first",
        "cell 2 of 4, about 5 min left: second",
        "cell 2 of 4, about 4 min left: second",
        "cell 2 of 4, about 3 min left: second",
        "cell 4 of 4, about 5 min left: last",
    ]


def test_bench_numerics_measures_both_in_turns(pair, tmp_path: Path, capsys) -> None:
    target, _ = pair
    out = tmp_path / "out.json"
    line = f"bench numerics {target} --rows 1,3 --context 20 --repeats 4 --dtype float32 --json {out}"
    assert main(line.split()) == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [(cell["num_rows"], cell["num_pairs"]) for cell in summary["cells"]] == [(1, 4), (3, 4)]
    for cell in summary["cells"]:
        assert cell["exact_ms"] > 0 and cell["fast_ms"] > 0
        assert cell["ratio_low"] <= cell["ratio"] <= cell["ratio_high"]
    written = json.loads(out.read_text())
    assert written["cells"] == summary["cells"]
    assert written["settings"]["rows"] == [1, 3]


def test_fast_numerics_are_said_to_promise_nothing(pair, capsys, caplog) -> None:
    target, _ = pair
    caplog.set_level(logging.INFO)
    line = ["generate", target, "--prompt-ids", PROMPT, "--max-tokens", "12", "--json"]
    exact, fast = json_of(capsys, *line), json_of(capsys, *line, "--numerics", "fast")
    assert len(exact["token_ids"]) == len(fast["token_ids"]) == 12
    said = [record.getMessage() for record in caplog.records if "numerics fast" in record.getMessage()]
    assert said == ["numerics fast: output may depend on speculation and on the other requests"]


def test_a_reader_that_leaves_is_no_error(pair: tuple[str, str]) -> None:
    """``outrider inspect MODEL | head``: no traceback, the status of a broken pipe."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    command = [
        sys.executable,
        "-c",
        "import sys; from outrider.cli import main; sys.exit(main(sys.argv[1:]))",
        "inspect",
        pair[0],
    ]
    finished = subprocess.run(command, stdout=write_end, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write_end)
    assert finished.returncode == 141
    assert "Traceback" not in finished.stderr
