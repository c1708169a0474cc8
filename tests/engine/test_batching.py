"""Plans and drafts become the right index tensors."""

import random

import pytest
import torch

from outrider.batch import SpanGroup
from outrider.engine import batching
from outrider.engine.batching import PageTable, StepDrafts, StepSpans, build_batch
from outrider.errors import EngineFault
from outrider.plan import ScheduledSequence

CPU = torch.device("cpu")


def item(slot: int, start: int, tokens: tuple[int, ...], pages: tuple[int, ...], **changes: bool) -> ScheduledSequence:
    return ScheduledSequence(
        request_id=f"s{slot}",
        state_slot=slot,
        page_ids=pages,
        start_position=start,
        query_token_ids=tokens,
        draft_budget=3,
        is_prompt=changes.get("is_prompt", False),
        wants_logits=changes.get("wants_logits", True),
        is_first=False,
    )


def table(*items: ScheduledSequence) -> PageTable:
    page_table = PageTable(num_slots=4, max_pages=3, page_size=4, device=CPU)
    for entry in items:
        page_table.assign(entry.state_slot, entry.page_ids)
    return page_table


def test_a_mixed_step_is_laid_out_row_by_row() -> None:
    items = (
        item(2, 6, (50,), (9, 4, 7)),
        item(0, 3, (51,), (1, 2)),
        item(3, 0, (60, 61, 62), (5,), is_prompt=True),
        item(1, 4, (70, 71, 72, 73), (3, 8), is_prompt=True, wants_logits=False),
    )
    block = torch.tensor([[20, 21, 22], [10, 11, 12]])
    spans = StepSpans(items=items, verify_lengths=(3, 0, 0, 0))
    batch = build_batch(spans, StepDrafts(token_ids_SG=block, block_rows=(1, 0, 0, 0)), table(*items))

    assert batch.token_ids_T.tolist() == [50, 10, 11, 12, 51, 60, 61, 62, 70, 71, 72, 73]
    assert batch.positions_T.tolist() == [6, 7, 8, 9, 3, 0, 1, 2, 4, 5, 6, 7]
    assert batch.context_lens_T.tolist() == [7, 8, 9, 10, 4, 1, 2, 3, 5, 6, 7, 8]
    assert batch.sequence_T.tolist() == [0, 0, 0, 0, 1, 2, 2, 2, 3, 3, 3, 3]
    assert batch.slot_mapping_T.tolist() == [18, 19, 28, 29, 7, 20, 21, 22, 32, 33, 34, 35]
    assert batch.page_table_SP.tolist() == [[9, 4, 7], [1, 2, 0], [5, 0, 0], [3, 8, 0]]
    assert batch.logits_rows_N.tolist() == [0, 1, 2, 3, 4, 7]
    assert batch.max_context == 10
    assert batch.num_tokens == 12
    step, chunk = batch.step, batch.chunk
    assert (step.lengths, step.starts, step.state_slots_S.tolist()) == ((4, 1), (6, 3), [2, 0])
    assert step.rows_T.tolist() == [0, 1, 2, 3, 4]
    assert step.padded_rows_SM.tolist() == [[0, 1, 2, 3], [4, 0, 0, 0]]
    assert step.valid_SM.tolist() == [[True] * 4, [True, False, False, False]]
    assert (chunk.lengths, chunk.starts, chunk.state_slots_S.tolist()) == ((3, 4), (0, 4), [3, 1])
    assert chunk.rows_T.tolist() == [5, 6, 7, 8, 9, 10, 11]
    assert chunk.padded_rows_SM.tolist() == [[0, 1, 2, 0], [3, 4, 5, 6]]


def test_one_group_may_be_empty() -> None:
    decode = item(0, 3, (51,), (1, 2))
    no_drafts = StepDrafts(token_ids_SG=torch.empty((1, 0), dtype=torch.int64), block_rows=(0,))
    batch = build_batch(StepSpans(items=(decode,), verify_lengths=(0,)), no_drafts, table(decode))
    assert batch.chunk.lengths == ()
    assert batch.chunk.max_length == 0
    assert batch.chunk.rows_T.tolist() == []
    assert batch.chunk.padded_rows_SM.shape == batch.chunk.valid_SM.shape == (0, 0)
    assert batch.token_ids_T.tolist() == [51]


def test_rows_beyond_the_reserved_pages_are_a_fault() -> None:
    decode = item(0, 6, (51,), (1, 2))
    block = StepDrafts(token_ids_SG=torch.tensor([[1, 2, 3]]), block_rows=(0,))
    build_batch(StepSpans(items=(decode,), verify_lengths=(1,)), block, table(decode))
    with pytest.raises(EngineFault, match="s0: rows up to position 8 exceed its 2 pages of 4 tokens"):
        build_batch(StepSpans(items=(decode,), verify_lengths=(2,)), block, table(decode))


def test_a_page_table_row_keeps_nothing_of_its_last_owner() -> None:
    page_table = table(item(1, 0, (1,), (7, 8, 9)))
    page_table.assign(1, (4,))
    assert page_table.rows(torch.tensor([1]), 12).tolist() == [[4, 0, 0]]
    assert page_table.rows(torch.tensor([1]), 0).tolist() == [[4]]


