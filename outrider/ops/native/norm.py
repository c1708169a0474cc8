"""RMSNorm, and the residual mix with the norm that follows it, one call each.

Dims: B candidates, T rows, D width.
"""

import torch

from outrider.ops.native.library import INT, POINTER, REAL, Library

__all__ = ["NativeNorm"]


class NativeNorm:
    """Forms of ``rms_norm`` and ``residual_mix_norm`` for bfloat16 on a CPU; argument for argument the same."""

    def __init__(self, native: Library) -> None:
        self._norm = native.function(
            "rms_norm",
            [POINTER, INT, INT, INT, INT, INT, INT, POINTER, INT, INT, REAL, INT, POINTER, INT],
        )
        self._mix_norm = native.function(
            "mix_norm",
            [POINTER, INT, INT, INT, INT, INT, POINTER, INT, POINTER, POINTER, REAL, POINTER, POINTER, INT],
        )

    def rms_norm(self, x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
        """``[..., D]``, up to four dims; ``weight_D`` may have leading dims that broadcast."""
        width = x_TD.shape[-1]
        if x_TD.stride(-1) != 1:
            x_TD = x_TD.contiguous()
        out_TD = torch.empty(x_TD.shape, dtype=torch.bfloat16)
        if x_TD.dim() == 2 and weight_D.dim() == 1:
            sizes, strides, weight_strides = (x_TD.shape[0], 1, 1), (x_TD.stride()[0], 0, 0), (0, 0)
        else:
            sizes, strides, weight_strides = _outer(x_TD, weight_D)
        self._norm(
            x_TD.data_ptr(), *sizes, *strides, weight_D.data_ptr(), *weight_strides, eps, width, out_TD.data_ptr(),
            torch.get_num_threads(),
        )  # fmt: skip
        return out_TD

    def mix_norm(
        self,
        candidates_BTD: torch.Tensor,
        added_TD: torch.Tensor | None,
        mix_weight_D: torch.Tensor | None,
        norm_weight_D: torch.Tensor,
        eps: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As ``residual_mix_norm``."""
        num_candidates, num_rows, width = candidates_BTD.shape
        plane_stride, row_stride, step = candidates_BTD.stride()
        assert step == 1, "rows of the residual stream are contiguous"
        if added_TD is not None and added_TD.stride(1) != 1:
            added_TD = added_TD.contiguous()
        normed_TD = torch.empty((num_rows, width), dtype=torch.bfloat16)
        if mix_weight_D is None or num_candidates == 1:
            mixed_TD, mixed, mix_weight = candidates_BTD[-1], None, None
        else:
            mixed_TD = torch.empty((num_rows, width), dtype=torch.bfloat16)
            mixed, mix_weight = mixed_TD.data_ptr(), mix_weight_D.data_ptr()
        self._mix_norm(
            candidates_BTD.data_ptr(), num_candidates, plane_stride, row_stride, num_rows, width,
            None if added_TD is None else added_TD.data_ptr(), 0 if added_TD is None else added_TD.stride(0),
            mix_weight, norm_weight_D.data_ptr(), eps, mixed, normed_TD.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
        return mixed_TD, normed_TD


def _outer(
    x_TD: torch.Tensor, weight_D: torch.Tensor
) -> tuple[tuple[int, int, int], tuple[int, int, int], tuple[int, int]]:
    """Sizes and strides of x before its last dim as three dims, and the strides of the weight for the last two."""
    missing = 4 - x_TD.dim()
    assert missing >= 0, f"{x_TD.dim()} dims, 4 at most"
    # The first dim is the one that threads share, so ones are put behind it.
    x = x_TD[(slice(None), *(None,) * missing)] if x_TD.dim() > 1 else x_TD[None, None, None]
    weight = weight_D.expand(x_TD.shape)
    weight = weight[(slice(None), *(None,) * missing)] if x_TD.dim() > 1 else weight[None, None, None]
    assert weight.stride(0) == 0 or weight.shape[0] == 1, "the first dim shares the weight"
    assert weight.stride(3) == 1 or weight.shape[3] == 1, "rows of the weight are contiguous"
    n0, n1, n2, _ = x.shape
    s0, s1, s2, _ = x.stride()
    return (n0, n1, n2), (s0, s1, s2), (weight.stride(1), weight.stride(2))
