"""Taps that wait change nothing: whatever happens meanwhile, proposals and context are those of storing at once."""

import random
from dataclasses import dataclass

import pytest
import torch

from outrider.batch import ForwardBatch, SpanGroup, TargetOutput
from outrider.models.dspark.checkpoint import TargetTables
from outrider.models.dspark.load import load_predictor
from outrider.models.dspark.recorded import num_stored_rows
from outrider.ops.linear import embedding, linear
from outrider.ops.native.library import library_for
from outrider.speculative.drafter import Anchors, DSparkDrafter, ObservedSpans
from outrider.testing.toy_dspark import ToyDrafterOptions, write_toy_drafter

PAGE_SIZE, MAX_CONTEXT, NUM_SLOTS, NUM_PAGES = 4, 64, 5, 110
# Its own head, so that all of a proposal is native and can be recorded.
OPTIONS = ToyDrafterOptions(family="speculators", draft_vocab_size=61, intermediate_size=64)


class FakeTarget:
    vocab_size, hidden_size, num_layers = 97, 32, 6

    def __init__(self, dtype):
        generator = torch.Generator().manual_seed(1)
        self.embedding = torch.randn(97, 32, generator=generator).to(dtype)
        self.lm_head = torch.randn(97, 32, generator=generator).to(dtype) / 4

    def embed(self, token_ids_T):
        return embedding(token_ids_T, self.embedding)

    def head(self, hidden_ND):
        return linear(hidden_ND, self.lm_head)


