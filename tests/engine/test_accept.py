"""The native way to decide a greedy step against the general one."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from outrider.engine.accept import Acceptance
from outrider.engine.batching import StepDrafts, StepSpans
from outrider.engine.metrics import PhaseClock
from outrider.ops.native.library import library
from outrider.plan import ScheduledSequence, SequenceChoice
from outrider.request import SamplingParams

VOCAB, NUM_DRAFTS = 11, 3


def decode(slot, num_drafts):
    return ScheduledSequence(
        request_id=f"decode-{slot}",
        state_slot=slot,
        page_ids=(slot,),
        start_position=5,
        query_token_ids=(1,),
        draft_budget=num_drafts,
        is_prompt=False,
        wants_logits=True,
        is_first=False,
    )


def chunk(slot, *, last):
    return replace(
        decode(slot, 0), request_id=f"chunk-{slot}", query_token_ids=(1, 2), is_prompt=True, wants_logits=last
    )


class Caches:
    def __init__(self):
        self.committed = []

    def commit(self, batch, num_committed_S):
        self.committed.append(num_committed_S.tolist())


def decide(items, verify_lengths, block_rows, logits_NV, drafts_BG):
    """Outcome and committed rows; what runs is decided by the dtype of the logits alone."""
    caches = Caches()
    acceptance = Acceptance(caches, max_sequences=8, num_draft_tokens=NUM_DRAFTS)
    spans = StepSpans(items=items, verify_lengths=verify_lengths)
    num_decodes = sum(not item.is_prompt for item in items)
    batch = SimpleNamespace(step=SimpleNamespace(lengths=tuple(1 + n for n in verify_lengths[:num_decodes])))
    drafts = StepDrafts(token_ids_SG=drafts_BG, block_rows=block_rows)
    outcome = acceptance.decide(spans, drafts, batch, SimpleNamespace(logits_NV=logits_NV), PhaseClock())
    return outcome, caches.committed, acceptance


CASES = {
    "decodes": ((decode(0, 3), decode(1, 0), decode(2, 2)), (3, 0, 2), (1, 0, 0)),
    "a chunk in the middle of a prompt": ((decode(0, 3), chunk(1, last=False)), (3, 0), (0, 0)),
    "chunks, the last of one prompt": ((decode(0, 1), chunk(1, last=False), chunk(2, last=True)), (1, 0, 0), (1, 0, 0)),
    "a prompt alone": ((chunk(0, last=True),), (0,), (0,)),
    "nothing wanted": ((chunk(0, last=False), chunk(1, last=False)), (0, 0), (0, 0)),
}


@pytest.mark.skipif(library() is None, reason="no native operations on this machine")
@pytest.mark.parametrize("name", CASES)
def test_both_ways_decide_and_commit_the_same(name):
    items, lengths, block_rows = CASES[name]
    num_rows = sum(1 + n for item, n in zip(items, lengths, strict=True) if item.wants_logits)
    for seed in range(12):
        generator = torch.Generator().manual_seed(seed)
        logits_NV = torch.randint(0, 2, (num_rows, VOCAB), generator=generator).float()
        logits_NV[:, :3] += 1  # argmax among three ids, so that drafts often stand
        drafts_BG = torch.randint(0, 3, (2, NUM_DRAFTS), generator=generator)
        native, committed, acceptance = decide(items, lengths, block_rows, logits_NV.bfloat16(), drafts_BG)
        general, expected, _ = decide(items, lengths, block_rows, logits_NV, drafts_BG)
        assert acceptance._greedy is not None
        assert native.output_token_ids == general.output_token_ids
        assert native.num_accepted == general.num_accepted
        assert committed == expected


def test_a_sequence_with_a_choice_of_its_own_takes_the_general_way():
    choice = SequenceChoice(
        params=SamplingParams(logprobs=1, seed=1),
        sample_index=0,
        num_prompt_tokens=5,
        stop_token_ids=frozenset(),
        history=(),
    )
    items = (decode(0, 0), replace(decode(1, 0), choice=choice))
    logits_NV = torch.eye(VOCAB)[[4, 7]].bfloat16()
    outcome, committed, acceptance = decide(items, (0, 0), (0, 0), logits_NV, torch.empty((1, 0), dtype=torch.int64))
    assert acceptance._greedy is None
    assert outcome.output_token_ids == ((4,), (7,)) and committed == [[1, 1]]
    assert outcome.logprobs[0] is None and outcome.logprobs[1][0].token_id == 7
