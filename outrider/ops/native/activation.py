"""Gated activations in one call.

Dims: T rows, I inner width, J = 2 I.
"""

import torch

from outrider.ops.activation import Activation
from outrider.ops.native.library import INT, POINTER, REAL, Library

__all__ = ["NativeGlu"]


class NativeGlu:
    """Form of ``glu_fused`` for bfloat16 on a CPU."""

    def __init__(self, native: Library) -> None:
        self._situ = native.function("situ", [POINTER, INT, INT, INT, REAL, REAL, POINTER, INT])
        self._silu_mul = native.function("silu_mul", [POINTER, INT, INT, INT, POINTER, INT])

    def __call__(self, activation: Activation, gate_up_TJ: torch.Tensor) -> torch.Tensor:
        """``[T, J]``, rows with any stride, to ``[T, I]``; more leading dims are joined."""
        if gate_up_TJ.dim() != 2:
            joined = self(activation, gate_up_TJ.reshape(-1, gate_up_TJ.shape[-1]))
            return joined.view(*gate_up_TJ.shape[:-1], joined.shape[-1])
        num_rows, width = gate_up_TJ.shape[0], gate_up_TJ.shape[1] // 2
        if gate_up_TJ.stride(1) != 1:
            gate_up_TJ = gate_up_TJ.contiguous()
        out_TI = torch.empty((num_rows, width), dtype=torch.bfloat16)
        rows = (gate_up_TJ.data_ptr(), gate_up_TJ.stride(0), num_rows, width)
        end = (out_TI.data_ptr(), torch.get_num_threads())
        if activation.name == "situ":
            beta = 1.0 if activation.beta is None else activation.beta
            # 0 says that the linear half is unbounded.
            self._situ(*rows, beta, 0.0 if activation.linear_beta is None else activation.linear_beta, *end)
        else:
            self._silu_mul(*rows, *end)
        return out_TI
