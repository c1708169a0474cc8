"""The tensors of one step: what goes into a target forward and what comes out.

Dims: T flat tokens, S sequences, S1 = S + 1, P pages per sequence, N rows that need logits,
V vocabulary, D model width, A tapped layers, G draft positions, G1 = G + 1.
"""

from dataclasses import dataclass

import torch

__all__ = ["DraftBlock", "ForwardBatch", "SpanGroup", "TargetOutput", "VerifyResult"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanGroup:
    """Rows of the flat batch that advance the recurrent state the same way.

    A step holds at most two groups: ``chunk`` spans (prompt rows, committed by the forward
    itself, advanced in fixed chunks at absolute multiples of the KDA chunk) and ``step`` spans
    (decode and verify rows: tentative, logged, committed after acceptance).
    """

    rows_T: torch.Tensor  # int64, rows of the flat batch that belong to this group, in order
    state_slots_S: torch.Tensor  # int64, recurrent seat of each sequence of the group
    lengths: tuple[int, ...]  # rows of each sequence of the group (host copy), all >= 1
    starts: tuple[int, ...]  # absolute position of each sequence's first row (host copy)
    padded_rows_SM: torch.Tensor  # int64 [S, max(lengths)]: index into rows_T, 0 where padded
    valid_SM: torch.Tensor  # bool [S, max(lengths)]

    @property
    def max_length(self) -> int:
        """Rows of the longest span of the group; 0 for an empty group."""
        return max(self.lengths, default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBatch:
    """One flat batch: each scheduled sequence contributes a span of rows.

    ``context_lens_T[r]`` is the number of keys row r may see, itself included
    (= its absolute position + 1): this alone gives causality inside a span.
    """

    token_ids_T: torch.Tensor  # int64
    positions_T: torch.Tensor  # int64, absolute
    context_lens_T: torch.Tensor  # int64, positions_T + 1
    sequence_T: torch.Tensor  # int64, index 0..S-1 of the row's sequence in this batch
    slot_mapping_T: torch.Tensor  # int64, flat row of the paged caches for each new token
    page_table_SP: torch.Tensor  # int64, pages of each sequence in order; unused entries 0
    logits_rows_N: torch.Tensor  # int64, rows whose logits are needed
    chunk: SpanGroup  # prompt rows (may be empty)
    step: SpanGroup  # decode and verify rows (may be empty)
    page_size: int
    max_context: int  # host: largest context_lens_T of the batch, in tokens (0 when empty)

    @property
    def num_tokens(self) -> int:
        """Rows in the flat batch."""
        return int(self.token_ids_T.shape[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetOutput:
    """What a target forward returns; the recurrent state is still tentative."""

    logits_NV: torch.Tensor  # compute dtype
    aux_hidden_TAD: torch.Tensor | None  # taps in capture order; None when nothing is tapped


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftBlock:
    """One batched proposal for all active sequences."""

    token_ids_SG: torch.Tensor  # int64, target ids
    confidence_SG: torch.Tensor | None  # float, sigmoid(conf logit); None without a head


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyResult:
    """Outcome of greedy acceptance, still on the device."""

    output_token_ids_SG1: torch.Tensor  # int64, accepted drafts then the final token, padding -1
    num_accepted_S: torch.Tensor  # int64, accepted drafts, without the final token
