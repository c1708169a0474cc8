"""`outrider calibrate`: what the drafter's confidence is worth, fitted and written beside its weights."""

import dataclasses
import json
import logging
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from outrider.bench.acceptance import answer_prompts
from outrider.bench.calibrate import (
    OutcomeCollector,
    Outcomes,
    confidence_errors,
    fit_positions,
    reliability_bins,
    survival_error,
    survivals,
)
from outrider.bench.ledger import environment
from outrider.bench.reliability_plot import ReliabilityPanel, reliability_plot
from outrider.bench.workload import PromptSet, demo_prompt_path, load_prompt_set
from outrider.cli.arguments import Calibrate
from outrider.cli.arms import Ticker, answer_sampling, draw_tiers, tokenise, tokenizer_of
from outrider.cli.checkpoints import resolve_checkpoint
from outrider.cli.runtime import loading_bar, prepare_output, resolve_dtype, set_threads, write_output
from outrider.engine.llm import LLM
from outrider.engine.watch import RoundWatch
from outrider.errors import ConfigError
from outrider.models.dspark.checkpoint import confidence_digest
from outrider.models.dspark.config_json import read_config
from outrider.request import SamplingParams
from outrider.speculative.calibration import (
    CALIBRATION_FILE,
    Calibration,
    Condition,
    PositionFit,
    condition_of_params,
    write_calibration,
)

__all__ = ["run_calibrate"]

logger = logging.getLogger(__name__)

Fits = dict[Condition, tuple[PositionFit, ...]]
OutcomesOf = dict[Condition, Outcomes]


def run_calibrate(command: Calibrate) -> int:
    """Answer, fit, write and print; returns the exit status."""
    ways = _ways(command)
    drafter = resolve_checkpoint(command.drafter)
    if read_config(drafter).confidence is None:
        raise ConfigError(f"the drafter {command.drafter} has no confidence head, so there is nothing to calibrate")
    fit_path = Path(command.out) if command.out else drafter / CALIBRATION_FILE
    outputs = {name: prepare_output(name) for name in (command.json, command.plot, command.out) if name}
    set_threads(command.threads)
    fit_set = load_prompt_set(Path(command.prompts) if command.prompts else demo_prompt_path())
    held_out_set = load_prompt_set(Path(command.held_out)) if command.held_out else None
    collector = OutcomeCollector()
    llm = _open(command, drafter, RoundWatch(collector))
    fitted = _outcomes(command, fit_set, llm, collector, ways)
    fits = {condition: fit_positions(outcomes) for condition, outcomes in fitted.items()}
    write_calibration(
        Calibration(
            confidence_head=confidence_digest(drafter),
            conditions=fits,
            fitted_on={
                "prompts": fit_set.name,
                "prompts_sha256": fit_set.sha256,
                "num_prompts": command.num_prompts,
                "max_tokens": command.max_tokens,
                "temperatures": list(command.temperatures),
                "seed": command.seed,
            },
        ),
        fit_path,
    )
    logger.info("wrote %s", fit_path)
    judged = fitted if held_out_set is None else _outcomes(command, held_out_set, llm, collector, ways)
    summary = _summary(fits, judged, held_out_set or fit_set, held_out=held_out_set is not None)
    Console(width=120).print(_table(fits, judged, held_out=held_out_set is not None))
    if command.json:
        row = {"environment": environment(), "settings": dataclasses.asdict(command), **summary}
        write_output(outputs[command.json], json.dumps(row, indent=1, allow_nan=False))
    if command.plot:
        title = f"{drafter.name}: survival of drafts, {(held_out_set or fit_set).name}"
        write_output(outputs[command.plot], reliability_plot(_panels(fits, judged), title))
    print(json.dumps(summary, allow_nan=False))
    return 0


