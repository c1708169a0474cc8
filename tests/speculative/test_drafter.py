"""DSparkDrafter through steps of mixed spans, with a target that is only a source of taps."""

import pytest
import torch

from outrider.batch import ForwardBatch, SpanGroup, TargetOutput
from outrider.errors import CheckpointError, EngineFault
from outrider.models.dspark.checkpoint import TargetTables
from outrider.models.dspark.load import load_predictor
from outrider.ops.linear import embedding, linear
from outrider.speculative.drafter import Anchors, DSparkDrafter, NullDrafter, ObservedSpans
from outrider.testing.toy_dspark import ToyDrafterOptions, write_toy_drafter

PAGE_SIZE, NUM_PAGES, MAX_CONTEXT, NUM_SLOTS = 4, 60, 64, 4
OPTIONS = ToyDrafterOptions()


class FakeTarget:
    """Embedding and head of a target, and a tap for every (sequence, position)."""

    vocab_size, hidden_size, num_layers = 97, 32, 6

    def __init__(self):
        generator = torch.Generator().manual_seed(1)
        self.embedding = torch.randn(97, 32, generator=generator)
        self.lm_head = torch.randn(97, 32, generator=generator) / 4
        self.taps = torch.randn(NUM_SLOTS, MAX_CONTEXT, 3, 32, generator=generator)

    def embed(self, token_ids_T):
        return embedding(token_ids_T, self.embedding)

    def head(self, hidden_ND):
        return linear(hidden_ND, self.lm_head)


@pytest.fixture
def target():
    return FakeTarget()


@pytest.fixture
def drafter(target, tmp_path):
    return make_drafter(target, tmp_path)


def make_drafter(target, directory, **kwargs):
    write_toy_drafter(directory, OPTIONS)
    tables = TargetTables(embedding_VD=target.embedding, head_VD=target.lm_head)
    predictor = load_predictor(directory, target, tables, max_context=MAX_CONTEXT, with_confidence=True, **kwargs)
    return DSparkDrafter(predictor, num_cache_rows=NUM_PAGES * PAGE_SIZE)


