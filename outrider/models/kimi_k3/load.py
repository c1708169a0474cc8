"""From a checkpoint directory to a filled model."""

from collections.abc import Callable
from pathlib import Path

import torch

from outrider.models.fields import read_config_json
from outrider.models.kernels import Kernels
from outrider.models.kimi_k3.checkpoint import SKIPPED_PREFIXES, assignments, holds_packed_experts
from outrider.models.kimi_k3.config import parse_config
from outrider.models.kimi_k3.model import KimiK3Model
from outrider.models.kimi_k3.moe import ExpertForm, ExpertStorage
from outrider.models.kimi_k3.numerics import choose_kernels
from outrider.models.layers import Build
from outrider.models.numerics import NumericsChoice
from outrider.models.weights import CheckpointReader, check_names, fill_parameters

__all__ = ["load_kimi_k3"]


def load_kimi_k3(
    directory: Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    experts: ExpertForm = "auto",
    numerics: NumericsChoice | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> KimiK3Model:
    """Load config and weights, strictly.

    Args:
        directory: Holds ``config.json`` and safetensors files.
        dtype: Compute dtype: bfloat16, float32 or float64.
        device: Where the parameters live.
        experts: ``packed`` keeps MXFP4 bytes, ``unpacked`` decodes once at load; ``auto`` is packed where the
            checkpoint is and products are formed from the bytes, else unpacked.
        numerics: How products are computed and probed; None is exact.
        progress: Called with (bytes done, bytes in total).

    Raises:
        ConfigError: the config is malformed or out of range.
        CheckpointError: the tensors do not match the config.
    """
    config = parse_config(read_config_json(directory))
    kernels, report = choose_kernels(config, numerics or NumericsChoice(), dtype=dtype, device=device)
    build = Build(dtype=dtype, device=device, kernels=kernels)
    with CheckpointReader(directory) as reader:
        on_disk_packed = holds_packed_experts(config, reader)
        storage = _storage(experts, on_disk_packed=on_disk_packed, kernels=kernels)
        plan = tuple(assignments(config, reader, on_disk_packed=on_disk_packed, keep_packed=storage == "packed"))
        check_names(reader, plan, SKIPPED_PREFIXES)  # before memory is taken for a config that does not fit the files
        model = KimiK3Model(config, experts=storage, build=build, numerics=report)
        fill_parameters(reader, model, plan, skipped_prefixes=SKIPPED_PREFIXES, progress=progress)
    model.prepare()
    model.eval()
    return model


def _storage(experts: ExpertForm, *, on_disk_packed: bool, kernels: Kernels) -> ExpertStorage:
    """How the routed experts are kept. The torch forms would decode packed ones in every step."""
    if experts != "auto":
        return experts
    return "packed" if on_disk_packed and kernels.routed is not None else "unpacked"
