"""Paged append-only latents: rows are stored, read by page table, and rolled back by length alone.

Dims: L layers, R cache rows (= pages * page_size), T flat tokens, C row width.
"""

from collections.abc import Sequence

import torch

__all__ = ["LatentCache"]


class LatentCache:
    """One row per token and attention layer; row ``page_id * page_size + offset`` of every layer.

    Writes are stores, never additions. A rejected draft leaves a stale row; the next span of the
    sequence starts at or before that position and overwrites it before any row may read it, so
    undoing costs nothing and ``commit`` has nothing to move here: the length lives with the
    scheduler, and readers are bounded by ``context_lens_T``. Pages are not cleared between owners.

    Args:
        num_layers: attention layers that keep a latent.
        num_pages: pages of every layer.
        page_size: tokens per page.
        width: values per row.
        dtype: compute dtype.
        device: where the rows live.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_pages: int,
        page_size: int,
        width: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.page_size = page_size
        self.num_pages = num_pages
        self._rows_LRC = torch.zeros((num_layers, num_pages * page_size, width), dtype=dtype, device=device)

    @property
    def num_bytes(self) -> int:
        """Bytes held by all layers."""
        return self._rows_LRC.nbytes

    @property
    def device(self) -> torch.device:
        """Where the rows live."""
        return self._rows_LRC.device

    def rows(self, layer_index: int) -> torch.Tensor:
        """All rows of one layer, ``[num_pages * page_size, width]``, as a view for reading.

        Rows outside a sequence's own context hold anything, NaN included: mask with ``where``.
        """
        return self._rows_LRC[layer_index]

    def write(self, layer_index: int, slot_mapping_T: torch.Tensor, rows_TC: torch.Tensor) -> None:
        """Store ``rows_TC`` at cache rows ``slot_mapping_T`` (int64, all different) of one layer."""
        self._rows_LRC[layer_index].index_copy_(0, slot_mapping_T, rows_TC)

    def snapshot(self, rows_R: torch.Tensor) -> torch.Tensor:
        """Copy of cache rows ``rows_R`` of all layers on the host, ``[L, R, C]``."""
        return self._rows_LRC.index_select(1, rows_R).cpu()

    def restore(self, rows_R: torch.Tensor, snapshot_LRC: torch.Tensor) -> None:
        """Store a snapshot at cache rows ``rows_R`` (int64, all different)."""
        self._rows_LRC.index_copy_(1, rows_R, snapshot_LRC.to(self.device))

    def poison(self, page_ids: Sequence[int]) -> None:
        """Fill pages with NaN; a test that reads memory it does not own then fails."""
        for page_id in page_ids:
            self._rows_LRC[:, page_id * self.page_size : (page_id + 1) * self.page_size] = torch.nan
