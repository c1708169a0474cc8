"""`outrider bench ab`: the same prompts through engines without and with a drafter."""

import dataclasses
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from outrider.bench.ab import RepeatRule, Workload, run_cell
from outrider.bench.arm import ArmSpec, parse_arms
from outrider.bench.drafter_fault import GarbageDrafters, parse_fault
from outrider.bench.ledger import LEDGER, append_row, environment
from outrider.bench.lengths import parse_length
from outrider.bench.report import cell_table, cells_to_json, draft_table, round_table, summary_line
from outrider.bench.summary import CellKey, CellSummary
from outrider.bench.workload import PromptSet, demo_prompt_path, load_prompt_set
from outrider.cli.arguments import BenchAb
from outrider.cli.arms import ArmOptions, Ticker, answer_sampling, draw_tiers, open_arms, tokenise, tokenizer_of
from outrider.cli.checkpoints import resolve_checkpoint
from outrider.cli.runtime import parse_speculation, prepare_output, resolve_dtype, set_threads, write_output
from outrider.engine.build import EngineLimits
from outrider.engine.llm import LLM
from outrider.engine.load import load_vocabulary, resolve_model_len
from outrider.errors import ConfigError
from outrider.speculative.drafter import DSparkDrafter
from outrider.tokenizer import Tokenizer

__all__ = ["Eta", "run_bench_ab"]

EXIT_FAILED = 1
REPEATS_FACTOR = 4  # of --repeats, until --max-repeats says otherwise

logger = logging.getLogger(__name__)


def run_bench_ab(command: BenchAb) -> int:
    """Measure, print and write; returns 1 if outputs differ or an arm that drafts drafted nothing, else 0."""
    rule = _rule(command)
    _check(command)
    arms = parse_arms(command.arms, spec=parse_speculation(command.speculation))
    lengths = [parse_length(text) for text in command.prompt_length]
    fault = parse_fault(command.drafter_fault)
    output = prepare_output(command.json) if command.json else None
    set_threads(command.threads)
    prompt_set = load_prompt_set(Path(command.prompts) if command.prompts else demo_prompt_path())
    model = resolve_checkpoint(command.model)
    tokenizer = tokenizer_of(load_vocabulary(model)[0])
    room = resolve_model_len(model, None) - command.max_tokens
    workloads = _workloads(command, prompt_set, lengths, tokenizer, room)
    engines = open_arms(arms, _options(command, model, workloads, fault))
    cells = _measure(workloads, engines, rule, fault)
    _print_tables(cells)
    row = {
        "environment": environment(),
        "settings": dataclasses.asdict(command),
        "prompts_sha256": prompt_set.sha256,
        "numerics": {name: llm.numerics.summary() for name, llm in engines.items()},
        "arms": [dataclasses.asdict(arm) for arm in arms],
    }
    if output is not None:
        write_output(output, json.dumps(row | {"cells": cells_to_json(cells)}, indent=1, allow_nan=False))
    if command.record:
        _record(row, cells)
    print(summary_line(cells))
    return _verdict(cells, arms, is_promised=command.numerics == "exact")


def _print_tables(cells: Sequence[CellSummary]) -> None:
    console = Console(width=120)
    for table in (cell_table(cells), draft_table(cells), round_table(cells)):
        if table.row_count:
            console.print(table)


def _record(row: dict[str, Any], cells: Sequence[CellSummary]) -> None:
    """The ledger is shared: where a file lay on this machine says nothing to others, its hash does."""
    settings = row["settings"]
    named = {key: Path(value).name for key in ("model", "drafter", "prompts") if (value := settings[key])}
    settings = settings | named | {"json": "", "record_rounds": ""}
    append_row(LEDGER, row | {"settings": settings, "cells": cells_to_json(cells, with_outputs=False)})


def _verdict(cells: Sequence[CellSummary], arms: Sequence[ArmSpec], *, is_promised: bool) -> int:
    """The exit status, and a line for everything that is wrong."""
    status = 0
    for arm in (arm for arm in arms if arm.drafts):
        idle = [cell.key.label for cell in cells if not cell.arms[arm.name].num_drafted]
        if idle and arm.must_draft:
            logger.error(
                "arm %s verified no draft in %s: nothing was compared; raise --max-tokens", arm.name, ", ".join(idle)
            )
            status = EXIT_FAILED
        elif idle:
            logger.warning("arm %s found no draft worth verifying in %s", arm.name, ", ".join(idle))
    for cell in cells:
        if not cell.identical and is_promised:
            logger.error(
                "%s: outputs DIFFER between arms or repeats, which must not happen: %s",
                cell.key.label, ", ".join(cell.differing),
            )  # fmt: skip
            status = EXIT_FAILED
        elif not cell.identical:
            logger.info("%s: outputs differ between arms or repeats, as fast numerics allows", cell.key.label)
    return status


