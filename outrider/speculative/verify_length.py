"""How many drafts of each sequence are fed to the target.

For now a fixed length, clipped so that no span passes the context or writes a token nobody wants.
Host integers only; a length of 0 is a plain decode step.
"""

from collections.abc import Sequence

__all__ = ["clip_verify_lengths"]


def clip_verify_lengths(
    num_draft_tokens: int,
    *,
    anchor_positions: Sequence[int],
    tokens_left: Sequence[int],
    max_context: int,
) -> tuple[int, ...]:
    """Drafts to verify per sequence: all of them, less what cannot be used.

    A span covers the anchor at position p and drafts at p + 1..p + length, which must stay below
    ``max_context``; and the final token is always produced, so more than ``tokens_left - 1`` drafts
    cannot be emitted. The choice sees no draft content, so it is lossless for every verifier.

    Args:
        num_draft_tokens: drafts proposed per round.
        anchor_positions: absolute position of each anchor.
        tokens_left: output tokens each request may still emit, at least 1.
        max_context: positions the caches can hold.
    """
    return tuple(
        max(0, min(num_draft_tokens, max_context - 1 - position, left - 1))
        for position, left in zip(anchor_positions, tokens_left, strict=True)
    )
