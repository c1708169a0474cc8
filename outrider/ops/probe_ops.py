"""The checks of ``probe`` for products, experts, norms and element-wise functions.

Dims: N rows of a call, O outputs, I inputs, H heads, W head width, K taps, D channels, X experts of the
stack, L width of the experts, J two inner widths.
"""

from dataclasses import dataclass
from functools import partial

import torch

from outrider.ops.activation import Activation, GluFunction, glu_fused, sigmoid_gate
from outrider.ops.conv import short_conv
from outrider.ops.invariant import island_dtype
from outrider.ops.linear import (
    LinearFunction,
    RowTiles,
    cancelling_operands,
    linear,
    linear_in_tiles,
    tile_candidates,
)
from outrider.ops.moe import (
    BATCHED_MAX_ROWS,
    RoutedFunction,
    Router,
    Routing,
    StackedExperts,
    expert_product,
    routed_experts_batched,
    routed_experts_loop,
    routed_path,
)
from outrider.ops.native.activation import NativeGlu
from outrider.ops.native.library import Library
from outrider.ops.native.linear import PackedLinear
from outrider.ops.native.moe import RoutedExperts
from outrider.ops.native.norm import NativeNorm
from outrider.ops.norm import NormFunction, gated_rms_norm, rms_norm
from outrider.ops.probe import (
    CASES,
    FEW_CASES,
    FIXED,
    NUM_ROWS,
    OpCheck,
    RowFunction,
    company_violation,
    fixed_check,
    random_rows,
)
from outrider.ops.residual import MixNormFunction, residual_mix_norm
from outrider.ops.spans import spans_from_lengths

__all__ = [
    "BOTH_FORMS",
    "RoutedSizes",
    "activation_check",
    "activation_name",
    "conv_check",
    "experts_check",
    "experts_name",
    "experts_product",
    "gated_norm_check",
    "linear_check",
    "mix_check",
    "mix_name",
    "norm_check",
    "norm_name",
    "probed_shape",
    "routed_check",
    "row_forms",
    "sigmoid_gate_check",
    "tiles_named",
]

# Output columns probed at most: the library works on column blocks far smaller than this.
PROBE_COLUMNS = 4096
# From this size on a weight is probed with few cases.
LARGE_WEIGHT = 1 << 20
# Experts probed at most; their number is a batch dim.
PROBE_EXPERTS = 4
BOTH_FORMS = "batched or looped"
TORCH_FORMS = "torch forms"


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedSizes:
    """Sizes of a layer's routed path."""

    num_experts: int
    model_width: int  # of the router's input
    width: int  # of the experts' input and output
    inner: int

    @property
    def name(self) -> str:
        """Name of its check."""
        return f"router {self.num_experts}x{self.model_width} and {experts_name(self.width, self.inner)} in one call"


def probed_shape(num_out: int, num_in: int) -> tuple[int, int]:
    """The shape that stands for a weight in a check."""
    return min(num_out, PROBE_COLUMNS), num_in


def tiles_named(name: str, dtype: torch.dtype) -> RowTiles:
    """The candidate of that name."""
    return {tiles.name: tiles for tiles in tile_candidates(dtype)}[name]


def linear_check(
    name: str, shape_OI: tuple[int, int], dtype: torch.dtype, device: torch.device, native: Library | None = None
) -> OpCheck:
    """Products with a weight of ``probed_shape``; candidates are the native form and the row tiles of ``linear``."""
    num_out, num_in = shape_OI
    cases = CASES if num_out * num_in <= LARGE_WEIGHT else FEW_CASES

    def find(geometry: str) -> str | None:
        random_OI = random_rows(num_out, num_in, dtype=dtype, device=device)
        random_3I = random_rows(NUM_ROWS, num_in, dtype=dtype, device=device, seed=2)
        for weight_OI, rows_3I in ((random_OI, random_3I), cancelling_operands(random_OI, random_3I)):
            if native is not None and geometry == native.geometry:
                product = _packed(native, weight_OI)
            else:
                product = partial(_in_tiles, weight_OI=weight_OI, tiles=tiles_named(geometry, dtype))
            if (violation := company_violation(product, rows_3I, cases=cases)) is not None:
                return violation
        return None

    names = tuple(tiles.name for tiles in tile_candidates(dtype))
    if native is not None:
        names = (native.geometry, *names)
    return OpCheck(name=name, geometries=names, find_violation=find)


def _in_tiles(x_NI: torch.Tensor, *, weight_OI: torch.Tensor, tiles: RowTiles) -> torch.Tensor:
    return linear_in_tiles(x_NI, weight_OI, tiles)


