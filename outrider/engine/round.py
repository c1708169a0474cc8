"""One round: propose, choose lengths, batch, forward, accept, commit, observe; in that order and nowhere else.

Plain decoding is a round whose drafter proposes nothing. No row is ever computed twice: accepted
rows are folded into the recurrent state by ``commit``, so nothing is pending between rounds.

Dims: S sequences, G draft positions, N rows that need logits.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import torch

from outrider.batch import ForwardBatch, TargetOutput
from outrider.cache.cache_set import CacheSet
from outrider.engine.accept import Acceptance, Outcome
from outrider.engine.batching import PageTable, StepDrafts, StepSpans, build_batch, upload
from outrider.engine.metrics import PhaseClock
from outrider.engine.sampling import build_draft_sampling
from outrider.models.protocol import TargetModel
from outrider.plan import ScheduledSequence, StepPlan, StepResult
from outrider.request import TokenLogprobs
from outrider.speculative.drafter import Anchors, Drafter, ObservedSpans
from outrider.speculative.lengths import NOBODY, LengthPolicy, RoundRecord

__all__ = ["RoundParts", "run_round"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundParts:
    """What a round works with; it owns none of it."""

    target: TargetModel
    drafter: Drafter
    lengths: LengthPolicy
    caches: CacheSet
    acceptance: Acceptance
    page_table: PageTable
    no_drafts: torch.Tensor  # int64 [1, 0], the block of a round without proposals
    max_step_rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """Drafts of a round, on the device, and how many of them go to the target."""

    token_ids_SG: torch.Tensor  # int64; S counts the drafting sequences only
    block_rows: tuple[int, ...]  # row of token_ids_SG per scheduled sequence; 0 without drafts
    verify_lengths: tuple[int, ...]  # per scheduled sequence
    proposed: frozenset[int]  # indices of the scheduled sequences that proposed
    read: frozenset[int] = NOBODY  # those of them whose drafts were read from the text
    probs_SGV: torch.Tensor | None = None  # what the drafts were drawn from, see DraftBlock


def run_round(parts: RoundParts, plan: StepPlan) -> StepResult:
    """Run a plan, as several target steps if its rows exceed ``max_step_rows``."""
    with PhaseClock() as clock:
        clock.begin("propose")
        proposal = _propose(parts, plan)
        outcomes: list[Outcome] = []
        num_rows = 0
        lapsed = parts.drafter.lapsed
        for spans, drafts in _steps(plan, proposal, parts.max_step_rows):
            clock.begin("batch")
            wants_taps = not lapsed or any(item.state_slot not in lapsed for item in spans.items)
            batch = build_batch(spans, drafts, parts.page_table, wants_taps=wants_taps)
            clock.begin("forward")
            output = parts.target.forward(batch, parts.caches)
            outcome = parts.acceptance.decide(spans, drafts, batch, output, clock)
            clock.begin("observe")
            _observe(parts.drafter, spans, batch, output, outcome)
            outcomes.append(outcome)
            num_rows += batch.num_tokens
    decided = outcomes[0] if len(outcomes) == 1 else _joined(outcomes)
    timings = clock.timings()
    parts.lengths.observe(
        RoundRecord(
            scheduled=plan.scheduled,
            verify_lengths=proposal.verify_lengths,
            num_accepted=decided.num_accepted,
            proposed=proposal.proposed,
            read=proposal.read,
            num_steps=len(outcomes),
            timings=timings,
        )
    )
    return StepResult(
        output_token_ids=decided.output_token_ids,
        num_drafted=proposal.verify_lengths,
        num_accepted=decided.num_accepted,
        logprobs=decided.logprobs,
        num_steps=len(outcomes),
        num_rows=num_rows,
        speculation=parts.lengths.report(),
        num_proposed=len(proposal.proposed),
        timings=timings,
    )


def _steps(plan: StepPlan, proposal: Proposal, max_step_rows: int) -> Iterator[tuple[StepSpans, StepDrafts]]:
    """The target steps of a round, each with its part of the drafts."""
    for begin, end in _split(plan, proposal.verify_lengths, max_step_rows):
        yield (
            StepSpans(items=plan.scheduled[begin:end], verify_lengths=proposal.verify_lengths[begin:end]),
            StepDrafts(
                token_ids_SG=proposal.token_ids_SG,
                block_rows=proposal.block_rows[begin:end],
                probs_SGV=proposal.probs_SGV,
            ),
        )


def _joined(outcomes: Sequence[Outcome]) -> Outcome:
    """What several steps, or none, decided."""
    logprobs: tuple[tuple[TokenLogprobs, ...] | None, ...] = ()
    if any(outcome.logprobs for outcome in outcomes):
        logprobs = tuple(chain.from_iterable(o.logprobs or (None,) * len(o.num_accepted) for o in outcomes))
    return Outcome(
        output_token_ids=tuple(chain.from_iterable(outcome.output_token_ids for outcome in outcomes)),
        num_accepted=tuple(chain.from_iterable(outcome.num_accepted for outcome in outcomes)),
        logprobs=logprobs,
    )


def _propose(parts: RoundParts, plan: StepPlan) -> Proposal:
    """One batched proposal for every sequence that may use a draft and is let propose."""
    lengths = parts.lengths
    proposing = lengths.proposing(plan.scheduled, parts.drafter.foresee, parts.drafter.lapsed)
    block = parts.drafter.propose(_anchors(parts, [plan.scheduled[i] for i in proposing])) if proposing else None
    if block is None:
        nothing = (0,) * len(plan.scheduled)
        return Proposal(token_ids_SG=parts.no_drafts, block_rows=nothing, verify_lengths=nothing, proposed=NOBODY)
    block_rows = [0] * len(plan.scheduled)
    for row, index in enumerate(proposing):
        block_rows[index] = row
    confidence, num_drafts = block.confidence_SG if lengths.reads_confidence else None, block.token_ids_SG.shape[1]
    read = frozenset([proposing[row] for row in block.read_rows]) if block.read_rows else NOBODY
    return Proposal(
        token_ids_SG=block.token_ids_SG,
        block_rows=tuple(block_rows),
        verify_lengths=lengths.choose(plan.scheduled, proposing, num_drafts, _listed(confidence), read),
        proposed=frozenset(proposing),
        read=read,
        probs_SGV=block.probs_SGV,
    )


def _listed(confidence_SG: torch.Tensor | None) -> list[list[float]] | None:
    """On the host; the one copy that choosing lengths costs."""
    return None if confidence_SG is None else confidence_SG.tolist()


def _anchors(parts: RoundParts, drafting: list[ScheduledSequence]) -> Anchors:
    page_table = parts.page_table
    slots = [item.state_slot for item in drafting]
    positions = [item.start_position for item in drafting]
    token_ids_S, positions_S, slots_S = upload(
        page_table.device, [item.query_token_ids[0] for item in drafting], positions, slots
    )
    return Anchors(
        token_ids_S=token_ids_S,
        positions_S=positions_S,
        page_table_SP=page_table.rows(slots_S, max(positions)),
        page_size=page_table.page_size,
        slots=tuple(slots),
        positions=tuple(positions),
        sampling=build_draft_sampling(drafting, parts.target.vocab_size, page_table.device),
    )


def _split(plan: StepPlan, verify_lengths: tuple[int, ...], max_step_rows: int) -> Iterator[tuple[int, int]]:
    """Half-open ranges of scheduled sequences, in order, whose rows fit one step each."""
    begin, num_rows = 0, 0
    for index, (item, length) in enumerate(zip(plan.scheduled, verify_lengths, strict=True)):
        span_rows = len(item.query_token_ids) + length
        assert span_rows <= max_step_rows, f"{item.request_id}: {span_rows} rows exceed a step of {max_step_rows}"
        if num_rows + span_rows > max_step_rows:
            yield begin, index
            begin, num_rows = index, 0
        num_rows += span_rows
    if num_rows:
        yield begin, len(plan.scheduled)


def _observe(drafter: Drafter, spans: StepSpans, batch: ForwardBatch, output: TargetOutput, outcome: Outcome) -> None:
    slots, num_decodes = tuple([item.state_slot for item in spans.items]), spans.num_decodes
    drafter.observe(
        batch,
        output,
        ObservedSpans(
            chunk_slots=slots[num_decodes:],
            step_slots=slots[:num_decodes],
            step_committed=tuple([accepted + 1 for accepted in outcome.num_accepted[:num_decodes]]),
        ),
    )
