"""Gate: DSpark round trip. Prefill, rounds, release, repeat: the plain stream, whatever the drafter is like."""

import random
from pathlib import Path

import pytest
import torch

from outrider.models.dspark.checkpoint import TargetTables
from outrider.models.dspark.load import load_predictor
from outrider.speculative.drafter import Drafter, DSparkDrafter
from outrider.testing.scripted import ScriptedDrafter, oracle, random_drafts, wrong_at
from outrider.testing.toy_dspark import ToyDrafterOptions, write_toy_drafter
from outrider.testing.workbench import Company, Trace, ask, unequal

pytestmark = pytest.mark.gates
NUM_DRAFTS, MAX_LEN = 4, 64


@pytest.fixture(scope="module")
def asked(lab):  # type: ignore[no-untyped-def]
    """The shared requests, one that fills the context, and one with a stop id in the middle of a span."""
    here = lab(torch.float64)
    dice = random.Random(4)
    tokens = here.alone.token_ids["r0"]
    stop = next(token for index, token in enumerate(tokens) if index >= 3 and token not in tokens[:index])
    return (
        *here.asked[1:],
        ask("full", [dice.randrange(8, 250) for _ in range(MAX_LEN - 7)], None),
        ask("stop", here.asked[0].prompt_token_ids, 16, stop_token_ids=(stop,)),
    )


@pytest.fixture(scope="module")
def plain(lab, asked) -> Trace:  # type: ignore[no-untyped-def]
    trace = lab(torch.float64).bench.run(asked)
    assert [trace.ends[one.request_id] for one in asked] == ["length", "length", "length", "stop"]
    assert len(trace.token_ids["full"]) == 7
    assert 3 <= len(trace.token_ids["stop"]) < 16
    return trace


@pytest.fixture(scope="module")
def make_drafter(lab, asked, plain, tmp_path_factory):  # type: ignore[no-untyped-def]
    here = lab(torch.float64)
    streams = [one.prompt_token_ids + plain.token_ids[one.request_id] for one in asked]
    right = oracle([*streams[:3], asked[3].prompt_token_ids + here.alone.token_ids["r0"]])  # goes on past the stop

    def stale(token_ids: tuple[int, ...], count: int):  # type: ignore[no-untyped-def]
        """What would have been right two tokens ago."""
        return right(token_ids[:-2], count) if len(token_ids) > 5 else (0,) * count

    scripts = {
        "random": random_drafts(right, 250, 0.6, seed=3),
        "always-right": right,
        "always-wrong": wrong_at(0, right, 250),
        "stale": stale,
    }

    def make(kind: str, num_cache_rows: int) -> Drafter:
        if kind != "real":
            return ScriptedDrafter(NUM_DRAFTS, scripts[kind])
        target = here.bench.target
        directory: Path = tmp_path_factory.mktemp("drafter")
        options = ToyDrafterOptions(
            hidden_size=64, vocab_size=257, mask_token_id=256, num_target_layers=14, aux_layer_ids=(1, 6, 12)
        )
        write_toy_drafter(directory, options, seed=3)
        tables = TargetTables(embedding_VD=target.embedding, head_VD=target.lm_head)
        predictor = load_predictor(directory, target, tables, max_context=MAX_LEN)
        return DSparkDrafter(predictor, num_cache_rows=num_cache_rows)

    return make


@pytest.mark.parametrize("kind", ["random", "always-right", "always-wrong", "stale", "real"])
def test_dspark_round_trip(lab, asked, plain, make_drafter, kind: str) -> None:
    bench = lab(torch.float64).bench
    company = Company(seqs=3, step_rows=24, rounds_between=1)
    engine = bench.engine(make_drafter(kind, company.seqs * MAX_LEN), company)
    names = [one.request_id for one in asked]
    first = engine.run(asked, company.rounds_between)
    again = engine.run(asked, company.rounds_between)
    for trace in (first, again):
        assert not unequal(trace, plain, names)
        rounds = [one for name in names for one in trace.rounds[name]]
        assert all(0 <= accepted <= drafted <= NUM_DRAFTS for drafted, accepted in rounds)
        assert max(drafted for drafted, _ in rounds) == NUM_DRAFTS
        cuts = {accepted for drafted, accepted in rounds if drafted == NUM_DRAFTS}
        assert cuts == {"always-right": {NUM_DRAFTS}, "always-wrong": {0}}.get(kind, cuts)
    assert again.rounds == first.rounds, "the repeat walked differently: something of the first walk was left"
    # Without company the walk is the same too: every sequence drafts for itself.
    alone = bench.engine(make_drafter(kind, MAX_LEN), Company(seqs=1)).run(asked)
    assert not unequal(alone, plain, names)
    assert alone.rounds == first.rounds
