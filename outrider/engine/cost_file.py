"""Profiled costs of rounds on disk: one file per pair, machine, build and settings.

A file that cannot be read, or is not what this program wrote, is as good as none: costs are measured again.
"""

import hashlib
import json
import logging
from collections.abc import Mapping
from pathlib import Path

import torch

from outrider.config import user_cache_directory
from outrider.models.probe_cache import machine_identity, write_json
from outrider.speculative.cost import RoundCosts

__all__ = ["cost_file", "recall_costs", "remember_costs"]

FORMAT = 1

logger = logging.getLogger(__name__)


def cost_file(model_path: Path, drafter_path: Path, device: torch.device, settings: Mapping[str, object]) -> Path:
    """The file that holds the costs of this pair here.

    Args:
        model_path: directory of the target.
        drafter_path: directory of the drafter.
        device: where they run.
        settings: whatever else the costs depend on, as JSON values.
    """
    identity = {
        "machine": machine_identity(device),
        "device": str(device),
        "target": _checkpoint_identity(model_path),
        "drafter": _checkpoint_identity(drafter_path),
        "settings": dict(settings),
    }
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    return user_cache_directory() / "costs" / f"{digest}.json"


def recall_costs(file: Path) -> RoundCosts | None:
    """The costs that a file holds; None when there is none or it is damaged."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            return None
        return RoundCosts.restored(content["costs"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        logger.info("costs in %s cannot be used (%s); measuring again", file, type(error).__name__)
        return None


def remember_costs(file: Path, costs: RoundCosts) -> None:
    """Write costs, whole or not at all; a place that cannot be written only costs the next start a profile."""
    write_json(file, {"format": FORMAT, "costs": costs.saved()})


def _checkpoint_identity(path: Path) -> list[object]:
    """What tells checkpoints apart whose speed may differ: config, and names and sizes of the weights."""
    files = sorted((file.name, file.stat().st_size) for file in path.glob("*.safetensors"))
    return [hashlib.sha256((path / "config.json").read_bytes()).hexdigest(), files]
