"""From logits to the tokens of a step on the host: judge the drafts, commit, read.

Where every token is an argmax and the native operations run, one call judges all spans straight into host memory.
Everything else, and every other device, goes through ``verify`` and one copy to the host, which waits for the device
only after the commit has been queued.

Dims: S sequences, G draft positions, N rows that need logits.
"""

from dataclasses import dataclass
from itertools import count

import torch

from outrider.batch import ForwardBatch, SubmittedDrafts, TargetOutput, VerifyResult
from outrider.cache.cache_set import CacheSet
from outrider.engine.batching import StepDrafts, StepSpans, upload
from outrider.engine.metrics import PhaseClock
from outrider.engine.sampling import LogprobRows, build_choices, logprob_columns, logprob_rows, read_logprobs
from outrider.ops.native.library import library_for
from outrider.ops.native.match import GreedyMatch
from outrider.request import TokenLogprobs
from outrider.speculative.verify import verify

__all__ = ["Acceptance", "Outcome"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Host copy of what one step decided, per sequence of the step."""

    output_token_ids: tuple[tuple[int, ...], ...]  # () where no logits were wanted
    num_accepted: tuple[int, ...]
    logprobs: tuple[tuple[TokenLogprobs, ...] | None, ...]  # per output token; None where not asked for, () for nobody


class Acceptance:
    """Decides the tokens of steps and has their rows committed.

    Args:
        caches: whose tentative rows are committed.
        max_sequences: sequences of a step at most.
        num_draft_tokens: of a block at most.
    """

    def __init__(self, caches: CacheSet, *, max_sequences: int, num_draft_tokens: int) -> None:
        self._caches = caches
        self._max_sequences, self._num_draft_tokens = max_sequences, num_draft_tokens
        self._greedy: GreedyMatch | None = None

    def decide(
        self, spans: StepSpans, drafts: StepDrafts, batch: ForwardBatch, output: TargetOutput, clock: PhaseClock
    ) -> Outcome:
        """Tokens of every sequence with logits; a prompt's last row is a span without drafts."""
        clock.begin("accept")
        wanted = [index for index, item in enumerate(spans.items) if item.wants_logits]
        greedy = self._match_for(output.logits_NV, drafts, spans)
        if greedy is not None:
            return self._decide_greedily(greedy, wanted, spans, drafts, batch, output, clock)
        verdict = _judge(wanted, spans, drafts, output)
        clock.begin("commit")
        self._caches.commit(batch, verdict.num_accepted_S[: spans.num_decodes] + 1)
        clock.begin("accept")
        return _read(spans, verdict, output, logprob_rows(spans, drafts, output.logits_NV.shape[1]))

    def _match_for(self, logits_NV: torch.Tensor, drafts: StepDrafts, spans: StepSpans) -> GreedyMatch | None:
        """The native form, if it does for such logits, drafts and sequences; built when first needed."""
        native = library_for(logits_NV.dtype, logits_NV.device)
        if native is None or drafts.token_ids_SG.shape[1] > self._num_draft_tokens or not logits_NV.shape[1]:
            return None
        for item in spans.items:
            if item.choice is not None:
                return None
        if self._greedy is None:
            self._greedy = GreedyMatch(native, max_sequences=self._max_sequences, num_drafts=self._num_draft_tokens)
        return self._greedy

    def _decide_greedily(
        self,
        greedy: GreedyMatch,
        wanted: list[int],
        spans: StepSpans,
        drafts: StepDrafts,
        batch: ForwardBatch,
        output: TargetOutput,
        clock: PhaseClock,
    ) -> Outcome:
        num_sequences = len(spans.items)
        block_rows, lengths = drafts.block_rows, spans.verify_lengths
        if len(wanted) < num_sequences:
            block_rows, lengths = tuple(block_rows[i] for i in wanted), tuple(lengths[i] for i in wanted)
        output_token_ids = greedy(output.logits_NV, drafts.token_ids_SG, block_rows, lengths)
        clock.begin("commit")
        self._caches.commit(batch, greedy.num_committed(len(batch.step.lengths)))
        clock.begin("accept")
        if len(wanted) < num_sequences:
            judged = dict(zip(wanted, output_token_ids, strict=True))
            output_token_ids = tuple(judged.get(index, ()) for index in range(num_sequences))
        num_accepted = tuple([len(tokens) - 1 if tokens else 0 for tokens in output_token_ids])
        return Outcome(output_token_ids=output_token_ids, num_accepted=num_accepted, logprobs=())


def _judge(wanted: list[int], spans: StepSpans, drafts: StepDrafts, output: TargetOutput) -> VerifyResult:
    """Judge the drafts of the sequences with logits, on the device."""
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
