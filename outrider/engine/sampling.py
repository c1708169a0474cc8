"""Sampling parameters of a step as tensors, and log probabilities of its tokens.

Everything comes from the plan; nothing is kept between rounds, so aborts, new company and moved
sequences have nothing to keep in order here.

Dims: S sequences, Q sequences whose tokens are not the plain argmax, R their rows, V vocabulary,
B pairs of a row and a draft before it, C sequences that judge drafts with coins, L rows whose log
probabilities are wanted, K most likely tokens, G1 draft positions + 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import torch

from outrider.batch import (
    CoinSpans,
    DraftSampling,
    DraftShaping,
    Penalties,
    StopMask,
    TokenChoices,
    Truncation,
    VerifyResult,
)
from outrider.engine.batching import StepDrafts, StepSpans, upload
from outrider.ops.invariant import island_dtype
from outrider.ops.sampling import log_softmax, top_values
from outrider.plan import ScheduledSequence, SequenceChoice
from outrider.request import AcceptanceRule, SamplingParams, TokenLogprobs

__all__ = ["LogprobRows", "build_choices", "build_draft_sampling", "logprob_columns", "logprob_rows", "read_logprobs"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceSpan:
    """One sequence of Q and where its rows are."""

    item: ScheduledSequence
    choice: SequenceChoice
    span: int  # index among the sequences with logits
    first_row: int  # in the step's logits
    num_rows: int  # 1 + drafts
    block_row: int  # of the draft block

    @property
    def first_position(self) -> int:
        """Absolute position of the token that the first row chooses."""
        return self.item.start_position + len(self.item.query_token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Output tokens before that one."""
        return self.first_position - self.choice.num_prompt_tokens


def _choice_spans(spans: StepSpans, drafts: StepDrafts) -> list[ChoiceSpan]:
    """Sequences with logits and a choice of any kind, in order of the step."""
    found, span, first_row = [], 0, 0
    for item, length, block_row in zip(spans.items, spans.verify_lengths, drafts.block_rows, strict=True):
        if not item.wants_logits:
            continue
        if item.choice is not None:
            found.append(
                ChoiceSpan(
                    item=item,
                    choice=item.choice,
                    span=span,
                    first_row=first_row,
                    num_rows=1 + length,
                    block_row=block_row,
                )
            )
        span, first_row = span + 1, first_row + 1 + length
    return found


def build_choices(spans: StepSpans, drafts: StepDrafts, vocab_size: int, device: torch.device) -> TokenChoices | None:
    """Tensors of the sequences that do not take the plain argmax; None when all do."""
    chosen = [span for span in _choice_spans(spans, drafts) if not span.choice.params.is_argmax]
    if not chosen:
        return None
    params = [span.choice.params for span in chosen]
    rows_R, sequence_R, positions_R, seed_Q, sample_Q, greedy_Q = upload(
        device,
        [span.first_row + i for span in chosen for i in range(span.num_rows)],
        [q for q, span in enumerate(chosen) for _ in range(span.num_rows)],
        [span.first_position + i for span in chosen for i in range(span.num_rows)],
        [one.seed or 0 for one in params],
        [span.choice.sample_index for span in chosen],
        [one.temperature == 0 for one in params],
    )
    return TokenChoices(
        rows_R=rows_R,
        sequence_R=sequence_R,
        positions_R=positions_R,
        seed_Q=seed_Q,
        sample_Q=sample_Q,
        temperature_Q=_reals(device, [one.temperature or 1.0 for one in params]),
        greedy_Q=greedy_Q.bool(),
        truncation=_truncation(params, vocab_size, device),
        bias_QV=_bias(params, vocab_size, device),
        penalties=_penalties(chosen, drafts, vocab_size, device),
        stop_mask=_stop_mask(chosen, vocab_size, device),
        coins=_coins(chosen, drafts.token_ids_SG.shape[1], device),
    )