def by_rows(spans: StepSpans, drafts: StepDrafts, page_size: int) -> dict[str, list[int]]:
    """The columns of a batch, row by row."""
    columns: dict[str, list[int]] = {
        name: [] for name in ("token_ids_T", "positions_T", "slot_mapping_T", "sequence_T")
    }
    columns["logits_rows_N"] = []
    rows = zip(spans.items, spans.verify_lengths, drafts.block_rows, strict=True)
    for sequence, (entry, num_drafts, block_row) in enumerate(rows):
        tokens = [*entry.query_token_ids, *drafts.token_ids_SG[block_row, :num_drafts].tolist()]
        for index, token in enumerate(tokens):
            position = entry.start_position + index
            if entry.wants_logits and (not entry.is_prompt or index == len(tokens) - 1):
                columns["logits_rows_N"].append(len(columns["token_ids_T"]))
            columns["token_ids_T"].append(token)
            columns["positions_T"].append(position)
            columns["slot_mapping_T"].append(entry.page_ids[position // page_size] * page_size + position % page_size)
            columns["sequence_T"].append(sequence)
    return columns


def check_group(group: SpanGroup, items: list[ScheduledSequence], lengths: list[int], first_row: int) -> None:
    assert (group.lengths, group.starts) == (tuple(lengths), tuple(entry.start_position for entry in items))
    assert group.state_slots_S.tolist() == [entry.state_slot for entry in items]
    assert group.rows_T.tolist() == list(range(first_row, first_row + sum(lengths)))
    assert group.num_keys_S.tolist() == [entry.start_position + n for entry, n in zip(items, lengths, strict=True)]
    begin = 0
    for index, (entry, length) in enumerate(zip(items, lengths, strict=True)):
        padding = group.max_length - length
        assert group.padded_rows_SM[index].tolist() == [*range(begin, begin + length)] + [0] * padding
        assert group.valid_SM[index].tolist() == [True] * length + [False] * padding
        keys = range(entry.start_position + 1, entry.start_position + length + 1)
        assert group.limits_SM[index].tolist() == [*keys] + [1] * padding
        begin += length


@pytest.mark.parametrize("form", ["native", "arrays"])
@pytest.mark.parametrize("seed", range(6))
def test_any_step_is_laid_out_as_row_by_row_whatever_the_slab_held(seed: int, form: str, monkeypatch) -> None:
    """Steps of all kinds through one page table; few sizes, so that shapes come again with other contents."""
    if form == "arrays":
        monkeypatch.setattr(batching, "library", lambda: None)
    elif batching.library() is None:
        pytest.skip("no native operations here")
    dice = random.Random(seed)
    page_size, max_pages, num_slots = 4, 12, 6
    page_table = PageTable(num_slots=num_slots, max_pages=max_pages, page_size=page_size, device=CPU)
    places = set()
    for _ in range(60):
        slots = dice.sample(range(num_slots), dice.choice((1, 2, 2, 4)))
        num_prompts = dice.choice((0, 0, 0, 1, len(slots)))
        items, verify_lengths = [], []
        for index, slot in enumerate(slots):
            is_prompt = index >= len(slots) - num_prompts
            tokens = tuple(dice.randrange(90) for _ in range(dice.randrange(1, 9) if is_prompt else 1))
            verify_lengths.append(0 if is_prompt else dice.choice((0, 2, 2, 3)))
            start = dice.randrange(page_size * max_pages - 12)
            pages = tuple(dice.sample(range(99), dice.randrange(-(-(start + 12) // page_size), max_pages + 1)))
            page_table.assign(slot, pages)
            flags = {"is_prompt": is_prompt, "wants_logits": not is_prompt or dice.random() < 0.5}
            items.append(item(slot, start, tokens, pages, **flags))
        spans = StepSpans(items=tuple(items), verify_lengths=tuple(verify_lengths))
        block = torch.tensor([[dice.randrange(90) for _ in range(3)] for _ in slots])
        drafts = StepDrafts(token_ids_SG=block, block_rows=tuple(dice.sample(range(len(slots)), len(slots))))
        batch = build_batch(spans, drafts, page_table)

        for name, expected in by_rows(spans, drafts, page_size).items():
            assert getattr(batch, name).tolist() == expected, name
        assert batch.context_lens_T.tolist() == [position + 1 for position in batch.positions_T.tolist()]
        rows = [[*entry.page_ids] + [0] * (max_pages - len(entry.page_ids)) for entry in items]
        assert batch.page_table_SP.tolist() == rows
        num_decodes = spans.num_decodes
        check_group(batch.step, items[:num_decodes], [*spans.lengths[:num_decodes]], 0)
        num_step_rows = sum(spans.lengths[:num_decodes])
        check_group(batch.chunk, items[num_decodes:], [*spans.lengths[num_decodes:]], num_step_rows)
        assert (batch.place is None) == (num_prompts > 0)
        if batch.place is not None:
            places.add(id(batch.place))
    assert 3 < len(places) < 20  # of 25 steps or more without prompts


def test_batches_of_a_shape_lie_in_one_place() -> None:
    first, second = item(0, 3, (51,), (1, 2)), item(2, 5, (52,), (9, 4))
    page_table = table(first, second)
    drafts = StepDrafts(token_ids_SG=torch.tensor([[5, 6]]), block_rows=(0,))
    one = build_batch(StepSpans(items=(first,), verify_lengths=(1,)), drafts, page_table)
    addresses = [one.token_ids_T.data_ptr(), one.page_table_SP.data_ptr(), one.step.limits_SM.data_ptr()]
    other = build_batch(StepSpans(items=(second,), verify_lengths=(1,)), drafts, page_table)
    assert other.place is one.place is not None
    assert addresses == [other.token_ids_T.data_ptr(), other.page_table_SP.data_ptr(), other.step.limits_SM.data_ptr()]
    longer = build_batch(StepSpans(items=(second,), verify_lengths=(2,)), drafts, page_table)
    assert longer.place is not one.place
