"""Gate: determinism and history. Nothing of earlier users, free memory or page ids may reach a row."""

import random

import pytest
import torch

from outrider.testing.scripted import ScriptedDrafter, random_drafts
from outrider.testing.workbench import Company, WatchedEngine, ask, fill_pools, scramble_ids, unequal

pytestmark = pytest.mark.gates
DTYPES = (torch.float64, torch.float32, torch.bfloat16)
FILLS = {
    "nan": lambda tensor: tensor.fill_(torch.nan),  # shows in everything that it touches, if only as 0 * NaN
    "0x3e": lambda tensor: tensor.view(torch.uint8).fill_(0x3E),  # small and finite: passes every NaN check
}


def make_history(engine: WatchedEngine, seed: int) -> None:
    """Prompts, decoding, aborts in any order; nothing runs afterwards."""
    dice = random.Random(seed)
    for index in range(3):
        length = dice.choice((3, 17, 40))
        noise = ask(f"noise-{seed}-{index}", [dice.randrange(8, 250) for _ in range(length)], dice.randint(1, 9))
        engine.engine.submit(noise)
        for _ in range(dice.randint(0, 2)):
            engine.engine.step()
        if dice.random() < 0.5:
            engine.engine.abort(noise.request_id)
    for index in range(3):
        engine.engine.abort(f"noise-{seed}-{index}")
    assert not engine.engine.has_work


@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_determinism_and_history(lab, dtype: torch.dtype, fill: str) -> None:
    here = lab(dtype)

    def script(token_ids: tuple[int, ...], count: int):  # type: ignore[no-untyped-def]
        known = any(token_ids[: len(one.prompt_token_ids)] == one.prompt_token_ids for one in here.asked)
        return random_drafts(here.right, 250, 0.7, seed=1)(token_ids, count) if known else (9,) * count

    engine = here.bench.engine(ScriptedDrafter(5, script), Company(seqs=3))
    for round_index in range(2):
        make_history(engine, seed=10 * round_index + len(fill))
        fill_pools(engine.caches, FILLS[fill])
        scramble_ids(engine.engine, seed=round_index)
        asked = here.asked if round_index == 0 else here.asked[::-1]
        assert not unequal(engine.run(asked), here.alone, here.names)


@pytest.mark.parametrize("seed", [1, 2])
def test_page_scramble(lab, seed: int) -> None:
    """Other pages and seats, and another page size: page ids and seats enter no arithmetic."""
    here = lab(torch.float64)
    plain = here.bench.engine(None, Company(seqs=5))
    scramble_ids(plain.engine, seed)
    assert not unequal(plain.run(here.asked), here.alone, here.names)
    other_pages = type(here.bench)(here.bench.target, page_size=(4, 32)[seed - 1], max_model_len=64)
    engine = other_pages.engine(ScriptedDrafter(3, here.right), Company(seqs=3))
    scramble_ids(engine.engine, seed)
    assert not unequal(engine.run(here.asked), here.alone, here.names)
