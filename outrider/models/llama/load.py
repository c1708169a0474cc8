"""From a checkpoint directory to a filled model."""

from collections.abc import Callable
from pathlib import Path

import torch

from outrider.errors import ConfigError
from outrider.models.fields import read_config_json
from outrider.models.layers import Build
from outrider.models.llama.checkpoint import assignments, skipped_prefixes
from outrider.models.llama.config import parse_config
from outrider.models.llama.model import LlamaModel
from outrider.models.llama.numerics import choose_kernels
from outrider.models.numerics import NumericsChoice
from outrider.models.weights import CheckpointReader, check_names, fill_parameters

__all__ = ["load_llama"]


def load_llama(
    directory: Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    experts: str = "auto",
    numerics: NumericsChoice | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> LlamaModel:
    """Load config and weights, strictly.

    Args:
        directory: holds ``config.json`` and safetensors files.
        dtype: compute dtype: bfloat16, float32 or float64.
        device: where the parameters live.
        experts: "auto"; this family has none.
        numerics: how products are computed and probed; None is exact.
        progress: called with (bytes done, bytes in total).

    Raises:
        ConfigError: the config is malformed or out of range, or a form of experts is asked for.
        CheckpointError: the tensors do not match the config.
    """
    if experts != "auto":
        raise ConfigError(f"experts={experts!r} is for models with experts, and this one has none; leave it at auto")
    config = parse_config(read_config_json(directory))
    kernels, grouped, report = choose_kernels(config, numerics or NumericsChoice(), dtype=dtype, device=device)
    with CheckpointReader(directory) as reader:
        plan, skipped = assignments(config), skipped_prefixes(config, reader)
        check_names(reader, plan, skipped)  # before memory is taken for a config that does not fit the files
        model = LlamaModel(
            config, build=Build(dtype=dtype, device=device, kernels=kernels), grouped=grouped, numerics=report
        )
        fill_parameters(reader, model, plan, skipped_prefixes=skipped, progress=progress)
    model.prepare()
    model.eval()
    return model
