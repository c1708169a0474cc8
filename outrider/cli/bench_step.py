"""`outrider bench step`: what a step costs over rows, slots and contexts, and what it must cost."""

import dataclasses
import json
import logging
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

from outrider.bench.floor import model_cost
from outrider.bench.ledger import LEDGER, append_row, environment
from outrider.bench.random_pair import cached_pair, load_shape
from outrider.bench.step_grid import StepGrid, step_grid
from outrider.bench.step_plot import step_plot
from outrider.bench.step_report import (
    anatomy_table,
    part_table,
    results_to_json,
    speed_table,
    step_table,
    synthetic_table,
    synthetic_to_json,
)
from outrider.bench.step_run import StepResults, measure_steps
from outrider.bench.synthetic import SyntheticCell
from outrider.cli.arguments import BenchStep
from outrider.cli.arms import Ticker
from outrider.cli.bench_synthetic import check_synthetic, synthetic_cells
from outrider.cli.checkpoints import resolve_checkpoint
from outrider.cli.runtime import loading_bar, prepare_output, resolve_dtype, set_threads, write_output
from outrider.engine.load import resolve_device
from outrider.engine.load import resolve_dtype as resolve_compute_dtype
from outrider.errors import ConfigError, UnsupportedError
from outrider.models.fields import read_config_json
from outrider.models.kimi_k3.config import parse_config
from outrider.models.kimi_k3.model import KimiK3Model
from outrider.models.numerics import NumericsChoice, NumericsMode
from outrider.models.registry import load_target

__all__ = ["run_bench_step"]

WIDTH = 150

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Checkpoints:
    """What is measured."""

    name: str
    target: Path
    drafter: Path | None


def run_bench_step(command: BenchStep) -> int:
    """Measure, print and write; returns the exit status."""
    if command.repeats < 1:
        raise ConfigError(f"repeats={command.repeats} is out of range; use 1 or more")
    output = prepare_output(command.json) if command.json else None
    plot = prepare_output(command.plot) if command.plot else None
    set_threads(command.threads)
    before = environment()
    found = _checkpoints(command)
    config = parse_config(read_config_json(found.target))
    grid = step_grid(
        command.rows, command.slots, command.context, limit=config.max_position_embeddings, model=found.name
    )
    if command.synthetic_acceptance:
        check_synthetic(command.synthetic_acceptance, found.drafter)
    for point in grid.skipped:
        logger.info("skipped: %d rows, %d slots, context %d: %s", point.rows, point.slots, point.context, point.reason)
    target = _load(command, found.target, command.numerics)
    results = measure_steps(
        target,
        model_cost(found.target),
        grid,
        resolve_device(command.device),
        repeats=command.repeats,
        progress=Ticker(),
    )
    cells, left_out = _synthetic(command, found, target, grid, config.max_position_embeddings)
    _print(results, cells, found.name, target.numerics.summary())
    row: dict[str, object] = {
        "environment": before,
        "load_average_after": environment()["load_average"],
        "settings": dataclasses.asdict(command),
        "model": found.name,
        "numerics": target.numerics.summary(),
        **results_to_json(results, grid.skipped),
        "synthetic": synthetic_to_json(cells),
        "synthetic_left_out": left_out,
    }
    if output is not None:
        write_output(output, json.dumps(row, indent=1, allow_nan=False))
    if plot is not None:
        write_output(plot, step_plot(results.cells, f"{found.name}: time of a step"))
    if command.record:
        named = {name: Path(value).name for name in ("model", "random", "drafter") if (value := getattr(command, name))}
        append_row(LEDGER, row | {"settings": dataclasses.asdict(command) | named | {"json": "", "plot": ""}})
    print(json.dumps(_brief(found.name, results, cells), allow_nan=False))
    return 0


def _checkpoints(command: BenchStep) -> _Checkpoints:
    if bool(command.model) == bool(command.random):
        raise ConfigError("give either MODEL or --random NAME, what is to be measured")
    if command.random:
        if command.drafter:
            raise ConfigError("--random brings its own drafter; leave --drafter out")
        shape = load_shape(command.random)
        logger.info("random pair %s: written once, then kept in the cache folder of the user", shape.name)
        pair = cached_pair(shape)
        return _Checkpoints(name=shape.name, target=pair.target, drafter=pair.drafter)
    target = resolve_checkpoint(command.model)
    drafter = resolve_checkpoint(command.drafter) if command.drafter else None
    return _Checkpoints(name=target.resolve().name, target=target, drafter=drafter)


def _load(command: BenchStep, path: Path, mode: NumericsMode) -> KimiK3Model:
    with loading_bar(f"{path.name}, {mode}") as progress:
        target = load_target(
            path,
            dtype=resolve_compute_dtype(path, resolve_dtype(command.dtype)),
            device=resolve_device(command.device),
            experts=command.experts,
            numerics=NumericsChoice(mode=mode, probe=command.probe),
            progress=progress,
        )
    if not isinstance(target, KimiK3Model):
        raise UnsupportedError(f"{path.name} is no K3 model; only those can be taken apart")
    return target


def _synthetic(
    command: BenchStep, found: _Checkpoints, target: KimiK3Model, grid: StepGrid, limit: int
) -> tuple[list[SyntheticCell], list[str]]:
    if not command.synthetic_acceptance or found.drafter is None:
        return [], []
    other: NumericsMode = "fast" if command.numerics == "exact" else "exact"
    return synthetic_cells(
        {command.numerics: target, other: _load(command, found.target, other)},
        _load(command, found.target, command.numerics),
        found.drafter,
        rates=command.synthetic_acceptance,
        slots=sorted({point.slots for point in grid.asked}),
        contexts=grid.contexts,
        limit=limit,
        num_rounds=command.repeats,
        numerics=NumericsChoice(mode=command.numerics, probe=command.probe),
        progress=Ticker(),
    )


def _print(results: StepResults, cells: list[SyntheticCell], name: str, numerics: str) -> None:
    console = Console(width=WIDTH)
    console.print(
        f"{name}: {results.num_repeats} turns, {torch.get_num_threads()} threads, {numerics}",
        highlight=False,
        markup=False,
    )
    tables = [step_table(results.cells), speed_table(results), part_table(results.cells), anatomy_table(results.cells)]
    for table in [*tables, *([synthetic_table(cells)] if cells else [])]:
        console.print(table)


def _brief(name: str, results: StepResults, cells: list[SyntheticCell]) -> dict[str, object]:
    """The last line of stdout."""
    return {
        "model": name,
        "points": [
            {
                "rows": cell.point.rows,
                "slots": cell.point.slots,
                "context": cell.point.context,
                "median_ms": round(cell.median_ms, 4),
                "ratio_to_one_row": round(cell.ratio_to_one_row, 3),
                "times_floor": round(cell.median_ms / cell.floor_ms, 2),
            }
            for cell in results.cells
        ],
        "synthetic": [{"slots": cell.slots, "context": cell.context, "ratio": round(cell.ratio, 3)} for cell in cells],
    }
