"""Plans and drafts become the right index tensors."""

import pytest
import torch

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
