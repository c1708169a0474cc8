"""Which loader serves a checkpoint, by the ``model_type`` of its config."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

import torch

from outrider.errors import UnsupportedError
from outrider.models.fields import Fields, read_config_json
from outrider.models.kimi_k3.load import load_kimi_k3
from outrider.models.kimi_k3.moe import ExpertForm
from outrider.models.llama.load import load_llama
from outrider.models.numerics import NumericsChoice
from outrider.models.protocol import TargetModel

__all__ = ["TARGET_LOADERS", "load_target"]


class TargetLoader(Protocol):
    """Loads one family."""

    def __call__(
        self,
        directory: Path,
        *,
        dtype: torch.dtype,
        device: torch.device,
        experts: ExpertForm = "auto",
        numerics: NumericsChoice | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> TargetModel:
        """Load config and weights from ``directory``."""
        ...


TARGET_LOADERS: Mapping[str, TargetLoader] = {
    "kimi_k3": load_kimi_k3,
    "kimi_linear": load_kimi_k3,
    "llama": load_llama,
    "qwen3": load_llama,
}


# A drafter may call itself by the model_type of the layers it is made of.
DRAFTER_FIELDS = frozenset({"target_layer_ids", "dspark_config", "dflash_config", "speculators_model_type"})


def load_target(
    path: str | Path,
    *,
    dtype: torch.dtype,
    device: str | torch.device = "cpu",
    experts: ExpertForm = "auto",
    numerics: NumericsChoice | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> TargetModel:
    """Load the target model of a checkpoint directory, ready to run.

    Raises:
        UnsupportedError: no family serves this ``model_type``.
        ConfigError: the config is missing, malformed or out of range.
        CheckpointError: the weights do not match the config.
    """
    directory = Path(path)
    raw = read_config_json(directory)
    if found := DRAFTER_FIELDS & raw.keys():
        raise UnsupportedError(
            f"{directory} holds a drafter, not a target (its config.json has {min(found)}); give the model that it "
            "drafts for, and this directory as the drafter"
        )
    model_type = Fields(raw, where="").text("model_type")
    if model_type not in TARGET_LOADERS:
        raise UnsupportedError(
            f"model_type {model_type!r} is not supported; supported are {', '.join(sorted(TARGET_LOADERS))}"
        )
    loader = TARGET_LOADERS[model_type]
    return loader(
        directory, dtype=dtype, device=torch.device(device), experts=experts, numerics=numerics, progress=progress
    )
