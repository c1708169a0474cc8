"""Ragged spans: one run of consecutive rows per sequence, flat or padded to a rectangle.

Dims: T rows of the group, S sequences, M rows of the longest span.
"""

import torch

__all__ = ["SpanLayout", "span_layout", "spans_from_lengths", "to_flat", "to_padded", "to_padded_with"]


class SpanLayout:
    """Where each sequence's rows sit. Built once per step and group, used by every layer. See ``span_layout``.

    Args:
        padded_rows_SM: int64, row of the group; arbitrary valid row where padded.
        valid_SM: bool.
        lengths: rows of each sequence.
        starts: absolute position of each first row.
    """

    __slots__ = ("_flat_T", "lengths", "num_rows", "padded_rows_SM", "starts", "valid_SM")

    def __init__(
        self,
        padded_rows_SM: torch.Tensor,
        valid_SM: torch.Tensor,
        *,
        lengths: tuple[int, ...],
        starts: tuple[int, ...],
    ) -> None:
        self.padded_rows_SM, self.valid_SM, self.lengths, self.starts = padded_rows_SM, valid_SM, lengths, starts
        self.num_rows = sum(lengths)
        self._flat_T: torch.Tensor | None = None

    @property
    def flat_T(self) -> torch.Tensor:
        """int64, s * M + m of every row; made when first asked for."""
        if self._flat_T is None:
            cells = torch.arange(self.valid_SM.numel(), device=self.valid_SM.device)
            if not self.is_rectangular:
                # Padded cells all write the one surplus entry, which is cut off: no masks, no host sync.
                target = torch.where(self.valid_SM, self.padded_rows_SM, self.num_rows).flatten()
                cells = cells.new_zeros(self.num_rows + 1).scatter_(0, target, cells)[: self.num_rows]
            self._flat_T = cells
        return self._flat_T

    @property
    def num_sequences(self) -> int:
        """Sequences in the group."""
        return len(self.lengths)

    @property
    def max_length(self) -> int:
        """Rows of the longest span."""
        return int(self.valid_SM.shape[1])

    @property
    def is_rectangular(self) -> bool:
        """True when every span has the same length, so that padding is only a view."""
        return self.num_rows == self.num_sequences * self.max_length


def span_layout(
    padded_rows_SM: torch.Tensor, valid_SM: torch.Tensor, *, lengths: tuple[int, ...], starts: tuple[int, ...]
) -> SpanLayout:
    """The layout of a group; rows of a sequence must be consecutive and in order."""
    assert len(lengths) == len(starts) == valid_SM.shape[0], "one length and one start per sequence"
    return SpanLayout(padded_rows_SM, valid_SM, lengths=lengths, starts=starts)


def spans_from_lengths(
    lengths: tuple[int, ...], *, starts: tuple[int, ...] | None = None, device: str | torch.device = "cpu"
) -> SpanLayout:
    """Layout of spans that follow each other in the flat batch; starts default to 0."""
    lengths_S1 = torch.tensor(lengths, device=device)[:, None]
    first_S1 = lengths_S1.cumsum(0) - lengths_S1
    offset_M = torch.arange(max(lengths, default=0), device=device)
    valid_SM = offset_M < lengths_S1
    padded_rows_SM = torch.where(valid_SM, first_S1 + offset_M, 0)
    return span_layout(padded_rows_SM, valid_SM, lengths=lengths, starts=starts or (0,) * len(lengths))


def to_padded(x_T: torch.Tensor, layout: SpanLayout) -> torch.Tensor:
    """``[T, ...] -> [S, M, ...]``; padding rows hold arbitrary values."""
    if layout.is_rectangular:
        return x_T.view(layout.num_sequences, layout.max_length, *x_T.shape[1:])
    return x_T[layout.padded_rows_SM]


def to_padded_with(x_T: torch.Tensor, layout: SpanLayout, padding: float) -> torch.Tensor:
    """``[T, ...] -> [S, M, ...]`` with a chosen value in the padding rows."""
    x_SM = to_padded(x_T, layout)
    if layout.is_rectangular:
        return x_SM
    valid = layout.valid_SM.view(*layout.valid_SM.shape, *(1,) * (x_T.dim() - 1))
    return torch.where(valid, x_SM, padding)


def to_flat(x_SM: torch.Tensor, layout: SpanLayout) -> torch.Tensor:
    """``[S, M, ...] -> [T, ...]``, the rows that are not padding."""
    x_cells = x_SM.reshape(-1, *x_SM.shape[2:])
    return x_cells if layout.is_rectangular else x_cells.index_select(0, layout.flat_T)
