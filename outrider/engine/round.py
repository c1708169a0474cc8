"""One round: propose, choose lengths, batch, forward, accept, commit, observe; in that order and nowhere else.

Plain decoding is a round whose drafter proposes nothing. No row is ever computed twice: accepted
rows are folded into the recurrent state by ``commit``, so nothing is pending between rounds.

Dims: S sequences, G draft positions, N rows that need logits.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, count

import torch

from outrider.batch import ForwardBatch, SubmittedDrafts, TargetOutput, VerifyResult
from outrider.cache.cache_set import CacheSet
from outrider.engine.batching import PageTable, StepDrafts, StepSpans, build_batch, upload
from outrider.engine.metrics import PhaseClock
from outrider.engine.sampling import (
    LogprobRows,
    build_choices,
    build_draft_sampling,
    logprob_columns,
    logprob_rows,
    read_logprobs,
)
from outrider.models.protocol import TargetModel
from outrider.plan import ScheduledSequence, StepPlan, StepResult
from outrider.request import TokenLogprobs
from outrider.speculative.drafter import Anchors, Drafter, ObservedSpans
from outrider.speculative.lengths import LengthPolicy, RoundRecord
from outrider.speculative.verify import verify

__all__ = ["RoundParts", "run_round"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundParts:
    """What a round works with; it owns none of it."""

    target: TargetModel
    drafter: Drafter
    lengths: LengthPolicy
    caches: CacheSet
    page_table: PageTable
    max_step_rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """Drafts of a round, on the device, and how many of them go to the target."""

    token_ids_SG: torch.Tensor  # int64; S counts the drafting sequences only
    block_rows: tuple[int, ...]  # row of token_ids_SG per scheduled sequence; 0 without drafts
    verify_lengths: tuple[int, ...]  # per scheduled sequence
    proposed: frozenset[int]  # indices of the scheduled sequences that proposed
    probs_SGV: torch.Tensor | None = None  # what the drafts were drawn from, see DraftBlock


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Host copy of what one step decided, per sequence of the step."""

    output_token_ids: tuple[tuple[int, ...], ...]  # () where no logits were wanted
    num_accepted: tuple[int, ...]
    logprobs: tuple[tuple[TokenLogprobs, ...] | None, ...]  # per output token; None where not asked for


def run_round(parts: RoundParts, plan: StepPlan) -> StepResult:
    """Run a plan, as several target steps if its rows exceed ``max_step_rows``."""
    clock = PhaseClock()
    with clock.phase("propose"):
        proposal = _propose(parts, plan)
    outcomes: list[Outcome] = []
    num_rows = 0
    for begin, end in _split(plan, proposal.verify_lengths, parts.max_step_rows):
        spans = StepSpans(items=plan.scheduled[begin:end], verify_lengths=proposal.verify_lengths[begin:end])
        drafts = StepDrafts(
            token_ids_SG=proposal.token_ids_SG,
            block_rows=proposal.block_rows[begin:end],
            probs_SGV=proposal.probs_SGV,
        )
        with clock.phase("batch"):
            batch = build_batch(spans, drafts, parts.page_table)
        with clock.phase("forward"):
            output = parts.target.forward(batch, parts.caches)
        with clock.phase("accept"):
            verdict = _accept(spans, drafts, output)
        with clock.phase("commit"):
            parts.caches.commit(batch, verdict.num_accepted_S[: spans.num_decodes] + 1)
        with clock.phase("accept"):
            outcome = _read(spans, verdict, output, logprob_rows(spans, drafts, parts.target.vocab_size))
        with clock.phase("observe"):
            _observe(parts.drafter, spans, batch, output, outcome)
        outcomes.append(outcome)
        num_rows += batch.num_tokens
    num_accepted = tuple(chain.from_iterable(o.num_accepted for o in outcomes))
    timings = clock.timings()
    parts.lengths.observe(
        RoundRecord(
            scheduled=plan.scheduled,
            verify_lengths=proposal.verify_lengths,
            num_accepted=num_accepted,
            proposed=proposal.proposed,
            num_steps=len(outcomes),
            timings=timings,
        )
    )
    return StepResult(
        output_token_ids=tuple(chain.from_iterable(o.output_token_ids for o in outcomes)),
        num_drafted=proposal.verify_lengths,
        num_accepted=num_accepted,
        logprobs=tuple(chain.from_iterable(o.logprobs for o in outcomes)),
        num_steps=len(outcomes),
        num_rows=num_rows,
        speculation=parts.lengths.report(),
        num_proposed=len(proposal.proposed),
        timings=timings,
    )


