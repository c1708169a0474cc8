"""Random histories of sequences on one drafter against each sequence alone, around an inner drafter that is watched."""

import random

import pytest
import torch

from outrider.batch import DraftBlock, DraftSampling, ForwardBatch, SpanGroup, TargetOutput, Truncation
from outrider.errors import EngineFault
from outrider.speculative.drafter import Anchors, ObservedSpans
from outrider.speculative.lookup_drafter import LookupDrafter

DRAFTS, VOCAB, NUM_SLOTS, PAGE = 4, 1000, 3, 64


class InnerDrafter:
    """Drafts ``anchor, anchor + 1, ...`` modulo the vocabulary; notes who asks and what it observed."""

    num_draft_tokens, aux_layer_ids, aux_hidden_stream = DRAFTS, (0,), "mixture"

    def __init__(self, *, with_confidence=True):
        self.with_confidence = with_confidence
        self.asked = []
        self.observed = {}

    def foresee(self, item):
        return None

    def propose(self, anchors):
        for slot, position in zip(anchors.slots, anchors.positions, strict=True):
            assert self.observed[slot] == position
        assert anchors.positions_S.tolist() == list(anchors.positions)
        assert anchors.page_table_SP[:, 0].tolist() == list(anchors.slots)
        self.asked.append(anchors.slots)
        token_ids_SG = (anchors.token_ids_S[:, None] + torch.arange(DRAFTS)) % VOCAB
        confidence_SG = torch.full(token_ids_SG.shape, 0.25) if self.with_confidence else None
        probs_SGV = None
        if anchors.sampling is not None and anchors.sampling.hands_over:
            probs_SGV = torch.full((*token_ids_SG.shape, VOCAB), 1 / VOCAB)
        return DraftBlock(token_ids_SG=token_ids_SG, confidence_SG=confidence_SG, probs_SGV=probs_SGV)

    def observe(self, batch, output, spans):
        counts = (*spans.step_committed, *batch.chunk.lengths)
        for slot, count in zip((*spans.step_slots, *spans.chunk_slots), counts, strict=True):
            self.observed[slot] += count

    def reset(self, slots):
        self.observed.update(dict.fromkeys(slots, 0))

    def release(self, slots):
        for slot in slots:
            del self.observed[slot]

    def snapshot(self, slot, rows_R):
        return (torch.tensor(self.observed[slot]),)

    def restore(self, slot, rows_R, snapshot):
        self.observed[slot] = int(snapshot[0])


def group(spans, first_row):
    """Spans are (slot, start, tokens)."""
    lengths = tuple(len(tokens) for _, _, tokens in spans)
    return SpanGroup(
        rows_T=torch.arange(first_row, first_row + sum(lengths)),
        state_slots_S=torch.tensor([slot for slot, _, _ in spans], dtype=torch.int64),
        lengths=lengths,
        starts=tuple(start for _, start, _ in spans),
        padded_rows_SM=torch.zeros(0, 0, dtype=torch.int64),
        valid_SM=torch.zeros(0, 0, dtype=torch.bool),
        limits_SM=torch.zeros(0, 0, dtype=torch.int64),
        num_keys_S=torch.zeros(0, dtype=torch.int64),
    )


def observe(drafter, *, chunks=(), steps=(), committed=()):
    spans = [*steps, *chunks]
    token_ids = [token for _, _, tokens in spans for token in tokens]
    nothing = torch.zeros(len(token_ids), dtype=torch.int64)
    batch = ForwardBatch(
        token_ids_T=torch.tensor(token_ids, dtype=torch.int64),
        positions_T=nothing,
        context_lens_T=nothing,
        sequence_T=nothing,
        slot_mapping_T=nothing,
        page_table_SP=nothing[:, None],
        logits_rows_N=nothing,
        chunk=group(chunks, sum(len(tokens) for _, _, tokens in steps)),
        step=group(steps, 0),
        page_size=PAGE,
        max_context=1,
    )
    drafter.observe(
        batch,
        TargetOutput(logits_NV=torch.zeros(0, VOCAB), aux_hidden_TAD=None),
        ObservedSpans(
            chunk_slots=tuple(slot for slot, _, _ in chunks),
            step_slots=tuple(slot for slot, _, _ in steps),
            step_committed=tuple(committed),
        ),
    )


def anchors(cells, sampling=None):
    """``cells`` maps slot to (anchor id, position)."""
    positions = tuple(position for _, position in cells.values())
    return Anchors(
        token_ids_S=torch.tensor([token for token, _ in cells.values()], dtype=torch.int64),
        positions_S=torch.tensor(positions, dtype=torch.int64),
        page_table_SP=torch.tensor([[slot] for slot in cells], dtype=torch.int64).view(-1, 1),
        page_size=PAGE,
        slots=tuple(cells),
        positions=positions,
        sampling=sampling,
    )