def build_draft_sampling(
    drafting: Sequence[ScheduledSequence], vocab_size: int, device: torch.device
) -> DraftSampling | None:
    """How the drafts of ``drafting`` are chosen; None when all are the plain argmax, which costs nothing."""
    choices = [item.choice for item in drafting]
    if not any(choices):
        return None
    draws = any(choice is not None and choice.params.temperature > 0 for choice in choices)
    shaping = _draft_shaping(drafting, vocab_size, device)
    if not draws and shaping is None:
        return None
    params = [SamplingParams() if choice is None else choice.params for choice in choices]
    seed_S, sample_S, greedy_S, coins_S = upload(
        device,
        [one.seed or 0 for one in params],
        [0 if choice is None else choice.sample_index for choice in choices],
        [one.temperature == 0 for one in params],
        [_rule(one) != "match" for one in params],
    )
    return DraftSampling(
        seed_S=seed_S,
        sample_S=sample_S,
        temperature_S=_reals(device, [one.temperature or 1.0 for one in params]),
        greedy_S=greedy_S.bool(),
        coins_S=coins_S.bool(),
        hands_over=any(_rule(one) != "match" for one in params),
        draws=draws,
        truncation=_truncation(params, vocab_size, device),
        shaping=shaping,
    )


def _draft_shaping(drafting: Sequence[ScheduledSequence], vocab_size: int, device: torch.device) -> DraftShaping | None:
    """What the drafts of some of ``drafting`` are to go through; None when nobody asks for anything."""
    spans = [
        ChoiceSpan(item=item, choice=item.choice, span=row, first_row=0, num_rows=1, block_row=0)
        for row, item in enumerate(drafting)
        if item.choice is not None
    ]
    chosen = [span for span in spans if span.choice.params.shapes_beyond(span.num_output_tokens)]
    if not chosen:
        return None
    params = [span.choice.params for span in chosen]
    num_masked = [max(0, span.choice.params.min_tokens - span.num_output_tokens) for span in chosen]
    rows_Q, num_masked_Q = upload(device, [span.span for span in chosen], num_masked)
    no_drafts = StepDrafts(token_ids_SG=torch.empty((1, 0), dtype=torch.int64, device=device), block_rows=())
    return DraftShaping(
        rows_Q=rows_Q,
        bias_QV=_bias(params, vocab_size, device),
        penalties=_penalties(chosen, no_drafts, vocab_size, device),
        stop_QV=_stop_table(chosen, vocab_size, device) if any(num_masked) else None,
        num_masked_Q=num_masked_Q,
    )


def _rule(params: SamplingParams) -> AcceptanceRule:
    """Greedy drafts and tokens are certain: then every rule is the same one."""
    return "match" if params.temperature == 0 else params.acceptance


def _reals(device: torch.device, values: Sequence[float]) -> torch.Tensor:
    return torch.tensor([float(value) for value in values], dtype=torch.float64).to(device)


def _truncation(params: Sequence[SamplingParams], vocab_size: int, device: torch.device) -> Truncation:
    def used(values: list[float], neutral: float) -> torch.Tensor | None:
        return _reals(device, values) if any(value != neutral for value in values) else None

    top_k = [one.top_k if 0 < one.top_k < vocab_size else vocab_size for one in params]
    largest_k = max((k for k in top_k if k < vocab_size), default=0)
    return Truncation(
        top_k_S=torch.tensor(top_k).to(device) if largest_k else None,
        largest_k=largest_k,
        top_p_S=used([one.top_p for one in params], 1),
        min_p_S=used([one.min_p for one in params], 0),
    )


def _bias(params: Sequence[SamplingParams], vocab_size: int, device: torch.device) -> torch.Tensor | None:
    if not any(one.logit_bias for one in params):
        return None
    sequences, token_ids = upload(
        device,
        [q for q, one in enumerate(params) for _ in one.logit_bias],
        [token_id for one in params for token_id in one.logit_bias],
    )
    values = _reals(device, [bias for one in params for bias in one.logit_bias.values()])
    bias_QV = torch.zeros((len(params), vocab_size), dtype=torch.float64, device=device)
    return bias_QV.index_put_((sequences, token_ids), values)