def _propose(parts: RoundParts, plan: StepPlan) -> Proposal:
    """One batched proposal for every sequence that may use a draft and is let propose."""
    device, lengths = parts.page_table.device, parts.lengths
    proposing = lengths.proposing(plan.scheduled)
    block = parts.drafter.propose(_anchors(parts, [plan.scheduled[i] for i in proposing])) if proposing else None
    if block is None:
        nothing = (0,) * len(plan.scheduled)
        empty_SG = torch.empty((1, 0), dtype=torch.int64, device=device)
        return Proposal(token_ids_SG=empty_SG, block_rows=nothing, verify_lengths=nothing, proposed=frozenset())
    row_of = {index: row for row, index in enumerate(proposing)}
    confidence = block.confidence_SG if lengths.reads_confidence else None
    return Proposal(
        token_ids_SG=block.token_ids_SG,
        block_rows=tuple(row_of.get(index, 0) for index in range(len(plan.scheduled))),
        verify_lengths=lengths.choose(plan.scheduled, proposing, block.token_ids_SG.shape[1], _listed(confidence)),
        proposed=frozenset(proposing),
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


def _accept(spans: StepSpans, drafts: StepDrafts, output: TargetOutput) -> VerifyResult:
    """Judge the drafts of every sequence with logits; a prompt's last row is a span without drafts."""
    wanted = [index for index, item in enumerate(spans.items) if item.wants_logits]
    rows_S, lengths_S = upload(
        output.logits_NV.device,
        [drafts.block_rows[index] for index in wanted],
        [spans.verify_lengths[index] for index in wanted],
    )
    if not wanted:
        return VerifyResult(output_token_ids_SG1=rows_S[:, None], num_accepted_S=lengths_S)
    submitted = SubmittedDrafts(
        token_ids_SG=drafts.token_ids_SG.index_select(0, rows_S),
        lengths_S=lengths_S,
        probs_SGV=None if drafts.probs_SGV is None else drafts.probs_SGV[rows_S],
    )
    vocab_size, device = output.logits_NV.shape[1], output.logits_NV.device
    return verify(output.logits_NV, submitted, build_choices(spans, drafts, vocab_size, device))


def _read(
    spans: StepSpans, verdict: VerifyResult, output: TargetOutput, wanted_logprobs: LogprobRows | None
) -> Outcome:
    """The only copy from device to host of a step: output ids, accepted counts, log probabilities, packed."""
    packed = torch.cat((verdict.num_accepted_S[:, None], verdict.output_token_ids_SG1), dim=1)
    if wanted_logprobs is None:
        rows, columns = packed.tolist(), []
    else:
        columns_LK = logprob_columns(output.logits_NV, verdict, wanted_logprobs)
        flat = torch.cat((packed.double().flatten(), columns_LK.flatten())).cpu()
        rows = flat[: packed.numel()].long().view(packed.shape).tolist()
        columns = flat[packed.numel() :].view(columns_LK.shape).tolist()
    judged = [tuple(token_ids[: accepted + 1]) for accepted, *token_ids in rows]
    logprobs = read_logprobs(wanted_logprobs, columns, judged) if wanted_logprobs is not None else {}
    spans_of = count()
    index_of = [next(spans_of) if item.wants_logits else None for item in spans.items]
    return Outcome(
        output_token_ids=tuple(() if index is None else judged[index] for index in index_of),
        num_accepted=tuple(0 if index is None else rows[index][0] for index in index_of),
        logprobs=tuple(None if index is None else logprobs.get(index) for index in index_of),
    )


def _observe(drafter: Drafter, spans: StepSpans, batch: ForwardBatch, output: TargetOutput, outcome: Outcome) -> None:
    num_decodes = spans.num_decodes
    drafter.observe(
        batch,
        output,
        ObservedSpans(
            chunk_slots=tuple(item.state_slot for item in spans.items[num_decodes:]),
            step_slots=tuple(item.state_slot for item in spans.items[:num_decodes]),
            step_committed=tuple(accepted + 1 for accepted in outcome.num_accepted[:num_decodes]),
        ),
    )
