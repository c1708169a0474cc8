"""What the grids of `outrider verify` cover."""

import pytest

from outrider.testing.grid import CONCURRENCIES, DECODINGS, DISTURBANCES, GREEDY, SPLITS, default_grid, full_grid

SEEDED = DECODINGS[1:]


def calm(cells):  # type: ignore[no-untyped-def]
    return [cell for cell in cells if (cell.preemption, cell.speculating) == ("none", "all")]


def disturbed(cells):  # type: ignore[no-untyped-def]
    return [cell for cell in cells if (cell.preemption, cell.speculating) != ("none", "all")]


@pytest.mark.parametrize("block", [1, 2, 3, 7, 12])
def test_the_default_grid_meets_every_value(block: int) -> None:
    cells = default_grid(block)
    assert {cell.num_drafts for cell in cells} == set(range(block + 1))
    assert {cell.split for cell in cells} == set(SPLITS)
    assert {cell.concurrency for cell in cells if cell.num_drafts == block} == set(CONCURRENCIES)
    assert {cell.decoding for cell in cells} == set(DECODINGS)
    assert {cell.preemption for cell in cells} == {"none", "oversubscribed", "forced"}
    assert {cell.speculating for cell in cells} == {"all", "half"}
    greedy = [cell for cell in calm(cells) if cell.decoding == GREEDY]
    assert len(set(greedy)) == len(greedy) == block + len(CONCURRENCIES)
    assert len(set(cells)) == len(cells)


@pytest.mark.parametrize("block", [1, 7])
def test_the_full_grid_is_every_combination_and_holds_the_default_one(block: int) -> None:
    def values(cells):  # type: ignore[no-untyped-def]
        return {(cell.num_drafts, cell.concurrency, cell.split, cell.decoding) for cell in calm(cells)}

    full = full_grid(block)
    assert len(calm(full)) == len(values(full))
    assert len(values(full)) == (block + 1) * len(CONCURRENCIES) * len(SPLITS) * len(DECODINGS)
    assert values(default_grid(block)) <= values(full)


@pytest.mark.parametrize("block", [1, 7])
def test_the_full_grid_has_every_disturbance_where_it_disturbs(block: int) -> None:
    def values(cells):  # type: ignore[no-untyped-def]
        return {(c.num_drafts, c.concurrency, c.preemption, c.speculating) for c in disturbed(cells)}

    full = full_grid(block)
    assert len(values(full)) == len(disturbed(full))
    assert values(default_grid(block)) <= values(full)
    assert {(c.preemption, c.speculating) for c in disturbed(full)} == set(DISTURBANCES)
    for counts, concurrency, preemption, speculating in values(full):
        assert concurrency > 1 or preemption != "oversubscribed"
        assert counts > 0 or speculating == "all"
    # forced: all; oversubscribed: in company; half: with a drafter
    num_companies, num_alone = len(CONCURRENCIES) - 1, len(CONCURRENCIES)
    assert len(disturbed(full)) == (block + 1) * (num_companies + num_alone) + block * (num_companies + 2 * num_alone)
    if block == 7:
        assert len({(cell.split, cell.decoding) for cell in disturbed(full)}) == len(SPLITS) * len(DECODINGS)


def test_every_way_of_decoding_gets_cells_of_its_own() -> None:
    cells = default_grid(7)
    assert [cell for cell in calm(cells) if cell.decoding == GREEDY] == calm(default_grid(7, (GREEDY,)))
    for decoding in SEEDED:
        assert {cell.num_drafts for cell in calm(cells) if cell.decoding == decoding} == {4, 7}
    assert len(calm(full_grid(3))) == len(DECODINGS) * len(calm(full_grid(3, (GREEDY,))))
    assert [decoding.label for decoding in SEEDED] == ["T=0.7 seed=1", "T=1 seed=2"]
    assert len({decoding.seed for decoding in SEEDED}) == len(SEEDED)


@pytest.mark.parametrize(
    ("lengths", "num_pages"),
    [
        ([80] * 20, 4 * (10 + 1)),  # eight seats, four taken
        ([80, 81] * 3, 3 * (10 + 11 + 2) // 2),  # six prompts, three seats taken
        ([80], -(-500 // 8)),  # never less than one sequence needs
    ],
)
def test_an_oversubscribed_cell_has_pages_for_half_of_its_seats(lengths: list[int], num_pages: int) -> None:
    (cell,) = [cell for cell in default_grid(7) if cell.preemption == "oversubscribed"]
    assert (cell.concurrency, cell.split.page_size) == (8, 8)
    limits = cell.limits(chunk_multiple=16, max_model_len=500 if len(lengths) == 1 else 200, prompt_lengths=lengths)
    assert limits.oversubscribe and limits.num_pages == num_pages
    assert cell.label.endswith(", greedy, oversubscribed")


def test_other_cells_have_pages_for_everybody() -> None:
    for cell in default_grid(7):
        if cell.preemption != "oversubscribed":
            sizes = {"chunk_multiple": 16, "max_model_len": 500}
            assert cell.limits(**sizes, prompt_lengths=[80]) == cell.split.limits(**sizes, num_drafts=cell.num_drafts)


def test_half_of_the_prompts_ask_for_no_drafts() -> None:
    (cell,) = [cell for cell in default_grid(7) if cell.speculating == "half"]
    assert [cell.speculates(index) for index in range(4)] == [True, False, True, False]
    assert cell.decoding.sampling(max_tokens=3, stop_token_ids=(), speculation=False).speculation == "off"
    assert all(other.speculates(1) for other in default_grid(7) if other != cell)
    assert cell.label.endswith(", half without drafts")


def test_narrow_steps_hold_a_verify_span_and_split_a_round() -> None:
    narrow = SPLITS[-1]
    for num_drafts in (0, 7, 40):
        limits = narrow.limits(chunk_multiple=16, max_model_len=500, num_drafts=num_drafts)
        assert limits.max_step_rows == max(32, 1 + num_drafts)
        assert limits.max_prefill_tokens == 48
    whole = SPLITS[0].limits(chunk_multiple=16, max_model_len=500, num_drafts=7)
    assert (whole.max_step_rows, whole.max_prefill_tokens) == (None, 500)
