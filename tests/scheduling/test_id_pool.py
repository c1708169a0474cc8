"""Page and slot ids: one owner at a time, and free + used = all after any history."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from outrider.errors import EngineFault
from outrider.scheduling import IdPool


class PoolHistory(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = IdPool("page", 11)
        self.owned: list[tuple[int, ...]] = []

    @rule(count=st.integers(0, 12))
    def allocate(self, count: int) -> None:
        if count > self.pool.num_free:
            before = self.pool.num_free
            with pytest.raises(EngineFault, match=f"{count} ids of kind page"):
                self.pool.allocate(count)
            assert self.pool.num_free == before
        else:
            taken = self.pool.allocate(count)
            assert len(taken) == count
            self.owned.append(taken)

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        ids = self.owned.pop(data.draw(st.integers(0, len(self.owned) - 1)))
        self.pool.free(ids)
        if ids:
            with pytest.raises(EngineFault, match="not in use"):
                self.pool.free(ids[:1])

    @invariant()
    def every_id_has_one_owner(self) -> None:
        used = [owned_id for ids in self.owned for owned_id in ids]
        assert len(used) == len(set(used))
        assert all(0 <= owned_id < 11 for owned_id in used)
        assert self.pool.num_free + len(used) == self.pool.size == 11


PoolHistory.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestPoolHistory = PoolHistory.TestCase


def test_fresh_pool_hands_out_ascending_ids_and_reuses_the_latest() -> None:
    pool = IdPool("page", 6)
    assert pool.allocate(3) == (0, 1, 2)
    pool.free((0, 1, 2))
    assert pool.allocate(4) == (0, 1, 2, 3)


@pytest.mark.parametrize("foreign", [-1, 6, 5])
def test_freeing_a_foreign_id_is_a_fault(foreign: int) -> None:
    pool = IdPool("state slot", 6)
    pool.allocate(2)
    with pytest.raises(EngineFault, match=f"state slot {foreign}"):
        pool.free((foreign,))
