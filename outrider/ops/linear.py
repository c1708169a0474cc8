"""Linear layers and embedding with a fixed geometry per row.

Dims: T rows, I inputs, O outputs, V vocabulary, D width.
"""

from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F

from outrider.ops.invariant import ROW_TILE, pad_rows

__all__ = [
    "cancelling_operands",
    "choose_linear",
    "embedding",
    "linear",
    "linear_padded",
    "linear_reference",
    "probe_row_invariance",
]

LinearFunction = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

# bfloat16 products kept their bits for 1..32 rows at every size tried; from 64 rows on some changed.
BF16_ROW_TILE = 32
# torch 2.13 on x86 leaves bfloat16 products of at most so many multiplications (rows * inputs * outputs) to a
# kernel that sums in another order; rounding to bfloat16 hides that in all but a few elements of ten thousand.
SMALL_PRODUCT = 16**3
# Output columns probed at most: the library works on column blocks far smaller than this.
PROBE_COLUMNS = 4096


def linear(x: torch.Tensor, weight_OI: torch.Tensor) -> torch.Tensor:
    """``x @ weight^T`` in row tiles, so that a row's bits do not depend on the other rows.

    Args:
        x: ``[..., I]``, the dtype of the weight.
        weight_OI: float64, float32 or bfloat16.

    Returns:
        ``[..., O]``. One library call for up to 32 bfloat16 rows or 16 others.
    """
    if weight_OI.dtype != torch.bfloat16:
        return linear_padded(x, weight_OI)
    least_rows = _least_bfloat16_rows(weight_OI)
    if least_rows * x.shape[-1] <= x.numel() <= BF16_ROW_TILE * x.shape[-1]:
        return F.linear(x, weight_OI)
    flat_TI = x.reshape(-1, x.shape[-1])
    tiles = [_with_rows(tile, weight_OI, least_rows) for tile in torch.split(flat_TI, BF16_ROW_TILE)]
    return torch.cat(tiles).view(*x.shape[:-1], weight_OI.shape[0])


def _least_bfloat16_rows(weight_OI: torch.Tensor) -> int:
    """Rows from which the library multiplies with the kernel that it uses for a whole tile."""
    return min(SMALL_PRODUCT // max(weight_OI.numel(), 1) + 1, BF16_ROW_TILE)


def _with_rows(x_TI: torch.Tensor, weight_OI: torch.Tensor, least_rows: int) -> torch.Tensor:
    """One library call on at least so many rows, zero rows added."""
    num_rows = x_TI.shape[0]
    if num_rows == 0 or num_rows >= least_rows:
        return F.linear(x_TI, weight_OI)
    return F.linear(F.pad(x_TI, (0, 0, 0, least_rows - num_rows)), weight_OI)[:num_rows]


def linear_padded(x: torch.Tensor, weight_OI: torch.Tensor) -> torch.Tensor:
    """As ``linear``, always on zero-padded tiles of exactly 16 rows, whatever the dtype."""
    flat_TI = x.reshape(-1, x.shape[-1])
    num_rows = flat_TI.shape[0]
    if num_rows == 0:
        return x.new_zeros(*x.shape[:-1], weight_OI.shape[0])
    tiles = [F.linear(tile, weight_OI) for tile in torch.split(pad_rows(flat_TI), ROW_TILE)]
    out_TO = tiles[0] if len(tiles) == 1 else torch.cat(tiles)
    return out_TO[:num_rows].view(*x.shape[:-1], weight_OI.shape[0])


def linear_reference(x: torch.Tensor, weight_OI: torch.Tensor) -> torch.Tensor:
    """Plain ``x @ weight^T``."""
    return x @ weight_OI.transpose(0, 1)


def probe_row_invariance(weight_shapes_OI: Iterable[tuple[int, int]], dtype: torch.dtype) -> bool:
    """Whether ``linear`` gives each of 1..32 rows the bits it has in a call of 32 rows.

    Runs on this process, machine and thread count, with seeded random weights of each shape, cut to
    4,096 output columns: an output head of 160,000 columns would need gigabytes for nothing new.
    """
    generator = torch.Generator().manual_seed(1)
    for num_out, num_in in sorted({(min(num_out, PROBE_COLUMNS), num_in) for num_out, num_in in weight_shapes_OI}):
        weight_OI = torch.randn(num_out, num_in, generator=generator)
        x_TI = torch.randn(BF16_ROW_TILE, num_in, generator=generator)
        for weight, x in ((weight_OI, x_TI), cancelling_operands(weight_OI, x_TI)):
            if not _rows_keep_their_bits(x.to(dtype), weight.to(dtype)):
                return False
    return True


def cancelling_operands(weight_OI: torch.Tensor, x_TI: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Operands whose products nearly cancel, so that another order of summing shows after rounding.

    The inner dim repeats its first half: in the weight as it is, in the rows negated and moved by up to a
    few parts in a hundred.
    """
    half = x_TI.shape[1] // 2
    weight_OI, x_TI = weight_OI.clone(), x_TI.clone()
    noise_TI = x_TI[:, half : 2 * half] * 2.0**-7
    weight_OI[:, half : 2 * half] = weight_OI[:, :half]
    x_TI[:, half : 2 * half] = -x_TI[:, :half] * (1 + noise_TI)
    return weight_OI, x_TI


def _rows_keep_their_bits(x_TI: torch.Tensor, weight_OI: torch.Tensor) -> bool:
    expected_TO = linear(x_TI, weight_OI)
    parts = [slice(0, num_rows) for num_rows in (2, 3, 4, 7, 8, 12, 16, 17, 24, 31)]
    parts += [slice(row, row + 1) for row in range(x_TI.shape[0])]
    return all(torch.equal(linear(x_TI[part], weight_OI), expected_TO[part]) for part in parts)


def choose_linear(weight_shapes_OI: Iterable[tuple[int, int]], dtype: torch.dtype) -> LinearFunction:
    """``linear`` where the start-up probe finds it row-invariant, else ``linear_padded``."""
    return linear if probe_row_invariance(weight_shapes_OI, dtype) else linear_padded


def embedding(token_ids_T: torch.Tensor, weight_VD: torch.Tensor) -> torch.Tensor:
    """Rows of the embedding table; ids must lie in ``[0, V)``."""
    return F.embedding(token_ids_T, weight_VD)
