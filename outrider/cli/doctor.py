"""`outrider doctor`: is this drafter read rightly, is it good, and what will it gain here?"""

import logging
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from outrider.bench.pair_cost import RoundCost, measure_cost, timed_tokens
from outrider.bench.pair_doctor import Diagnosis, Examiner, Problem, damaged_tensors
from outrider.bench.pair_links import misordered_tensors
from outrider.bench.pair_readings import Facts, given_reading
from outrider.bench.pair_texts import PairText, TextSettings, write_texts
from outrider.bench.workload import demo_prompt_path, load_prompt_set
from outrider.cli.arguments_pair import Doctor
from outrider.cli.checkpoints import resolve_checkpoint
from outrider.cli.doctor_report import DoctorReport, neighbour_table, problem_of, render, to_json
from outrider.cli.progress import Advance, Title, counting_bar
from outrider.cli.runtime import loading_bar, prepare_output, resolve_dtype, set_threads, write_output
from outrider.engine import load
from outrider.errors import ConfigError, RequestError, UnsupportedError, UserError
from outrider.models.dspark.checkpoint import TargetTables, load_model, stores_head
from outrider.models.dspark.config import DSparkConfig, check_target
from outrider.models.dspark.config_json import read_config
from outrider.models.dspark.model import DSparkModel
from outrider.models.fields import read_config_json
from outrider.models.inspect_drafter import describe_drafter
from outrider.models.numerics import NumericsChoice
from outrider.models.protocol import TargetModel
from outrider.models.registry import load_target
from outrider.models.weights import CheckpointReader
from outrider.tokenizer import answer_stop_ids

__all__ = ["run_doctor"]

WIDTH = 120
SEATS = 8  # texts written side by side
EXIT_WRONG = 1

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pair:
    """What is loaded."""

    target: TargetModel
    tables: TargetTables
    model: DSparkModel
    prompts: tuple[tuple[int, ...], ...]
    stop_token_ids: tuple[int, ...]
    max_context: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Examined:
    """What was measured."""

    texts: tuple[PairText, ...]
    diagnosis: Diagnosis
    cost: RoundCost


def run_doctor(command: Doctor) -> int:
    """Check, print and write; returns 1 if something is wrong, else 0."""
    begin_s = time.perf_counter()
    for name, value in (("anchors", command.anchors), ("max_tokens", command.max_tokens)):
        if value < 1:
            raise ConfigError(f"{name}={value} is out of range; use 1 or more")
    output = prepare_output(command.json) if command.json else None
    set_threads(command.threads)
    model, drafter = resolve_checkpoint(command.model), resolve_checkpoint(command.drafter)
    problems: tuple[Problem, ...] = ()
    examined: _Examined | None = None
    try:
        read_config(drafter)
        describe_drafter(drafter)
    except UnsupportedError:
        raise  # nothing is wrong with it, we do not offer it
    except UserError as error:
        problems = (problem_of(error),)
    if not problems:
        problems, examined = _examine(command, model, drafter)
    report = DoctorReport(
        problems=problems,
        diagnosis=None if examined is None else examined.diagnosis,
        cost=None if examined is None else examined.cost,
        num_texts=0 if examined is None else len(examined.texts),
        seconds=time.perf_counter() - begin_s,
    )
    console = Console(width=WIDTH)
    if report.diagnosis is not None:
        console.print(neighbour_table(report.diagnosis))
    if output is not None:
        write_output(output, to_json(report, command))
    for line in render(report):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    return EXIT_WRONG if report.verdict == "wrong" else 0


def _examine(command: Doctor, model: Path, drafter: Path) -> tuple[tuple[Problem, ...], _Examined | None]:
    """Load both, then measure; a drafter that does not load is a problem, a target that does not is an error."""
    pair, problem = _load(command, model, drafter)
    if pair is None:
        assert problem is not None, "a pair that did not load comes with its problem"
        return (problem,), None
    stored = pair.model.state_dict()
    damaged = damaged_tensors(stored) or misordered_tensors(stored, pair.model.config)
    with counting_bar(None, "anchors") as (title, advance):
        texts = _texts(command, pair, title, advance)
        choice = NumericsChoice(mode=command.numerics, probe=command.probe)

        def progress(label: str, count: int) -> None:
            title(f"drafting, {label}")
            advance(count)

        examiner = Examiner(
            pair.model,
            pair.target,
            pair.tables,
            texts,
            _facts(pair, texts, model, drafter),
            max_context=pair.max_context,
            numerics=choice,
            progress=progress,
        )
        diagnosis = examiner.diagnose()
        title("timing rounds")
        advance(0)
        cost = measure_cost(pair.target, examiner.predictor(given_reading(pair.model.config)), texts)
    # What a damaged drafter prefers says nothing of how it was trained.
    return damaged or diagnosis.problems, _Examined(texts=texts, diagnosis=diagnosis, cost=cost)


