"""`outrider inspect`: what a checkpoint is, from its config.json."""

import dataclasses
import json

from outrider.cli.arguments import Inspect
from outrider.cli.checkpoints import resolve_checkpoint
from outrider.models.fields import read_config_json
from outrider.models.inspect import Inspection, describe, render
from outrider.models.inspect_drafter import DrafterInspection, describe_drafter, is_drafter, render_drafter

__all__ = ["run_inspect"]


def run_inspect(command: Inspect) -> int:
    """Print the report; returns the exit status."""
    path = resolve_checkpoint(command.path)
    if is_drafter(read_config_json(path)):
        drafter = describe_drafter(path)
        print(json.dumps(_drafter_as_json(drafter), indent=2) if command.json else render_drafter(drafter))
        return 0
    report = describe(path)
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


def _drafter_as_json(report: DrafterInspection) -> dict[str, object]:
    config = report.config
    return {
        "family": report.family,
        "has_weights": report.has_weights,
        "num_parameters": report.num_parameters,
        "parameters": dict(report.parameters),
        "num_bytes": report.num_bytes,
        "layout": config.layout.value,
        "num_block_rows": config.num_block_rows,
        "num_draft_tokens": config.num_draft_tokens,
        "aux_layer_ids": list(config.aux_layer_ids),
        "aux_layer_convention": config.aux_layer_convention.value,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "markov": config.markov.value,
        "markov_rank": config.markov_rank,
        "confidence_head": config.confidence is not None,
        "context_bytes_per_token": report.context_bytes_per_token,
    }
