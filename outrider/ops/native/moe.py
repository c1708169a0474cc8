"""Router, routed experts and combine of a layer in one call, from MXFP4 codes or bfloat16 weights.

``ops.moe.routed_path`` is the torch form. Same roundings: router in float32, products with float32 sums rounded to
bfloat16, activation and combine in float32 with one rounding each; only the order within a product differs. It does
not depend on the rows of the call (see moe.cpp), and packed and unpacked weights of equal values give equal bits.

Dims: T rows, D model width, E experts, X experts per token, L width the experts work in, I inner width, J = 2 I,
O outputs, N blocks of 16 outputs, G groups of 32 inputs, B bytes.
"""

import ctypes

import torch
import torch.nn.functional as F

from outrider.ops.activation import Activation
from outrider.ops.experts import Experts, PackedExperts, Router, Routing, StackedExperts
from outrider.ops.native.arena import CACHE_LINE, Arena
from outrider.ops.native.library import INT, POINTER, Library

__all__ = ["RoutedExperts"]

BLOCK = 16  # outputs side by side
GROUP = 32  # inputs that share a scale
STRIP = 4  # blocks that lie together
CHUNK_BYTES = 4  # of one output: the codes of 8 inputs
SILU, SITU, SITU_UNBOUNDED_LINEAR = range(3)


class LayerArguments(ctypes.Structure):
    """``Layer`` of moe.cpp."""

    _fields_ = (
        ("gate", POINTER),
        ("correction_bias", POINTER),
        ("experts", POINTER),
        ("is_packed", INT),
        ("model_width", INT),
        ("num_experts", INT),
        ("top_k", INT),
        ("width", INT),
        ("inner", INT),
        ("renormalize", INT),
        ("activation", INT),
        ("scaling", ctypes.c_float),
        ("beta", ctypes.c_float),
        ("linear_beta", ctypes.c_float),
    )


