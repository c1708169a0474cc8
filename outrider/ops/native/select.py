"""Largest value of a row without a copy of the rows.

It has one right answer, so unlike sums it needs no choice at load: ``outrider.ops.select`` asks here first.

Dims: N rows, V vocabulary.
"""

from collections.abc import Callable
from functools import cache

import torch

from outrider.ops.native.library import INT, POINTER, Library, library_for

__all__ = ["argmax_of", "native_argmax"]


def native_argmax(x_NV: torch.Tensor, *, nan_is_largest: bool) -> torch.Tensor | None:
    """Lowest index of the largest value, int64 ``[N]``; None where there is no native form for ``x_NV``.

    Args:
        x_NV: rows.
        nan_is_largest: a row with a NaN gives its first one; otherwise it gives V.
    """
    native = library_for(x_NV.dtype, x_NV.device)
    if native is None or x_NV.dim() != 2 or x_NV.shape[1] == 0 or x_NV.stride(1) != 1:
        return None
    return argmax_of(native, x_NV, nan_is_largest)


def argmax_of(native: Library, x_NV: torch.Tensor, nan_is_largest: bool) -> torch.Tensor:
    """As ``native_argmax`` with a given library, for bfloat16 rows of at least one value, columns contiguous."""
    out_N = torch.empty(x_NV.shape[0], dtype=torch.int64)
    _function(native)(
        x_NV.data_ptr(), x_NV.stride(0), *x_NV.shape, nan_is_largest, out_N.data_ptr(), torch.get_num_threads()
    )
    return out_N


@cache
def _function(native: Library) -> Callable[..., int | None]:
    return native.function("argmax", [POINTER, INT, INT, INT, INT, POINTER, INT])
