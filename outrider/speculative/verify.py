"""Acceptance of drafts: flat target logits and a draft block -> VerifyResult.

Pure and on the device: no host copy, no loop over sequences.

Dims: N rows that need logits, V vocabulary, S sequences, G draft positions, G1 = G + 1.
"""

import torch

from outrider.batch import VerifyResult
from outrider.ops.select import argmax_lowest

__all__ = ["verify_greedy"]


def verify_greedy(
    logits_NV: torch.Tensor, draft_token_ids_SG: torch.Tensor, verify_lengths_S: torch.Tensor
) -> VerifyResult:
    """Accept the longest prefix of drafts that the target's argmax repeats.

    Sequence s owns ``1 + verify_lengths_S[s]`` consecutive rows, sequences in order: row i of a
    span is the target's distribution after the anchor and i drafts, so it judges draft i, and the
    row after the last accepted draft gives the final token (dspark.md 3.1). Equal logits go to the
    lowest id. Length 0 is a plain decode step.

    Args:
        logits_NV: target logits of all spans, N = sum(1 + verify_lengths_S).
        draft_token_ids_SG: int64 target ids; entries at or beyond a sequence's length are ignored,
            whatever they hold. G may be 0.
        verify_lengths_S: int64, drafts of each sequence that were fed to the target, 0..G.

    Returns:
        Accepted drafts and the final token per sequence, padded with -1, and the accepted counts.
    """
    num_drafts = draft_token_ids_SG.shape[1]
    winners_N = argmax_lowest(logits_NV)
    span_ends_S = (verify_lengths_S + 1).cumsum(0)
    offsets_G1 = torch.arange(num_drafts + 1, device=logits_NV.device)
    # Beyond a short span the index would run into the next sequence or off the end; those entries
    # are masked below, so any valid row will do.
    rows_SG1 = (span_ends_S - 1 - verify_lengths_S)[:, None] + offsets_G1
    winners_SG1 = winners_N[rows_SG1.minimum(span_ends_S[:, None] - 1)]
    agrees_SG = (winners_SG1[:, :-1] == draft_token_ids_SG) & (offsets_G1[:-1] < verify_lengths_S[:, None])
    num_accepted_S = agrees_SG.cumprod(1).sum(1)
    output_SG1 = torch.where(offsets_G1 <= num_accepted_S[:, None], winners_SG1, -1)
    return VerifyResult(output_token_ids_SG1=output_SG1, num_accepted_S=num_accepted_S)
