"""Gate: corruption value. A right draft block that is corrupted at index i is cut exactly at i, for every i."""

import pytest
import torch

from outrider.testing.scripted import ScriptedDrafter
from outrider.testing.workbench import Company, Trace, unequal

pytestmark = pytest.mark.gates
NUM_DRAFTS = 7


def corrupted(right, index: int, mask: int):  # type: ignore[no-untyped-def]
    def script(token_ids: tuple[int, ...], count: int) -> list[int]:
        drafts = list(right(token_ids, count))
        drafts[index] = (drafts[index] ^ mask) % 257
        return drafts

    return script


def walk(here, script) -> Trace:  # type: ignore[no-untyped-def]
    return here.bench.run(here.asked, ScriptedDrafter(NUM_DRAFTS, script), Company(seqs=3))


@pytest.mark.parametrize("index", range(NUM_DRAFTS))
def test_corruption_is_cut_at_its_index(lab, index: int) -> None:
    """Also independent of the wrong value. Exact, because a verify row has the bits of a decode row."""
    here = lab(torch.float64)
    for mask in (1, 2):
        trace = walk(here, corrupted(here.right, index, mask))
        assert not unequal(trace, here.alone, here.names)
        rounds = [one for name in here.names for one in trace.rounds[name]]
        assert all(accepted == min(index, drafted) for drafted, accepted in rounds), rounds
        assert any(drafted == NUM_DRAFTS for drafted, _ in rounds)


def test_oracle_drafts_reach_the_cap(lab) -> None:
    here = lab(torch.float64)
    trace = walk(here, here.right)
    assert not unequal(trace, here.alone, here.names)
    assert trace.rounds["r0"] == [(7, 7), (6, 6)]  # 16 tokens: one from the prompt, then 8 and 7
    assert all(accepted == drafted for name in here.names for drafted, accepted in trace.rounds[name])
