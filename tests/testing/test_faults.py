"""Planted faults come out again, whatever happens while they are in."""

import pytest

import outrider.engine.accept
import outrider.engine.round
import outrider.engine.runner
from outrider.cache.cache_set import CacheSet
from outrider.cache.recurrent import RecurrentCache
from outrider.engine.batching import PageTable
from outrider.errors import ConfigError
from outrider.speculative.drafter import DSparkDrafter
from outrider.testing.faults import FAULTS, find_fault, planted

PLACES = (
    (CacheSet, "commit"),
    (RecurrentCache, "commit"),
    (PageTable, "assign"),
    (outrider.engine.round, "build_batch"),
    (outrider.engine.accept, "build_choices"),
    (outrider.engine.runner, "copy_in"),
    (DSparkDrafter, "observe"),
)


def functions() -> list[object]:
    return [getattr(owner, name) for owner, name in PLACES]


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_replaces_what_it_must_and_puts_it_back(name: str) -> None:
    before = functions()
    with pytest.raises(KeyError), planted(find_fault(name)):
        assert sum(now is not then for now, then in zip(functions(), before, strict=True)) == (
            2 if name == "stale-page" else 1
        )
        raise KeyError
    assert all(now is then for now, then in zip(functions(), before, strict=True))


def test_nothing_is_planted_without_a_name() -> None:
    before = functions()
    with planted(None):
        assert all(now is then for now, then in zip(functions(), before, strict=True))


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"'off-by-two' is unknown; known are commit-off-by-one, .*, shifted-tap"):
        find_fault("off-by-two")
    assert [fault.name for fault in FAULTS.values() if not fault.changes_output] == ["shifted-tap"]