def _penalties(
    chosen: Sequence[ChoiceSpan], drafts: StepDrafts, vocab_size: int, device: torch.device
) -> Penalties | None:
    params = [span.choice.params for span in chosen]
    if not any(one.counts_tokens for one in params):
        return None
    prompts = [span.choice.history[: span.choice.num_prompt_tokens] for span in chosen]
    outputs = [span.choice.history[span.choice.num_prompt_tokens :] for span in chosen]
    first_rows = [0, *accumulate(span.num_rows for span in chosen)]
    pairs = [
        (first_row + i, span.block_row * drafts.token_ids_SG.shape[1] + j)
        for span, first_row in zip(chosen, first_rows, strict=False)
        if span.choice.params.counts_tokens
        for i in range(span.num_rows)
        for j in range(i)
    ]
    prompt_sequences, prompt_ids, output_sequences, output_ids, later_rows_B, earlier_cells_B = upload(
        device,
        [q for q, tokens in enumerate(prompts) for _ in tokens],
        list(chain.from_iterable(prompts)),
        [q for q, tokens in enumerate(outputs) for _ in tokens],
        list(chain.from_iterable(outputs)),
        [row for row, _ in pairs],
        [cell for _, cell in pairs],
    )
    counts_QV = torch.zeros((len(chosen), vocab_size), dtype=torch.int32, device=device)
    ones = torch.ones_like(output_ids, dtype=torch.int32)
    counts_QV.index_put_((output_sequences, output_ids), ones, accumulate=True)
    seen_QV = counts_QV > 0
    seen_QV[prompt_sequences, prompt_ids] = True
    return Penalties(
        repetition_Q=_reals(device, [one.repetition_penalty for one in params]),
        presence_Q=_reals(device, [one.presence_penalty for one in params]),
        frequency_Q=_reals(device, [one.frequency_penalty for one in params]),
        counts_QV=counts_QV,
        seen_QV=seen_QV,
        later_rows_B=later_rows_B,
        earlier_ids_B=drafts.token_ids_SG.flatten()[earlier_cells_B],
    )


def _stop_mask(chosen: Sequence[ChoiceSpan], vocab_size: int, device: torch.device) -> StopMask | None:
    masked = [
        span.num_output_tokens + i < span.choice.params.min_tokens for span in chosen for i in range(span.num_rows)
    ]
    if not any(masked):
        return None
    (masked_R,) = upload(device, masked)
    return StopMask(stop_QV=_stop_table(chosen, vocab_size, device), masked_R=masked_R.bool())


def _stop_table(chosen: Sequence[ChoiceSpan], vocab_size: int, device: torch.device) -> torch.Tensor:
    """The stop ids of each sequence, bool ``[Q, V]``."""
    stops = [sorted(span.choice.stop_token_ids) for span in chosen]
    sequences, token_ids = upload(
        device, [q for q, ids in enumerate(stops) for _ in ids], list(chain.from_iterable(stops))
    )
    stop_QV = torch.zeros((len(chosen), vocab_size), dtype=torch.bool, device=device)
    stop_QV[sequences, token_ids] = True
    return stop_QV


