"""Gate: the negative control on the shipped pair. A shifted tap costs acceptance and changes no token."""

from pathlib import Path

import pytest
import torch

from outrider.bench.workload import demo_prompt_path, load_prompt_set
from outrider.engine.load import load_vocabulary
from outrider.models.dspark.checkpoint import TargetTables
from outrider.models.dspark.load import load_predictor
from outrider.models.registry import load_target
from outrider.testing.equivalence import Pair, PlainRuns, VerifyPrompt, compare, run_cell
from outrider.testing.faults import find_fault, planted
from outrider.testing.grid import GREEDY, SPLITS, Cell
from outrider.tokenizer import answer_stop_ids

pytestmark = pytest.mark.gates
MODELS = Path(__file__).resolve().parents[2] / "models"
MAX_TOKENS, NUM_PROMPTS = 16, 4


def test_shifted_tap_changes_acceptance_and_no_output() -> None:
    tokenizer, _ = load_vocabulary(MODELS / "k3-small")
    assert tokenizer is not None, "the shipped target has a tokenizer"
    rows = sorted(load_prompt_set(demo_prompt_path()).prompts, key=lambda row: len(row.text))[:NUM_PROMPTS]
    prompts = [
        VerifyPrompt(
            name=row.question_id, token_ids=tuple(tokenizer.render_chat([{"role": "user", "content": row.text}]))
        )
        for row in rows
    ]
    max_model_len = max(len(prompt.token_ids) for prompt in prompts) + MAX_TOKENS
    target = load_target(MODELS / "k3-small", dtype=torch.bfloat16)
    tables = TargetTables(embedding_VD=target.embedding, head_VD=target.lm_head)
    pair = Pair(
        target=target,
        predictor=load_predictor(MODELS / "k3-small-dspark", target, tables, max_context=max_model_len),
        device=torch.device("cpu"),
        max_model_len=max_model_len,
        max_tokens=MAX_TOKENS,
        stop_token_ids=answer_stop_ids(tokenizer),
    )
    plain = PlainRuns(pair)
    cell = Cell(num_drafts=7, concurrency=NUM_PROMPTS, split=SPLITS[0], decoding=GREEDY, order_seed=0)
    clean = run_cell(pair, prompts, cell)
    with planted(find_fault("shifted-tap")):
        shifted = run_cell(pair, prompts, cell)
    assert not compare(prompts, clean, plain)
    assert not compare(prompts, shifted, plain)
    assert clean.num_accepted > 0, "a drafter that never guesses right could not get worse"
    assert (clean.num_drafted, clean.num_accepted) != (shifted.num_drafted, shifted.num_accepted)
