"""`outrider verify`: is every answer with speculation the one without, whatever shares its step?"""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from outrider.bench.workload import PromptSet, demo_prompt_path, load_prompt_set
from outrider.cli.arguments import Verify
from outrider.cli.checkpoints import resolve_checkpoint
from outrider.cli.progress import counting_bar
from outrider.cli.runtime import loading_bar, prepare_output, resolve_dtype, set_threads, write_output
from outrider.cli.verify_report import Report, TapArm, acceptance_of, difference_table, grid_table, to_json, verdict
from outrider.engine import load
from outrider.errors import ConfigError, RequestError
from outrider.models.dspark.checkpoint import TargetTables
from outrider.models.dspark.load import load_predictor
from outrider.models.registry import load_target
from outrider.testing.equivalence import CellResult, Difference, Pair, PlainRuns, VerifyPrompt, compare, run_cell
from outrider.testing.faults import Fault, find_fault, planted
from outrider.testing.grid import Cell, default_grid, full_grid
from outrider.tokenizer import Tokenizer, answer_stop_ids

__all__ = ["run_verify", "shifts_of"]

WIDTH = 120
EXIT_DIFFERENT = 1

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Opened:
    """Everything that is loaded before the first run."""

    pair: Pair
    prompts: tuple[VerifyPrompt, ...]
    prompt_set: PromptSet
    tokenizer: Tokenizer


def run_verify(command: Verify) -> int:
    """Compare, print and write; returns 1 if any stream differs, else 0."""
    begin_s = time.perf_counter()
    if command.max_tokens < 1:
        raise ConfigError(f"max_tokens={command.max_tokens} is out of range; use 1 or more")
    fault = find_fault(command.inject) if command.inject else None
    output = prepare_output(command.json) if command.json else None
    set_threads(command.threads)
    opened = _open(command)
    build_grid = full_grid if command.full else default_grid
    cells = build_grid(opened.pair.predictor.num_draft_tokens)
    report = _compare_all(opened, cells, fault, shifts_of(opened.pair) if command.taps else (), begin_s)
    console = Console(width=WIDTH)
    console.print(grid_table(report))
    if report.differences:
        console.print(difference_table(report, opened.tokenizer))
    if output is not None:
        write_output(output, to_json(report, command, opened.prompt_set.sha256))
    for line in verdict(report):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    return 0 if report.identical else EXIT_DIFFERENT


def shifts_of(pair: Pair) -> tuple[int, ...]:
    """By how many layers all taps of the drafter can be moved, of -1, 0 and 1: the conventions next to its own."""
    first, last = pair.predictor.config.aux_layer_ids[0], pair.predictor.config.aux_layer_ids[-1]
    return tuple(shift for shift in (-1, 0, 1) if first + shift >= 0 and last + shift < pair.target.num_layers)


def _compare_all(
    opened: _Opened, cells: Sequence[Cell], fault: Fault | None, shifts: Sequence[int], begin_s: float
) -> Report:
    """All references once, then cell by cell; one cell also without a fault, and with moved taps."""
    pair, prompts = opened.pair, opened.prompts
    plain = PlainRuns(pair)
    results: list[CellResult] = []
    differences: list[Difference] = []
    decodings = tuple(dict.fromkeys(cell.decoding for cell in cells))
    num_runs = len(prompts) * (len(decodings) + len(cells) + len(shifts) + (fault is not None))
    taps: list[TapArm] = []
    with counting_bar(num_runs, "runs") as (title, advance):
        clean = None
        if fault is not None:
            title("without the fault")
            clean = run_cell(pair, prompts, _probe(cells), advance)
        with planted(fault):
            for decoding in decodings:
                title(f"plain, {decoding.label}")
                for prompt in prompts:
                    plain.get(prompt, decoding)
                    advance(1)
            for cell in cells:
                title(cell.label)
                results.append(run_cell(pair, prompts, cell, advance))
                differences.extend(compare(prompts, results[-1], plain))
            for shift in shifts:
                title(f"taps moved by {shift}")
                result = run_cell(pair, prompts, _probe(cells), advance, tap_shift=shift, lookup=False)
                differences.extend(compare(prompts, result, plain))
                ids = tuple(layer_id + shift for layer_id in pair.predictor.config.aux_layer_ids)
                taps.append(TapArm(shift=shift, aux_layer_ids=ids, acceptance=acceptance_of(result)))
    return Report(
        prompts=prompts,
        results=tuple(results),
        differences=tuple(differences),
        fault=fault,
        clean=None if clean is None else acceptance_of(clean),
        taps=tuple(taps),
        seconds=time.perf_counter() - begin_s,
    )


def _probe(cells: Sequence[Cell]) -> Cell:
    """The cell whose acceptance is also measured without the fault: most drafts, most company."""
    return max(cells, key=lambda cell: (cell.num_drafts, cell.concurrency))


def _open(command: Verify) -> _Opened:
    """Load the pair and the prompts that fit.

    Raises:
        UserError: a checkpoint, a file or a value cannot be used.
    """
    model, drafter = resolve_checkpoint(command.model), resolve_checkpoint(command.drafter)
    prompt_set = load_prompt_set(Path(command.prompts) if command.prompts else demo_prompt_path())
    tokenizer, eos_token_ids = load.load_vocabulary(model)
    if tokenizer is None:
        raise RequestError("the model has no tokenizer files, which prompts in text form need; add them")
    prompts = _fitting(prompt_set, tokenizer, load.resolve_model_len(model, None) - command.max_tokens)
    load.check_drafter_vocabulary(model, drafter, tokenizer, eos_token_ids)
    device = load.resolve_device(command.device)
    # Caches hold the longest prompt and its answer, no more: a cell is an engine of its own.
    max_model_len = max(len(prompt.token_ids) for prompt in prompts) + command.max_tokens
    with loading_bar(command.model) as progress:
        target = load_target(
            model,
            dtype=load.resolve_dtype(model, resolve_dtype(command.dtype)),
            device=device,
            experts=command.experts,
            progress=progress,
        )
    tables = TargetTables(embedding_VD=target.embedding, head_VD=target.lm_head)
    pair = Pair(
        target=target,
        predictor=load_predictor(drafter, target, tables, max_context=max_model_len),
        device=device,
        max_model_len=max_model_len,
        max_tokens=command.max_tokens,
        stop_token_ids=tuple(sorted({*answer_stop_ids(tokenizer), *eos_token_ids})),
    )
    return _Opened(pair=pair, prompts=prompts, prompt_set=prompt_set, tokenizer=tokenizer)


def _fitting(prompt_set: PromptSet, tokenizer: Tokenizer, room: int) -> tuple[VerifyPrompt, ...]:
    """The prompts in the chat form, without those that exceed ``room`` tokens."""
    rendered = [
        VerifyPrompt(
            name=row.question_id,
            token_ids=tuple(tokenizer.render_chat([{"role": "user", "content": row.text}])),
        )
        for row in prompt_set.prompts
    ]
    fitting = tuple(prompt for prompt in rendered if len(prompt.token_ids) <= room)
    if not fitting:
        raise RequestError(
            f"none of the {len(rendered)} prompts of {prompt_set.name} leaves room for the answer "
            f"({max(room, 0)} tokens for a prompt); give shorter ones or lower --max-tokens"
        )
    if len(fitting) < len(rendered):
        logger.warning(
            "%d of %d prompts are longer than %d tokens and left out", len(rendered) - len(fitting), len(rendered), room
        )
    return fitting
