"""Gate: oracle tracking, restated as equality. A verify row has the bits of the decode step it stands for."""

import random

import pytest
import torch

from outrider.testing.driver import Driver, Span
from outrider.testing.scripted import ScriptedDrafter
from outrider.testing.workbench import Company, unequal

pytestmark = pytest.mark.gates
DTYPES = (torch.float64, torch.float32, torch.bfloat16)
SLOT, NUM_ROWS = 2, 8


def state_of(driver: Driver) -> list[torch.Tensor]:
    num_tokens, size = driver.lengths[SLOT], driver.page_size
    rows = [int(driver.pages[SLOT, p // size]) * size + p % size for p in range(num_tokens)]
    recurrent = driver.caches.recurrent
    return [
        recurrent._state_LBHVK[:, SLOT],
        recurrent._window_LBWD[:, SLOT],
        driver.caches.latents._rows_LRC[:, rows],
    ]


@pytest.mark.parametrize("num_prompt", [1, 19])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_verify_equals_decode(deep, dtype: torch.dtype, num_prompt: int) -> None:
    """One span of eight, the same rows as spans of three and five, and eight single steps, past four snapshots."""
    dice = random.Random(num_prompt)
    ids = tuple(dice.randrange(257) for _ in range(num_prompt + NUM_ROWS))
    found = []
    for cuts in ((NUM_ROWS,), (3, 5), (1,) * NUM_ROWS):
        driver = Driver(model=deep(dtype), max_tokens=40)
        driver.forward([Span(slot=SLOT, token_ids=ids[:num_prompt], is_prompt=True)])
        logits, begin = [], num_prompt
        for count in cuts:
            logits.append(driver.forward([Span(slot=SLOT, token_ids=ids[begin : begin + count], is_prompt=False)]))
            driver.commit([count])
            begin += count
        found.append([torch.cat([output.logits_NV for output in logits]), *state_of(driver)])
    for other in found[1:]:
        assert all(torch.equal(one, two) for one, two in zip(found[0], other, strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_partly_committed_span_leaves_the_state_of_its_prefix(deep, dtype: torch.dtype) -> None:
    """For every number of committed rows; the rejected rest is different each time."""
    dice = random.Random(1)
    ids = tuple(dice.randrange(257) for _ in range(9 + NUM_ROWS))
    drivers = [Driver(model=deep(dtype), max_tokens=24) for _ in range(2)]
    stepped, spanned = drivers
    for driver in drivers:
        driver.forward([Span(slot=SLOT, token_ids=ids[:9], is_prompt=True)])
    for count in range(1, 4):
        begin = stepped.lengths[SLOT]
        rest = tuple(dice.randrange(257) for _ in range(NUM_ROWS - count))
        spanned.forward([Span(slot=SLOT, token_ids=ids[begin : begin + count] + rest, is_prompt=False)])
        spanned.commit([count])
        for token_id in ids[begin : begin + count]:
            stepped.forward([Span(slot=SLOT, token_ids=(token_id,), is_prompt=False)])
            stepped.commit([1])
        pairs = zip(state_of(stepped), state_of(spanned), strict=True)
        assert all(torch.equal(one, two) for one, two in pairs), count


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_oracle_tracking_flips_no_argmax(lab, dtype: torch.dtype) -> None:
    """The reference engine allows a quarter of the tokens to flip; here none does, and no logit moves."""
    here = lab(dtype)
    trace = here.bench.run(here.asked, ScriptedDrafter(7, here.right), Company(seqs=3))
    assert not unequal(trace, here.alone, here.names)
    assert all(accepted == drafted for rounds in trace.rounds.values() for drafted, accepted in rounds)
