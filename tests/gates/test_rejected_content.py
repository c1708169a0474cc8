"""Gate: rejected content cannot leak, whatever the rejected drafts are."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from outrider.testing.scripted import ScriptedDrafter
from outrider.testing.workbench import Company, unequal

pytestmark = pytest.mark.gates
DTYPES = (torch.float64, torch.float32, torch.bfloat16)
NUM_DRAFTS = 5


def first_wrong(right, mask: int):  # type: ignore[no-untyped-def]
    """The first draft differs from the target's token in its last bit; the others depend on ``mask``."""

    def script(token_ids: tuple[int, ...], count: int) -> list[int]:
        first, *others = right(token_ids, count)
        return [(first ^ 1) % 257, *((other ^ mask) % 250 for other in others)]

    return script


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rejected_content_cannot_leak(lab, dtype: torch.dtype) -> None:
    """Two walks that commit one token a round and differ in all rejected rows: same bits, those of no drafts."""
    here = lab(dtype)
    for mask in (0, 21):  # 0: right tokens behind a wrong one
        trace = here.bench.run(here.asked, ScriptedDrafter(NUM_DRAFTS, first_wrong(here.right, mask)), Company(seqs=3))
        assert not unequal(trace, here.alone, here.names)
        for name in here.names:
            drafted, accepted = zip(*trace.rounds[name], strict=True)
            assert max(drafted) == NUM_DRAFTS
            assert set(accepted) == {0}
            assert len(accepted) == len(trace.token_ids[name]) - 1


@contextmanager
def poisoned(table_VD: torch.Tensor, token_id: int) -> Iterator[None]:
    """The embedding of one token is NaN inside the ``with`` body."""
    kept_D = table_VD[token_id].detach().clone()
    with torch.no_grad():
        table_VD[token_id] = torch.nan
    try:
        yield
    finally:
        with torch.no_grad():
            table_VD[token_id] = kept_D


@pytest.mark.parametrize("num_right", [0, 2])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rejected_nan_leaves_no_trace(lab, dtype: torch.dtype, num_right: int) -> None:
    """Rejected rows are NaN through and through: one multiplied by zero instead of left out would stay."""
    here = lab(dtype)
    used = {token for one in here.asked for token in one.prompt_token_ids + here.alone.token_ids[one.request_id]}
    poison = next(token_id for token_id in range(8, 250) if token_id not in used)

    def script(token_ids: tuple[int, ...], count: int) -> list[int]:
        return [*here.right(token_ids, count)[:num_right], *[poison] * (count - num_right)]

    with poisoned(here.bench.target.embedding, poison):
        trace = here.bench.run(here.asked, ScriptedDrafter(NUM_DRAFTS, script), Company(seqs=3))
    assert not unequal(trace, here.alone, here.names)
    assert max(accepted for rounds in trace.rounds.values() for _, accepted in rounds) == num_right