def coins(num_sequences):
    numbers, flags = torch.zeros(num_sequences, dtype=torch.int64), torch.zeros(num_sequences, dtype=torch.bool)
    none = Truncation(top_k_S=None, largest_k=0, top_p_S=None, min_p_S=None)
    return DraftSampling(
        seed_S=numbers,
        sample_S=numbers,
        temperature_S=torch.ones(num_sequences, dtype=torch.float64),
        greedy_S=flags,
        coins_S=~flags,
        hands_over=True,
        draws=True,
        truncation=none,
    )


def text_of(dice):
    """Fresh numbers, pieces of what came before, and pairs that never go on as before."""
    tokens = [dice.randrange(VOCAB)]
    while len(tokens) < 150:
        kind = dice.random()
        if kind < 0.4 and len(tokens) > 8:
            begin = dice.randrange(len(tokens) - 4)
            tokens.extend(tokens[begin : begin + dice.randint(2, 20)])
        elif kind < 0.6:
            tokens.extend((1, 2, dice.randrange(VOCAB)))
        else:
            tokens.append(dice.randrange(VOCAB))
    return tokens


def alone(text, num_prompt):
    """What is drafted at every position of the answer when nothing is ever verified; None = by the inner drafter."""
    inner = InnerDrafter()
    drafter = LookupDrafter(inner)
    drafter.reset((0,))
    observe(drafter, chunks=((0, 0, text[:num_prompt]),))
    drafts = {}
    for position in range(num_prompt, len(text)):
        inner.asked.clear()
        block = drafter.propose(anchors({0: (text[position], position)}))
        drafts[position] = None if inner.asked else (block.token_ids_SG.tolist()[0], block.confidence_SG.tolist()[0])
        observe(drafter, steps=((0, position, [text[position]]),), committed=(1,))
    return drafts


class Player:
    """One sequence of a history: its text, and how far it is."""

    def __init__(self, dice):
        self.text = text_of(dice)
        self.num_prompt = dice.randint(1, 60)
        self.expected = alone(self.text, self.num_prompt)
        self.done = 0

    @property
    def anchor(self):
        return self.text[self.done], self.done


def play_round(drafter, inner, seats, dice):
    """Chunks, proposals of some, a step that commits what is right of drafts or of a guess; how many rows were read."""
    decoding = {slot: one for slot, one in seats.items() if one.num_prompt <= one.done < len(one.text) - DRAFTS}
    proposing = {slot: one for slot, one in decoding.items() if dice.random() < 0.7}
    inner.asked.clear()
    block = drafter.propose(anchors({slot: one.anchor for slot, one in proposing.items()}))
    asked = inner.asked[0] if inner.asked else ()
    num_read = 0
    for row, (slot, one) in enumerate(proposing.items()):
        expected = one.expected[one.done]
        assert (slot in asked) == (expected is None)
        token_ids, confidence = block.token_ids_SG[row].tolist(), block.confidence_SG[row].tolist()
        if expected is None:
            expected = [(one.text[one.done] + i) % VOCAB for i in range(DRAFTS)], [0.25] * DRAFTS
        num_read += slot not in asked
        assert (token_ids, confidence) == expected
    steps, committed, chunks = [], [], []
    for slot, one in decoding.items():
        num_rows = dice.randint(1, 1 + DRAFTS)
        count = dice.randint(1, num_rows)
        right = one.text[one.done : one.done + count]
        steps.append((slot, one.done, [*right, *[-7] * (num_rows - count)]))
        committed.append(count)
    for slot, one in seats.items():
        if one.done < one.num_prompt:
            end = dice.randint(one.done + 1, one.num_prompt)
            chunks.append((slot, one.done, one.text[one.done : end]))
    if steps or chunks:
        observe(drafter, chunks=chunks, steps=steps, committed=committed)
    for slot, start, tokens in chunks:
        seats[slot].done = start + len(tokens)
    for (slot, start, _), count in zip(steps, committed, strict=True):
        seats[slot].done = start + count
    return num_read


def test_any_history_proposes_what_each_sequence_alone_would():
    dice = random.Random(0)
    num_read = num_moved = 0
    for _ in range(12):
        inner = InnerDrafter()
        drafter = LookupDrafter(inner)
        seats, waiting = {}, []
        for _ in range(80):
            free = [slot for slot in range(NUM_SLOTS) if slot not in seats]
            if free and dice.random() < 0.5:
                slot = dice.choice(free)
                if waiting and dice.random() < 0.7:
                    one, copy = waiting.pop()
                    drafter.restore(slot, torch.arange(one.done), copy)
                    num_moved += 1
                else:
                    one = Player(dice)
                    drafter.reset((slot,))
                seats[slot] = one
            elif seats and dice.random() < 0.2:
                slot = dice.choice(list(seats))
                one = seats.pop(slot)
                if dice.random() < 0.7:
                    waiting.append((one, drafter.snapshot(slot, torch.arange(one.done))))
                drafter.release((slot,))
            num_read += play_round(drafter, inner, seats, dice)
    assert num_read > 100 and num_moved > 20


