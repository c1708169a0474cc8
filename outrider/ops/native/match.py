"""Acceptance of drafts by equality in one call.

Integers have one right answer, so it needs no choice at load: ``outrider.speculative.verify`` and
``outrider.engine.accept`` ask here first.

Dims: N rows that need logits, V vocabulary, S sequences, B rows of the draft block, G draft positions, G1 = G + 1.
"""

from array import array
from collections.abc import Callable, Sequence
from functools import cache

import torch

from outrider.ops.native.library import INT, POINTER, Library

__all__ = ["GreedyMatch", "native_match"]


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


class GreedyMatch:
    """From logits to the tokens of a step, for sequences that all take the argmax: what ``verify_greedy`` gives.

    One call of the library; the outcome lands in host memory that is used again by the next call.

    Args:
        native: the library.
        max_sequences: sequences of a step at most.
        num_drafts: draft positions of a block at most.
    """

    def __init__(self, native: Library, *, max_sequences: int, num_drafts: int) -> None:
        arguments = [POINTER, INT, INT, POINTER, INT, POINTER, POINTER, INT, POINTER, POINTER, INT]
        self._function = native.function("accept_greedy", arguments)
        self._outputs = array("q", bytes(8 * max_sequences * (num_drafts + 1)))
        self._committed = array("q", bytes(8 * max_sequences))
        committed_S = torch.frombuffer(self._committed, dtype=torch.int64)
        self._committed_of = [committed_S[:count] for count in range(max_sequences + 1)]

    def __call__(
        self, logits_NV: torch.Tensor, drafts_BG: torch.Tensor, block_rows: Sequence[int], lengths: Sequence[int]
    ) -> tuple[tuple[int, ...], ...]:
        """Accepted drafts and the final token of each sequence.

        Args:
            logits_NV: bfloat16 on the CPU, columns contiguous; ``1 + lengths[s]`` rows of each sequence s, in order.
            drafts_BG: int64, contiguous; G may be 0.
            block_rows: row of ``drafts_BG`` of each sequence, 0 where it has no drafts.
            lengths: drafts of each sequence that were fed to the target, 0..G.
        """
        num_sequences, num_drafts = len(lengths), drafts_BG.shape[1]
        num_rows, vocab_size = logits_NV.shape
        row_stride, step = logits_NV.stride()
        assert num_rows == num_sequences + sum(lengths), f"{num_rows} rows of logits for drafts of lengths {lengths}"
        assert drafts_BG.dtype == torch.int64 and drafts_BG.is_contiguous() and step == 1, "as documented"
        where, spans = array("q", block_rows), array("q", lengths)
        self._function(
            logits_NV.data_ptr(),
            row_stride,
            vocab_size,
            drafts_BG.data_ptr(),
            num_drafts,
            where.buffer_info()[0],
            spans.buffer_info()[0],
            num_sequences,
            self._committed.buffer_info()[0],
            self._outputs.buffer_info()[0],
            torch.get_num_threads(),
        )
        found, width = self._outputs, num_drafts + 1
        counts = self._committed[:num_sequences].tolist()
        return tuple([tuple(found[s * width : s * width + count]) for s, count in enumerate(counts)])

    def num_committed(self, count: int) -> torch.Tensor:
        """Tokens of each of the first ``count`` sequences, int64 on the CPU, until the next call."""
        return self._committed_of[count]
