"""Speculation off and on over a grid: is every stream the one that the prompt gets alone?

The reference is *plain*: no drafter, the prompt alone in a fresh engine, computed once per prompt and way of
choosing tokens. Every cell of the grid must repeat it, token by token, and end for the same reason.
"""

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter

import torch

from outrider.batch import ForwardBatch, TargetOutput
from outrider.config import EngineConfig
from outrider.engine.build import EngineLimits, build_engine, resolve_config
from outrider.engine.engine import Engine
from outrider.errors import EngineFault
from outrider.models.dspark.block import BlockPredictor
from outrider.models.protocol import TargetModel
from outrider.request import FinishReason, Request, RequestUpdate
from outrider.speculative.drafter import DSparkDrafter
from outrider.speculative.lookup_drafter import LookupDrafter
from outrider.testing.grid import Cell, Decoding
from outrider.testing.recording import draw_margins, recording, top_margins

__all__ = [
    "CellResult",
    "Difference",
    "Pair",
    "PlainRun",
    "PlainRuns",
    "Stream",
    "VerifyPrompt",
    "compare",
    "run_cell",
]

ROUNDS_BETWEEN_PREEMPTIONS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyPrompt:
    """A prompt and the name that reports use for it."""

    name: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Target and drafter, and what all engines of a run share."""

    target: TargetModel
    predictor: BlockPredictor
    device: torch.device
    max_model_len: int  # prompt and output tokens of one sequence
    max_tokens: int  # output tokens of one prompt
    stop_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """What one prompt got."""

    token_ids: tuple[int, ...]
    end: str  # a finish reason, or "lost" when the engine stopped before it
    stop_reason: int | str | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainRun:
    """The reference of one prompt."""

    stream: Stream
    # Per position, a stop id included: top logit less the second, with the noise of the draw where tokens are drawn.
    margins: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CellResult:
    """What came out of one cell."""

    cell: Cell
    streams: tuple[Stream, ...]  # in order of the prompts, whatever the order of admission
    num_rounds: int
    num_steps: int
    num_drafted: int
    num_accepted: int
    num_preempted: int  # times that a sequence lost its seat and left state behind
    tokens_per_round: float  # per slot, the final token included
    seconds: float
    fault: str | None  # an invariant that the engine itself found broken


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first position where a stream leaves its reference."""

    prompt: str
    cell: Cell
    position: int  # output position, from 0
    plain_token: int | None  # None: the stream ended before it; a stop id counts as a token
    token: int | None
    margin: float | None  # of the plain run at this position
    plain_end: str
    end: str
    error: str | None


class PlainRuns:
    """References, computed when first asked for and kept.

    Args:
        pair: the drafter is not used.
    """

    def __init__(self, pair: Pair) -> None:
        self._pair = pair
        self._runs: dict[tuple[VerifyPrompt, Decoding], PlainRun] = {}

    def get(self, prompt: VerifyPrompt, decoding: Decoding) -> PlainRun:
        """The reference of one prompt.

        Raises:
            EngineFault: the engine found one of its invariants broken.
        """
        key = (prompt, decoding)
        if key not in self._runs:
            self._runs[key] = self._run(prompt, decoding)
        return self._runs[key]

    def _run(self, prompt: VerifyPrompt, decoding: Decoding) -> PlainRun:
        pair, margins = self._pair, list[float]()

        def watch(batch: ForwardBatch, output: TargetOutput) -> None:
            if decoding.seed is None:
                margins.extend(top_margins(output.logits_NV))
            else:
                positions_N = batch.positions_T[batch.logits_rows_N] + 1  # of the token that the row chooses
                margins.extend(
                    draw_margins(output.logits_NV, positions_N, temperature=decoding.temperature, seed=decoding.seed)
                )

        config = _config(pair, EngineLimits(), num_drafts=0, concurrency=1)
        engine = build_engine(recording(pair.target, watch), None, config, device=pair.device)
        (stream,), fault = _drive(engine, [_request(pair, 0, prompt, decoding)])
        if fault is not None:
            raise EngineFault(f"the plain run of {prompt.name} broke an invariant, so nothing can be compared: {fault}")
        return PlainRun(stream=stream, margins=tuple(margins))


def run_cell(
    pair: Pair,
    prompts: Sequence[VerifyPrompt],
    cell: Cell,
    progress: Callable[[int], None] | None = None,
    *,
    tap_shift: int = 0,
    lookup: bool = True,
) -> CellResult:
    """Run all prompts in one new engine.

    Args:
        pair: target and drafter.
        prompts: all of them are run.
        cell: the settings.
        progress: gets the number of prompts that just ended.
        tap_shift: layers by which the drafter taps the target later than its config says; every tap must exist.
        lookup: read drafts from the text where it repeats, as an engine does; False judges the model alone.
    """
    limits = cell.limits(
        chunk_multiple=pair.target.chunk_multiple,
        max_model_len=pair.max_model_len,
        prompt_lengths=[len(prompt.token_ids) for prompt in prompts],
    )
    config = _config(pair, limits, num_drafts=cell.num_drafts, concurrency=cell.concurrency)
    num_cache_rows = config.cache.num_pages * config.cache.page_size
    drafter = DSparkDrafter(pair.predictor, num_cache_rows=num_cache_rows) if cell.num_drafts else None
    if drafter is not None:
        drafter.aux_layer_ids = tuple(layer_id + tap_shift for layer_id in drafter.aux_layer_ids)
    reading = LookupDrafter(drafter) if drafter is not None and lookup else drafter
    engine = build_engine(pair.target, reading, config, device=pair.device)
    order = list(range(len(prompts)))
    random.Random(cell.order_seed).shuffle(order)
    begin = perf_counter()
    asked = [_request(pair, index, prompts[index], cell.decoding, cell.speculates(index)) for index in order]
    disturb = _preempting(engine, asked, cell.order_seed) if cell.preemption == "forced" else None
    streams, fault = _drive(engine, asked, progress, disturb)
    by_prompt = dict(zip(order, streams, strict=True))
    metrics = engine.metrics
    return CellResult(
        cell=cell,
        streams=tuple(by_prompt[index] for index in range(len(prompts))),
        num_rounds=metrics.num_rounds,
        num_steps=metrics.num_steps,
        num_drafted=metrics.num_drafted,
        num_accepted=metrics.num_accepted,
        num_preempted=metrics.num_preempted,
        tokens_per_round=metrics.accepted_length,
        seconds=perf_counter() - begin,
        fault=fault,
    )


