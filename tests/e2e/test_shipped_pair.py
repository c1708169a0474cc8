"""The promise of the README on the shipped pair in bfloat16: speculation and company change no token."""

import random
from pathlib import Path

import pytest
import torch

from outrider.bench.closed_loop import TokenisedPrompt, run_pass
from outrider.bench.records import PromptRecord
from outrider.bench.workload import demo_prompt_path, load_prompt_set
from outrider.engine.llm import LLM
from outrider.request import SamplingParams
from outrider.tokenizer import answer_stop_ids

MODELS = Path(__file__).resolve().parents[2] / "models"
TARGET, DRAFTER = MODELS / "k3-small", MODELS / "k3-small-dspark"
MAX_TOKENS, NUM_PER_TIER, CONCURRENCY = 32, 2, (1, 2, 4, 8)
TIERS = ("low_entropy", "mixed", "high_entropy")

Records = dict[str, PromptRecord]


@pytest.fixture(scope="module")
def engines() -> dict[str | int, LLM]:
    return {
        speculation: LLM(
            TARGET, DRAFTER, speculation=speculation, dtype="bfloat16", max_num_seqs=max(CONCURRENCY), max_model_len=512
        )
        for speculation in ("off", 3, 7, "auto")
    }


@pytest.fixture(scope="module")
def asked(engines: dict[str | int, LLM]) -> dict[str, list[TokenisedPrompt]]:
    """The shortest prompts of each tier, rendered as in `bench ab`."""
    tokenizer = engines["off"].tokenizer
    assert tokenizer is not None, "the shipped target has a tokenizer"
    rows = sorted(load_prompt_set(demo_prompt_path()).prompts, key=lambda row: len(row.text))
    return {
        tier: [
            TokenisedPrompt(
                question_id=row.question_id,
                token_ids=tuple(tokenizer.render_chat([{"role": "user", "content": row.text}])),
            )
            for row in [row for row in rows if row.tier == tier][:NUM_PER_TIER]
        ]
        for tier in TIERS
    }


def run(llm: LLM, prompts: list[TokenisedPrompt], concurrency: int) -> Records:
    assert llm.tokenizer is not None
    sampling = SamplingParams(max_tokens=MAX_TOKENS, stop_token_ids=answer_stop_ids(llm.tokenizer))
    record = run_pass(llm.engine, prompts, concurrency=concurrency, sampling=sampling)
    return {one.question_id: one for one in record.prompts}


@pytest.fixture(scope="module")
def alone(engines: dict[str | int, LLM], asked: dict[str, list[TokenisedPrompt]]) -> Records:
    """Plain decoding, one prompt at a time in an otherwise empty engine."""
    return run(engines["off"], [prompt for tier in TIERS for prompt in asked[tier]], 1)


def test_the_outputs_are_worth_comparing(alone: Records) -> None:
    assert len(alone) == NUM_PER_TIER * len(TIERS)
    assert sum(len(set(one.token_ids)) for one in alone.values()) > 30
    assert sum(one.num_drafted for one in alone.values()) == 0


@pytest.mark.parametrize("concurrency", CONCURRENCY)
@pytest.mark.parametrize("speculation", ["off", 3, 7, "auto"])
def test_every_stream_is_the_plain_one_run_alone(engines, asked, alone: Records, speculation, concurrency: int) -> None:
    order = [prompt for tier in TIERS for prompt in asked[tier]]
    random.Random(f"{speculation} {concurrency}").shuffle(order)
    records = run(engines[speculation], order, concurrency)
    different = [name for name, one in records.items() if one.token_ids != alone[name].token_ids]
    assert not different
    drafted = sum(one.num_drafted for one in records.values())
    if speculation == "auto":  # drafts where that pays, which depends on the machine
        return
    assert (drafted > 0) == (speculation != "off")
    if speculation != "off":
        assert sum(records[prompt.question_id].num_accepted for prompt in asked["low_entropy"]) > 0


def test_the_pair_computes_in_bfloat16(engines) -> None:
    llm = engines["auto"]
    assert llm.last_logits([1, 2, 3]).dtype == torch.bfloat16
