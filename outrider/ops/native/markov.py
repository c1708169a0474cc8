"""The sequential part of greedy drafting over all sequences in one call (``src/markov.cpp``).

Dims: S sequences, G drafts kept, D model width, V target vocabulary, U draft vocabulary, r Markov rank,
M rows of bias kept.
"""

from dataclasses import dataclass

import torch

from outrider.ops.native.library import INT, POINTER, REAL, Library
from outrider.ops.native.panels import pack_panels

__all__ = ["BiasMemo", "ChainWeights", "NativeMarkov", "chain_weights"]

# Rows of bias that are kept: of 256 tokens, four megabytes at most, but of a few even for a large vocabulary.
MAX_MEMO_ROWS, MAX_MEMO_BYTES, MIN_MEMO_ROWS = 256, 1 << 22, 8
MEMO_WAYS = 4  # rows that a token may lie in, WAYS of markov.cpp


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainWeights:
    """A vanilla Markov head, and a confidence head or None, as the native chain reads them."""

    w1_Vr: torch.Tensor  # bfloat16
    w2_panels: torch.Tensor  # bfloat16, packed
    draft_vocab_size: int  # U
    target_ids_U: torch.Tensor | None  # int64; None where draft ids are target ids
    confidence_hidden_D: torch.Tensor | None  # float32
    confidence_markov_r: torch.Tensor | None  # float32; None where confidence does not read the previous token
    confidence_bias: float
    memo: "BiasMemo"


@dataclass(frozen=True, slots=True, kw_only=True)
class BiasMemo:
    """Bias of tokens seen lately; the chain reads and writes it."""

    ids_M: torch.Tensor  # int64, -1 = none
    used_N: torch.Tensor  # int64, when each was used last, and then the time; N = M + 1
    rows_MU: torch.Tensor  # bfloat16

    @classmethod
    def empty(cls, num_rows: int, draft_vocab_size: int) -> "BiasMemo":
        """Room for the bias of at least ``num_rows`` tokens."""
        num_rows += -num_rows % MEMO_WAYS
        return cls(
            ids_M=torch.full((num_rows,), -1),
            used_N=torch.zeros(num_rows + 1, dtype=torch.int64),
            rows_MU=torch.empty((num_rows, draft_vocab_size), dtype=torch.bfloat16),
        )


def chain_weights(
    w1_Vr: torch.Tensor,
    w2_Ur: torch.Tensor,
    *,
    target_ids_U: torch.Tensor | None,
    confidence_F: torch.Tensor | None,
    confidence_bias: float,
    hidden_size: int,
) -> ChainWeights:
    """Pack once, at load.

    Args:
        w1_Vr: bfloat16, by target id of the previous token.
        w2_Ur: bfloat16; r even.
        target_ids_U: int64 target id of each draft id, or None.
        confidence_F: weight of the confidence head over D, or D and then r, features; None without one.
        confidence_bias: its bias, 0 without.
        hidden_size: D.
    """
    wide_F = None if confidence_F is None else confidence_F.float()
    with_markov = wide_F is not None and wide_F.shape[0] > hidden_size
    draft_vocab_size = w2_Ur.shape[0]
    num_memo_rows = min(MAX_MEMO_ROWS, max(MIN_MEMO_ROWS, MAX_MEMO_BYTES // (2 * draft_vocab_size)))
    return ChainWeights(
        w1_Vr=w1_Vr.contiguous(),
        w2_panels=pack_panels(w2_Ur.T),
        draft_vocab_size=draft_vocab_size,
        target_ids_U=None if target_ids_U is None else target_ids_U.contiguous(),
        confidence_hidden_D=None if wide_F is None else wide_F[:hidden_size].contiguous(),
        confidence_markov_r=wide_F[hidden_size:].contiguous() if wide_F is not None and with_markov else None,
        confidence_bias=confidence_bias,
        memo=BiasMemo.empty(num_memo_rows, draft_vocab_size),
    )


class NativeMarkov:
    """The native chain; bfloat16."""

    def __init__(self, library: Library) -> None:
        self._chain = library.function(
            "markov_chain",
            [
                *(POINTER,) * 7,  # anchors, logits, weights, memo
                *(INT, POINTER, POINTER),  # memo rows, target ids, hidden rows
                *(POINTER, POINTER, REAL),  # confidence head
                *(INT,) * 6,  # counts, whether to keep logits
                *(POINTER, POINTER, INT),  # results, threads
            ],
        )

    def chain(
        self,
        weights: ChainWeights,
        anchor_ids_S: torch.Tensor,
        hidden_SGD: torch.Tensor,
        logits_SGU: torch.Tensor,
        *,
        keep_logits: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Greedy drafts, left to right.

        Args:
            weights: from ``chain_weights``.
            anchor_ids_S: int64 token before the first draft.
            hidden_SGD: post-norm block rows of the drafts; read for confidence only.
            logits_SGU: logits without bias.
            keep_logits: let them gain it, in place.

        Returns:
            Target ids ``[S, G]``, int64, and the confidence of each ``[S, G]``, float32, where there is a head.
        """
        num_sequences, num_drafts, width = hidden_SGD.shape
        memo = weights.memo
        assert anchor_ids_S.is_contiguous() and hidden_SGD.is_contiguous() and logits_SGU.is_contiguous()
        token_ids_SG = anchor_ids_S.new_empty(num_sequences, num_drafts)
        confidence_SG = None
        if weights.confidence_hidden_D is not None:
            confidence_SG = weights.confidence_hidden_D.new_empty(num_sequences, num_drafts)
        self._chain(
            anchor_ids_S.data_ptr(),
            logits_SGU.data_ptr(),
            weights.w1_Vr.data_ptr(),
            weights.w2_panels.data_ptr(),
            memo.ids_M.data_ptr(),
            memo.used_N.data_ptr(),
            memo.rows_MU.data_ptr(),
            memo.ids_M.shape[0],
            _pointer(weights.target_ids_U),
            hidden_SGD.data_ptr(),
            _pointer(weights.confidence_hidden_D),
            _pointer(weights.confidence_markov_r),
            weights.confidence_bias,
            num_sequences,
            num_drafts,
            weights.draft_vocab_size,
            weights.w1_Vr.shape[1],
            width,
            keep_logits,
            token_ids_SG.data_ptr(),
            _pointer(confidence_SG),
            torch.get_num_threads(),
        )
        return token_ids_SG, confidence_SG


def _pointer(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
