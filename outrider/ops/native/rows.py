"""Native forms of ``outrider.ops.rows`` for bfloat16 on a CPU (``src/rows.cpp``)."""

import torch

from outrider.ops.native.library import INT, POINTER, Library
from outrider.ops.rows import RowForm

__all__ = ["native_rows"]


def native_rows(library: Library) -> RowForm:
    """The operations of a library; the elements of a row are neighbours in every tensor."""
    gather = library.function("gather_rows", [POINTER, INT, INT, INT, POINTER, INT, INT, INT, POINTER, INT, INT])
    copy = library.function("copy_rows", [POINTER, INT, INT, INT, POINTER, INT])
    add = library.function("add_rows", [POINTER, INT, POINTER, INT, INT, INT, POINTER, INT])

    def gather_rows(source_RD: torch.Tensor, index_T: torch.Tensor, out_TD: torch.Tensor) -> None:
        num_planes = source_RD.shape[0] if source_RD.dim() == 3 else 1
        num_source, width = source_RD.shape[-2:]
        assert out_TD.shape == (*source_RD.shape[:-2], index_T.shape[0], width) and index_T.is_contiguous()
        assert index_T.dtype == torch.int64, f"{index_T.dtype} where int64 is read"
        gather(
            source_RD.data_ptr(), source_RD.stride(0), _row_stride(source_RD), num_source, index_T.data_ptr(),
            num_planes, index_T.shape[0], width, out_TD.data_ptr(), out_TD.stride(0), _row_stride(out_TD),
        )  # fmt: skip

    def copy_rows(source_TD: torch.Tensor, out_TD: torch.Tensor) -> None:
        assert source_TD.shape == out_TD.shape, "a copy has the shape of its source"
        copy(source_TD.data_ptr(), _row_stride(source_TD), *source_TD.shape, out_TD.data_ptr(), _row_stride(out_TD))

    def add_rows(left_TD: torch.Tensor, right_TD: torch.Tensor, out_TD: torch.Tensor) -> None:
        assert left_TD.shape == right_TD.shape == out_TD.shape, "a sum has the shape of its parts"
        add(
            left_TD.data_ptr(), _row_stride(left_TD), right_TD.data_ptr(), _row_stride(right_TD), *out_TD.shape,
            out_TD.data_ptr(), _row_stride(out_TD),
        )  # fmt: skip

    return RowForm(gather=gather_rows, copy=copy_rows, add=add_rows)


def _row_stride(rows_TD: torch.Tensor) -> int:
    """Elements between rows; refuses what the C side would read wrongly."""
    *_, row_stride, step = rows_TD.stride()
    assert rows_TD.dtype == torch.bfloat16 and (step == 1 or rows_TD.shape[-1] == 1), (
        f"rows of {rows_TD.dtype} with elements {step} apart where neighbouring bfloat16 are read"
    )
    return row_stride
