"""`outrider bench startup`: how long until the first token, and how much memory it takes."""

import dataclasses
import json
from pathlib import Path

from rich.console import Console

from outrider.bench.ledger import LEDGER, append_row, environment
from outrider.bench.startup import needed_bytes, start_once, startup_table, startup_to_json
from outrider.cli.arguments import BenchStartup
from outrider.cli.arms import Ticker
from outrider.cli.checkpoints import resolve_checkpoint
from outrider.cli.runtime import prepare_output, resolve_dtype, set_threads, write_output
from outrider.engine.load import resolve_device
from outrider.engine.load import resolve_dtype as resolve_compute_dtype
from outrider.errors import ConfigError
from outrider.models.fields import read_config_json
from outrider.models.kimi_k3.config import parse_config

__all__ = ["run_bench_startup"]


def run_bench_startup(command: BenchStartup) -> int:
    """Measure, print and write; returns the exit status."""
    if command.repeats < 1:
        raise ConfigError(f"repeats={command.repeats} is out of range; use 1 or more")
    output = prepare_output(command.json) if command.json else None
    set_threads(command.threads)
    resolve_device(command.device)
    model = resolve_checkpoint(command.model)
    drafter = resolve_checkpoint(command.drafter) if command.drafter else None
    vocab_size = parse_config(read_config_json(model)).vocab_size
    options = {
        "model": str(model),
        "drafter": str(drafter or ""),
        "threads": command.threads,
        "dtype": resolve_dtype(command.dtype),
        "device": command.device,
        "experts": command.experts,
        "numerics": command.numerics,
        "probe": command.probe,
    }
    ticker = Ticker()
    starts = []
    for number in range(1 + command.repeats):
        ticker(f"start {number + 1} of {1 + command.repeats}")
        starts.append(start_once(options, vocab_size))
    starts = starts[1:]
    needed = needed_bytes(
        model,
        drafter,
        starts[-1],
        dtype=resolve_compute_dtype(model, resolve_dtype(command.dtype)),
        unpacked=command.experts == "unpacked",
    )
    Console(width=120).print(startup_table(starts, needed))
    results = startup_to_json(starts, needed)
    settings = dataclasses.asdict(command)
    row = {"environment": environment(), "settings": settings, **results}
    if output is not None:
        write_output(output, json.dumps(row, indent=1, allow_nan=False))
    if command.record:
        named = {name: Path(settings[name]).name for name in ("model", "drafter") if settings[name]}
        append_row(LEDGER, row | {"settings": settings | named | {"json": ""}})
    print(json.dumps(results, allow_nan=False))
    return 0
