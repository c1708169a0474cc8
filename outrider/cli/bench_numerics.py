"""`outrider bench numerics`: how much longer a decode step takes with exact numerics."""

import dataclasses
import json
from pathlib import Path

import torch
from rich.console import Console

from outrider.bench.ledger import environment
from outrider.bench.numerics import MODES, compare_steps, max_tokens_of, numerics_table
from outrider.cli.arguments import BenchNumerics
from outrider.cli.checkpoints import resolve_checkpoint
from outrider.cli.runtime import loading_bar, prepare_output, resolve_dtype, set_threads, write_output
from outrider.engine.build import EngineLimits, build_engine, resolve_config
from outrider.engine.engine import Engine
from outrider.engine.load import resolve_device, resolve_model_len
from outrider.engine.load import resolve_dtype as resolve_compute_dtype
from outrider.errors import ConfigError
from outrider.models.numerics import NumericsChoice, NumericsMode
from outrider.models.protocol import TargetModel
from outrider.models.registry import load_target

__all__ = ["run_bench_numerics"]


def run_bench_numerics(command: BenchNumerics) -> int:
    """Measure, print and write; returns the exit status."""
    for name, values in (("rows", command.rows), ("context", (command.context,)), ("repeats", (command.repeats,))):
        if not values or min(values) < 1:
            raise ConfigError(f"{name}={','.join(map(str, values))} is out of range; use numbers of 1 or more")
    output = prepare_output(command.json) if command.json else None
    set_threads(command.threads)
    path, device = resolve_checkpoint(command.model), resolve_device(command.device)
    targets = {mode: _load(command, path, mode, device) for mode in MODES}
    engines: dict[str, Engine] = {mode: _engine(command, path, target, device) for mode, target in targets.items()}
    vocab_size = targets["exact"].vocab_size
    cells = [
        compare_steps(engines, num_rows=rows, context=command.context, repeats=command.repeats, vocab_size=vocab_size)
        for rows in command.rows
    ]
    summary = {
        "model": path.name,
        "exact": targets["exact"].numerics.summary(),
        "cells": [dataclasses.asdict(cell) for cell in cells],
    }
    Console(width=120).print(numerics_table(cells))
    if output is not None:
        row = {"environment": environment(), "settings": dataclasses.asdict(command), **summary}
        write_output(output, json.dumps(row, indent=1, allow_nan=False))
    print(json.dumps(summary, allow_nan=False))
    return 0


def _load(command: BenchNumerics, path: Path, mode: NumericsMode, device: torch.device) -> TargetModel:
    with loading_bar(f"{path.name}, {mode}") as progress:
        return load_target(
            path,
            dtype=resolve_compute_dtype(path, resolve_dtype(command.dtype)),
            device=device,
            experts=command.experts,
            numerics=NumericsChoice(mode=mode),
            progress=progress,
        )


def _engine(command: BenchNumerics, path: Path, target: TargetModel, device: torch.device) -> Engine:
    """An engine whose prompts all fit one round, and whose sequences end at their last token only."""
    most_rows = max(command.rows)
    config = resolve_config(
        EngineLimits(max_prefill_tokens=most_rows * command.context),
        max_num_seqs=most_rows,
        max_model_len=resolve_model_len(path, command.context + max_tokens_of(command.repeats)),
        num_draft_tokens=0,
        chunk_multiple=target.chunk_multiple,
    )
    return build_engine(target, None, config, device=device)
