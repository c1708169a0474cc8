"""Gate: packed isolation. A sequence's bits do not depend on who else is in the step, or where."""

import random

import pytest
import torch

from outrider.testing.driver import Driver, Span
from outrider.testing.scripted import ScriptedDrafter, random_drafts
from outrider.testing.workbench import Company, ask, scramble_ids, unequal

pytestmark = pytest.mark.gates
DTYPES = (torch.float64, torch.float32, torch.bfloat16)


def with_noise(right, noise_token: int):  # type: ignore[no-untyped-def]
    """Mostly right drafts for the known requests, one token for all others."""

    def script(token_ids: tuple[int, ...], count: int):  # type: ignore[no-untyped-def]
        try:
            return random_drafts(right, 250, 0.75, seed=count)(token_ids, count)
        except AssertionError:  # no stream begins like this
            return [noise_token] * count

    return script


@pytest.mark.parametrize("seed", range(5))
def test_packed_isolation_over_random_packings(lab, seed: int) -> None:
    """Random order, arrival, seats, row and prompt budgets (rounds split into steps), and neighbours."""
    here = lab(torch.float64)
    dice = random.Random(seed)
    noise = [
        ask(f"n{index}", [dice.randrange(8, 250) for _ in range(dice.choice((1, 20, 33)))], dice.randint(1, 9))
        for index in range(2)
    ]
    asked = [*here.asked, *noise]
    dice.shuffle(asked)
    company = Company(
        seqs=dice.choice((2, 3, 5)),
        step_rows=dice.choice((16, 24, None)),
        prefill_tokens=dice.choice((16, 48, 512)),
        rounds_between=dice.choice((0, 1, 3)),
    )
    drafter = ScriptedDrafter(dice.randint(1, 7), with_noise(here.right, dice.randrange(8, 250)))
    engine = here.bench.engine(drafter, company)
    scramble_ids(engine.engine, seed)
    assert not unequal(engine.run(asked, company.rounds_between), here.alone, here.names), company


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_packed_isolation_when_the_neighbour_changes(lab, dtype: torch.dtype) -> None:
    here = lab(dtype)
    for shift in (0, 1):
        neighbour = ask("n", [100 + shift + 7 * index for index in range(18)], 12)
        engine = here.bench.engine(ScriptedDrafter(5, with_noise(here.right, 50 + shift)), Company(seqs=10))
        scramble_ids(engine.engine, seed=4)  # two of ten seats, neither the first nor side by side
        assert not unequal(engine.run([neighbour, here.asked[1]]), here.alone, ["r1"])


def test_four_staggered_sequences_equal_the_solo_run(lab) -> None:
    """The same prompt four times, each two rounds behind the one before: prompt, plain and verify rows mix."""
    here = lab(torch.float64)
    one = here.asked[1]
    asked = [ask(f"s{index}", one.prompt_token_ids, one.sampling.max_tokens) for index in range(4)]
    company = Company(seqs=4, rounds_between=2)
    trace = here.bench.run(asked, ScriptedDrafter(2, random_drafts(here.right, 250, 0.4, seed=6)), company)
    assert {trace.stream(request.request_id) for request in asked} == {here.alone.stream("r1")}
    for (name, position), logits_V in here.alone.logits.items():
        if name == "r1":
            assert all(torch.equal(trace.logits[other.request_id, position], logits_V) for other in asked)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_row_independence_in_a_bucket_of_eight(deep, dtype: torch.dtype) -> None:
    """Eight rows, the upper four and one alone; in the full bucket also in another order."""
    dice = random.Random(5)
    prompts = [tuple(dice.randrange(257) for _ in range(3 + slot)) for slot in range(8)]
    driver = Driver(model=deep(dtype), num_slots=8, max_tokens=16)
    driver.forward([Span(slot=slot, token_ids=ids, is_prompt=True) for slot, ids in enumerate(prompts)])
    found: dict[int, list[torch.Tensor]] = {slot: [] for slot in range(8)}
    for slots in (range(8), range(4, 8), (6,), (3, 7, 1, 6, 0, 2, 5, 4)):
        spans = [Span(slot=slot, token_ids=(40 + slot,), is_prompt=False) for slot in slots]
        for slot, logits_V in zip(slots, driver.forward(spans).logits_NV, strict=True):
            found[slot].append(logits_V)
    assert [len(rows) for rows in found.values()] == [2, 2, 2, 2, 3, 3, 4, 3]
    assert all(torch.equal(rows[0], other) for rows in found.values() for other in rows[1:])
