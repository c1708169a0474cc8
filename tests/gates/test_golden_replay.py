"""Gate: golden replay. Stored continuations of the literal model, with the top five of every logit row."""

from pathlib import Path

import pytest
import torch

from outrider.testing.driver import Driver, Span
from outrider.testing.golden import GOLDEN_PROMPTS, GOLDEN_SEED, GoldenRun, golden_run, read_golden
from outrider.testing.reference_k3 import reference_forward
from outrider.testing.scripted import ScriptedDrafter, oracle, random_drafts
from outrider.testing.toy import deep_toy, toy_config, toy_tensors
from outrider.testing.workbench import Company, Workbench, ask

pytestmark = pytest.mark.gates
GOLDEN = read_golden(Path(__file__).with_name("golden_deep_toy.json"))
TOLERANCE = 1e-9


def forced_rows(model, run: GoldenRun, span_rows: int) -> torch.Tensor:  # type: ignore[no-untyped-def]
    """Logits of the rows that choose each golden token, the golden tokens being fed, ``span_rows`` at a time."""
    driver = Driver(model=model)
    rows = [driver.forward([Span(slot=1, token_ids=run.prompt_token_ids, is_prompt=True)]).logits_NV[-1:]]
    for begin in range(0, len(run.steps) - 1, span_rows):
        token_ids = run.token_ids[begin : min(begin + span_rows, len(run.steps) - 1)]
        rows.append(driver.forward([Span(slot=1, token_ids=token_ids, is_prompt=False)]).logits_NV)
        driver.commit([len(token_ids)])
    return torch.cat(rows).double()


def check_top_five(logits_NV: torch.Tensor, run: GoldenRun) -> None:
    assert len(logits_NV) == len(run.steps)
    for logits_V, step in zip(logits_NV, run.steps, strict=True):
        ranked = sorted(range(len(logits_V)), key=lambda token_id: (-float(logits_V[token_id]), token_id))
        assert tuple(ranked[:5]) == step.token_ids
        assert (
            float((logits_V[list(step.token_ids)] - torch.tensor(step.logits, dtype=torch.float64)).abs().max())
            < TOLERANCE
        )


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_file_is_of_the_literal_model(name: str) -> None:
    """The last stored row, from a fresh run of the literal model over all tokens before it."""
    run = GOLDEN[name]
    assert run.prompt_token_ids == GOLDEN_PROMPTS[name]
    assert len(set(run.token_ids)) > len(run.token_ids) // 2, "a stream that repeats itself proves little"
    if name == "short":
        tensors, config = toy_tensors(deep_toy(), GOLDEN_SEED), toy_config(deep_toy())
        token_ids = run.prompt_token_ids + run.token_ids[:-1]
        rows = reference_forward(tensors, config, token_ids).logits_TV[len(run.prompt_token_ids) - 1 :]
        check_top_five(rows, run)
        (step,) = golden_run(deep_toy(), GOLDEN_SEED, run.prompt_token_ids, 1).steps
        assert step.token_ids == run.steps[0].token_ids


@pytest.mark.parametrize("name", GOLDEN)
@pytest.mark.parametrize("span_rows", [1, 8])
def test_golden_forced_replay(deep, name: str, span_rows: int) -> None:
    """Decode rows, and verify spans of eight."""
    check_top_five(forced_rows(deep(torch.float64), GOLDEN[name], span_rows), GOLDEN[name])


@pytest.mark.parametrize("kind", ["plain", "speculative"])
def test_golden_greedy_replay(deep, kind: str) -> None:
    """Both prompts at once; there is no coin flip up to which one could only compare."""
    bench = Workbench(deep(torch.float64))
    asked = [ask(name, run.prompt_token_ids, len(run.steps)) for name, run in GOLDEN.items()]
    right = oracle([run.prompt_token_ids + run.token_ids for run in GOLDEN.values()])
    drafter = ScriptedDrafter(7, random_drafts(right, 250, 0.8, seed=2)) if kind == "speculative" else None
    trace = bench.run(asked, drafter, Company(seqs=2))
    for name, run in GOLDEN.items():
        assert trace.stream(name) == (run.token_ids, "length")
        first = len(run.prompt_token_ids) - 1
        rows = [trace.logits[name, first + index] for index in range(len(run.steps))]
        check_top_five(torch.stack(rows), run)


# Of logits that spread over several units. Random toys amplify rounding from layer to layer: in bfloat16 the same
# rows are off by up to 7, so a replay there would say nothing.
FLOAT32_NOISE = 1e-3


def test_golden_forced_replay_in_float32(deep) -> None:
    """The noise is bounded, and a token flips only where its golden margin is below twice the noise."""
    run = GOLDEN["chunk"]
    logits_NV = forced_rows(deep(torch.float32), run, span_rows=8)
    top_ids_N5 = torch.tensor([step.token_ids for step in run.steps])
    golden_N5 = torch.tensor([step.logits for step in run.steps], dtype=torch.float64)
    noise = float((logits_NV.gather(1, top_ids_N5) - golden_N5).abs().max())
    assert 0 < noise < FLOAT32_NOISE
    flipped_N = logits_NV.argmax(-1) != top_ids_N5[:, 0]
    margins_N = golden_N5[:, 0] - golden_N5[:, 1]
    assert bool((margins_N[flipped_N] < 2 * noise).all())