def _coins(chosen: Sequence[ChoiceSpan], num_drafts: int, device: torch.device) -> tuple[CoinSpans, ...]:
    first_rows = [0, *accumulate(span.num_rows for span in chosen)]
    groups = []
    for rule in ("rejection", "block"):
        members = [q for q, span in enumerate(chosen) if _rule(span.choice.params) == rule]
        if not members:
            continue
        spans_C, sequences_C, anchor_positions_C, rows = upload(
            device,
            [chosen[q].span for q in members],
            members,
            [chosen[q].first_position - 1 for q in members],
            [first_rows[q] + min(i, chosen[q].num_rows - 1) for q in members for i in range(num_drafts + 1)],
        )
        groups.append(
            CoinSpans(
                rule=rule,
                spans_C=spans_C,
                sequences_C=sequences_C,
                anchor_positions_C=anchor_positions_C,
                rows_CG1=rows.view(len(members), num_drafts + 1),
            )
        )
    return tuple(groups)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobRows:
    """Rows whose log probabilities are wanted; all rows of a span, accepted or not."""

    rows: tuple[int, ...]  # of the step's logits
    spans: tuple[int, ...]  # of each row, index among the sequences with logits
    offsets: tuple[int, ...]  # of each row in its span
    num_top: dict[int, int]  # span -> number of most likely tokens

    @property
    def largest_top(self) -> int:
        """K: most likely tokens that are computed for every row."""
        return max(self.num_top.values())


def logprob_rows(spans: StepSpans, drafts: StepDrafts, vocab_size: int) -> LogprobRows | None:
    """The rows of a step whose log probabilities are wanted; None when there are none."""
    wanted = {
        span.span: (span, min(span.choice.params.logprobs, vocab_size))
        for span in _choice_spans(spans, drafts)
        if span.choice.params.logprobs is not None
    }
    if not wanted:
        return None
    cells = [(span, i) for span, _ in wanted.values() for i in range(span.num_rows)]
    return LogprobRows(
        rows=tuple(span.first_row + i for span, i in cells),
        spans=tuple(span.span for span, _ in cells),
        offsets=tuple(i for _, i in cells),
        num_top={index: num_top for index, (_, num_top) in wanted.items()},
    )


def logprob_columns(logits_NV: torch.Tensor, verdict: VerifyResult, wanted: LogprobRows) -> torch.Tensor:
    """Per wanted row: log probability of its token, then K (id, log probability) pairs; float64 ``[L, 1 + 2 K]``.

    Ids are exact in float64, so that everything travels in one copy. What stands behind the last emitted
    token of a span is of no meaning.
    """
    rows_L, spans_L, offsets_L = upload(logits_NV.device, wanted.rows, wanted.spans, wanted.offsets)
    island_LV = logits_NV[rows_L].to(island_dtype(logits_NV.dtype))
    logprobs_LV = log_softmax(island_LV)
    # Padding is -1 and the mark of logits that are not finite is V; neither is emitted.
    token_ids_L = verdict.output_token_ids_SG1[spans_L, offsets_L].clamp(0, logits_NV.shape[1] - 1)
    columns = [logprobs_LV.gather(1, token_ids_L[:, None]).double()]
    if wanted.largest_top:
        values_LK, ids_LK = top_values(logprobs_LV, wanted.largest_top)
        columns += [ids_LK.double(), values_LK.double()]
    return torch.cat(columns, dim=1)


def read_logprobs(
    wanted: LogprobRows, columns: Sequence[Sequence[float]], output_token_ids: Sequence[tuple[int, ...]]
) -> dict[int, tuple[TokenLogprobs, ...]]:
    """Host form of ``logprob_columns``: for each span with log probabilities, those of its output tokens."""
    found: dict[int, list[TokenLogprobs]] = {span: [] for span in wanted.num_top}
    num_top = wanted.largest_top
    for span, offset, (logprob, *pairs) in zip(wanted.spans, wanted.offsets, columns, strict=True):
        if offset >= len(output_token_ids[span]):
            continue
        top = zip(map(int, pairs[:num_top]), pairs[num_top:], strict=True)
        found[span].append(
            TokenLogprobs(
                token_id=output_token_ids[span][offset],
                logprob=logprob,
                top=tuple(top)[: wanted.num_top[span]],
            )
        )
    return {span: tuple(tokens) for span, tokens in found.items()}
