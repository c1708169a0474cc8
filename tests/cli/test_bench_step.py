"""`outrider bench step` and `bench startup` from the line to their files, on toys; no time is judged."""

import json
import math
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import torch

import outrider.cli.bench_startup
from outrider.bench.startup import Start
from outrider.cli import main
from outrider.testing.toy import ToyOptions, toy_config, write_toy_checkpoint
from outrider.testing.toy_dspark import ToyDrafterOptions, toy_drafter_config, write_toy_drafter

OPTIONS = ToyOptions(num_layers=4, mla_layers=(2, 3), attn_res_block_size=3)
DRAFTER = ToyDrafterOptions(hidden_size=64, num_target_layers=4, aux_layer_ids=(0, 1, 2))
PROMISED = {"rows", "slots", "context", "median_ms", "ratio_to_one_row", "floor_ms", "weight_bytes", "bandwidth_gb_s"}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("pair")
    write_toy_checkpoint(folder / "target", OPTIONS)
    write_toy_drafter(folder / "drafter", DRAFTER, dtype=torch.bfloat16)
    return str(folder / "target"), str(folder / "drafter")


@pytest.fixture(autouse=True)
def short_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    """Speeds from single calls: their values play no part here."""
    monkeypatch.setattr("outrider.bench.floor.READ_SECONDS", 0.0)
    monkeypatch.setattr("outrider.bench.floor.PRODUCT_SECONDS", 0.0)
    monkeypatch.setattr("outrider.bench.floor.PRODUCTS_RIC", ((64, 64, 64),))


