"""The tensors of one step: what goes into a target forward and what comes out.

Dims: T flat tokens, S sequences, S1 = S + 1, P pages per sequence, N rows that need logits,
V vocabulary, D model width, A tapped layers, G draft positions, G1 = G + 1, Q sequences whose tokens
are not the plain argmax, R their rows among the N, B pairs of a row and a draft before it,
C sequences that judge drafts with coins.
"""

from dataclasses import dataclass, field
from typing import Literal

import torch

__all__ = [
    "BatchPlace",
    "CoinSpans",
    "DraftBlock",
    "DraftSampling",
    "DraftShaping",
    "ForwardBatch",
    "Penalties",
    "SpanGroup",
    "StopMask",
    "SubmittedDrafts",
    "TargetOutput",
    "TokenChoices",
    "Truncation",
    "VerifyResult",
]


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
    limits_SM: torch.Tensor  # int64 [S, max(lengths)]: keys each row may see, 1 where padded
    num_keys_S: torch.Tensor  # int64, keys that each sequence has after its last row

    @property
    def max_length(self) -> int:
        """Rows of the longest span of the group; 0 for an empty group."""
        return max(self.lengths, default=0)


@dataclass(slots=True, kw_only=True, eq=False)
class BatchPlace:
    """Memory that the batches of one shape take in turns: every tensor of the next one lies where this one's lies.

    Whoever runs a batch may keep here what holds for the place, such as a recorded step.
    """

    num_batches: int = 0  # so far
    kept: dict[object, object] = field(default_factory=dict)  # by who keeps it


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
    wants_taps: bool = True  # host: whether anybody reads what the target taps
    # Set where all tensors lie in a place, which makes them valid until the next batch of the same shape is built.
    # A copy of the batch with another tensor has none.
    place: BatchPlace | None = None

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
class Truncation:
    """Cuts of the distribution, per sequence; a part that no sequence uses is None."""

    top_k_S: torch.Tensor | None  # int64 >= 1, V or more = off
    largest_k: int  # host: largest k that is not off
    top_p_S: torch.Tensor | None  # 1 = off
    min_p_S: torch.Tensor | None  # 0 = off

    def rows(self, sequence_N: torch.Tensor) -> "Truncation":
        """The same cuts per row, for rows of the given sequences."""
        parts = (None if part is None else part[sequence_N] for part in (self.top_k_S, self.top_p_S, self.min_p_S))
        top_k_N, top_p_N, min_p_N = parts
        return Truncation(top_k_S=top_k_N, largest_k=self.largest_k, top_p_S=top_p_N, min_p_S=min_p_N)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSampling:
    """How a drafter draws its drafts; a drafter may ignore it, then its drafts are taken as certain."""

    seed_S: torch.Tensor  # int64
    sample_S: torch.Tensor  # int64, sample index
    temperature_S: torch.Tensor  # float64, 1 where greedy
    greedy_S: torch.Tensor  # bool: draft the most likely token
    coins_S: torch.Tensor  # bool: draw from the own distribution, with own noise, and hand it over
    hands_over: bool  # host: coins_S.any()
    draws: bool  # host: not all of greedy_S
    truncation: Truncation
    shaping: "DraftShaping | None" = None  # None: nobody's logits are changed before they are chosen from


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftBlock:
    """One batched proposal for all active sequences."""

    token_ids_SG: torch.Tensor  # int64, target ids
    confidence_SG: torch.Tensor | None  # float, sigmoid(conf logit); None without a head
    # Distribution that each draft was drawn from, given the drafts before it, over target ids; None when
    # no sequence draws, or when drafts are a function of the committed tokens.
    probs_SGV: torch.Tensor | None = None
    # Host: rows whose drafts were read from the text and not asked of a model: they cost nothing, and their
    # confidence is measured, not a head's.
    read_rows: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Penalties:
    """Repetition, presence and frequency penalties, and the tokens that they count."""

    repetition_Q: torch.Tensor  # float64, 1 = neutral
    presence_Q: torch.Tensor  # float64, 0 = neutral
    frequency_Q: torch.Tensor  # float64, 0 = neutral
    counts_QV: torch.Tensor  # int32, tokens of the committed output
    seen_QV: torch.Tensor  # bool, tokens of prompt and committed output
    later_rows_B: torch.Tensor  # int64, index into the R rows ...
    earlier_ids_B: torch.Tensor  # ... and id of a draft of its span that precedes it


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftShaping:
    """What the logits of some sequences go through, for a drafter to do the same; a part nobody uses is None.

    Here Q are the drafting sequences that ask for any of it.
    """

    rows_Q: torch.Tensor  # int64, index into the drafting sequences S
    bias_QV: torch.Tensor | None  # float64
    penalties: Penalties | None  # without drafts: B = 0
    stop_QV: torch.Tensor | None  # bool, stop ids that are masked ...
    num_masked_Q: torch.Tensor  # int64, ... for so many of the next tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class StopMask:
    """Stop ids that may not be drawn before ``min_tokens``."""

    stop_QV: torch.Tensor  # bool
    masked_R: torch.Tensor  # bool, whether the row is below its minimum


@dataclass(frozen=True, slots=True, kw_only=True)
class CoinSpans:
    """Sequences whose drafts are judged by one of the rules that toss coins."""

    rule: Literal["rejection", "block"]
    spans_C: torch.Tensor  # int64, index among the sequences with logits
    sequences_C: torch.Tensor  # int64, index into Q
    anchor_positions_C: torch.Tensor  # int64, absolute: what tells one round from the next
    rows_CG1: torch.Tensor  # int64, index into the R rows; a short span repeats its last row


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenChoices:
    """How the tokens of those sequences are chosen that do not take the plain argmax."""

    rows_R: torch.Tensor  # int64, rows of the step's logits
    sequence_R: torch.Tensor  # int64, 0..Q-1
    positions_R: torch.Tensor  # int64, absolute position of the token that the row chooses
    seed_Q: torch.Tensor  # int64
    sample_Q: torch.Tensor  # int64, sample index
    temperature_Q: torch.Tensor  # float64, 1 where greedy
    greedy_Q: torch.Tensor  # bool
    truncation: Truncation
    bias_QV: torch.Tensor | None  # float64
    penalties: Penalties | None
    stop_mask: StopMask | None
    coins: tuple[CoinSpans, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmittedDrafts:
    """The drafts that the target judges, of every sequence with logits."""

    token_ids_SG: torch.Tensor  # int64 target ids; entries at or beyond a length are ignored. G may be 0
    lengths_S: torch.Tensor  # int64
    probs_SGV: torch.Tensor | None  # see DraftBlock


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyResult:
    """Outcome of acceptance, still on the device."""

    output_token_ids_SG1: torch.Tensor  # int64, accepted drafts then the final token, padding -1
    num_accepted_S: torch.Tensor  # int64, accepted drafts, without the final token
