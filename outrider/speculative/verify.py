"""Acceptance of drafts: flat target logits and a draft block -> VerifyResult.

The default rule draws the target's own token at every row and lets drafts stand while they equal it. What
is emitted is then always the target's draw, whatever was drafted, so the text does not depend on
speculation. The two rules with coins accept more and are exact in distribution only.

Pure and on the device: no host copy, no loop over sequences.

Dims: N rows that need logits, V vocabulary, S sequences, G draft positions, G1 = G + 1, R rows with a
choice of their own, C sequences that judge drafts with coins.
"""

import torch
import torch.nn.functional as F

from outrider.batch import CoinSpans, SubmittedDrafts, TokenChoices, VerifyResult
from outrider.ops.draws import Purpose, draw_keys, uniform
from outrider.ops.invariant import elementwise
from outrider.ops.native.library import Library, library_for
from outrider.ops.native.match import native_match
from outrider.ops.rejection import accept_block, accept_tokenwise
from outrider.ops.sampling import draw, softmax
from outrider.ops.select import argmax_lowest
from outrider.speculative.choose import choose_tokens

__all__ = ["verify", "verify_greedy", "verify_matching"]

COIN_RULES = {"rejection": accept_tokenwise, "block": accept_block}


def verify(logits_NV: torch.Tensor, drafts: SubmittedDrafts, choices: TokenChoices | None) -> VerifyResult:
    """Judge the drafts of every sequence by the rule that it asks for.

    Args:
        logits_NV: target logits of all spans, N = sum(1 + lengths_S).
        drafts: what was fed to the target.
        choices: of the sequences that do not take the plain argmax; None when all do.
    """
    if choices is None:
        return verify_greedy(logits_NV, drafts.token_ids_SG, drafts.lengths_S)
    chosen = choose_tokens(logits_NV[choices.rows_R], choices)
    winners_N = argmax_lowest(logits_NV).index_copy(0, choices.rows_R, chosen.token_ids_R)
    native = library_for(logits_NV.dtype, logits_NV.device)
    result = verify_matching(winners_N, drafts.token_ids_SG, drafts.lengths_S, native)
    for spans in choices.coins:
        result = _toss_coins(result, chosen.scores_RV, drafts, choices, spans)
    return result


def verify_greedy(
    logits_NV: torch.Tensor, draft_token_ids_SG: torch.Tensor, verify_lengths_S: torch.Tensor
) -> VerifyResult:
    """Accept the longest prefix of drafts that the target's argmax repeats; see ``verify_matching``.

    Equal logits go to the lowest id.
    """
    native = library_for(logits_NV.dtype, logits_NV.device)
    return verify_matching(argmax_lowest(logits_NV), draft_token_ids_SG, verify_lengths_S, native)


def verify_matching(
    winners_N: torch.Tensor,
    draft_token_ids_SG: torch.Tensor,
    verify_lengths_S: torch.Tensor,
    native: Library | None = None,
) -> VerifyResult:
    """Accept the longest prefix of drafts that the target's own tokens repeat.

    Sequence s owns ``1 + verify_lengths_S[s]`` consecutive rows, sequences in order: row i of a
    span is the target's distribution after the anchor and i drafts, so its token judges draft i, and the
    row after the last accepted draft gives the final token (dspark.md 3.1). Length 0 is a plain decode step.

    Args:
        winners_N: int64, the target's token at each row, N = sum(1 + verify_lengths_S).
        draft_token_ids_SG: int64 target ids; entries at or beyond a sequence's length are ignored,
            whatever they hold. G may be 0.
        verify_lengths_S: int64, drafts of each sequence that were fed to the target, 0..G.
        native: does it in one call; None takes the torch form, which gives the same.

    Returns:
        Accepted drafts and the final token per sequence, padded with -1, and the accepted counts.
    """
    if native is not None:
        output_SG1, num_accepted_S = native_match(native, winners_N, draft_token_ids_SG, verify_lengths_S)
        return VerifyResult(output_token_ids_SG1=output_SG1, num_accepted_S=num_accepted_S)
    num_drafts = draft_token_ids_SG.shape[1]
    span_ends_S = (verify_lengths_S + 1).cumsum(0)
    offsets_G1 = torch.arange(num_drafts + 1, device=winners_N.device)
    # Beyond a short span the index would run into the next sequence or off the end; those entries
    # are masked below, so any valid row will do.
    rows_SG1 = (span_ends_S - 1 - verify_lengths_S)[:, None] + offsets_G1
    winners_SG1 = winners_N[rows_SG1.minimum(span_ends_S[:, None] - 1)]
    agrees_SG = (winners_SG1[:, :-1] == draft_token_ids_SG) & (offsets_G1[:-1] < verify_lengths_S[:, None])
    num_accepted_S = agrees_SG.cumprod(1).sum(1)
    output_SG1 = winners_SG1.masked_fill(offsets_G1 > num_accepted_S[:, None], -1)
    return VerifyResult(output_token_ids_SG1=output_SG1, num_accepted_S=num_accepted_S)


def _toss_coins(
    result: VerifyResult,
    scores_RV: torch.Tensor,
    drafts: SubmittedDrafts,
    choices: TokenChoices,
    spans: CoinSpans,
) -> VerifyResult:
    """Replace the outcome of the sequences in ``spans`` by that of their rule.

    The anchor's position is a word of every key: block verification learns something about drafts that it
    does not accept, so a later round may not meet the same noise again.
    """
    vocab_size = scores_RV.shape[1]
    # Entries beyond a length may hold anything, but they are used as columns before they are masked.
    draft_ids_CG = drafts.token_ids_SG[spans.spans_C].clamp(0, vocab_size - 1)
    lengths_C = drafts.lengths_S[spans.spans_C]
    target_CG1V = softmax(scores_RV)[spans.rows_CG1]
    if drafts.probs_SGV is None:  # a function of the committed tokens: certain
        draft_CGV = F.one_hot(draft_ids_CG, vocab_size).to(target_CG1V.dtype)
    else:
        draft_CGV = drafts.probs_SGV[spans.spans_C].to(target_CG1V.dtype)
    round_words = (choices.seed_Q[spans.sequences_C], choices.sample_Q[spans.sequences_C], spans.anchor_positions_C)
    stream_C = draw_keys(*round_words)
    offsets_G1 = torch.arange(draft_ids_CG.shape[1] + 1, device=stream_C.device)
    coins_CG = uniform(draw_keys(stream_C[:, None], offsets_G1[:-1], Purpose.ACCEPT))
    verdict = COIN_RULES[spans.rule](target_CG1V, draft_CGV, draft_ids_CG, lengths_C, coins_CG)
    final_C = draw(
        elementwise(torch.log, verdict.final_CV),
        draw_keys(stream_C, verdict.num_accepted_C, Purpose.RECOVER),
        torch.arange(vocab_size, device=stream_C.device),
    )
    accepted_C1 = verdict.num_accepted_C[:, None]
    padded_CG1 = torch.constant_pad_nd(draft_ids_CG, (0, 1))
    output_CG1 = torch.where(
        offsets_G1 < accepted_C1, padded_CG1, torch.where(offsets_G1 == accepted_C1, final_C[:, None], -1)
    )
    return VerifyResult(
        output_token_ids_SG1=result.output_token_ids_SG1.index_copy(0, spans.spans_C, output_CG1),
        num_accepted_S=result.num_accepted_S.index_copy(0, spans.spans_C, verdict.num_accepted_C),
    )