def _load(command: Doctor, model: Path, drafter: Path) -> tuple[_Pair | None, Problem | None]:
    """The pair and prompts that fit, or what keeps the drafter from loading.

    Raises:
        UserError: the target, a file or a value cannot be used.
    """
    tokenizer, eos_token_ids = load.load_vocabulary(model)
    prompts = load_prompt_set(Path(command.prompts) if command.prompts else demo_prompt_path()).prompts
    if tokenizer is None:
        raise RequestError("the model has no tokenizer files, which prompts in text form need; add them")
    config = read_config(drafter)
    room = timed_tokens(config.num_draft_tokens)
    if command.max_tokens < config.num_draft_tokens + 2:
        raise ConfigError(
            f"max_tokens={command.max_tokens} holds no anchor with a whole block of {config.num_draft_tokens} drafts; "
            f"use {config.num_draft_tokens + 2} or more"
        )
    longest = load.resolve_model_len(model, None) - max(command.max_tokens, room)
    rendered = [tuple(tokenizer.render_chat([{"role": "user", "content": row.text}])) for row in prompts]
    fitting = [ids for ids in rendered if len(ids) <= longest]
    if not fitting:
        raise RequestError(f"none of {len(rendered)} prompts leaves room for an answer; give shorter ones")
    if len(fitting) < len(rendered):
        logger.warning(
            "%d of %d prompts are longer than %d tokens and left out",
            len(rendered) - len(fitting),
            len(rendered),
            longest,
        )
    random.Random(0).shuffle(fitting)  # any first part of them is a mixture
    with loading_bar(command.model) as progress:
        target = load_target(
            model,
            dtype=load.resolve_dtype(model, resolve_dtype(command.dtype)),
            device=load.resolve_device(command.device),
            experts=command.experts,
            numerics=NumericsChoice(mode=command.numerics, probe=command.probe),
            progress=progress,
        )
    tables = TargetTables(embedding_VD=target.embedding, head_VD=target.lm_head)
    try:
        load.check_drafter_vocabulary(model, drafter, tokenizer, eos_token_ids)
        loaded = load_model(drafter, tables, dtype=tables.embedding_VD.dtype, device=tables.embedding_VD.device)
        check_target(
            loaded.config, vocab_size=target.vocab_size, hidden_size=target.hidden_size, num_layers=target.num_layers
        )
    except UserError as error:
        return None, problem_of(error)
    pair = _Pair(
        target=target,
        tables=tables,
        model=loaded,
        prompts=tuple(fitting),
        stop_token_ids=tuple(sorted({*answer_stop_ids(tokenizer), *eos_token_ids})),
        max_context=max(map(len, fitting)) + max(command.max_tokens, room),
    )
    return pair, None


def _texts(command: Doctor, pair: _Pair, title: Title, advance: Advance) -> tuple[PairText, ...]:
    title("the target writes texts")
    num_drafts = pair.model.config.num_draft_tokens
    texts = write_texts(
        pair.target,
        pair.prompts,
        _tap_ids(pair.model.config, pair.target.num_layers),
        pair.model.config.aux_hidden_stream.value,
        TextSettings(
            num_anchors=command.anchors,
            max_tokens=command.max_tokens,
            max_model_len=max(map(len, pair.prompts)) + command.max_tokens,
            seats=min(SEATS, len(pair.prompts)),
            stop_token_ids=pair.stop_token_ids,
        ),
        advance,
    )
    if not any(text.is_greedy and text.num_anchors >= num_drafts for text in texts):
        raise RequestError(f"no greedy answer is longer than {num_drafts} tokens; give prompts with longer answers")
    return texts


def _tap_ids(config: DSparkConfig, num_layers: int) -> tuple[int, ...]:
    """The taps of the config and those one layer away, as far as there are such layers."""
    near = {t + shift for t in config.aux_layer_ids for shift in (-1, 0, 1)}
    return tuple(sorted(t for t in near if 0 <= t < num_layers))


def _facts(pair: _Pair, texts: tuple[PairText, ...], model: Path, drafter: Path) -> Facts:
    raw = read_config_json(drafter)
    with CheckpointReader(drafter) as reader:
        has_head = stores_head(reader.names())
    return Facts(
        tap_ids=_tap_ids(pair.model.config, pair.target.num_layers),
        target_theta=_theta(read_config_json(model)),
        longest_context=max(len(text.token_ids) for text in texts),
        tap_key="aux_hidden_state_layer_ids" if "speculators_model_type" in raw else "target_layer_ids",
        head_VD=None if has_head else pair.tables.head_VD,
    )


def _theta(config: Mapping[str, Any]) -> float | None:
    """The target's rotary base, where its config states one."""
    text = config.get("text_config", config)
    for place in (text, text.get("rope_parameters") or {}):
        value = place.get("rope_theta")
        if isinstance(value, int | float) and value > 0:
            return float(value)
    return None
