"""`outrider bench ab`: a whole prompt file, with and without the drafter."""

import dataclasses
import json
import logging
from pathlib import Path

from rich.console import Console

from outrider.bench.ab import run_cell
from outrider.bench.ledger import LEDGER, append_row, environment
from outrider.bench.report import cell_table, cells_to_json, round_table, summary_line
from outrider.bench.summary import CellSummary
from outrider.bench.workload import PromptSet, load_prompt_set
from outrider.cli.arguments import BenchAb
from outrider.cli.arms import ArmOptions, Ticker, answer_sampling, draw_tiers, open_arms, tokenise, tokenizer_of
from outrider.cli.checkpoints import resolve_checkpoint
from outrider.cli.runtime import parse_speculation, prepare_output, resolve_dtype, set_threads, write_output
from outrider.engine.llm import LLM
from outrider.errors import ConfigError

__all__ = ["run_bench_ab"]

EXIT_DIFFERENT = 1

logger = logging.getLogger(__name__)


def run_bench_ab(command: BenchAb) -> int:
    """Measure, print and write; returns 1 if any outputs differ, else 0."""
    _check(command)
    output = prepare_output(command.json) if command.json else None
    set_threads(command.threads)
    prompt_set = load_prompt_set(Path(command.prompts))
    arms = open_arms(
        command.arms,
        ArmOptions(
            model=resolve_checkpoint(command.model),
            drafter=resolve_checkpoint(command.drafter),
            speculation=parse_speculation(command.speculation),
            dtype=resolve_dtype(command.dtype),
            device=command.device,
            experts=command.experts,
            max_num_seqs=max(command.concurrency),
            numerics=command.numerics,
            probe=command.probe,
            record_rounds=command.record_rounds,
        ),
    )
    cells = _measure(command, prompt_set, arms)
    console = Console(width=120)
    console.print(cell_table(cells))
    if "spec" in arms:
        console.print(round_table(cells))
    row_settings = dataclasses.asdict(command)
    row = {
        "environment": environment(),
        "settings": row_settings,
        "prompts_sha256": prompt_set.sha256,
        "numerics": {name: llm.numerics.summary() for name, llm in arms.items()},
        "cells": cells_to_json(cells),
    }
    if output is not None:
        write_output(output, json.dumps(row, indent=1, allow_nan=False))
    if command.record:
        # The ledger is shared: where a file lay on this machine says nothing to others, its hash does.
        named = {key: Path(value).name for key in ("model", "drafter", "prompts") if (value := row_settings[key])}
        append_row(LEDGER, row | {"settings": row_settings | named | {"json": "", "record_rounds": ""}})
    all_same = all(cell.identical for cell in cells)
    print(summary_line(cells))
    idle = [f"c{cell.concurrency} {cell.tier}" for cell in cells if "spec" in cell.arms and _is_idle(cell)]
    if idle and command.speculation == "auto" and command.max_tokens >= ENOUGH_TOKENS:
        logger.warning("auto found no draft worth verifying in %s", ", ".join(idle))
    elif idle:
        logger.error("the spec arm verified no draft in %s: nothing was compared; raise --max-tokens", ", ".join(idle))
        return EXIT_DIFFERENT
    if all_same:
        return 0
    if command.numerics == "fast":
        logger.info("outputs differ between arms or repeats, as fast numerics allows: see `identical`")
        return 0
    logger.error("outputs DIFFER between arms or repeats: see `identical`; this must not happen")
    return EXIT_DIFFERENT


ENOUGH_TOKENS = 6  # in which "auto" has had the time to try drafts


def _is_idle(cell: CellSummary) -> bool:
    """Whether the spec arm never drafted, so that both arms ran the same program."""
    return cell.arms["spec"].num_drafted == 0


def _check(command: BenchAb) -> None:
    for name, values in (
        ("concurrency", command.concurrency),
        ("num_prompts", (command.num_prompts,)),
        ("max_tokens", (command.max_tokens,)),
        ("repeats", (command.repeats,)),
    ):
        if not values or min(values) < 1:
            raise ConfigError(f"{name}={','.join(map(str, values))} is out of range; use numbers of 1 or more")
    if "spec" in command.arms and parse_speculation(command.speculation) in ("off", 0):
        raise ConfigError(f"--speculation {command.speculation} leaves the spec arm without drafts; use --arms plain")
    if not command.tiers:
        raise ConfigError("--tiers is empty; name at least one category of the prompt file")


def _measure(command: BenchAb, prompt_set: PromptSet, arms: dict[str, LLM]) -> list[CellSummary]:
    first = next(iter(arms.values()))
    drawn = draw_tiers(prompt_set, command.tiers, command.num_prompts, first, command.max_tokens)
    ticker = Ticker()
    cells = []
    for tier, prompts in drawn.items():
        tokenised = [tokenise(prompt, tokenizer_of(first)) for prompt in prompts]
        for concurrency in command.concurrency:
            if concurrency > len(tokenised):
                logger.warning("c%d %s: only %d prompts, so no more are in flight", concurrency, tier, len(tokenised))
            cell = run_cell(
                {name: llm.engine for name, llm in arms.items()},
                tokenised,
                tier=tier,
                concurrency=concurrency,
                prompt_set=prompt_set.name,
                sampling=answer_sampling(tokenizer_of(first), command.max_tokens),
                repeats=command.repeats,
                progress=ticker,
            )
            logger.info("c%d %s: ratio %.2f, %.2f tokens/round", concurrency, tier, cell.ratio, cell.tokens_per_round)
            cells.append(cell)
    return cells