def test_points_of_a_grid(pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target, _ = pair
    out, plot = tmp_path / "new" / "step.json", tmp_path / "step.svg"
    line = ["bench", "step", target, "--rows", "1,2,5", "--slots", "1,2", "--context", "16,40", "--repeats", "3"]
    assert main([*line, "--threads", "1", "--probe", "skip", "--json", str(out), "--plot", str(plot)]) == 0
    shown = capsys.readouterr().out
    row = json.loads(out.read_text(encoding="utf-8"))
    points = row["points"]
    combinations = [(point["context"], point["slots"], point["rows"]) for point in points]
    assert combinations == [(c, s, r) for c in (16, 40) for s in (1, 2) for r in (1, 2, 5) if r >= s]
    assert [(point["slots"], point["rows"]) for point in row["skipped"]] == [(2, 1)] * 2
    for point in points:
        assert point.keys() >= PROMISED
        assert all(math.isfinite(point[name]) and point[name] > 0 for name in PROMISED)
        assert point["floor_ms"] == max(point["bytes_floor_ms"], point["operations_floor_ms"])
        moved = point["weight_bytes"] + point["cache_bytes"]
        assert moved == sum(point["kind_bytes"].values())
        assert point["bytes_floor_ms"] == pytest.approx(moved / point["bandwidth_gb_s"] / 1e6)
        assert len(point["distinct_experts"]) == 3
        assert all(2 <= count <= min(8, 2 * point["rows"]) for count in point["distinct_experts"])
    ones = [point for point in points if (point["rows"], point["slots"]) == (1, 1)]
    assert [point["ratio_to_one_row"] for point in ones] == [1.0, 1.0]
    base = {point["context"]: point["median_ms"] for point in ones}
    assert all(p["ratio_to_one_row"] == pytest.approx(p["median_ms"] / base[p["context"]]) for p in points)
    assert [(each["slots"], each["context"]) for each in row["anatomy"]] == [(1, 16)] * 3
    for each in row["anatomy"]:
        assert sum(part["ms"] for part in each["parts"]) + each["watching_ms"] == pytest.approx(each["step_ms"])
    environment = row["environment"]
    assert environment["num_threads"] == 1 and len(environment["load_average"]) == 3
    assert environment.keys() >= {"commit", "processor", "libraries", "kernel_variables", "cpu_capability"}
    ElementTree.fromstring(plot.read_text(encoding="utf-8"))
    brief = json.loads(shown.splitlines()[-1])
    assert [(p["context"], p["slots"], p["rows"]) for p in brief["points"]] == combinations
    for words in ("One step", "Fastest speeds", "by part", "by operation", "KDA attention"):
        assert words in shown


def test_the_one_row_step_is_measured_where_it_is_not_asked_for(pair, tmp_path: Path) -> None:
    out = tmp_path / "step.json"
    line = ["bench", "step", pair[0], "--rows", "4", "--slots", "2", "--context", "16", "--repeats", "1"]
    assert main([*line, "--probe", "skip", "--json", str(out), "--experts", "packed"]) == 0
    (point,) = json.loads(out.read_text(encoding="utf-8"))["points"]
    assert (point["rows"], point["slots"]) == (4, 2) and point["ratio_to_one_row"] != 1.0


def test_a_random_pair_with_synthetic_rounds_and_a_row_in_the_ledger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    shape = {"target": toy_config(OPTIONS), "drafter": toy_drafter_config(DRAFTER)}
    (tmp_path / "tiny.json").write_text(json.dumps(shape), encoding="utf-8")
    line = ["bench", "step", "--random", str(tmp_path / "tiny.json"), "--rows", "1,3", "--slots", "1"]
    line += ["--context", "20", "--repeats", "2", "--synthetic-acceptance", "1,1", "--probe", "skip", "--record"]
    assert main(line) == 0
    assert "Rounds at a chosen acceptance" in capsys.readouterr().out
    (row,) = [json.loads(text) for text in Path("benchmarks/ledger.jsonl").read_text().splitlines()]
    assert row["model"] == "tiny" and row["settings"]["random"] == "tiny.json"
    (cell,) = row["synthetic"]
    assert cell["arms"]["spec"]["tokens_per_round"] == 3.0 == cell["expected_tokens"]
    assert cell["arms"].keys() == {"plain exact", "plain fast", "spec"}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("step", "either MODEL or --random"),
        ("step {target} --random k3-60m", "either MODEL or --random"),
        ("step --random k3-60m --drafter {drafter}", "brings its own drafter"),
        ("step --random k3-7t", "no random shape 'k3-7t'"),
        ("step {target} --context 4097", "context=4097 exceeds the 4096 positions"),
        ("step {target} --rows 0", "rows=0"),
        ("step {target} --rows 2 --slots 4", "fewer rows than slots"),
        ("step {target} --repeats 0", "repeats=0"),
        ("step {target} --synthetic-acceptance 0.5", "give --drafter"),
        ("step {target} --drafter {drafter} --synthetic-acceptance 1.5", "1.5 is outside 0..1"),
        ("startup {target} --repeats 0", "repeats=0"),
        ("startup absent", "no checkpoint 'absent'"),
    ],
)
def test_what_is_refused_in_one_line(pair, line: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    target, drafter = pair
    arguments = line.format(target=target, drafter=drafter).split()
    assert main(["bench", *arguments]) == 2
    error = capsys.readouterr().err.strip().splitlines()
    assert words in error[-1] and "Traceback" not in "".join(error)


def test_startup_reports_every_start_but_the_first(
    pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    starts = iter(range(1, 9))

    def one(options: dict[str, object], vocab_size: int) -> Start:
        number = next(starts)
        assert (options["threads"], options["experts"], vocab_size) == (1, "packed", 97)
        return Start(
            interpreter_s=0.1, import_s=0.2, load_s=float(number), first_token_s=0.5,
            imported={"total": 100}, running={"total": 350}, derived_bytes=50,
            num_slots=8, num_cache_tokens=64, num_log_rows=8,
        )  # fmt: skip

    monkeypatch.setattr(outrider.cli.bench_startup, "start_once", one)
    target, drafter = pair
    out = tmp_path / "start.json"
    line = ["bench", "startup", target, "--drafter", drafter, "--repeats", "3", "--experts", "packed"]
    assert main([*line, "--json", str(out)]) == 0
    row = json.loads(out.read_text(encoding="utf-8"))
    assert [start["load_s"] for start in row["starts"]] == [2.0, 3.0, 4.0]
    assert [start["to_first_token_s"] for start in row["starts"]] == [2.5, 3.5, 4.5]
    shown = capsys.readouterr().out
    assert "3.50 s" in shown and "weights and caches" in shown and "packed copies" in shown
    assert row["starts"][0]["derived_bytes"] == 50
