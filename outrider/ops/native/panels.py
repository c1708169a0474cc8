"""Weights packed for products of pairs (``src/pairs.h``): the layout of native attention and of the Markov chain."""

import torch

__all__ = ["PANEL", "pack_panels"]

PANEL = 16  # columns of a panel


def pack_panels(weight_IO: torch.Tensor) -> torch.Tensor:
    """Pack a bfloat16 matrix ``[..., I, O]`` that rows of I values are multiplied with.

    Returns:
        ``[..., ceil(O / 16), I / 2, 16, 2]``, contiguous, columns padded with zeros.
    """
    *leading, inner, outer = weight_IO.shape
    assert weight_IO.dtype == torch.bfloat16, f"panels hold bfloat16, not {weight_IO.dtype}"
    assert inner % 2 == 0, f"an inner width of {inner} is odd; the torch form takes it"
    padded = torch.nn.functional.pad(weight_IO, (0, -outer % PANEL))
    return padded.view(*leading, inner // 2, 2, -1, PANEL).movedim(-2, -4).transpose(-1, -2).contiguous()
