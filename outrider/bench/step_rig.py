"""One model without a drafter, sequences in its caches, and the same step of them as often as asked.

A step is a round of the engine's runner on a plan made by hand: batch, forward, choice, commit and the copy to
the host. Its drafts are random tokens instead of a drafter's; what handing them over costs is left out of the
step's time. Nothing is captured, since no drafter asks for taps. The state of every sequence is put back before
each step, so that all steps of a point are the same one.
"""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from outrider.batch import DraftBlock, ForwardBatch, TargetOutput
from outrider.bench.floor import device_barrier
from outrider.bench.step_grid import StepGrid, StepPoint
from outrider.cache.recurrent import RecurrentSnapshot
from outrider.engine.build import EngineLimits, resolve_config
from outrider.engine.preemption import cache_rows
from outrider.engine.runner import Runner
from outrider.errors import ConfigError, EngineFault, allocating
from outrider.models.protocol import TargetModel
from outrider.plan import ScheduledSequence, StepPlan, StepResult
from outrider.scheduling.admission import num_pages_for
from outrider.speculative.drafter import Anchors, ObservedSpans

__all__ = ["StepRig", "TimedStep"]

PAGE_SIZE = 64
PREFILL_TOKENS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedStep:
    """One step that was run."""

    seconds: float  # the round without the handing over of drafts
    result: StepResult


