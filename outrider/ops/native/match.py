"""Acceptance of drafts by equality in one call.

Integers have one right answer, so it needs no choice at load: ``outrider.speculative.verify`` asks here first.

Dims: N rows that need logits, S sequences, G draft positions, G1 = G + 1.
"""

from collections.abc import Callable
from functools import cache

import torch

from outrider.ops.native.library import INT, POINTER, Library

__all__ = ["native_match"]


def native_match(
    native: Library, winners_N: torch.Tensor, draft_token_ids_SG: torch.Tensor, lengths_S: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output ids ``[S, G1]`` and accepted counts ``[S]``; see ``verify_matching``. All int64 on the CPU."""
    num_sequences, num_drafts = draft_token_ids_SG.shape
    # One check for all: a length that is no int64 would be read as garbage.
    assert winners_N.dtype == draft_token_ids_SG.dtype == lengths_S.dtype == torch.int64, "ids and lengths are int64"
    winners_N, drafts_SG, lengths_S = winners_N.contiguous(), draft_token_ids_SG.contiguous(), lengths_S.contiguous()
    output_SG1 = winners_N.new_empty(num_sequences, num_drafts + 1)
    num_accepted_S = winners_N.new_empty(num_sequences)
    _function(native)(
        winners_N.data_ptr(),
        drafts_SG.data_ptr(),
        num_drafts,
        lengths_S.data_ptr(),
        num_sequences,
        num_drafts,
        output_SG1.data_ptr(),
        num_accepted_S.data_ptr(),
    )
    return output_SG1, num_accepted_S


@cache
def _function(native: Library) -> Callable[..., int | None]:
    return native.function("match_drafts", [POINTER, POINTER, INT, POINTER, INT, INT, POINTER, POINTER])
