"""What the start-up probe checks of a K3 model, and the kernels that follow from its outcome."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import torch

from outrider.models.kernels import PLAIN_KERNELS, Kernels
from outrider.models.kimi_k3.config import KimiK3Config, MoeConfig
from outrider.models.kimi_k3.model import KimiK3Model
from outrider.models.kimi_k3.numerics_kda import chosen_kda, kda_checks
from outrider.models.layers import Build, IslandParameter
from outrider.models.numerics import (
    NumericsChoice,
    NumericsReport,
    chosen_linear,
    linear_checks,
    resolve_numerics,
    with_native_rows,
)
from outrider.ops.activation import Activation
from outrider.ops.attention import mla_absorbed
from outrider.ops.invariant import ROW_TILE, island_dtype
from outrider.ops.moe import routed_experts_loop
from outrider.ops.native.arena import Arena
from outrider.ops.native.library import Library, library_for
from outrider.ops.native.mla import NativeMla, absorb_into_panels
from outrider.ops.native.moe import RoutedExperts
from outrider.ops.probe import OpCheck
from outrider.ops.probe_mixers import (
    MlaSizes,
    absorbed_check,
    absorbed_name,
    expanded_check,
    expanded_name,
    query_tile_named,
)
from outrider.ops.probe_ops import (
    BOTH_FORMS,
    RoutedSizes,
    activation_check,
    activation_name,
    experts_check,
    experts_name,
    experts_product,
    mix_check,
    mix_name,
    norm_check,
    norm_name,
    routed_check,
    sigmoid_gate_check,
)

__all__ = ["choose_kernels", "model_checks"]

LINEAR, ROUTER = "linear", "router"


Shapes = frozenset[tuple[int, int]]


def choose_kernels(
    config: KimiK3Config, choice: NumericsChoice, *, dtype: torch.dtype, device: torch.device
) -> tuple[Kernels, NumericsReport]:
    """The kernels a model is built with, and how they were found."""
    shapes = _weight_shapes(config)
    report = resolve_numerics(_checks(config, shapes, dtype, device), choice, dtype=dtype, device=device)
    if choice.mode == "fast":
        return PLAIN_KERNELS, report
    return _kernels(config, shapes, dtype, device, report.geometries), report


def model_checks(config: KimiK3Config, dtype: torch.dtype, device: torch.device) -> tuple[OpCheck, ...]:
    """Every operation that a row passes through, at the sizes of the model."""
    return _checks(config, _weight_shapes(config), dtype, device)


def _checks(config: KimiK3Config, shapes: Shapes, dtype: torch.dtype, device: torch.device) -> tuple[OpCheck, ...]:
    checks = list(linear_checks(LINEAR, shapes, dtype, device))
    activation = _activation(config)
    if config.moe is not None:
        checks += _moe_checks(config, config.moe, dtype, device)
    native = library_for(dtype, device)
    checks += [activation_check(activation, inner, dtype, device, native) for inner in sorted(_inner_sizes(config))]
    checks += [norm_check(width, config.rms_norm_eps, dtype, device, native) for width in sorted(_norm_widths(config))]
    if config.attn_res_block_size is not None:
        num_candidates = config.num_snapshots + 1  # what the last layer sees
        checks.append(mix_check(num_candidates, config.hidden_size, config.rms_norm_eps, dtype, device, native))
    if config.kda_layers:
        checks += kda_checks(config, dtype, device)
    if config.mla_layers:
        sizes = _mla_sizes(config)
        checks += [
            absorbed_check(sizes, dtype, device, library_for(dtype, device)),
            expanded_check(sizes, dtype, device, library_for(dtype, device)),
        ]
        if config.mla.output_gate:
            checks.append(sigmoid_gate_check(sizes.num_heads * sizes.value_dim, dtype, device))
    return tuple(checks)


def _moe_checks(config: KimiK3Config, moe: MoeConfig, dtype: torch.dtype, device: torch.device) -> list[OpCheck]:
    """The routed path in one call where there is a native one, else its parts."""
    width, activation = moe.latent_size or config.hidden_size, _activation(config)
    if (native := library_for(dtype, device)) is not None:
        return [routed_check(_routed_sizes(config, moe), activation, native)]
    return [
        *linear_checks(ROUTER, [(moe.num_experts, config.hidden_size)], island_dtype(dtype), device),
        experts_check(moe.num_experts, width, moe.intermediate_size, activation, dtype, device),
    ]


def _kernels(
    config: KimiK3Config, shapes: Shapes, dtype: torch.dtype, device: torch.device, geometries: Mapping[str, str]
) -> Kernels:
    """Kernels in the geometries that were found; a default geometry is the default function."""
    chosen = Kernels(linear=chosen_linear(LINEAR, shapes, dtype, device, geometries))
    if config.moe is not None:
        chosen = _with_moe_kernels(chosen, config, config.moe, dtype, device, geometries)
    if config.mla_layers:
        chosen = _with_attention(chosen, _mla_sizes(config), geometries, library_for(dtype, device))
    if config.kda_layers:
        chosen = replace(chosen, kda=chosen_kda(config, dtype, device, geometries))
    return with_native_rows(
        chosen,
        norms=[norm_name(width) for width in _norm_widths(config)],
        mixes=[(norm_name if config.attn_res_block_size is None else mix_name)(config.hidden_size)],
        activations=[activation_name(_activation(config), inner) for inner in _inner_sizes(config)],
        dtype=dtype,
        device=device,
        geometries=geometries,
    )


def _with_moe_kernels(
    chosen: Kernels,
    config: KimiK3Config,
    moe: MoeConfig,
    dtype: torch.dtype,
    device: torch.device,
    geometries: Mapping[str, str],
) -> Kernels:
    if (native := library_for(dtype, device)) is not None:
        holds = geometries[_routed_sizes(config, moe).name] == native.geometry
        return replace(chosen, routed=partial(RoutedExperts, native, arena=Arena())) if holds else chosen
    router_shape = (moe.num_experts, config.hidden_size)
    chosen = replace(chosen, router=chosen_linear(ROUTER, [router_shape], island_dtype(dtype), device, geometries))
    geometry = geometries[experts_name(moe.latent_size or config.hidden_size, moe.intermediate_size)]
    if geometry == BOTH_FORMS:
        return chosen
    return replace(chosen, experts=partial(routed_experts_loop, product=experts_product(geometry, dtype)))


def _routed_sizes(config: KimiK3Config, moe: MoeConfig) -> RoutedSizes:
    return RoutedSizes(
        num_experts=moe.num_experts,
        model_width=config.hidden_size,
        width=moe.latent_size or config.hidden_size,
        inner=moe.intermediate_size,
    )


def _with_attention(
    kernels: Kernels, sizes: MlaSizes, geometries: Mapping[str, str], native: Library | None
) -> Kernels:
    """Attention as its checks found it."""
    geometry = geometries[absorbed_name(sizes)]
    if native is not None and geometry == native.geometry:
        mla = NativeMla(native)
        kernels = replace(
            kernels,
            absorbed=mla.absorbed,
            absorb=partial(absorb_into_panels, arena=Arena()),
            append_latents=mla.append_latents,
        )
        return replace(kernels, expanded=None) if geometries[expanded_name(sizes)] == native.geometry else kernels
    row_tile = query_tile_named(geometry)
    return kernels if row_tile == ROW_TILE else replace(kernels, absorbed=partial(mla_absorbed, row_tile=row_tile))


def _activation(config: KimiK3Config) -> Activation:
    return Activation(name=config.activation, beta=config.situ_beta, linear_beta=config.situ_linear_beta)


def _mla_sizes(config: KimiK3Config) -> MlaSizes:
    mla = config.mla
    return MlaSizes(
        num_heads=mla.num_heads,
        nope_dim=mla.nope_head_dim,
        rope_dim=mla.rope_head_dim,
        value_dim=mla.v_head_dim,
        latent_dim=mla.kv_lora_rank,
    )


def _inner_sizes(config: KimiK3Config) -> set[int]:
    moe = config.moe
    routed = set() if moe is None else {moe.intermediate_size, moe.shared_intermediate_size} - {0}
    return {config.intermediate_size} | routed


def _norm_widths(config: KimiK3Config) -> set[int]:
    widths = {config.hidden_size}
    if config.mla_layers:
        widths |= {config.mla.kv_lora_rank, config.mla.q_lora_rank or config.hidden_size}
    if config.moe is not None and config.moe.latent_norm and config.moe.latent_size is not None:
        widths.add(config.moe.latent_size)
    return widths


def _weight_shapes(config: KimiK3Config) -> Shapes:
    """Shapes of all matrices that go through ``linear``, from a model without storage."""
    build = Build(dtype=torch.bfloat16, device=torch.device("meta"))
    model = KimiK3Model(config, experts="unpacked", build=build)
    islands = {id(module.weight) for module in model.modules() if isinstance(module, IslandParameter)}
    return frozenset(
        (parameter.shape[0], parameter.shape[1])
        for parameter in model.parameters()
        if parameter.dim() == 2 and id(parameter) not in islands
    )
