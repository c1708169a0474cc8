"""The command line as outside scripts write it."""

import pytest
import tyro

from outrider.cli import main
from outrider.cli.arguments import Bench, BenchAb, BenchNumerics, Command, Demo, Generate, Inspect, Logits
from outrider.cli.checkpoints import resolve_checkpoint
from outrider.cli.runtime import parse_speculation, prepare_output, set_threads
from outrider.errors import CheckpointError, ConfigError


def parse(*arguments: str):
    return tyro.cli(Command, args=list(arguments), prog="outrider", config=(tyro.conf.FlagCreatePairsOff,))


def test_generate_in_any_order() -> None:
    expected = Generate(model="m", drafter="d", speculation="3", prompt="hello", max_tokens=5, json=True)
    line = ["--drafter", "d", "--speculation", "3", "--prompt", "hello", "--max-tokens", "5", "--json"]
    assert parse("generate", "m", *line) == expected
    assert parse("generate", *line, "m") == expected


def test_sampling_flags() -> None:
    line = "--temperature 0.7 --top-p 0.9 --top-k 40 --min-p 0.05 --seed 7 --n 3 --logprobs 2 --ignore-eos".split()
    line += "--min-tokens 4 --repetition-penalty 1.1 --presence-penalty 0.5 --frequency-penalty -0.5".split()
    line += ["--logit-bias", "17:-100,5:2.5", "--stop", "a, b", "--stop", "\n", "--acceptance", "block"]
    assert parse("generate", "m", "--prompt", "x", *line) == Generate(
        model="m", prompt="x", temperature=0.7, top_p=0.9, top_k=40, min_p=0.05, seed=7, n=3, logprobs=2,
        ignore_eos=True, min_tokens=4, repetition_penalty=1.1, presence_penalty=0.5, frequency_penalty=-0.5,
        logit_bias=((17, -100.0), (5, 2.5)), stop=("a, b", "\n"), acceptance="block",
    )  # fmt: skip


@pytest.mark.parametrize("text", ["- a list", "-5 + 3", "None", "two\nlines", " ", "a,b", "ünïcode"])
def test_a_prompt_may_be_any_text(text: str) -> None:
    assert parse("generate", "m", "--prompt", text).prompt == text


def test_lists_are_comma_separated() -> None:
    assert parse("logits", "m", "--prompt-ids", "1,2,3", "--json", "o", "--dtype", "float64") == Logits(
        model="m", prompt_ids=(1, 2, 3), json="o", dtype="float64"
    )
    command = parse(
        *"bench ab m --drafter d --prompts f.jsonl --tiers a,b --concurrency 1,4 --num-prompts 2".split(),
        *"--max-tokens 9 --arms plain,fixed7,auto --repeats 3 --threads 2 --json OUT --prompt-length 256,1k".split(),
        *"--max-repeats 9 --time-budget 60 --drafter-fault garbage@5".split(),
    )
    assert command.kind == BenchAb(
        model="m", drafter="d", prompts="f.jsonl", tiers=("a", "b"), concurrency=(1, 4), num_prompts=2,
        max_tokens=9, arms=("plain", "fixed7", "auto"), repeats=3, threads=2, json="OUT", prompt_length=("256", "1k"),
        max_repeats=9, time_budget=60.0, drafter_fault="garbage@5",
    )  # fmt: skip


@pytest.mark.parametrize("line", ["m --rows 1,4 --repeats 5 --json o", "--rows 1,4 --repeats 5 m --json o"])
def test_bench_numerics_in_any_order(line: str) -> None:
    expected = Bench(kind=BenchNumerics(model="m", rows=(1, 4), repeats=5, json="o"))
    assert parse("bench", "numerics", *line.split()) == expected


def test_numerics_of_an_engine() -> None:
    assert parse(*"generate m --prompt p --numerics fast --probe skip".split()) == Generate(
        model="m", prompt="p", numerics="fast", probe="skip"
    )


def test_demo_and_inspect() -> None:
    assert parse("demo") == Demo()
    assert parse("inspect", "p") == Inspect(path="p")


@pytest.mark.parametrize(
    "line",
    ["", "generate", "generate m --unknown 1", "generate m --prompt-ids 1,x", "bench", "bench m",
     "bench numerics", "logits m --prompt-ids 1", "generate m --dtype int8", "generate m --numerics quick"],
)  # fmt: skip
def test_wrong_lines_end_with_status_2(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        parse(*line.split())
    assert stopped.value.code == 2
    assert not capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("", "generate, chat, demo, import-gguf, inspect, logits, bench"),
        ("generate", "MODEL"),
        ("generate m --unknown 1", "--unknown"),
        ("generate m --prompt-ids 1,x", "--prompt-ids"),
        ("generate m --dtype int8", "'int8'"),
        ("generate m --logit-bias x:1", "--logit-bias"),
        ("generate m --logit-bias 5", "--logit-bias"),
        ("generate m --temperature warm", "--temperature"),
        ("generate m --acceptance always", "'always'"),
    ],
)
def test_a_wrong_line_is_one_line_on_stderr(line: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(line.split())
    assert stopped.value.code == 2
    printed = capsys.readouterr()
    assert not printed.out
    (message,) = printed.err.splitlines()
    assert message.startswith("outrider: ") and message.endswith("; see outrider --help")
    assert words in message and "--- " not in message


def test_help_goes_to_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["generate", "--help"])
    assert not stopped.value.code
    printed = capsys.readouterr()
    assert "--prompt-ids" in printed.out and not printed.err


def test_values_that_python_or_the_system_refuses(tmp_path) -> None:
    assert parse_speculation("9" * 5000) == "9" * 5000  # int() would raise
    with pytest.raises(ConfigError, match="--threads 10000000000"):
        set_threads(10**10)
    for name in ("a" * 5000, "\0"):
        with pytest.raises(CheckpointError, match="no checkpoint"):
            resolve_checkpoint(name, checkout=tmp_path)
    with pytest.raises(ConfigError, match="cannot be written"):
        prepare_output("\0")


def test_speculation_is_a_word_or_a_number() -> None:
    assert [parse_speculation(text) for text in ("auto", "off", "0", "7", "-1")] == ["auto", "off", 0, 7, "-1"]


def test_a_checkpoint_is_a_path_or_a_name(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    work, checkout = tmp_path / "work", tmp_path / "checkout"
    for folder in (work / "here", work / "models/both", checkout / "models/both", checkout / "models/shipped"):
        folder.mkdir(parents=True)
    monkeypatch.chdir(work)

    def resolved(name: str):
        return resolve_checkpoint(name, checkout=checkout).resolve()

    assert resolved("here") == work / "here"
    assert resolved("both") == resolved("models/both") == work / "models/both"
    assert resolved("shipped") == resolved("models/shipped") == checkout / "models/shipped"
    for missing in ("absent", ""):
        with pytest.raises(CheckpointError, match="no checkpoint"):
            resolved(missing)