def _check(command: BenchAb) -> None:
    for name, values in (
        ("concurrency", command.concurrency),
        ("num_prompts", (command.num_prompts,)),
        ("max_tokens", (command.max_tokens,)),
    ):
        if not values or min(values) < 1:
            raise ConfigError(f"{name}={','.join(map(str, values))} is out of range; use numbers of 1 or more")
    if not command.tiers:
        raise ConfigError("--tiers is empty; name at least one category of the prompt file")


def _rule(command: BenchAb) -> RepeatRule:
    if command.repeats < 1:
        raise ConfigError(f"repeats={command.repeats} is out of range; use 1 or more")
    max_repeats = command.max_repeats or REPEATS_FACTOR * command.repeats
    if max_repeats < command.repeats:
        raise ConfigError(f"max_repeats={max_repeats} is below repeats={command.repeats}; raise it, or 0 = four times")
    if not command.time_budget >= 0:
        raise ConfigError(f"time_budget={command.time_budget} is out of range; use seconds, or 0 for no limit")
    budget_s = command.time_budget or float("inf")
    return RepeatRule(min_repeats=command.repeats, max_repeats=max_repeats, budget_s=budget_s)


def _workloads(
    command: BenchAb, prompt_set: PromptSet, lengths: Sequence[int], tokenizer: Tokenizer, room: int
) -> list[Workload]:
    """One per cell, tier by tier and length by length."""
    wanted: Sequence[int | None] = lengths or [None]
    drawn = {
        length: draw_tiers(
            prompt_set, command.tiers, command.num_prompts, tokenizer=tokenizer, room=room, length=length
        )
        for length in wanted
    }
    sampling = answer_sampling(tokenizer, command.max_tokens)
    workloads = []
    for tier in command.tiers:
        for length, by_tier in drawn.items():
            prompts = [tokenise(prompt, tokenizer) for prompt in by_tier[tier]]
            for concurrency in command.concurrency:
                key = CellKey(tier=tier, concurrency=concurrency, prompt_length=length, prompt_set=prompt_set.name)
                workloads.append(Workload(key=key, prompts=prompts, sampling=sampling))
    return workloads


def _options(command: BenchAb, model: Path, workloads: Sequence[Workload], fault: GarbageDrafters | None) -> ArmOptions:
    """Prompts take one round each: else, with long ones in flight, hardly a round would hold decode rows only."""
    longest = max(len(prompt.token_ids) for workload in workloads for prompt in workload.prompts)
    return ArmOptions(
        model=model,
        drafter=resolve_checkpoint(command.drafter),
        dtype=resolve_dtype(command.dtype),
        device=command.device,
        experts=command.experts,
        max_num_seqs=max(command.concurrency),
        numerics=command.numerics,
        probe=command.probe,
        limits=EngineLimits(max_prefill_tokens=max(EngineLimits().max_prefill_tokens, longest)),
        drafter_type=DSparkDrafter if fault is None else fault,
        lookup=fault is None,  # drafts that no fault reaches would hide what it costs
        record_rounds=command.record_rounds,
    )


class Eta:
    """Says, with every line of progress, how far the whole grid is and how long it may take.

    Args:
        num_cells: of the grid.
        say: gets the lines.
        clock: seconds.
    """

    def __init__(
        self, num_cells: int, say: Callable[[str], None], clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._num_cells, self._num_done = num_cells, 0
        self._say, self._clock = say, clock
        self._begin_s = self._cell_begin_s = clock()

    def __call__(self, line: str) -> None:
        """Pass a line on, with what is known about the whole."""
        left = ""
        if self._num_done:
            mean_s = (self._cell_begin_s - self._begin_s) / self._num_done
            in_cell_s = self._clock() - self._cell_begin_s
            left_s = mean_s * (self._num_cells - self._num_done - 1) + max(mean_s - in_cell_s, 0.0)
            left = f", about {left_s / 60:.0f} min left" if left_s >= 90 else f", about {left_s:.0f} s left"
        self._say(f"cell {self._num_done + 1} of {self._num_cells}{left}: {line}")

    def finish_cell(self) -> None:
        """The next line is about the next cell."""
        self._num_done += 1
        self._cell_begin_s = self._clock()


def _measure(
    workloads: Sequence[Workload], engines: Mapping[str, LLM], rule: RepeatRule, fault: GarbageDrafters | None
) -> list[CellSummary]:
    eta = Eta(len(workloads), Ticker())
    cells = []
    for workload in workloads:
        cell = run_cell(
            {name: llm.engine for name, llm in engines.items()},
            workload,
            rule=rule,
            progress=eta,
            before=(lambda: None) if fault is None else fault.restart,
        )
        eta.finish_cell()
        logger.info("%s", _brief(cell))
        cells.append(cell)
    return cells


def _brief(cell: CellSummary) -> str:
    said = [
        f"{name} {comparison.ratio.value:.2f} {comparison.verdict}" for name, comparison in cell.comparisons.items()
    ]
    return f"{cell.key.label}: {'; '.join(said) or 'measured'} ({cell.num_repeats} repeats, {cell.seconds:.0f} s)"
