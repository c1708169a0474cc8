"""Gate: planted faults on the shipped pair. Each is found, except the control, which costs acceptance only."""

import json
from pathlib import Path

import pytest
import torch

from outrider.bench.workload import demo_prompt_path, load_prompt_set
from outrider.cli import main
from outrider.engine.load import load_vocabulary
from outrider.models.dspark.checkpoint import TargetTables
from outrider.models.dspark.load import load_predictor
from outrider.models.registry import load_target
from outrider.testing.equivalence import CellResult, Pair, PlainRuns, VerifyPrompt, compare, run_cell
from outrider.testing.faults import FAULTS, find_fault, planted
from outrider.testing.grid import DECODINGS, GREEDY, SPLITS, Cell
from outrider.tokenizer import answer_stop_ids

MODELS = Path(__file__).resolve().parents[2] / "models"
MAX_TOKENS, NUM_PROMPTS = 16, 4
SHORTEST_FIRST = 9  # the order seed that leaves four prompts in order: every seat goes to a longer one
# Seats change hands and bonus tokens follow few drafts; all drafts, drawn, by sequences that lose their seats.
CELLS = (
    Cell(num_drafts=2, concurrency=2, split=SPLITS[-1], decoding=GREEDY, order_seed=SHORTEST_FIRST),
    Cell(num_drafts=7, concurrency=4, split=SPLITS[0], decoding=DECODINGS[-1], order_seed=0, preemption="forced"),
)


@pytest.fixture(scope="module")
def prompts() -> list[VerifyPrompt]:
    """The shortest prompts, as `outrider verify` renders them."""
    tokenizer, _ = load_vocabulary(MODELS / "k3-small")
    assert tokenizer is not None, "the shipped target has a tokenizer"
    rows = sorted(load_prompt_set(demo_prompt_path()).prompts, key=lambda row: len(row.text))[:NUM_PROMPTS]
    return [
        VerifyPrompt(
            name=row.question_id, token_ids=tuple(tokenizer.render_chat([{"role": "user", "content": row.text}]))
        )
        for row in rows
    ]


@pytest.fixture(scope="module")
def pair(prompts: list[VerifyPrompt]) -> Pair:
    tokenizer, _ = load_vocabulary(MODELS / "k3-small")
    assert tokenizer is not None
    max_model_len = max(len(prompt.token_ids) for prompt in prompts) + MAX_TOKENS
    target = load_target(MODELS / "k3-small", dtype=torch.bfloat16)
    tables = TargetTables(embedding_VD=target.embedding, head_VD=target.lm_head)
    return Pair(
        target=target,
        predictor=load_predictor(MODELS / "k3-small-dspark", target, tables, max_context=max_model_len),
        device=torch.device("cpu"),
        max_model_len=max_model_len,
        max_tokens=MAX_TOKENS,
        stop_token_ids=answer_stop_ids(tokenizer),
    )


@pytest.fixture(scope="module")
def plain(pair: Pair) -> PlainRuns:
    """Without a fault; none of them shows in one prompt alone without drafts."""
    return PlainRuns(pair)


@pytest.fixture(scope="module")
def clean(pair: Pair, prompts: list[VerifyPrompt]) -> list[CellResult]:
    return [run_cell(pair, prompts, cell) for cell in CELLS]


@pytest.mark.gates
def test_the_sound_engine_is_identical(prompts, plain: PlainRuns, clean: list[CellResult]) -> None:
    for result in clean:
        assert not compare(prompts, result, plain)
        assert 0 < result.num_accepted < result.num_drafted, "without both, faults have nothing to show in"
    assert clean[1].num_preempted > 0


@pytest.mark.gates
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_and_the_control_costs_acceptance_only(
    pair: Pair, prompts, plain: PlainRuns, clean: list[CellResult], name: str
) -> None:
    fault = find_fault(name)
    with planted(fault):
        results = [run_cell(pair, prompts, cell) for cell in CELLS]
    differing = [cell for cell, result in zip(CELLS, results, strict=True) if compare(prompts, result, plain)]
    assert bool(differing) == fault.changes_output
    if not fault.changes_output:
        assert all(result.fault is None for result in results)
        assert [one.num_accepted for one in results] != [one.num_accepted for one in clean]


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_the_command_finds_it_on_the_shipped_pair(name: str, tmp_path: Path) -> None:
    rows = demo_prompt_path().read_text(encoding="utf-8").splitlines()
    shortest = sorted(rows, key=len)[:6]
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.json"
    prompts.write_text("\n".join(shortest), encoding="utf-8")
    line = f"verify {MODELS / 'k3-small'} --drafter {MODELS / 'k3-small-dspark'} --prompts {prompts} --json {out}"
    status = main([*line.split(), "--max-tokens", str(MAX_TOKENS), "--inject", name])
    assert status == int(FAULTS[name].changes_output)
    injected = json.loads(out.read_text(encoding="utf-8"))["injected"]
    if not FAULTS[name].changes_output:
        assert injected["acceptance"]["clean"] != injected["acceptance"]["injected"]
