"""Linear layers and embedding with a fixed geometry per row.

Dims: T rows, I inputs, O outputs, V vocabulary, D width.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from outrider.ops.invariant import ROW_TILE

__all__ = [
    "LinearFunction",
    "LinearTable",
    "RowTiles",
    "cancelling_operands",
    "embedding",
    "linear",
    "linear_in_tiles",
    "linear_padded",
    "linear_plain",
    "linear_reference",
    "tile_candidates",
]

LinearFunction = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowTiles:
    """How the rows of a product are cut into library calls."""

    num_rows: int  # of one call at most
    padded: bool  # every call has exactly ``num_rows`` rows, zero rows added

    @property
    def name(self) -> str:
        """As a report says it."""
        return f"{'exactly' if self.padded else 'up to'} {self.num_rows} rows a call"


# bfloat16 products kept their bits for 1..32 rows at every size tried; from 64 rows on some changed.
BF16_TILES = RowTiles(num_rows=32, padded=False)
# torch 2.13 on x86 leaves bfloat16 products of at most so many multiplications (rows * inputs * outputs) to a
# kernel that sums in another order; rounding to bfloat16 hides that in all but a few elements of ten thousand.
SMALL_PRODUCT = 16**3
# float32 and float64 products take other kernels below 16 rows and 4 rows.
PADDED_TILES = RowTiles(num_rows=ROW_TILE, padded=True)
# What may hold where those do not, ascending in cost; one row a call cannot depend on a row count.
FALLBACK_TILES = (
    RowTiles(num_rows=32, padded=True),
    RowTiles(num_rows=64, padded=True),
    RowTiles(num_rows=1, padded=True),
)


def tile_candidates(dtype: torch.dtype) -> tuple[RowTiles, ...]:
    """Geometries that a weight of this dtype may get; the first is what ``linear`` does."""
    first = (BF16_TILES, PADDED_TILES) if dtype == torch.bfloat16 else (PADDED_TILES,)
    return (*first, *FALLBACK_TILES)


def linear(x: torch.Tensor, weight_OI: torch.Tensor) -> torch.Tensor:
    """``x @ weight^T`` in row tiles, so that a row's bits do not depend on the other rows.

    Args:
        x: ``[..., I]``, the dtype of the weight.
        weight_OI: float64, float32 or bfloat16.

    Returns:
        ``[..., O]``. One library call for up to 32 bfloat16 rows or 16 others.
    """
    return linear_in_tiles(x, weight_OI, BF16_TILES if weight_OI.dtype == torch.bfloat16 else PADDED_TILES)


def linear_padded(x: torch.Tensor, weight_OI: torch.Tensor) -> torch.Tensor:
    """As ``linear``, always on zero-padded tiles of exactly 16 rows, whatever the dtype."""
    return linear_in_tiles(x, weight_OI, PADDED_TILES)


def linear_in_tiles(x: torch.Tensor, weight_OI: torch.Tensor, tiles: RowTiles) -> torch.Tensor:
    """``x @ weight^T`` with a chosen cut into calls; arguments as for ``linear``."""
    # A column slice of one row counts as contiguous, that of several does not: all get one layout.
    x = x.contiguous()
    least_rows = tiles.num_rows if tiles.padded else _least_rows(weight_OI, tiles)
    if not tiles.padded and least_rows * x.shape[-1] <= x.numel() <= tiles.num_rows * x.shape[-1]:
        return F.linear(x, weight_OI)
    flat_TI = x.view(-1, x.shape[-1])
    num_rows = flat_TI.shape[0]
    if num_rows == 0:
        return x.new_zeros(*x.shape[:-1], weight_OI.shape[0])
    missing = max(least_rows - ((num_rows - 1) % tiles.num_rows + 1), 0)  # in the last call
    if missing:
        flat_TI = F.pad(flat_TI, (0, 0, 0, missing))
    outputs = [F.linear(tile_TI, weight_OI) for tile_TI in torch.split(flat_TI, tiles.num_rows)]
    out_TO = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return out_TO[:num_rows].view(*x.shape[:-1], weight_OI.shape[0])


def _least_rows(weight_OI: torch.Tensor, tiles: RowTiles) -> int:
    """Rows from which the library multiplies with the kernel that it uses for a whole tile."""
    if weight_OI.dtype != torch.bfloat16:
        return 1
    return min(SMALL_PRODUCT // max(weight_OI.numel(), 1) + 1, tiles.num_rows)


def linear_plain(x: torch.Tensor, weight_OI: torch.Tensor) -> torch.Tensor:
    """``x @ weight^T`` in one library call, whose kernel may depend on the number of rows."""
    return F.linear(x, weight_OI)


def linear_reference(x: torch.Tensor, weight_OI: torch.Tensor) -> torch.Tensor:
    """Plain ``x @ weight^T``."""
    return x @ weight_OI.transpose(0, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearTable:
    """A LinearFunction with a geometry per weight shape, for machines where the default does not hold for all."""

    tiles: Mapping[tuple[int, int], RowTiles]  # by (O, I); other shapes go through ``linear``
    dtype: torch.dtype  # of those weights; others go through ``linear``

    def __call__(self, x: torch.Tensor, weight_OI: torch.Tensor) -> torch.Tensor:
        """Arguments and result as for ``linear``."""
        tiles = self.tiles.get((weight_OI.shape[0], weight_OI.shape[1])) if weight_OI.dtype == self.dtype else None
        return linear(x, weight_OI) if tiles is None else linear_in_tiles(x, weight_OI, tiles)


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


def embedding(token_ids_T: torch.Tensor, weight_VD: torch.Tensor) -> torch.Tensor:
    """Rows of the embedding table; ids must lie in ``[0, V)``."""
    return F.embedding(token_ids_T, weight_VD)