def _packed(native: Library, weight_OI: torch.Tensor) -> RowFunction:
    product = PackedLinear(native, linear)
    product.pack(weight_OI)
    return partial(_of_weight, product=product, weight_OI=weight_OI)


def _of_weight(x_NI: torch.Tensor, *, product: LinearFunction, weight_OI: torch.Tensor) -> torch.Tensor:
    return product(x_NI, weight_OI)


def experts_product(geometry: str, dtype: torch.dtype) -> LinearFunction:
    """The product of one expert's rows that a geometry of ``experts_check`` means."""
    return expert_product if geometry == BOTH_FORMS else partial(linear_in_tiles, tiles=tiles_named(geometry, dtype))


def experts_check(
    num_experts: int, width: int, inner: int, activation: Activation, dtype: torch.dtype, device: torch.device
) -> OpCheck:
    """Expert products and their combine: both forms with the same bits, or the loop alone on padded tiles."""
    stack = min(num_experts, PROBE_EXPERTS)

    def find(geometry: str) -> str | None:
        experts = StackedExperts(
            gate_up_EJL=random_rows(stack, 2 * inner, width, dtype=dtype, device=device),
            down_ELI=random_rows(stack, width, inner, dtype=dtype, device=device, seed=2),
        )
        weights_X = torch.linspace(0.1, 0.9, stack, dtype=island_dtype(dtype), device=device)
        rows_3L = random_rows(NUM_ROWS, width, dtype=dtype, device=device, seed=3)

        def routing(num_rows: int) -> Routing:
            ids_TX = torch.arange(stack, device=device).expand(num_rows, stack)
            return Routing(expert_ids_TX=ids_TX, weights_TX=weights_X.expand(num_rows, stack))

        product = experts_product(geometry, dtype)

        def loop(x_NL: torch.Tensor) -> torch.Tensor:
            return routed_experts_loop(x_NL, routing(x_NL.shape[0]), experts, activation, product=product)

        violation = company_violation(loop, rows_3L, cases=FEW_CASES)
        if violation is None and geometry == BOTH_FORMS:
            violation = company_violation(
                lambda x_NL: routed_experts_batched(x_NL, routing(x_NL.shape[0]), experts, activation),
                rows_3L,
                alone=loop,
                cases=[case for case in FEW_CASES if case[0] <= BATCHED_MAX_ROWS],
            )
        return violation

    padded = tuple(tiles.name for tiles in tile_candidates(dtype) if tiles.padded)
    return OpCheck(name=experts_name(width, inner), geometries=(BOTH_FORMS, *padded), find_violation=find)


def experts_name(width: int, inner: int) -> str:
    """Name of the experts' check."""
    return f"experts of {width} to {inner}"


def norm_check(
    width: int, eps: float, dtype: torch.dtype, device: torch.device, native: Library | None = None
) -> OpCheck:
    """RMSNorm of a width."""
    weight_D = random_rows(width, dtype=dtype, device=device)
    rows_3D = random_rows(NUM_ROWS, width, dtype=dtype, device=device, seed=2)

    def find(geometry: str) -> str | None:
        norm: NormFunction = rms_norm if native is None or geometry == FIXED else NativeNorm(native).rms_norm
        return company_violation(lambda x_ND: norm(x_ND, weight_D, eps), rows_3D)

    return OpCheck(name=norm_name(width), geometries=row_forms(native), find_violation=find)


def row_forms(native: Library | None) -> tuple[str, ...]:
    """Geometries of an operation that has a torch form and, with a library, a native one."""
    return (FIXED,) if native is None else (native.geometry, FIXED)


def routed_check(sizes: RoutedSizes, activation: Activation, native: Library) -> OpCheck:
    """Router, experts and combine: in one native call, or the torch forms one after the other; bfloat16, CPU."""
    dtype, device = torch.bfloat16, torch.device("cpu")
    stack, model_width, width, inner = (
        min(sizes.num_experts, PROBE_EXPERTS), sizes.model_width, sizes.width, sizes.inner
    )  # fmt: skip

    def find(geometry: str) -> str | None:
        router = Router(
            gate_weight_ED=random_rows(stack, model_width, dtype=torch.float32, device=device),
            correction_bias_E=random_rows(stack, dtype=torch.float32, device=device),
            top_k=(stack + 1) // 2,
            renormalize=True,
            scaling=1.0,
        )
        experts = StackedExperts(
            gate_up_EJL=random_rows(stack, 2 * inner, width, dtype=dtype, device=device, seed=2),
            down_ELI=random_rows(stack, width, inner, dtype=dtype, device=device, seed=3),
        )
        routed: RoutedFunction = partial(routed_path, router=router, experts=experts, activation=activation)
        if geometry == native.geometry:
            routed = RoutedExperts(native, router, experts, activation)
        rows_3F = random_rows(NUM_ROWS, model_width + width, dtype=dtype, device=device, seed=4)
        return company_violation(
            lambda x_NF: routed(x_NF[:, :model_width], x_NF[:, model_width:]), rows_3F, cases=FEW_CASES
        )

    return OpCheck(name=sizes.name, geometries=(native.geometry, TORCH_FORMS), find_violation=find)