def repeating(drafter, slots):
    """Slots whose text repeats itself, in step and with an anchor; the others do not."""
    drafter.reset(range(NUM_SLOTS))
    cells = {}
    for slot in range(NUM_SLOTS):
        text = [5, 6, 7, 8, 9, 10, 5, 6] if slot in slots else [5, 6, 7, 8, 9, 10, 11, 12]
        observe(drafter, chunks=((slot, 0, text),))
        cells[slot] = (7 if slot in slots else 13, len(text))
    return cells


def test_only_who_does_not_read_is_asked():
    inner = InnerDrafter()
    drafter = LookupDrafter(inner)
    cells = repeating(drafter, {1})
    block = drafter.propose(anchors(cells))
    assert inner.asked == [(0, 2)]
    assert block.token_ids_SG.tolist() == [[13, 14, 15, 16], [8, 9, 10, 5], [13, 14, 15, 16]]
    assert block.confidence_SG[0].tolist() == [0.25] * DRAFTS and block.confidence_SG[1, 0] > 0.5


def test_who_reads_alone_asks_nobody():
    inner = InnerDrafter()
    drafter = LookupDrafter(inner)
    cells = repeating(drafter, {0, 1, 2})
    block = drafter.propose(anchors(cells, coins(NUM_SLOTS)))
    assert not inner.asked and block.probs_SGV is None
    assert block.token_ids_SG.tolist() == [[8, 9, 10, 5]] * NUM_SLOTS


def test_without_confidence_of_the_inner_drafter_a_joined_block_has_none():
    drafter = LookupDrafter(InnerDrafter(with_confidence=False))
    block = drafter.propose(anchors(repeating(drafter, {2})))
    assert block.confidence_SG is None and block.token_ids_SG[2].tolist() == [8, 9, 10, 5]


def test_among_drawn_drafts_the_read_ones_are_certain():
    inner = InnerDrafter()
    drafter = LookupDrafter(inner)
    block = drafter.propose(anchors(repeating(drafter, {1}), coins(NUM_SLOTS)))
    assert inner.asked == [(0, 1, 2)], "parameters of sampling belong to all anchors"
    assert block.token_ids_SG.tolist() == [[13, 14, 15, 16], [8, 9, 10, 5], [13, 14, 15, 16]]
    expected_GV = torch.zeros(DRAFTS, VOCAB)
    expected_GV[torch.arange(DRAFTS), block.token_ids_SG[1]] = 1
    assert torch.equal(block.probs_SGV[1], expected_GV)
    assert torch.equal(block.probs_SGV[0], torch.full((DRAFTS, VOCAB), 1 / VOCAB))


def test_a_sequence_that_its_matches_mislead_is_given_to_the_inner_drafter():
    inner = InnerDrafter()
    drafter = LookupDrafter(inner)
    drafter.reset((0,))
    text = [token for index in range(40) for token in (1, 2, 100 + index)]
    observe(drafter, chunks=((0, 0, text[:6]),))
    readers = []
    for position in range(6, len(text)):
        inner.asked.clear()
        drafter.propose(anchors({0: (text[position], position)}))
        readers.append(not inner.asked)
        observe(drafter, steps=((0, position, [text[position]]),), committed=(1,))
    assert any(readers[:10]) and not any(readers[10:])


@pytest.mark.parametrize("position", [3, 6])
def test_positions_must_continue_the_history(position):
    drafter = LookupDrafter(InnerDrafter())
    drafter.reset((0,))
    observe(drafter, chunks=((0, 0, [1, 2, 3, 4, 5]),))
    with pytest.raises(EngineFault, match=f"position {position} of slot 0, whose history has 5 tokens"):
        drafter.propose(anchors({0: (9, position)}))


def test_misuse_is_a_fault():
    drafter = LookupDrafter(InnerDrafter())
    assert drafter.propose(anchors({})) is None
    with pytest.raises(EngineFault, match="slot 1 holds no sequence"):
        drafter.propose(anchors({1: (9, 0)}))
    drafter.reset((0,))
    observe(drafter, chunks=((0, 0, [1, 2, 3]),))
    with pytest.raises(EngineFault, match="copied at 2 tokens, but 3"):
        drafter.snapshot(0, torch.arange(2))
    with pytest.raises(EngineFault, match="twice"):
        drafter.propose(
            Anchors(
                token_ids_S=torch.tensor([9, 9]),
                positions_S=torch.tensor([3, 3]),
                page_table_SP=torch.zeros(2, 1, dtype=torch.int64),
                page_size=PAGE,
                slots=(0, 0),
                positions=(3, 3),
            )
        )
