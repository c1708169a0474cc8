"""Dense product on weights packed once: bfloat16 with float32 sums and one rounding.

Dims: T rows, I inputs, O outputs.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from outrider.ops.linear import LinearFunction
from outrider.ops.native.arena import Arena
from outrider.ops.native.library import INT, POINTER, Library

__all__ = ["PackedLinear", "pack_weights"]


@dataclass(frozen=True, slots=True)
class _Packed:
    """A packed weight; the original is held so that its identity cannot pass to another tensor."""

    original: torch.Tensor
    values: torch.Tensor
    pointer: int
    num_out: int
    num_in: int


class PackedLinear:
    """A ``LinearFunction``: weights that were packed go through the native product, others through ``fallback``.

    Which way a weight goes is decided when it is packed, never by its rows, so a row's bits are its own. The packed
    copy doubles the memory of the weight; the original stays as it is for whoever else reads it.

    Args:
        native: library.
        fallback: product with every other weight.
        shapes: ``(O, I)`` of the weights that ``pack`` takes; None takes all bfloat16 matrices.
    """

    def __init__(
        self, native: Library, fallback: LinearFunction, shapes: frozenset[tuple[int, int]] | None = None
    ) -> None:
        self._fallback, self._shapes = fallback, shapes
        self._size = native.function("linear_packed_size", [INT, INT], INT)
        self._pack = native.function("linear_pack", [POINTER, INT, INT, INT, POINTER])
        self._run = native.function("linear", [POINTER, INT, INT, POINTER, INT, INT, POINTER, INT])
        self._packed: dict[int, _Packed] = {}
        self._arena = Arena()

    def pack(self, weight_OI: torch.Tensor) -> None:
        """Pack a weight, or pack it again after its values changed; other dtypes and shapes are left alone.

        Weights that are packed in the order of use lie in memory in that order, which reads fastest.
        """
        if weight_OI.dtype != torch.bfloat16 or weight_OI.dim() != 2 or weight_OI.device.type != "cpu":
            return
        num_out, num_in = weight_OI.shape
        if self._shapes is not None and (num_out, num_in) not in self._shapes:
            return
        rows_OI = weight_OI.detach()
        if rows_OI.stride(1) != 1:
            rows_OI = rows_OI.contiguous()
        packed = self._packed.get(id(weight_OI))
        if packed is None or (packed.num_out, packed.num_in) != (num_out, num_in):
            size = self._size(num_out, num_in)
            assert size is not None
            values = self._arena.empty((size,), torch.bfloat16)
            packed = _Packed(weight_OI, values, values.data_ptr(), num_out, num_in)
            self._packed[id(weight_OI)] = packed
        self._pack(rows_OI.data_ptr(), rows_OI.stride(0), num_out, num_in, packed.pointer)

    def __call__(self, x: torch.Tensor, weight_OI: torch.Tensor) -> torch.Tensor:
        """``x @ weight^T``: ``[..., I]`` to ``[..., O]``; see ``linear``."""
        packed = self._packed.get(id(weight_OI))
        if packed is None or x.dtype != torch.bfloat16:
            return self._fallback(x, weight_OI)
        if x.dim() != 2:
            return self(x.reshape(-1, packed.num_in), weight_OI).view(*x.shape[:-1], packed.num_out)
        num_rows, num_in = x.shape
        assert num_in == packed.num_in, f"rows of {num_in} inputs meet a weight of {packed.num_in}"
        stride, step = x.stride()
        if step != 1:
            x = x.contiguous()
            stride = num_in
        out_TO = torch.empty((num_rows, packed.num_out), dtype=torch.bfloat16)
        self._run(
            x.data_ptr(), num_rows, stride, packed.pointer, packed.num_out, num_in, out_TO.data_ptr(),
            torch.get_num_threads(),
        )  # fmt: skip
        return out_TO


def pack_weights(linear: LinearFunction, weights: Iterable[torch.Tensor]) -> None:
    """Pack weights for a product that works on packed ones; nothing to do for the torch forms."""
    if isinstance(linear, PackedLinear):
        for weight in weights:
            linear.pack(weight)