class RoutedExperts:
    """The routed path of one layer: ``(x_TD, x_TL) -> out_TL``, bfloat16.

    Copies the weights into the layout of the kernel; the originals are not needed afterwards.

    Args:
        native: library.
        router: float32.
        experts: packed, or unpacked in bfloat16; on the CPU.
        activation: between the two products.
        arena: where the copies lie; layers that share one lie side by side.
    """

    def __init__(
        self, native: Library, router: Router, experts: Experts, activation: Activation, arena: Arena | None = None
    ) -> None:
        self._top_k = router.top_k
        self._num_experts, self._model_width = router.gate_weight_ED.shape
        self._width, self._inner = experts.width, experts.inner
        arena = Arena() if arena is None else arena
        self._gate = _kept(arena, _gate_blocks(router.gate_weight_ED))
        self._correction_bias = router.correction_bias_E.detach().contiguous()
        assert self._gate.dtype == self._correction_bias.dtype == torch.float32, "the router works in float32"
        is_packed = isinstance(experts, PackedExperts)
        self._weights_EB = _stacked(arena, experts)
        kind = SILU if activation.name == "silu" else SITU_UNBOUNDED_LINEAR if activation.linear_beta is None else SITU
        self._layer = LayerArguments(
            gate=self._gate.data_ptr(),
            correction_bias=self._correction_bias.data_ptr(),
            experts=self._weights_EB.data_ptr(),
            is_packed=is_packed,
            model_width=self._model_width,
            num_experts=self._num_experts,
            top_k=router.top_k,
            width=self._width,
            inner=self._inner,
            renormalize=int(router.renormalize),
            activation=kind,
            scaling=router.scaling,
            beta=1.0 if activation.beta is None else activation.beta,
            linear_beta=0.0 if activation.linear_beta is None else activation.linear_beta,
        )
        self._address = ctypes.addressof(self._layer)
        self._routed = native.function("moe_routed", [POINTER, POINTER, INT, POINTER, INT, INT, POINTER, INT])
        self._route = native.function("moe_route", [POINTER, POINTER, INT, INT, POINTER, POINTER, INT])
        self._experts = native.function(
            "moe_experts", [POINTER, POINTER, INT, INT, POINTER, POINTER, POINTER, INT], INT
        )

    @property
    def num_bytes(self) -> int:
        """Memory of the weights in the layout of the kernel."""
        return self._gate.nbytes + self._weights_EB.nbytes

    def __call__(self, x_TD: torch.Tensor, x_TL: torch.Tensor) -> torch.Tensor:
        """Expert outputs combined per row, ``[T, L]``.

        Args:
            x_TD: router input; rows may lie apart, elements of a row may not.
            x_TL: what the experts see, likewise.
        """
        x_TD, x_TL = _rows(x_TD, self._model_width), _rows(x_TL, self._width)
        num_rows = x_TL.shape[0]
        assert x_TD.shape[0] == num_rows, f"{x_TD.shape[0]} rows are routed, {num_rows} go to the experts"
        out_TL = torch.empty((num_rows, self._width), dtype=torch.bfloat16)
        self._routed(
            self._address, x_TD.data_ptr(), x_TD.stride(0), x_TL.data_ptr(), x_TL.stride(0), num_rows,
            out_TL.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
        return out_TL

    def route(self, x_TD: torch.Tensor) -> Routing:
        """The router alone; see ``ops.moe.route``."""
        x_TD = _rows(x_TD, self._model_width)
        ids_TX = torch.empty((x_TD.shape[0], self._top_k), dtype=torch.int64)
        weights_TX = torch.empty((x_TD.shape[0], self._top_k), dtype=torch.float32)
        self._route(
            self._address, x_TD.data_ptr(), x_TD.stride(0), x_TD.shape[0], ids_TX.data_ptr(), weights_TX.data_ptr(),
            torch.get_num_threads(),
        )  # fmt: skip
        return Routing(expert_ids_TX=ids_TX, weights_TX=weights_TX)

    def experts(self, x_TL: torch.Tensor, routing: Routing) -> torch.Tensor:
        """Experts and combine alone, summed in the order of the given ids; see ``ops.moe.routed_experts``.

        Raises:
            ValueError: an expert id is out of range.
        """
        x_TL = _rows(x_TL, self._width)
        ids_TX, weights_TX = routing.expert_ids_TX.contiguous(), routing.weights_TX.contiguous()
        assert ids_TX.shape == weights_TX.shape == (x_TL.shape[0], self._top_k), "routing is not of these rows"
        assert (ids_TX.dtype, weights_TX.dtype) == (torch.int64, torch.float32), "routing is int64 and float32"
        out_TL = torch.empty((x_TL.shape[0], self._width), dtype=torch.bfloat16)
        if self._experts(
            self._address, x_TL.data_ptr(), x_TL.stride(0), x_TL.shape[0], ids_TX.data_ptr(), weights_TX.data_ptr(),
            out_TL.data_ptr(), torch.get_num_threads(),
        ):  # fmt: skip
            raise ValueError(f"an expert id is outside 0..{self._num_experts - 1}; route the rows with this router")
        return out_TL


def _rows(x: torch.Tensor, width: int) -> torch.Tensor:
    """Rows whose elements are neighbours; a copy only where they are not."""
    assert x.dtype == torch.bfloat16 and x.dim() == 2 and x.shape[1] == width, (
        f"rows of {width} bfloat16 elements are needed, got {tuple(x.shape)} of {x.dtype}"
    )
    return x if x.stride(1) == 1 else x.contiguous()


def _gate_blocks(gate_ED: torch.Tensor) -> torch.Tensor:
    """``[E, D] -> [N, D, 16]``, absent experts zero."""
    rows = _whole_blocks(gate_ED.detach())
    return rows.view(-1, BLOCK, rows.shape[1]).transpose(1, 2).contiguous()


def _kept(arena: Arena, tensor: torch.Tensor) -> torch.Tensor:
    """A copy in the arena."""
    return arena.empty(tensor.shape, tensor.dtype).copy_(tensor)


def _stacked(arena: Arena, experts: Experts) -> torch.Tensor:
    """The bytes of every expert, ``[E, B]``; converted one at a time, so that no second copy of all is made."""
    first_B = _expert_bytes(experts, 0)
    stack_EB = arena.empty((experts.num_experts, first_B.shape[0]), torch.uint8)
    for index in range(experts.num_experts):
        stack_EB[index] = _expert_bytes(experts, index) if index else first_B
    return stack_EB


def _expert_bytes(experts: Experts, index: int) -> torch.Tensor:
    if isinstance(experts, PackedExperts):
        return _packed_expert(experts, index)
    return _unpacked_expert(experts, index)


def _packed_expert(experts: PackedExperts, index: int) -> torch.Tensor:
    gate_up, gate_up_scale, down, down_scale = (
        _alternating(experts.gate_up_packed_EJB[index]),
        _alternating(experts.gate_up_scale_EJG[index]),
        _whole_blocks(experts.down_packed_ELB[index]),
        _whole_blocks(experts.down_scale_ELG[index]),
    )
    return torch.cat(
        [
            _strips(_code_blocks(gate_up), _scale_blocks(gate_up_scale)),
            _strips(_code_blocks(down), _scale_blocks(down_scale)),
        ]
    )


def _unpacked_expert(experts: StackedExperts, index: int) -> torch.Tensor:
    assert experts.gate_up_EJL.dtype == experts.down_ELI.dtype == torch.bfloat16, "unpacked experts are bfloat16"
    matrices = _alternating(experts.gate_up_EJL[index].detach()), _whole_blocks(experts.down_ELI[index].detach())
    return torch.cat([_strips(_value_blocks(rows)) for rows in matrices])


def _strips(*parts: torch.Tensor) -> torch.Tensor:
    """Bytes of a matrix: of every 4 blocks (the last may have fewer) all ``[G, N, ...]`` of one part, then of the next.

    Args:
        parts: ``[N, G, ...]`` each.
    """
    runs = [
        part[first : first + STRIP].transpose(0, 1).contiguous().view(torch.uint8).flatten()
        for first in range(0, parts[0].shape[0], STRIP)
        for part in parts
    ]
    bytes_B = torch.cat(runs)
    return F.pad(bytes_B, (0, -bytes_B.shape[0] % CACHE_LINE))


def _whole_blocks(rows_OB: torch.Tensor) -> torch.Tensor:
    """Zero rows appended up to a multiple of 16."""
    return F.pad(rows_OB, (0, 0, 0, -rows_OB.shape[0] % BLOCK))


def _alternating(rows_JB: torch.Tensor) -> torch.Tensor:
    """Rows of w1 and w3 in blocks of 16 by turns, so that one strip of outputs holds both halves of an activation."""
    gate, up = (_whole_blocks(half).unflatten(0, (-1, BLOCK)) for half in rows_JB.chunk(2))
    return torch.stack([gate, up], dim=1).flatten(0, 2)


def _code_blocks(rows_OB: torch.Tensor) -> torch.Tensor:
    """``[O, B] -> [N, G, 4, 16, 4]``: of each output 8 inputs in 4 bytes, the even ones before the odd ones."""
    chunks = rows_OB.unflatten(1, (-1, GROUP // 2 // CHUNK_BYTES, CHUNK_BYTES))  # [O, G, 4, 4]
    halves = (chunks & 15, chunks >> 4)  # inputs 0, 2, 4, 6 and 1, 3, 5, 7
    ordered = torch.cat([half[..., 0::2] | half[..., 1::2] << 4 for half in halves], dim=-1)
    return ordered.unflatten(0, (-1, BLOCK)).permute(0, 2, 3, 1, 4).contiguous()


def _scale_blocks(scales_OG: torch.Tensor) -> torch.Tensor:
    """``[O, G] -> [N, G, 16]``."""
    return scales_OG.unflatten(0, (-1, BLOCK)).transpose(1, 2).contiguous()


def _value_blocks(rows_OI: torch.Tensor) -> torch.Tensor:
    """``[O, I] -> [N, G, 16, 16, 2]``: pairs of inputs of every output, inputs padded with zeros to whole groups."""
    padded = F.pad(rows_OI, (0, -rows_OI.shape[1] % GROUP))
    pairs = padded.unflatten(1, (-1, GROUP // 2, 2)).unflatten(0, (-1, BLOCK))  # [N, 16, G, 16, 2]
    return pairs.permute(0, 2, 3, 1, 4).contiguous()
