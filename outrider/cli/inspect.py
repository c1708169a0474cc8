"""`outrider inspect`: what a checkpoint is, from its config.json."""

import dataclasses
import json

from outrider.cli.arguments import Inspect
from outrider.cli.checkpoints import resolve_checkpoint
from outrider.models.inspect import Inspection, describe, render

__all__ = ["run_inspect"]


def run_inspect(command: Inspect) -> int:
    """Print the report; returns the exit status."""
    report = describe(resolve_checkpoint(command.path))
    print(json.dumps(_as_json(report), indent=2) if command.json else render(report))
    return 0


def _as_json(report: Inspection) -> dict[str, object]:
    return {
        "model_type": report.model_type,
        "has_weights": report.has_weights,
        "num_layers": report.config.num_layers,
        "num_parameters": report.num_parameters,
        "num_active": report.num_active,
        "num_tensors": report.num_tensors,
        "num_bytes": report.num_bytes,
        "weights": [dataclasses.asdict(kind) for kind in report.kinds],
        "latent_bytes_per_token": report.latents.bytes_per_token,
        "state_bytes_per_slot": report.recurrent.state_bytes_per_slot,
        "conv_bytes_per_slot": report.recurrent.conv_bytes_per_slot,
    }
