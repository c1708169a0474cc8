"""What the grids of `outrider verify` cover."""

import pytest

from outrider.testing.grid import CONCURRENCIES, GREEDY, SPLITS, Decoding, default_grid, full_grid


@pytest.mark.parametrize("block", [1, 2, 3, 7, 12])
def test_the_default_grid_meets_every_value(block: int) -> None:
    cells = default_grid(block)
    assert {cell.num_drafts for cell in cells} == set(range(block + 1))
    assert {cell.split for cell in cells} == set(SPLITS)
    assert {cell.concurrency for cell in cells if cell.num_drafts == block} == set(CONCURRENCIES)
    assert len(set(cells)) == len(cells) == block + len(CONCURRENCIES)


@pytest.mark.parametrize("block", [1, 7])
def test_the_full_grid_is_every_combination_and_holds_the_default_one(block: int) -> None:
    def values(cells):  # type: ignore[no-untyped-def]
        return {(cell.num_drafts, cell.concurrency, cell.split, cell.decoding) for cell in cells}

    full = full_grid(block)
    assert len(full) == len(values(full)) == (block + 1) * len(CONCURRENCIES) * len(SPLITS)
    assert values(default_grid(block)) <= values(full)


def test_every_way_of_decoding_gets_cells_of_its_own() -> None:
    seeded = tuple(Decoding(temperature=0.8, seed=seed) for seed in (1, 2))
    cells = default_grid(7, (GREEDY, *seeded))
    assert {cell.decoding for cell in cells} == {GREEDY, *seeded}
    assert [cell for cell in cells if cell.decoding == GREEDY] == list(default_grid(7))
    assert len(full_grid(3, (GREEDY, *seeded))) == 3 * len(full_grid(3))
    assert seeded[0].label == "T=0.8 seed=1"


def test_narrow_steps_hold_a_verify_span_and_split_a_round() -> None:
    narrow = SPLITS[-1]
    for num_drafts in (0, 7, 40):
        limits = narrow.limits(chunk_multiple=16, max_model_len=500, num_drafts=num_drafts)
        assert limits.max_step_rows == max(32, 1 + num_drafts)
        assert limits.max_prefill_tokens == 48
    whole = SPLITS[0].limits(chunk_multiple=16, max_model_len=500, num_drafts=7)
    assert (whole.max_step_rows, whole.max_prefill_tokens) == (None, 500)
