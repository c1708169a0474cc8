"""Selections with a defined order of ties: the lowest index wins.

Dims: N rows, V vocabulary, T rows, E candidates.
"""

import torch

from outrider.ops.native.select import native_argmax

__all__ = ["argmax_lowest", "first_maximum", "topk_lowest"]


def argmax_lowest(x_NV: torch.Tensor) -> torch.Tensor:
    """Index of the largest value of each row, the lowest one among equals; int64 ``[N]``.

    A row with a NaN gives V, which is out of range on purpose.
    """
    found_N = native_argmax(x_NV, nan_is_largest=False)
    if found_N is not None:
        return found_N
    value_N, index_N = x_NV.max(-1)
    return torch.where(value_N.isnan(), x_NV.shape[-1], index_N)


def first_maximum(x_NV: torch.Tensor) -> torch.Tensor:
    """As ``argmax_lowest``, but a row with a NaN gives its first NaN: always in range; int64 ``[N]``.

    ``torch.max`` along a dim documents the first of equal maxima. For drafts: a wrong one costs time
    only, an index out of range would be a fault.
    """
    found_N = native_argmax(x_NV, nan_is_largest=True)
    return x_NV.max(-1).indices if found_N is None else found_N


def topk_lowest(x_TE: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k largest values of each row in descending order, ties by ascending index.

    Returns:
        Values ``[T, k]`` and int64 indices ``[T, k]``.
    """
    values_TE, order_TE = x_TE.sort(dim=-1, descending=True, stable=True)
    return values_TE[..., :k], order_TE[..., :k]
