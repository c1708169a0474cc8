"""Gate: chunked prefill at full depth, with the depth probe.

Cuts at multiples of the KDA chunk are bitwise. The per-token form rounds in another order: it is a reference
within a tolerance, and bitwise only against itself.
"""

import random

import pytest
import torch

from outrider.testing.driver import Driver, Span
from outrider.testing.workbench import Company, unequal

pytestmark = pytest.mark.gates
DTYPES = (torch.float64, torch.float32, torch.bfloat16)
IDS = tuple(random.Random(8).randrange(257) for _ in range(53))
# Of logits and states that spread over units: room for another order of rounding through 14 layers.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-2}


def run(model, cuts: tuple[int, ...], *, is_prompt: bool = True, ids: tuple[int, ...] = IDS):  # type: ignore[no-untyped-def]
    """Logits, KDA states, windows and latents of one sequence cut into ``cuts``; beside it runs another one."""
    driver = Driver(model=model, num_slots=2)
    logits, begin = [], 0
    for count in cuts:
        spans = [Span(slot=1, token_ids=ids[begin : begin + count], is_prompt=is_prompt)]
        logits.append(driver.forward(spans).logits_NV)
        if not is_prompt:
            driver.commit([count])
        begin += count
    assert begin == len(ids)
    rows = [int(driver.pages[1, p // driver.page_size]) * driver.page_size + p % driver.page_size for p in range(begin)]
    recurrent = driver.caches.recurrent
    states = (recurrent._state_LBHVK[:, 1], recurrent._window_LBWD[:, 1], driver.caches.latents._rows_LRC[:, rows])
    return (torch.cat(logits), *states)


def worst(found, expected) -> float:  # type: ignore[no-untyped-def]
    return max(float((one.double() - two.double()).abs().max()) for one, two in zip(found, expected, strict=True))


def test_the_toy_is_deep_enough(deep) -> None:
    """More than two snapshot blocks, and layers behind the last one: row 0 and shallow models hide strides."""
    model = deep(torch.float64)
    config = model.config
    assert config.num_snapshots > 2
    assert config.num_layers > 3 * config.attn_res_block_size
    assert len(IDS) > 3 * model.chunk_multiple > 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_chunk_multiples_are_bitwise(deep, dtype: torch.dtype) -> None:
    model = deep(dtype)
    whole = run(model, (53,))
    for cuts in ((16, 16, 16, 5), (32, 21), (48, 5)):
        assert all(torch.equal(one, two) for one, two in zip(run(model, cuts), whole, strict=True)), cuts


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_depth_probe_chunked_against_per_token(deep, dtype: torch.dtype) -> None:
    model = deep(dtype)
    ids = IDS[:37]
    stepped = run(model, (1,) * 37, is_prompt=False, ids=ids)
    assert worst(run(model, (37,), ids=ids), stepped) < TOLERANCE[dtype]
    spans = run(model, (8, 8, 8, 8, 5), is_prompt=False, ids=ids)
    assert all(torch.equal(one, two) for one, two in zip(spans, stepped, strict=True))


def test_a_ragged_cut_stays_close(deep) -> None:
    """Thirteen tokens at a cap of eight: no cut that the engine makes, so the bits may differ and nothing else."""
    model = deep(torch.float64)
    assert worst(run(model, (8, 5), ids=IDS[:13]), run(model, (13,), ids=IDS[:13])) < TOLERANCE[torch.float64]


@pytest.mark.parametrize("prefill_tokens", [16, 32, 48])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_prompt_budgets_of_the_engine_are_bitwise(lab, dtype: torch.dtype, prefill_tokens: int) -> None:
    """A budget cuts prompts and mixes their chunks with decode rows of others."""
    here = lab(dtype)
    trace = here.bench.run(here.asked[::-1], None, Company(seqs=3, prefill_tokens=prefill_tokens))
    assert not unequal(trace, here.alone, here.names)
