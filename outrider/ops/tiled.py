"""Softmax attention over key tiles whose result for a row does not depend on the rest of the call.

Each tile yields its own maximum, sum and weighted values; the tiles are then rescaled to the row's
overall maximum and added in ascending order. All in the island dtype. Neither the number of tiles
nor how many are computed at once changes a bit: a masked tile contributes exact zeros.

Dims: B matrices (sequence or sequence x head), R query rows, Y key tiles, K width of a key,
W width of a value, N keys of one tile.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from outrider.ops.invariant import batch_matmul, exp

__all__ = ["TilePartials", "attend_panels", "combine_partials", "tile_partials", "tiles_per_panel"]

PANEL_ELEMENTS = 1 << 19  # largest temporary of a panel of tiles, in elements; does not affect results


@dataclass(frozen=True, slots=True, kw_only=True)
class TilePartials:
    """Softmax pieces of a run of tiles, each relative to its tile's own maximum."""

    maximum_BYR: torch.Tensor
    total_BYR: torch.Tensor
    values_BYRW: torch.Tensor


LoadPanel = Callable[[int, int], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


def tile_partials(
    q_BRK: torch.Tensor, keys_BYNK: torch.Tensor, values_BYNW: torch.Tensor, visible_BYRN: torch.Tensor
) -> TilePartials:
    """Scores, masked softmax pieces and weighted values of every tile.

    Args:
        q_BRK: queries times the softmax scale; R a multiple of 16.
        keys_BYNK: keys; N fixed.
        values_BYNW: values; anything where masked, NaN included.
        visible_BYRN: bool, broadcastable.
    """
    num_matrices, num_tiles, num_keys, width = keys_BYNK.shape
    num_rows = q_BRK.shape[1]
    queries = q_BRK[:, None].expand(-1, num_tiles, -1, -1).reshape(-1, num_rows, width)
    scores = batch_matmul(queries, keys_BYNK.reshape(-1, num_keys, width).transpose(1, 2))
    scores_BYRN = scores.view(num_matrices, num_tiles, num_rows, num_keys)
    masked_BYRN = torch.where(visible_BYRN, scores_BYRN, float("-inf"))
    # A fully masked tile has no maximum: a finite stand-in makes its weights exp(-inf) = 0.
    maximum_BYR1 = masked_BYRN.amax(-1, keepdim=True).clamp_min(torch.finfo(scores.dtype).min)
    weights_BYRN = exp(masked_BYRN - maximum_BYR1)
    # A rejected draft may be NaN all through, and 0 * NaN is NaN even where it is masked. Where it is
    # visible its score is NaN and so is the result.
    finite_BYNW = values_BYNW.nan_to_num(0.0, 0.0, 0.0)
    values = batch_matmul(
        weights_BYRN.view(-1, num_rows, num_keys), finite_BYNW.reshape(-1, num_keys, finite_BYNW.shape[-1])
    )
    return TilePartials(
        maximum_BYR=maximum_BYR1[..., 0],
        total_BYR=weights_BYRN.sum(-1),
        values_BYRW=values.view(num_matrices, num_tiles, num_rows, -1),
    )


def combine_partials(partials: Sequence[TilePartials]) -> torch.Tensor:
    """Weighted values ``[B, R, W]`` over all tiles, added in ascending order."""
    if len(partials) == 1 and partials[0].total_BYR.shape[1] == 1:  # every weight would be exp(0) = 1
        return partials[0].values_BYRW[:, 0] / partials[0].total_BYR[:, 0, :, None]
    maximum_BYR = torch.cat([part.maximum_BYR for part in partials], dim=1)
    weight_BYR = exp(maximum_BYR - maximum_BYR.amax(1, keepdim=True))
    values_BRW, total_BR, tile = None, None, 0
    for part in partials:
        count = part.total_BYR.shape[1]
        weight = weight_BYR[:, tile : tile + count]
        scaled_values = part.values_BYRW * weight[..., None]
        scaled_total = part.total_BYR * weight
        for y in range(count):
            values_BRW = scaled_values[:, y] if values_BRW is None else values_BRW.add_(scaled_values[:, y])
            total_BR = scaled_total[:, y] if total_BR is None else total_BR.add_(scaled_total[:, y])
        tile += count
    assert values_BRW is not None and total_BR is not None, "attention needs at least one key tile"
    return values_BRW / total_BR[..., None]


def attend_panels(q_BRK: torch.Tensor, num_tiles: int, panel_tiles: int, load: LoadPanel) -> list[TilePartials]:
    """Partials of tiles ``0..num_tiles``; ``load(first, last)`` gives keys, values and mask of a run."""
    partials = []
    for first in range(0, num_tiles, panel_tiles):
        keys, values, visible = load(first, min(first + panel_tiles, num_tiles))
        partials.append(tile_partials(q_BRK, keys, values, visible))
    return partials


def tiles_per_panel(elements_per_tile: int) -> int:
    """How many tiles to compute at once within the size of the largest temporary."""
    return max(1, PANEL_ELEMENTS // max(1, elements_per_tile))
