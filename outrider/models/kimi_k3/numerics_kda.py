"""The forms that KDA layers may run in, their checks, and the form that follows from the outcome."""

from collections.abc import Mapping
from dataclasses import replace

import torch

from outrider.models.kimi_k3.config import KimiK3Config
from outrider.models.kimi_k3.kda import KDA_CHUNK
from outrider.ops.kda_step import PLAIN_KDA, KdaForm
from outrider.ops.native.kda import native_kda
from outrider.ops.native.library import library_for
from outrider.ops.probe import OpCheck
from outrider.ops.probe_kda import KdaSizes, kda_prompt_check, kda_prompt_name, kda_step_check, kda_step_name
from outrider.ops.probe_ops import conv_check, gated_norm_check

__all__ = ["chosen_kda", "kda_checks"]


def kda_checks(config: KimiK3Config, dtype: torch.dtype, device: torch.device) -> list[OpCheck]:
    """Every form as a whole; what the torch form is made of is checked by name besides."""
    kda, sizes, forms = config.kda, _sizes(config), _forms(dtype, device)
    return [
        conv_check(3 * kda.inner_size, kda.conv_kernel_size, dtype, device),
        kda_step_check(forms, sizes, dtype, device),
        kda_prompt_check(forms, sizes, KDA_CHUNK, dtype, device),
        gated_norm_check(kda.num_heads, kda.head_dim, config.rms_norm_eps, dtype, device),
    ]


def chosen_kda(
    config: KimiK3Config, dtype: torch.dtype, device: torch.device, geometries: Mapping[str, str]
) -> KdaForm:
    """Steps and prompts in the forms that their checks found."""
    named, sizes = {form.name: form for form in _forms(dtype, device)}, _sizes(config)
    step, prompt = named[geometries[kda_step_name(sizes)]], named[geometries[kda_prompt_name(sizes)]]
    return replace(step, bind_prompt=prompt.bind_prompt)


def _forms(dtype: torch.dtype, device: torch.device) -> tuple[KdaForm, ...]:
    """The fastest first."""
    library = library_for(dtype, device)
    return (PLAIN_KDA,) if library is None else (native_kda(library), PLAIN_KDA)


def _sizes(config: KimiK3Config) -> KdaSizes:
    kda = config.kda
    return KdaSizes(
        num_heads=kda.num_heads,
        width=kda.head_dim,
        num_taps=kda.conv_kernel_size,
        bound=kda.gate_lower_bound,
        eps=config.rms_norm_eps,
    )
