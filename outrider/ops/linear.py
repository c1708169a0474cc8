"""Linear layers and embedding with a fixed geometry per row.

Dims: T rows, I inputs, O outputs, V vocabulary, D width.
"""

from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F

from outrider.ops.invariant import ROW_TILE, pad_rows

__all__ = ["choose_linear", "embedding", "linear", "linear_padded", "linear_reference", "probe_row_invariance"]

LinearFunction = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

# bfloat16 products kept their bits for 1..32 rows at every size tried; from 64 rows on some changed.
BF16_ROW_TILE = 32
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
    if x.numel() <= BF16_ROW_TILE * x.shape[-1]:
        return F.linear(x, weight_OI)
    flat_TI = x.reshape(-1, x.shape[-1])
    tiles = [F.linear(tile, weight_OI) for tile in torch.split(flat_TI, BF16_ROW_TILE)]
    return torch.cat(tiles).view(*x.shape[:-1], weight_OI.shape[0])


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
        weight_OI = torch.randn(num_out, num_in, generator=generator).to(dtype)
        x_TI = torch.randn(BF16_ROW_TILE, num_in, generator=generator).to(dtype)
        expected_TO = linear(x_TI, weight_OI)
        for num_rows in (1, 2, 3, 4, 7, 8, 12, 16, 17, 24, 31):
            if not torch.equal(linear(x_TI[:num_rows], weight_OI), expected_TO[:num_rows]):
                return False
        if not torch.equal(linear(x_TI[-1:], weight_OI), expected_TO[-1:]):
            return False
    return True


def choose_linear(weight_shapes_OI: Iterable[tuple[int, int]], dtype: torch.dtype) -> LinearFunction:
    """``linear`` where the start-up probe finds it row-invariant, else ``linear_padded``."""
    return linear if probe_row_invariance(weight_shapes_OI, dtype) else linear_padded


def embedding(token_ids_T: torch.Tensor, weight_VD: torch.Tensor) -> torch.Tensor:
    """Rows of the embedding table; ids must lie in ``[0, V)``."""
    return F.embedding(token_ids_T, weight_VD)
