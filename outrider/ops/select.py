"""Selections with a defined order of ties: the lowest index wins.

Dims: N rows, V vocabulary, T rows, E candidates.
"""

import torch

__all__ = ["argmax_lowest", "topk_lowest"]


def argmax_lowest(x_NV: torch.Tensor) -> torch.Tensor:
    """Index of the largest value of each row, the lowest one among equals; int64 ``[N]``.

    ``torch.argmax`` leaves the choice among equals open. A row with a NaN gives V, which is out of
    range on purpose.
    """
    index_V = torch.arange(x_NV.shape[-1], device=x_NV.device)
    return torch.where(x_NV == x_NV.amax(-1, keepdim=True), index_V, x_NV.shape[-1]).amin(-1)


def topk_lowest(x_TE: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k largest values of each row in descending order, ties by ascending index.

    Returns:
        Values ``[T, k]`` and int64 indices ``[T, k]``.
    """
    values_TE, order_TE = x_TE.sort(dim=-1, descending=True, stable=True)
    return values_TE[..., :k], order_TE[..., :k]