class GivenDrafts:
    """A drafter that hands over the drafts it was given; it observes nothing."""

    aux_layer_ids: tuple[int, ...] = ()
    aux_hidden_stream = "mixture"

    def __init__(self, num_draft_tokens: int) -> None:
        self.num_draft_tokens = num_draft_tokens
        self.token_ids_SG: torch.Tensor | None = None

    lapsed: frozenset[int] = frozenset()

    def lapse(self, slots: Sequence[int]) -> None:
        """Nothing to give up."""

    def foresee(self, item: ScheduledSequence) -> None:
        """See Drafter; nothing is read."""

    def propose(self, anchors: Anchors) -> DraftBlock | None:
        """The rows given, one per drafting sequence."""
        if self.token_ids_SG is None:
            return None
        return DraftBlock(token_ids_SG=self.token_ids_SG, confidence_SG=None)

    def observe(self, batch: ForwardBatch, output: TargetOutput, spans: ObservedSpans) -> None:
        """Nothing to take in."""

    def reset(self, slots: Sequence[int]) -> None:
        """Nothing to start."""

    def release(self, slots: Sequence[int]) -> None:
        """Nothing to forget."""

    def snapshot(self, slot: int, rows_R: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Nothing to copy."""
        return ()

    def restore(self, slot: int, rows_R: torch.Tensor, snapshot: tuple[torch.Tensor, ...]) -> None:
        """Nothing to start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seat:
    """One sequence: where it sits and its state at its context."""

    slot: int
    page_ids: tuple[int, ...]
    state: RecurrentSnapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prepared:
    """A point's step, ready to run."""

    seats: tuple[_Seat, ...]
    plan: StepPlan
    draft_ids_SG: torch.Tensor | None


class StepRig:
    """Sequences at every context of a grid, in caches of their own.

    One random prompt as long as the longest context is run once; every sequence starts with its beginning.

    Args:
        target: the model, without taps.
        grid: what will be measured.
        device: where the model is.
        seed: of prompt and step tokens.
        clock: seconds.

    Raises:
        CapacityError: the caches do not fit.
        ConfigError: the vocabulary has fewer tokens than a step has rows.
    """

    def __init__(
        self,
        target: TargetModel,
        grid: StepGrid,
        device: torch.device,
        *,
        seed: int = 0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if grid.max_rows > target.vocab_size:
            raise ConfigError(
                f"{grid.max_rows} rows need as many distinct tokens and the vocabulary has {target.vocab_size}; "
                "lower --rows"
            )
        self._target, self._device, self._clock = target, device, clock
        self._barrier = device_barrier(device)
        self._random = random.Random(seed)
        self._drafter = GivenDrafts(grid.max_span - 1)
        num_seats = len(grid.contexts) * grid.max_slots
        pages_of = {context: num_pages_for(context + grid.max_span, PAGE_SIZE) for context in grid.contexts}
        num_pages = grid.max_slots * sum(pages_of.values())
        max_model_len = max(grid.contexts) + grid.max_span
        prefill_tokens = max(PREFILL_TOKENS, target.chunk_multiple)
        config = resolve_config(
            EngineLimits(
                page_size=PAGE_SIZE,
                num_pages=num_pages,
                max_step_rows=max(prefill_tokens, grid.max_rows),
                max_prefill_tokens=prefill_tokens,
            ),
            max_num_seqs=num_seats,
            max_model_len=max_model_len,
            num_draft_tokens=grid.max_span - 1,
            chunk_multiple=target.chunk_multiple,
        )
        with allocating(f"the caches of {num_seats} sequences and {num_pages * PAGE_SIZE} tokens"):
            self.runner = Runner(target, self._drafter, config, device)
        self._prefill_tokens = prefill_tokens
        self._seats = self._fill(grid, pages_of)
        self._prepared = {point: self._prepare(point) for point in grid.measured}

    def run(self, point: StepPoint) -> TimedStep:
        """Put the state back, run the step of a point and time it.

        Raises:
            EngineFault: the round did not hold the rows of the point.
        """
        prepared = self._prepared[point]
        recurrent = self.runner.caches.recurrent
        with torch.inference_mode():
            for seat in prepared.seats:
                recurrent.restore(seat.slot, seat.state)
        self._drafter.token_ids_SG = prepared.draft_ids_SG
        self._barrier()
        begin_s = self._clock()
        result = self.runner.run(prepared.plan)
        self._barrier()
        seconds = self._clock() - begin_s - result.timings.propose_s
        if (result.num_rows, result.num_steps) != (point.rows, 1):
            raise EngineFault(f"{result.num_rows} rows in {result.num_steps} steps where one had {point.rows}")
        return TimedStep(seconds=seconds, result=result)

    def _fill(self, grid: StepGrid, pages_of: dict[int, int]) -> dict[int, tuple[_Seat, ...]]:
        """Prefill the first sequence of the longest context; copy its beginning to all others."""
        longest = max(grid.contexts)
        prompt = self._tokens(longest)
        slots_of, pages, first_page = {}, {}, 0
        for index, context in enumerate(grid.contexts):
            slots_of[context] = range(index * grid.max_slots, (index + 1) * grid.max_slots)
            for slot in slots_of[context]:
                pages[slot] = tuple(range(first_page, first_page + pages_of[context]))
                first_page += pages_of[context]
        source = slots_of[longest][0]
        seats: dict[int, tuple[_Seat, ...]] = {}
        begin = 0
        for context in grid.contexts:
            self._prefill(source, pages[source], prompt, begin, context)
            begin = context
            seats[context] = self._copy(source, pages, slots_of[context], context)
        return seats

    def _prefill(self, slot: int, page_ids: tuple[int, ...], prompt: tuple[int, ...], begin: int, end: int) -> None:
        for start in range(begin, end, self._prefill_tokens):
            item = ScheduledSequence(
                request_id="prompt",
                state_slot=slot,
                page_ids=page_ids,
                start_position=start,
                query_token_ids=prompt[start : min(end, start + self._prefill_tokens)],
                draft_budget=0,
                is_prompt=True,
                wants_logits=False,
                is_first=start == 0,
            )
            self.runner.run(StepPlan(step_id=0, scheduled=(item,), released_slots=()))

    @torch.inference_mode()
    def _copy(self, source: int, pages: dict[int, tuple[int, ...]], slots: range, num_tokens: int) -> tuple[_Seat, ...]:
        """Seats at ``num_tokens`` tokens of the source, which has just as many."""
        caches = self.runner.caches
        snapshot = caches.snapshot(source, cache_rows(caches, pages[source], num_tokens))
        seats = []
        for slot in slots:
            if slot != source:
                caches.restore(slot, cache_rows(caches, pages[slot], num_tokens), snapshot)
            seats.append(_Seat(slot=slot, page_ids=pages[slot], state=snapshot.recurrent))
        return tuple(seats)

    def _prepare(self, point: StepPoint) -> _Prepared:
        """Plan and drafts of a point; all its rows have different tokens."""
        seats, spans = self._seats[point.context][: point.slots], point.spans
        tokens = iter(self._tokens(point.rows))
        items, drafts, width = [], [], max(spans) - 1
        for seat, span in zip(seats, spans, strict=True):
            anchor, *draft_ids = (next(tokens) for _ in range(span))
            items.append(
                ScheduledSequence(
                    request_id=f"seat {seat.slot}",
                    state_slot=seat.slot,
                    page_ids=seat.page_ids,
                    start_position=point.context,
                    query_token_ids=(anchor,),
                    draft_budget=span - 1,
                    is_prompt=False,
                    wants_logits=True,
                    is_first=False,
                )
            )
            if draft_ids:
                drafts.append(draft_ids + [0] * (width - len(draft_ids)))
        return _Prepared(
            seats=seats,
            plan=StepPlan(step_id=0, scheduled=tuple(items), released_slots=()),
            draft_ids_SG=torch.tensor(drafts, device=self._device) if drafts else None,
        )

    def _tokens(self, count: int) -> tuple[int, ...]:
        """Random tokens, distinct as far as the vocabulary goes."""
        tokens: list[int] = []
        while len(tokens) < count:
            tokens += self._random.sample(range(self._target.vocab_size), min(count, self._target.vocab_size))
        return tuple(tokens[:count])