@dataclass(eq=False)
class Sequence:
    slot: int
    pages: list[int]
    taps: torch.Tensor
    length: int = 0

    def rows(self):
        at = torch.arange(self.length)
        return torch.tensor(self.pages)[at // PAGE_SIZE] * PAGE_SIZE + at % PAGE_SIZE


def group(spans, first_row):
    lengths = tuple(count for _, count, _ in spans)
    return SpanGroup(
        rows_T=torch.arange(first_row, first_row + sum(lengths)),
        state_slots_S=torch.tensor([sequence.slot for sequence, _, _ in spans], dtype=torch.int64),
        lengths=lengths,
        starts=tuple(sequence.length for sequence, _, _ in spans),
        padded_rows_SM=torch.zeros(len(spans), 0, dtype=torch.int64),
        valid_SM=torch.zeros(len(spans), 0, dtype=torch.bool),
        num_keys_S=torch.zeros(len(spans), dtype=torch.int64),
        limits_SM=torch.zeros(len(spans), 0, dtype=torch.int64),
    )


class World:
    """Sequences of some drafters, which all see the same steps."""

    def __init__(self, drafters, seed):
        self.drafters, self.dice = drafters, random.Random(seed)
        self.live: list[Sequence] = []
        self.free_slots = list(range(NUM_SLOTS))
        self.free_pages = list(range(NUM_PAGES))
        self.dtype = drafters[0]._context.rows_2LRJK.dtype
        self.seen = {"moved": 0, "ended": 0, "proposed": 0}

    def start(self):
        if not self.free_slots:
            return
        slot = self.free_slots.pop(self.dice.randrange(len(self.free_slots)))
        pages = self._pages()
        for drafter in self.drafters:
            drafter.reset((slot,))
        taps = torch.randn(MAX_CONTEXT, 3, 32, generator=torch.Generator().manual_seed(self.dice.randrange(10**6)))
        self.live.append(Sequence(slot, pages, taps.to(self.dtype)))

    def _pages(self):
        self.dice.shuffle(self.free_pages)
        pages, self.free_pages = (
            self.free_pages[: MAX_CONTEXT // PAGE_SIZE],
            self.free_pages[MAX_CONTEXT // PAGE_SIZE :],
        )
        return pages

    def step(self):
        """Some sequences decode or verify, others run a part of their prompt; rejected rows are NaN."""
        able = [s for s in self.live if s.length < MAX_CONTEXT - 30]
        chosen = self.dice.sample(able, self.dice.randint(0, len(able)))
        steps = [(s, n := self.dice.randint(1, 5), self.dice.randint(1, n)) for s in chosen if s.length]
        chunks = [(s, n := self.dice.choice((1, 3, 7, 8, 20)), n) for s in chosen if not s.length]
        spans = [*steps, *chunks]
        if not spans:
            return
        taps = torch.cat([s.taps[s.length : s.length + n] for s, n, _ in spans])
        positions = torch.cat([torch.arange(s.length, s.length + n) for s, n, _ in spans])
        owner = torch.tensor([i for i, (_, n, _) in enumerate(spans) for _ in range(n)])
        begin = 0
        for _, n, committed in spans:
            taps[begin + committed : begin + n] = torch.nan
            begin += n
        table = torch.tensor([s.pages for s, _, _ in spans])
        batch = ForwardBatch(
            token_ids_T=torch.zeros_like(positions),
            positions_T=positions,
            context_lens_T=positions + 1,
            sequence_T=owner,
            slot_mapping_T=table[owner, positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE,
            page_table_SP=table,
            logits_rows_N=torch.zeros(0, dtype=torch.int64),
            chunk=group(chunks, sum(n for _, n, _ in steps)),
            step=group(steps, 0),
            page_size=PAGE_SIZE,
            max_context=int(positions.max()) + 1,
        )
        observed = ObservedSpans(
            chunk_slots=tuple(s.slot for s, _, _ in chunks),
            step_slots=tuple(s.slot for s, _, _ in steps),
            step_committed=tuple(committed for _, _, committed in steps),
        )
        for drafter in self.drafters:
            drafter.observe(batch, TargetOutput(logits_NV=torch.zeros(0, 97), aux_hidden_TAD=taps.clone()), observed)
        for s, _, committed in spans:
            s.length += committed
        at_once = self.drafters[0]
        for s in self.live:
            at_once.snapshot(s.slot, s.rows())
            assert at_once.stored_tokens(s.slot) == s.length

    def propose(self):
        chosen = self.dice.sample(self.live, min(len(self.live), self.dice.randint(1, 3)))
        if not chosen:
            return
        self.seen["proposed"] += 1
        lengths = [s.length for s in chosen]
        num_pages = max(1, -(-max(lengths) // PAGE_SIZE))
        anchors = Anchors(
            token_ids_S=torch.tensor([self.dice.randrange(90) for _ in chosen]),
            positions_S=torch.tensor(lengths),
            page_table_SP=torch.tensor([s.pages[:num_pages] for s in chosen]),
            page_size=PAGE_SIZE,
            slots=tuple(s.slot for s in chosen),
            positions=tuple(lengths),
        )
        expected, *others = [drafter.propose(anchors) for drafter in self.drafters]
        for block in others:
            assert torch.equal(block.token_ids_SG, expected.token_ids_SG)
            assert torch.equal(block.confidence_SG, expected.confidence_SG)

    def move(self):
        """A sequence is copied out and comes back elsewhere, taps of others in its old place."""
        if not self.live or not self.free_slots:
            return
        self.seen["moved"] += 1
        s = self.dice.choice(self.live)
        copies = [drafter.snapshot(s.slot, s.rows()) for drafter in self.drafters]
        assert all(torch.equal(copy[0], copies[0][0]) for copy in copies)
        old_slot, old_pages = s.slot, s.pages
        s.slot, s.pages = self.free_slots.pop(0), self._pages()
        self.free_slots.append(old_slot)
        self.free_pages += old_pages
        for drafter, copy in zip(self.drafters, copies, strict=True):
            drafter.release((old_slot,))
            drafter.restore(s.slot, s.rows(), copy)

    def end(self):
        if len(self.live) < 3:
            return
        self.seen["ended"] += 1
        s = self.live.pop(self.dice.randrange(len(self.live)))
        self.free_slots.append(s.slot)
        self.free_pages += s.pages
        for drafter in self.drafters:
            drafter.release((s.slot,))


@pytest.fixture(params=[(torch.float32, 1), (torch.bfloat16, 1), (torch.bfloat16, 2)], ids=str)
def form(request):
    """Compute dtype and number of threads."""
    before = torch.get_num_threads()
    dtype, num_threads = request.param
    torch.set_num_threads(num_threads)
    yield dtype
    torch.set_num_threads(before)


@pytest.fixture
def predictor(form, tmp_path):
    target = FakeTarget(form)
    write_toy_drafter(tmp_path, OPTIONS)
    tables = TargetTables(embedding_VD=target.embedding, head_VD=target.lm_head)
    return load_predictor(tmp_path, target, tables, max_context=MAX_CONTEXT, with_confidence=True)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("num_waiting", [6, 64])
def test_waiting_changes_no_bit(predictor, monkeypatch, num_waiting, seed):
    monkeypatch.setenv("OUTRIDER_RECORD", "0")
    at_once = DSparkDrafter(predictor, num_cache_rows=NUM_PAGES * PAGE_SIZE)
    monkeypatch.setattr("outrider.speculative.drafter.NUM_WAITING", num_waiting)
    eager = DSparkDrafter(predictor, num_cache_rows=NUM_PAGES * PAGE_SIZE)
    monkeypatch.setenv("OUTRIDER_RECORD", "1")
    recorded = DSparkDrafter(predictor, num_cache_rows=NUM_PAGES * PAGE_SIZE)
    world = World([at_once, eager, recorded], seed)
    for drafter in world.drafters:
        drafter._context.rows_2LRJK.fill_(torch.nan)
    waited = 0
    for _ in range(140):
        action = world.dice.choices(("start", "step", "propose", "move", "end"), (3, 8, 6, 2, 1))[0]
        getattr(world, action)()
        recorded._blocks._scratch.poison()
        waited = max(waited, *(eager.observed_tokens(s.slot) - eager.stored_tokens(s.slot) for s in world.live), 0)
    assert 4 < waited <= num_waiting and min(world.seen.values()) > 1, world.seen
    for s in world.live:
        copies = [drafter.snapshot(s.slot, s.rows()) for drafter in world.drafters]
        assert not bool(copies[0][0].isnan().any())
        assert all(torch.equal(copy[0], copies[0][0]) for copy in copies)
    assert eager._blocks.num_replayed == 0
    if library_for(world.dtype, torch.device("cpu")) is not None:
        assert recorded._blocks.refusal is None and recorded._blocks.num_replayed > 5


def test_a_round_without_proposals_projects_nothing(predictor, monkeypatch):
    drafter = DSparkDrafter(predictor, num_cache_rows=NUM_PAGES * PAGE_SIZE)
    world = World([drafter], 0)
    world.start()
    (s,) = world.live
    monkeypatch.setattr(type(predictor.context), "store", None)
    monkeypatch.setattr(DSparkDrafter, "snapshot", lambda *args: None)
    monkeypatch.setattr(DSparkDrafter, "stored_tokens", lambda self, slot: s.length)
    while s.length < 25:
        world.step()
    assert drafter._stored[s.slot] == 0
    drafter.release((s.slot,))  # and a sequence that ends has cost no product


def test_rows_of_a_store_are_few_more_than_wait():
    numbers = [num_stored_rows(n) for n in range(1, 600)]
    assert all(n <= padded <= n + max(0, n // 8) for n, padded in enumerate(numbers, 1))
    assert numbers[:16] == list(range(1, 17)) and len(set(numbers)) < 70
