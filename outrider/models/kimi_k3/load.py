"""From a checkpoint directory to a filled model."""

from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from outrider.models.fields import read_config_json
from outrider.models.kimi_k3.checkpoint import SKIPPED_PREFIXES, assignments, holds_packed_experts
from outrider.models.kimi_k3.config import KimiK3Config, parse_config
from outrider.models.kimi_k3.model import KimiK3Model
from outrider.models.kimi_k3.moe import ExpertForm
from outrider.models.layers import Build
from outrider.models.weights import CheckpointReader, check_names, fill_parameters
from outrider.ops.linear import LinearFunction, choose_linear, linear_padded
from outrider.ops.moe import probe_expert_invariance

__all__ = ["load_kimi_k3"]


def load_kimi_k3(
    directory: Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    experts: ExpertForm = "unpacked",
    progress: Callable[[int, int], None] | None = None,
) -> KimiK3Model:
    """Load config and weights, strictly.

    Args:
        directory: Holds ``config.json`` and safetensors files.
        dtype: Compute dtype: bfloat16, float32 or float64.
        device: Where the parameters live.
        experts: ``packed`` keeps MXFP4 bytes, ``unpacked`` decodes once at load.
        progress: Called with (bytes done, bytes in total).

    Raises:
        ConfigError: the config is malformed or out of range.
        CheckpointError: the tensors do not match the config.
    """
    config = parse_config(read_config_json(directory))
    build = Build(dtype=dtype, device=device, linear=_choose_product(config, dtype))
    with CheckpointReader(directory) as reader:
        on_disk_packed = holds_packed_experts(config, reader)
        plan = tuple(assignments(config, reader, on_disk_packed=on_disk_packed, keep_packed=experts == "packed"))
        check_names(reader, plan, SKIPPED_PREFIXES)  # before memory is taken for a config that does not fit the files
        model = KimiK3Model(config, experts=experts, build=build)
        fill_parameters(reader, model, plan, skipped_prefixes=SKIPPED_PREFIXES, progress=progress)
    model.prepare()
    model.eval()
    return model


def _choose_product(config: KimiK3Config, dtype: torch.dtype) -> LinearFunction:
    """Plain row tiles where start-up probes find dense and expert products row-invariant, else padded ones."""
    if dtype != torch.bfloat16:  # these always run on padded tiles
        return linear_padded
    moe = config.moe
    if moe is not None:
        width = moe.latent_size or config.hidden_size
        if not probe_expert_invariance(moe.num_experts, width, moe.intermediate_size, dtype):
            return linear_padded
    return choose_linear(_weight_shapes(config), dtype)


def _weight_shapes(config: KimiK3Config) -> Iterator[tuple[int, int]]:
    """Shapes of all matrices that go through ``linear``, for the row-invariance probe."""
    shapes = Build(dtype=torch.bfloat16, device=torch.device("meta"))
    model = KimiK3Model(config, experts="unpacked", build=shapes)
    for parameter in model.parameters():
        if parameter.dim() == 2 and parameter.dtype == torch.bfloat16:
            yield (parameter.shape[0], parameter.shape[1])
