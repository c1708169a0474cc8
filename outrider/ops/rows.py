"""Rows that are gathered, copied or added: what lies between the products of a step.

Every form gives the same bits: a copy has one right answer, and an addition one rounding.

Dims: R rows to choose from, T rows, D width, B planes.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

__all__ = ["PLAIN_ROWS", "RowForm", "add_rows", "copy_rows", "gather_rows"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowForm:
    """The three operations in one form; see the functions of this module."""

    gather: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
    copy: Callable[[torch.Tensor, torch.Tensor], None]
    add: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]


def gather_rows(source_RD: torch.Tensor, index_T: torch.Tensor, out_TD: torch.Tensor) -> None:
    """``out[t] = source[index[t]]``; with a leading dim of both, plane by plane.

    An index out of range raises, or gives a row of NaN in the native form.
    """
    out_TD.copy_(source_RD.index_select(-2, index_T))


def copy_rows(source_TD: torch.Tensor, out_TD: torch.Tensor) -> None:
    """``out = source``."""
    out_TD.copy_(source_TD)


def add_rows(left_TD: torch.Tensor, right_TD: torch.Tensor, out_TD: torch.Tensor) -> None:
    """``out = left + right``, rounded once; ``out`` may be one of them."""
    torch.add(left_TD, right_TD, out=out_TD)


PLAIN_ROWS = RowForm(gather=gather_rows, copy=copy_rows, add=add_rows)
