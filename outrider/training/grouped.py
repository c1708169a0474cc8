"""A linear per group of consecutive rows, with exact gradients and no capacity limit.

Dims: R rows sorted by group, E groups, I inputs, O outputs.
"""

from collections.abc import Sequence

import torch

__all__ = ["GroupedLinear", "grouped_linear"]


class GroupedLinear(torch.autograd.Function):
    """``out[rows of e] = x[rows of e] @ weight[e]^T`` for consecutive runs of rows."""

    @staticmethod
    def forward(ctx, x, weight, sizes):
        """``x`` [R, I], ``weight`` [E, O, I], ``sizes`` E host counts summing to R -> [R, O]."""
        out = x.new_empty(x.shape[0], weight.shape[1])
        start = 0
        for group, size in enumerate(sizes):
            torch.mm(x[start : start + size], weight[group].T, out=out[start : start + size])
            start += size
        ctx.save_for_backward(x, weight)
        ctx.sizes = sizes
        return out

    @staticmethod
    def backward(ctx, grad_out):
        """Gradients by the same runs."""
        x, weight = ctx.saved_tensors
        grad_x, grad_weight = torch.empty_like(x), torch.empty_like(weight)
        grad_out = grad_out.contiguous()
        start = 0
        for group, size in enumerate(ctx.sizes):
            rows = slice(start, start + size)
            torch.mm(grad_out[rows], weight[group], out=grad_x[rows])
            torch.mm(grad_out[rows].T, x[rows], out=grad_weight[group])
            start += size
        return grad_x, grad_weight, None


def grouped_linear(x: torch.Tensor, weight: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    """Apply expert ``e``'s weight to its ``sizes[e]`` consecutive rows of ``x``."""
    return GroupedLinear.apply(x.contiguous(), weight, sizes)
