"""Goodness-of-fit tests for draws."""

import torch

__all__ = ["chi_square_p_value", "counts_of"]


def counts_of(values: torch.Tensor, num_cells: int) -> torch.Tensor:
    """How often each of 0..num_cells-1 occurs; int64 ``[num_cells]``."""
    return torch.bincount(values.flatten(), minlength=num_cells)


def chi_square_p_value(counts: torch.Tensor, expected: torch.Tensor, *, smallest: float = 5.0) -> float:
    """P-value of Pearson's test that ``counts`` come from ``expected``.

    Cells with an expectation below ``smallest`` are joined, because the approximation fails there; a count
    in a cell that cannot occur gives 0.

    Args:
        counts: observed, per cell.
        expected: expected counts or probabilities, per cell.
        smallest: least expected count of a cell of its own.
    """
    counts, expected = counts.double().flatten(), expected.double().flatten()
    if counts[expected == 0].sum() > 0:
        return 0.0
    expected = expected * (counts.sum() / expected.sum())
    rare = expected < smallest
    if rare.any():
        joined = (torch.cat((part[~rare], part[rare].sum()[None])) for part in (counts, expected))
        counts, expected = joined
    possible = expected > 0
    counts, expected = counts[possible], expected[possible]
    statistic = ((counts - expected).square() / expected).sum()
    freedom = torch.tensor(counts.shape[0] - 1, dtype=torch.float64)
    if freedom < 1:
        return 1.0
    return float(torch.special.gammaincc(freedom / 2, statistic / 2))
