"""What the start-up probe checks of a Llama model, and the kernels that follow from its outcome."""

import torch

from outrider.models.kernels import PLAIN_KERNELS, Kernels
from outrider.models.llama.config import LlamaConfig
from outrider.models.llama.kernels import TORCH_GROUPED_KERNELS, GroupedKernels
from outrider.models.numerics import (
    NumericsChoice,
    NumericsReport,
    chosen_linear,
    linear_checks,
    resolve_numerics,
    with_native_rows,
)
from outrider.ops.activation import Activation
from outrider.ops.native.library import library_for
from outrider.ops.probe import OpCheck
from outrider.ops.probe_grouped import GroupedSizes, grouped_check, grouped_forms
from outrider.ops.probe_ops import activation_check, activation_name, norm_check, norm_name

__all__ = ["choose_kernels", "model_checks"]

LINEAR = "linear"
SILU = Activation(name="silu")


def choose_kernels(
    config: LlamaConfig, choice: NumericsChoice, *, dtype: torch.dtype, device: torch.device
) -> tuple[Kernels, GroupedKernels, NumericsReport]:
    """Kernels for this model on this machine, and how they were found."""
    report = resolve_numerics(model_checks(config, dtype, device), choice, dtype=dtype, device=device)
    if choice.mode == "fast":
        return PLAIN_KERNELS, TORCH_GROUPED_KERNELS, report
    kernels = with_native_rows(
        Kernels(linear=chosen_linear(LINEAR, _weight_shapes(config), dtype, device, report.geometries)),
        norms=[norm_name(config.hidden_size)],
        mixes=[norm_name(config.hidden_size)],
        activations=[activation_name(SILU, config.intermediate_size)],
        dtype=dtype,
        device=device,
        geometries=report.geometries,
    )
    native = library_for(dtype, device)
    append, attend = grouped_forms(report.geometries[_grouped_sizes(config).name], native)
    return kernels, GroupedKernels(append=append, attend=attend), report


def model_checks(config: LlamaConfig, dtype: torch.dtype, device: torch.device) -> tuple[OpCheck, ...]:
    """Every operation that a row passes through, at the sizes of the model."""
    native = library_for(dtype, device)
    return (
        *linear_checks(LINEAR, _weight_shapes(config), dtype, device),
        activation_check(SILU, config.intermediate_size, dtype, device, native),
        norm_check(config.hidden_size, config.rms_norm_eps, dtype, device, native),
        grouped_check(_grouped_sizes(config), dtype, device, native),
    )


def _grouped_sizes(config: LlamaConfig) -> GroupedSizes:
    return GroupedSizes(
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        head_norms=config.head_norms,
    )


def _weight_shapes(config: LlamaConfig) -> frozenset[tuple[int, int]]:
    width, inner = config.hidden_size, config.intermediate_size
    return frozenset(
        {
            (config.vocab_size, width),
            (config.query_size + 2 * config.kv_size, width),
            (width, config.query_size),
            (2 * inner, width),
            (width, inner),
        }
    )