def page_table(slot):
    """Every slot owns its pages, strided so that neighbours interleave."""
    return torch.arange(MAX_CONTEXT // PAGE_SIZE - 1) * NUM_SLOTS + slot


def group(spans, first_row):
    """Spans are (slot, start, number of rows)."""
    lengths = tuple(length for _, _, length in spans)
    total = sum(lengths)
    width = max(lengths, default=0)
    return SpanGroup(
        rows_T=torch.arange(first_row, first_row + total),
        state_slots_S=torch.tensor([slot for slot, _, _ in spans], dtype=torch.int64),
        lengths=lengths,
        starts=tuple(start for _, start, _ in spans),
        padded_rows_SM=torch.zeros(len(spans), width, dtype=torch.int64),
        valid_SM=torch.zeros(len(spans), width, dtype=torch.bool),
        limits_SM=torch.ones(len(spans), width, dtype=torch.int64),
        num_keys_S=torch.tensor([start + length for _, start, length in spans], dtype=torch.int64),
    )


def run_step(drafter, target, *, chunks=(), steps=(), committed=(), rejected_value=None):
    """One target step: step spans first in the flat batch, then chunks; then observe."""
    spans = [*steps, *chunks]
    cells = [(slot, start + i) for slot, start, length in spans for i in range(length)]
    slots = torch.tensor([slot for slot, _ in cells])
    positions = torch.tensor([position for _, position in cells])
    taps = target.taps[slots, positions].clone()
    row = 0
    for (_, _, length), count in zip(steps, committed, strict=True):
        if rejected_value is not None:
            taps[row + count : row + length] = rejected_value
        row += length
    pages = torch.stack([page_table(slot) for slot in range(NUM_SLOTS)])
    batch = ForwardBatch(
        token_ids_T=torch.zeros_like(positions),
        positions_T=positions,
        context_lens_T=positions + 1,
        sequence_T=slots,
        slot_mapping_T=pages[slots, positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE,
        page_table_SP=pages,
        logits_rows_N=torch.zeros(0, dtype=torch.int64),
        chunk=group(chunks, row),
        step=group(steps, 0),
        page_size=PAGE_SIZE,
        max_context=int(positions.max()) + 1,
    )
    drafter.observe(
        batch,
        TargetOutput(logits_NV=torch.zeros(0, 97), aux_hidden_TAD=taps),
        ObservedSpans(
            chunk_slots=tuple(slot for slot, _, _ in chunks),
            step_slots=tuple(slot for slot, _, _ in steps),
            step_committed=tuple(committed),
        ),
    )


def anchors(cells):
    """``cells`` maps slot to (anchor id, position)."""
    return Anchors(
        token_ids_S=torch.tensor([token for token, _ in cells.values()], dtype=torch.int64),
        positions_S=torch.tensor([position for _, position in cells.values()], dtype=torch.int64),
        page_table_SP=torch.stack([page_table(slot) for slot in cells]) if cells else torch.zeros(0, 1).long(),
        page_size=PAGE_SIZE,
        slots=tuple(cells),
        positions=tuple(position for _, position in cells.values()),
    )


def assert_same(block, expected):
    assert torch.equal(block.token_ids_SG, expected.token_ids_SG)
    assert torch.equal(block.confidence_SG, expected.confidence_SG)


@pytest.mark.parametrize("rejected_value", [None, torch.nan, 1e30])
def test_any_history_of_steps_equals_one_prefill(drafter, target, tmp_path, rejected_value):
    drafter.reset((0, 1, 3))
    run_step(drafter, target, chunks=((0, 0, 7), (1, 0, 16)))
    run_step(drafter, target, chunks=((3, 0, 5),), steps=((0, 7, 5), (1, 16, 1)), committed=(3, 1))
    run_step(
        drafter, target, steps=((0, 10, 5), (3, 5, 5), (1, 17, 5)), committed=(1, 5, 2), rejected_value=rejected_value
    )
    assert [drafter.observed_tokens(slot) for slot in (0, 1, 3)] == [11, 19, 10]
    cells = {3: (8, 10), 0: (9, 11), 1: (2, 19)}
    mixed = drafter.propose(anchors(cells))
    fresh = make_drafter(target, tmp_path / "fresh")
    fresh.reset((0, 1, 3))
    run_step(fresh, target, chunks=((0, 0, 11), (1, 0, 19), (3, 0, 10)))
    assert_same(fresh.propose(anchors(cells)), mixed)
    assert mixed.token_ids_SG.shape == (3, 4)


def test_a_slot_forgets_on_release_and_starts_again(drafter, target):
    drafter.reset((2,))
    run_step(drafter, target, chunks=((2, 0, 9),))
    first = drafter.propose(anchors({2: (5, 9)}))
    run_step(drafter, target, steps=((2, 9, 5),), committed=(4,))
    drafter.release((2,))
    with pytest.raises(EngineFault, match="holds no sequence"):
        drafter.propose(anchors({2: (5, 13)}))
    drafter.reset((2,))
    run_step(drafter, target, chunks=((2, 0, 9),))  # shorter than before: stale rows lie behind it
    assert_same(drafter.propose(anchors({2: (5, 9)})), first)


def test_a_snapshot_goes_on_in_another_slot_and_on_other_pages(drafter, target):
    def rows(slot, count):
        positions = torch.arange(count)
        return page_table(slot)[positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE

    drafter.reset((0,))
    run_step(drafter, target, chunks=((0, 0, 9),))
    expected = drafter.propose(anchors({0: (5, 9)}))
    with pytest.raises(EngineFault, match=r"copy at position 8 of slot 0.*9 tokens"):
        drafter.snapshot(0, rows(0, 8))
    snapshot = drafter.snapshot(0, rows(0, 9))
    drafter.release((0,))
    target.taps = target.taps + 1
    drafter.reset((0,))
    run_step(drafter, target, chunks=((0, 0, 12),))  # the old place is used by another sequence
    drafter.restore(2, rows(2, 9), snapshot)
    assert_same(drafter.propose(anchors({2: (5, 9)})), expected)
    with pytest.raises(EngineFault, match="slot 2 is reset while it holds"):
        drafter.restore(2, rows(2, 9), snapshot)


def test_positions_must_continue_the_context(drafter, target):
    drafter.reset((0, 1))
    run_step(drafter, target, chunks=((0, 0, 6),))
    for position in (5, 7):
        with pytest.raises(EngineFault, match=f"anchor at position {position} of slot 0.*6 tokens"):
            drafter.propose(anchors({0: (5, position)}))
    for start in (5, 7):
        with pytest.raises(EngineFault, match=f"span at position {start} of slot 0"):
            run_step(drafter, target, steps=((0, start, 2),), committed=(1,))
    with pytest.raises(EngineFault, match="3 committed rows of a span of 2"):
        run_step(drafter, target, steps=((0, 6, 2),), committed=(3,))
    with pytest.raises(EngineFault, match="reset while it holds"):
        drafter.reset((0,))
    assert drafter.observed_tokens(0) == 6


def test_the_rule_of_a_plus_one_rows_is_enforced(drafter, target):
    """Observing all rows of a verify span, not only the accepted ones, is caught in the next round."""
    drafter.reset((0,))
    run_step(drafter, target, chunks=((0, 0, 6),))
    run_step(drafter, target, steps=((0, 6, 5),), committed=(5,))
    with pytest.raises(EngineFault, match="anchor at position 9"):
        drafter.propose(anchors({0: (5, 9)}))


def test_missing_taps_are_a_fault(drafter, target):
    target.taps = None
    drafter.reset((0,))
    spans = ObservedSpans(chunk_slots=(0,), step_slots=(), step_committed=())
    one = torch.zeros(1, dtype=torch.int64)
    batch = ForwardBatch(
        token_ids_T=one, positions_T=one, context_lens_T=one + 1, sequence_T=one, slot_mapping_T=one,
        page_table_SP=one[None], logits_rows_N=one, chunk=group(((0, 0, 1),), 0), step=group((), 0),
        page_size=PAGE_SIZE, max_context=1,
    )  # fmt: skip
    with pytest.raises(EngineFault, match="no taps"):
        drafter.observe(batch, TargetOutput(logits_NV=torch.zeros(1, 97), aux_hidden_TAD=None), spans)


def test_no_sequences_propose_nothing(drafter):
    assert drafter.propose(anchors({})) is None


def test_a_slot_may_not_propose_twice(drafter):
    cell = anchors({0: (5, 0)})
    drafter.reset((0,))
    twice = Anchors(
        token_ids_S=cell.token_ids_S.repeat(2),
        positions_S=cell.positions_S.repeat(2),
        page_table_SP=cell.page_table_SP.repeat(2, 1),
        page_size=PAGE_SIZE,
        slots=(0, 0),
        positions=(0, 0),
    )
    with pytest.raises(EngineFault, match="twice"):
        drafter.propose(twice)


def test_what_the_engine_asks_for(drafter, target, tmp_path):
    assert drafter.num_draft_tokens == 4
    assert drafter.aux_layer_ids == (0, 2, 4)
    assert drafter.aux_hidden_stream == "mixture"
    assert make_drafter(target, tmp_path / "short", num_draft_tokens=2).num_draft_tokens == 2
    target.num_layers = 4
    with pytest.raises(CheckpointError, match="num_target_layers=6"):
        make_drafter(target, tmp_path / "other")


def test_the_null_drafter_does_nothing():
    drafter = NullDrafter()
    drafter.reset((0,))
    assert drafter.propose(anchors({0: (1, 5)})) is None
    drafter.restore(1, torch.arange(5), drafter.snapshot(0, torch.arange(5)))
    drafter.release((0,))
    assert (drafter.num_draft_tokens, drafter.aux_layer_ids) == (0, ())
