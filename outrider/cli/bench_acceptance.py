"""`outrider bench acceptance`: how many drafts stand, by tier, temperature and rule of acceptance."""

import dataclasses
import json
import logging
from pathlib import Path

from rich.console import Console

from outrider.bench.acceptance import AcceptanceCell, acceptance_table, measure_cell
from outrider.bench.arm import fixed_arm
from outrider.bench.ledger import environment
from outrider.bench.workload import PromptSet, load_prompt_set
from outrider.cli.arguments import BenchAcceptance
from outrider.cli.arms import ArmOptions, Ticker, answer_sampling, draw_tiers, open_arms, tokenise, tokenizer_of
from outrider.cli.checkpoints import resolve_checkpoint
from outrider.cli.runtime import parse_speculation, prepare_output, resolve_dtype, set_threads, write_output
from outrider.config import resolve_num_draft_tokens
from outrider.engine.llm import LLM
from outrider.errors import ConfigError
from outrider.models.dspark.config_json import read_config
from outrider.request import SamplingParams

__all__ = ["run_bench_acceptance"]

logger = logging.getLogger(__name__)


def run_bench_acceptance(command: BenchAcceptance) -> int:
    """Measure, print and write; returns the exit status."""
    ways = _ways(command)
    output = prepare_output(command.json) if command.json else None
    set_threads(command.threads)
    prompt_set = load_prompt_set(Path(command.prompts))
    drafter, speculation = resolve_checkpoint(command.drafter), parse_speculation(command.speculation)
    options = ArmOptions(
        model=resolve_checkpoint(command.model),
        drafter=drafter,
        dtype=resolve_dtype(command.dtype),
        device=command.device,
        experts=command.experts,
        max_num_seqs=command.concurrency,
        numerics=command.numerics,
        probe=command.probe,
        lookup=False,  # the rules are judged on what the drafter's model draws
    )
    # A rule is judged on all drafts, not on those that auto finds worth their time.
    arm = fixed_arm(resolve_num_draft_tokens(speculation, read_config(drafter).num_draft_tokens))
    llm = open_arms((arm,), options)[arm.name]
    cells = _measure(command, prompt_set, llm, ways)
    Console(width=120).print(acceptance_table(cells))
    summary = {
        "prompt_set": prompt_set.name,
        "prompts_sha256": prompt_set.sha256,
        "numerics": llm.numerics.summary(),
        "cells": [dataclasses.asdict(cell) for cell in cells],
    }
    if output is not None:
        row = {"environment": environment(), "settings": dataclasses.asdict(command), **summary}
        write_output(output, json.dumps(row, indent=1, allow_nan=False))
    print(json.dumps(summary, allow_nan=False))
    return 0


def _ways(command: BenchAcceptance) -> list[SamplingParams]:
    """How tokens are drawn in the cells of a tier: every temperature, and for each every rule.

    Raises:
        UserError: a value is out of range.
    """
    for name, value in (
        ("concurrency", command.concurrency),
        ("num_prompts", command.num_prompts),
        ("max_tokens", command.max_tokens),
    ):
        if value < 1:
            raise ConfigError(f"{name}={value} is out of range; use 1 or more")
    for name, values in (("tiers", command.tiers), ("temperatures", command.temperatures), ("rules", command.rules)):
        if not values:
            raise ConfigError(f"--{name} is empty; name at least one")
    if parse_speculation(command.speculation) in ("off", 0):
        raise ConfigError(f"--speculation {command.speculation} leaves nothing to accept; use auto or a number")
    if 0 in command.temperatures:
        raise ConfigError("--temperatures 0 is greedy, where all rules are the same one; use numbers above 0")
    return [
        SamplingParams(temperature=temperature, acceptance=rule, seed=command.seed)  # type: ignore[arg-type]
        for temperature in command.temperatures
        for rule in command.rules
    ]


def _measure(
    command: BenchAcceptance, prompt_set: PromptSet, llm: LLM, ways: list[SamplingParams]
) -> list[AcceptanceCell]:
    tokenizer, ticker = tokenizer_of(llm.tokenizer), Ticker()
    room = llm.max_model_len - command.max_tokens
    drawn = draw_tiers(prompt_set, command.tiers, command.num_prompts, tokenizer=tokenizer, room=room)
    ends = answer_sampling(tokenizer, command.max_tokens)
    cells = []
    for tier, prompts in drawn.items():
        tokenised = [tokenise(prompt, tokenizer) for prompt in prompts]
        for way in ways:
            cell = measure_cell(
                llm.engine,
                tokenised,
                tier=tier,
                sampling=dataclasses.replace(way, max_tokens=ends.max_tokens, stop_token_ids=ends.stop_token_ids),
                num_drafts=llm.config.num_draft_tokens,
                progress=ticker,
            )
            logger.info("%s, T=%g, %s: %.2f tokens/round", tier, cell.temperature, cell.rule, cell.tokens_per_round)
            cells.append(cell)
    return cells