def compare(prompts: Sequence[VerifyPrompt], result: CellResult, plain: PlainRuns) -> tuple[Difference, ...]:
    """The first difference of each prompt that has one, in order of the prompts."""
    found = []
    for prompt, stream in zip(prompts, result.streams, strict=True):
        reference = plain.get(prompt, result.cell.decoding)
        position = _first_difference(reference.stream, stream)
        if position is None:
            continue
        margins = reference.margins
        found.append(
            Difference(
                prompt=prompt.name,
                cell=result.cell,
                position=position,
                plain_token=_token_at(reference.stream, position),
                token=_token_at(stream, position),
                margin=margins[position] if position < len(margins) else None,
                plain_end=reference.stream.end,
                end=stream.end,
                error=stream.error,
            )
        )
    return tuple(found)


def _first_difference(plain: Stream, stream: Stream) -> int | None:
    """First position with another token, or where one goes on and the other ends; None when equal."""
    pairs = zip(plain.token_ids, stream.token_ids, strict=False)
    for position, (theirs, ours) in enumerate(pairs):
        if theirs != ours:
            return position
    if plain == stream:
        return None
    return min(len(plain.token_ids), len(stream.token_ids))


def _token_at(stream: Stream, position: int) -> int | None:
    if position < len(stream.token_ids):
        return stream.token_ids[position]
    # A stop id is chosen like any token, but is not part of the output.
    return stream.stop_reason if isinstance(stream.stop_reason, int) else None


def _config(pair: Pair, limits: EngineLimits, *, num_drafts: int, concurrency: int) -> EngineConfig:
    return resolve_config(
        limits,
        max_num_seqs=concurrency,
        max_model_len=pair.max_model_len,
        num_draft_tokens=num_drafts,
        chunk_multiple=pair.target.chunk_multiple,
    )


def _request(pair: Pair, index: int, prompt: VerifyPrompt, decoding: Decoding, speculation: bool = True) -> Request:
    sampling = decoding.sampling(
        max_tokens=pair.max_tokens, stop_token_ids=pair.stop_token_ids, speculation=speculation
    )
    return Request(request_id=str(index), prompt_token_ids=prompt.token_ids, sampling=sampling)


def _preempting(engine: Engine, asked: Sequence[Request], seed: int) -> Callable[[], None]:
    """What takes the seat of some running request, now and then, when called before every round."""
    dice, names, rounds = random.Random(seed), [request.request_id for request in asked], itertools.count(1)

    def disturb() -> None:
        if next(rounds) % ROUNDS_BETWEEN_PREEMPTIONS == 0:
            dice.shuffle(names)
            any(engine.preempt(name) for name in names)  # the first of them that has a seat

    return disturb


def _drive(
    engine: Engine,
    asked: Sequence[Request],
    progress: Callable[[int], None] | None = None,
    before_round: Callable[[], None] | None = None,
) -> tuple[list[Stream], str | None]:
    """Streams in order of ``asked``, and the invariant that broke, if one did."""
    updates: dict[str, list[RequestUpdate]] = {request.request_id: [] for request in asked}
    fault = None
    try:
        for request in asked:
            _take(updates, [engine.submit(request)], progress)
        while engine.has_work:
            if before_round is not None:
                before_round()
            _take(updates, engine.step(), progress)
    except (EngineFault, AssertionError) as error:  # a finding like any other, and the engine has stopped
        fault = f"{type(error).__name__}: {error}"
    return [_stream(updates[request.request_id]) for request in asked], fault


def _take(
    updates: Mapping[str, list[RequestUpdate]],
    news: Sequence[RequestUpdate | None],
    progress: Callable[[int], None] | None,
) -> None:
    known = [update for update in news if update is not None]
    for update in known:
        updates[update.request_id].append(update)
    num_ended = sum(update.finish_reason is not None for update in known)
    if progress is not None and num_ended:
        progress(num_ended)


def _stream(updates: Sequence[RequestUpdate]) -> Stream:
    token_ids = tuple(token_id for update in updates for token_id in update.new_token_ids)
    last = updates[-1] if updates else None
    if last is None or last.finish_reason is None:
        return Stream(token_ids=token_ids, end="lost")
    error = last.error if last.finish_reason is FinishReason.ERROR else None
    return Stream(token_ids=token_ids, end=last.finish_reason.value, stop_reason=last.stop_reason, error=error)