def norm_name(width: int) -> str:
    """Name of a norm's check."""
    return f"norm of {width}"


def mix_check(
    num_candidates: int,
    width: int,
    eps: float,
    dtype: torch.dtype,
    device: torch.device,
    native: Library | None = None,
) -> OpCheck:
    """Residual addition, mix over so many candidates, and the norm that follows; one row holds them all."""
    mix_weight_D = random_rows(width, dtype=island_dtype(dtype), device=device)
    norm_weight_D = random_rows(width, dtype=dtype, device=device, seed=3)
    rows_3BD = random_rows(NUM_ROWS, num_candidates + 1, width, dtype=dtype, device=device, seed=2)

    def find(geometry: str) -> str | None:
        mix_norm: MixNormFunction = (
            residual_mix_norm if native is None or geometry == FIXED else NativeNorm(native).mix_norm
        )

        def mix(x_NBD: torch.Tensor) -> torch.Tensor:
            planes_BND = x_NBD.transpose(0, 1).clone(memory_format=torch.contiguous_format)  # the prefix is written
            both = mix_norm(planes_BND[:-1], planes_BND[-1], mix_weight_D, norm_weight_D, eps)
            return torch.stack((planes_BND[-2], *both), dim=1)

        return company_violation(mix, rows_3BD)

    return OpCheck(name=mix_name(width), geometries=row_forms(native), find_violation=find)


def mix_name(width: int) -> str:
    """Name of the check of the residual mix."""
    return f"residual mix of {width}"


def gated_norm_check(num_heads: int, width: int, eps: float, dtype: torch.dtype, device: torch.device) -> OpCheck:
    """Gated RMSNorm of a KDA output."""
    weight_W = random_rows(width, dtype=island_dtype(dtype), device=device)
    return _row_check(
        f"gated norm of {num_heads} heads of {width}",
        lambda x_N2HW: gated_rms_norm(x_N2HW[:, 0], weight_W, x_N2HW[:, 1], eps),
        (2, num_heads, width),
        dtype,
        device,
    )


def activation_check(
    activation: Activation, inner: int, dtype: torch.dtype, device: torch.device, native: Library | None = None
) -> OpCheck:
    """Gated activation of an inner width."""
    rows_3J = random_rows(NUM_ROWS, 2 * inner, dtype=dtype, device=device, seed=2)

    def find(geometry: str) -> str | None:
        glu: GluFunction = glu_fused if native is None or geometry == FIXED else NativeGlu(native)
        return company_violation(lambda x_NJ: glu(activation, x_NJ), rows_3J)

    return OpCheck(name=activation_name(activation, inner), geometries=row_forms(native), find_violation=find)


def activation_name(activation: Activation, inner: int) -> str:
    """Name of an activation's check."""
    return f"{activation.name} of {inner}"


def sigmoid_gate_check(width: int, dtype: torch.dtype, device: torch.device) -> OpCheck:
    """Output gate of an attention layer."""
    return _row_check(
        f"sigmoid gate of {width}", lambda x_N2D: sigmoid_gate(x_N2D[:, 0], x_N2D[:, 1]), (2, width), dtype, device
    )


def conv_check(num_channels: int, kernel: int, dtype: torch.dtype, device: torch.device) -> OpCheck:
    """Short convolution of one new input per sequence; the carried inputs are part of the row."""
    weight_DK = random_rows(num_channels, kernel, dtype=island_dtype(dtype), device=device)

    def run(x_NKD: torch.Tensor) -> torch.Tensor:
        layout = spans_from_lengths((1,) * x_NKD.shape[0], device=device)
        return short_conv(x_NKD[:, -1], x_NKD[:, :-1], weight_DK, layout)

    return _row_check(f"convolution of {num_channels}", run, (kernel, num_channels), dtype, device)


def _row_check(
    name: str, run: RowFunction, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> OpCheck:
    """A check of a function of whole rows."""
    return fixed_check(
        name, lambda: company_violation(run, random_rows(NUM_ROWS, *shape, dtype=dtype, device=device, seed=2))
    )