def _ways(command: Calibrate) -> list[SamplingParams]:
    """How tokens are drawn: greedy once, and every rule at every other temperature.

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
    if not command.temperatures or not command.rules:
        raise ConfigError("--temperatures or --rules is empty; name at least one")
    return [
        SamplingParams(temperature=temperature, acceptance=rule, seed=command.seed)  # type: ignore[arg-type]
        for temperature in command.temperatures
        for rule in (command.rules if temperature else ("match",))
    ]


def _open(command: Calibrate, drafter: Path, watch: RoundWatch) -> LLM:
    """An engine that verifies the whole block in every round, so that every position is seen."""
    with loading_bar(command.model) as progress:
        return LLM(
            resolve_checkpoint(command.model),
            drafter,
            speculation=read_config(drafter).num_draft_tokens,
            dtype=resolve_dtype(command.dtype),
            device=command.device,
            experts=command.experts,
            max_num_seqs=command.concurrency,
            progress=progress,
            watch=watch,
            lookup=False,  # drafts of the model are judged
        )


def _outcomes(
    command: Calibrate, prompt_set: PromptSet, llm: LLM, collector: OutcomeCollector, ways: list[SamplingParams]
) -> OutcomesOf:
    """Outcomes of all answers to a prompt file, by condition.

    Raises:
        ConfigError: no draft was judged.
    """
    categories = tuple(dict.fromkeys(prompt.tier for prompt in prompt_set.prompts))
    tokenizer, ticker = tokenizer_of(llm.tokenizer), Ticker()
    ends = answer_sampling(tokenizer, command.max_tokens)
    room = llm.max_model_len - command.max_tokens
    drawn = draw_tiers(prompt_set, categories, command.num_prompts, tokenizer=tokenizer, room=room)
    prompts = [tokenise(prompt, tokenizer) for tier in drawn.values() for prompt in tier]
    collector.take()
    for way in ways:
        label = f"{prompt_set.name}, {condition_of_params(way)}"
        sampling = dataclasses.replace(way, max_tokens=ends.max_tokens, stop_token_ids=ends.stop_token_ids)
        answer_prompts(llm.engine, prompts, sampling, label=label, progress=ticker)
    outcomes = collector.take()
    if not outcomes:
        raise ConfigError(f"{prompt_set.name}: no draft was judged, so there is nothing to fit; raise --max-tokens")
    return outcomes


def _neutral(outcomes: Outcomes) -> tuple[PositionFit, ...]:
    return (PositionFit(),) * int(outcomes.logits_NG.shape[1])


def _summary(fits: Fits, judged: OutcomesOf, prompt_set: PromptSet, *, held_out: bool) -> dict[str, object]:
    return {
        "judged_on": prompt_set.name,
        "judged_on_sha256": prompt_set.sha256,
        "held_out": held_out,
        "conditions": [
            {
                "rule": condition.rule,
                "band": condition.band,
                "num_proposals": len(outcomes.accepted_N),
                "mean_accepted": float(outcomes.accepted_N.mean()),
                "num_reached": [int(outcomes.reached(k).sum()) for k in range(outcomes.logits_NG.shape[1])],
                "fits": [dataclasses.asdict(fit) for fit in fits[condition]],
                "confidence_error_before": confidence_errors(outcomes, _neutral(outcomes)),
                "confidence_error_after": confidence_errors(outcomes, fits[condition]),
                "survival_error_before": survival_error(outcomes, _neutral(outcomes)),
                "survival_error_after": survival_error(outcomes, fits[condition]),
            }
            for condition, outcomes in judged.items()
        ],
    }


def _table(fits: Fits, judged: OutcomesOf, *, held_out: bool) -> Table:
    """Calibration errors in percent, by condition: of the confidence and the survival of drafts 1, 2, ..."""
    where = "held-out prompts" if held_out else "the prompts of the fit"
    table = Table(title=f"Calibration error on {where}, %, by draft 1, 2, ...", title_justify="left")
    for heading in ("condition", "proposals", "of", "before", "after"):
        table.add_column(heading, no_wrap=True, justify="left" if heading in ("condition", "of") else "right")
    for condition, outcomes in judged.items():
        for name, errors in (("confidence", confidence_errors), ("survival", survival_error)):
            before, after = errors(outcomes, _neutral(outcomes)), errors(outcomes, fits[condition])
            table.add_row(
                str(condition), str(len(outcomes.accepted_N)), name, _listed(before), _listed(after),
                end_section=name == "survival",
            )  # fmt: skip
    return table


def _listed(errors: list[float | None]) -> str:
    known = [error for error in errors if error is not None]
    each = " ".join("  -" if error is None else f"{100 * error:4.1f}" for error in errors)
    return f"{each}  mean {100 * float(np.mean(known)):4.1f}" if known else each


def _panels(fits: Fits, judged: OutcomesOf) -> list[ReliabilityPanel]:
    panels = []
    for condition, outcomes in judged.items():
        before_NG, after_NG = survivals(outcomes, _neutral(outcomes)), survivals(outcomes, fits[condition])
        for position in range(before_NG.shape[1]):
            chosen, stood_N = outcomes.judged(position), outcomes.stood(position)
            panels.append(
                ReliabilityPanel(
                    row=str(condition),
                    column=f"draft {position + 1}",
                    before=reliability_bins(before_NG[chosen, position], stood_N[chosen]),
                    after=reliability_bins(after_NG[chosen, position], stood_N[chosen]),
                )
            )
    return panels
