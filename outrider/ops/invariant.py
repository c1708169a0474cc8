"""Building blocks whose result for one row does not depend on the other rows of the call.

Two effects of the CPU library break that, both measured on x86 with torch 2.13:

* a matrix product with few rows takes another kernel (float32 below 16 rows, float64 below 4), and
  fewer large products than threads are split along their inner dimension;
* ``sigmoid`` in float32 treats the last elements of a contiguous run with other instructions than
  the rest, and every strided tensor too.

So products run on row counts that are multiples of 16 and never as fewer large matrices than threads, and
non-linear functions run on contiguous runs of whole vectors, below the size at which torch splits
work over threads.

Dims: B batch of matrices, R rows, C inner, N columns.
"""

from collections.abc import Callable

import torch

__all__ = [
    "batch_matmul",
    "elementwise",
    "exp",
    "island_dtype",
    "pad_last",
    "pad_rows",
    "sigmoid",
    "silu",
    "softplus",
    "tanh",
    "tile_bmm",
    "tile_bmm_reference",
]

LANES = 64  # covers two vectors of the widest unit (2 x 16 float32)
ROW_TILE = 16  # smallest row count from which float32 and float64 products stop depending on it
SPLIT_INNER_LIMIT = 256  # fewer matrices than threads are split along a longer inner dimension
# torch runs element-wise work serially below 32768 elements; the largest multiple of LANES under it
SERIAL_ELEMENTS = 32704


def island_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of numerically delicate parts: float64 for float64 models, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def pad_last(x: torch.Tensor, multiple: int = LANES) -> torch.Tensor:
    """Append zeros to the last dim up to a multiple; the same object when nothing is missing."""
    missing = -x.shape[-1] % multiple
    return torch.constant_pad_nd(x, (0, missing)) if missing else x


def pad_rows(x: torch.Tensor, multiple: int = ROW_TILE) -> torch.Tensor:
    """Append zero rows (dim -2) up to a multiple; the same object when nothing is missing."""
    missing = -x.shape[-2] % multiple
    return torch.constant_pad_nd(x, (0, 0, 0, missing)) if missing else x


def elementwise(function: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Apply ``function(x, out=...)`` so that an element's bits do not depend on its neighbours.

    Args:
        function: a unary torch function that accepts ``out``.
        x: any shape, float32 or float64.
    """
    if x.is_cuda:  # one thread per element there
        return function(x)
    if x.dim() and x.shape[-1] % LANES == 0 and x.numel() <= SERIAL_ELEMENTS:
        return function(x.contiguous())
    width = x.shape[-1] if x.dim() else 1
    padded = pad_last(x if x.dim() else x[None]).contiguous()
    if padded.numel() <= SERIAL_ELEMENTS:
        result = function(padded)
    else:
        result = torch.empty_like(padded)
        flat_in, flat_out = padded.view(-1), result.view(-1)
        for first in range(0, flat_in.shape[0], SERIAL_ELEMENTS):
            piece = slice(first, first + SERIAL_ELEMENTS)
            function(flat_in[piece], out=flat_out[piece])
    return result[..., :width].reshape(x.shape)


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """Logistic function of an island tensor."""
    return elementwise(torch.sigmoid, x)


def tanh(x: torch.Tensor) -> torch.Tensor:
    """Hyperbolic tangent of an island tensor."""
    return elementwise(torch.tanh, x)


def exp(x: torch.Tensor) -> torch.Tensor:
    """Exponential of an island tensor."""
    return elementwise(torch.exp, x)


def silu(x: torch.Tensor) -> torch.Tensor:
    """``x * sigmoid(x)`` of an island tensor."""
    return x * sigmoid(x)


def softplus(x: torch.Tensor) -> torch.Tensor:
    """``log(1 + exp(x))`` of an island tensor, without overflow."""
    return x.clamp_min(0) + elementwise(torch.log1p, exp(-x.abs()))


def batch_matmul(a_BRC: torch.Tensor, b_BCN: torch.Tensor) -> torch.Tensor:
    """``torch.bmm`` whose matrices do not depend on how many there are; R, C, N must be fixed."""
    num_matrices, inner = a_BRC.shape[0], a_BRC.shape[2]
    if a_BRC.is_cuda or a_BRC.dtype == torch.bfloat16 or inner <= SPLIT_INNER_LIMIT or num_matrices == 0:
        return torch.bmm(a_BRC, b_BCN)
    threads = torch.get_num_threads()
    if num_matrices >= threads:
        return torch.bmm(a_BRC, b_BCN)
    # Every thread computes the same whole matrix, instead of a part of its inner sum.
    alone = [
        torch.bmm(a_BRC[i : i + 1].expand(threads, -1, -1), b_BCN[i : i + 1].expand(threads, -1, -1))[:1]
        for i in range(num_matrices)
    ]
    return alone[0] if num_matrices == 1 else torch.cat(alone)


def tile_bmm(a_BRC: torch.Tensor, b_BCN: torch.Tensor, row_tile: int = ROW_TILE) -> torch.Tensor:
    """Batched product whose rows depend neither on the number of rows nor on the batch.

    bfloat16 products (float32 accumulation) were found row-invariant from one row on; the others
    get zero rows up to a multiple of ``row_tile``.
    """
    if a_BRC.dtype == torch.bfloat16 or a_BRC.shape[1] % row_tile == 0:
        return batch_matmul(a_BRC.contiguous(), b_BCN)  # the layout that padding gives
    return batch_matmul(pad_rows(a_BRC, row_tile), b_BCN)[:, : a_BRC.shape[1]]


def tile_bmm_reference(a_BRC: torch.Tensor, b_BCN: torch.Tensor) -> torch.Tensor:
    """Plain batched product."""
    return a_BRC @ b_BCN
