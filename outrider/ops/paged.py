"""Which cache rows a step's queries read, as index tensors built once per step and group.

Keys are read in tiles of a fixed width at absolute positions. Tiles past a sequence's end exist when
another sequence is longer; they are masked, and a fully masked tile changes no bit of the result.

Dims: T rows of the group, S sequences, M rows of the longest span, P pages per sequence,
K keys rounded up to whole tiles.
"""

from dataclasses import dataclass

import torch

from outrider.ops.spans import SpanLayout, to_padded, to_padded_with

__all__ = ["PagedKeys", "PagedSpans", "paged_keys", "paged_spans"]

KEY_TILE = 64  # keys per tile; part of the numerics, not a tuning knob


class PagedKeys:
    """Where the keys of every sequence lie: page tables, or the cache row of every key. See ``paged_keys``."""

    __slots__ = ("_key_rows_SK", "num_keys_S", "num_tiles", "page_size", "page_table_SP")

    def __init__(
        self, page_table_SP: torch.Tensor, num_keys_S: torch.Tensor, *, page_size: int, max_context: int
    ) -> None:
        self.page_table_SP, self.num_keys_S, self.page_size = page_table_SP, num_keys_S, page_size
        self.num_tiles = -(-max_context // KEY_TILE)  # key tiles of the longest sequence of the step
        self._key_rows_SK: torch.Tensor | None = None

    @property
    def key_rows_SK(self) -> torch.Tensor:
        """Flat cache row of every key position, int64, made when first asked for.

        Past a sequence's end it is the row of position 0, so never an unwritten row.
        """
        if self._key_rows_SK is None:
            position_K = torch.arange(self.num_tiles * KEY_TILE, device=self.page_table_SP.device)
            position_SK = torch.where(position_K < self.num_keys_S[:, None], position_K, 0)
            page_SK = self.page_table_SP.gather(1, position_SK // self.page_size)
            self._key_rows_SK = page_SK * self.page_size + position_SK % self.page_size
        return self._key_rows_SK


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedSpans:
    """Query spans of a group together with the keys their sequences hold."""

    layout: SpanLayout
    keys: PagedKeys
    limits_SM: torch.Tensor  # int64, keys each row may see; 1 for padding rows


def paged_keys(page_table_SP: torch.Tensor, num_keys_S: torch.Tensor, *, page_size: int, max_context: int) -> PagedKeys:
    """Keys of sequences; nothing is computed until a form asks for their rows.

    Args:
        page_table_SP: int64 page ids in order; entries past the last used page may hold any valid id.
        num_keys_S: int64, 0 or more.
        page_size: tokens per page.
        max_context: at least every ``num_keys``, at most ``P * page_size`` (host integer: no sync).
    """
    return PagedKeys(page_table_SP, num_keys_S, page_size=page_size, max_context=max_context)


def paged_spans(
    layout: SpanLayout,
    context_lens_T: torch.Tensor,
    sequence_T: torch.Tensor,
    page_table_SP: torch.Tensor,
    *,
    page_size: int,
    max_context: int,
) -> PagedSpans:
    """Index tensors of one group.

    Args:
        layout: the group's spans.
        context_lens_T: keys each row of the group may see, itself included.
        sequence_T: sequence of each row of the group, as index into ``page_table_SP``.
        page_table_SP: page table of the whole batch.
        page_size: tokens per page.
        max_context: largest context length of the batch or of the group (host integer).
    """
    limits_SM = to_padded_with(context_lens_T, layout, 1)
    sequences_S = to_padded(sequence_T, layout)[:, 0]
    keys = paged_keys(page_table_SP[sequences_S], limits_SM.amax(1), page_size=page_size, max_context=max_context)
    return PagedSpans(layout=layout, keys=keys, limits_SM=limits_SM)
