"""One pass of prompts through an engine at a fixed concurrency, with every step timed."""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from outrider.bench.records import PHASES, PassRecord, PromptRecord
from outrider.engine.metrics import EngineMetrics
from outrider.errors import EngineFault
from outrider.request import FinishReason, Request, RequestUpdate, SamplingParams

__all__ = ["SteppingEngine", "TokenisedPrompt", "run_pass"]


class SteppingEngine(Protocol):
    """What a pass needs of an engine."""

    metrics: EngineMetrics

    def submit(self, request: Request) -> RequestUpdate | None:
        """Queue a request; an update means that it ended at once."""
        ...

    def step(self) -> Sequence[RequestUpdate]:
        """Run one round and return the news of each request that got tokens or ended."""
        ...

    def abort(self, request_id: str) -> RequestUpdate | None:
        """Give a request up, wherever it is."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenisedPrompt:
    """A prompt in the form that the engine gets."""

    question_id: str
    token_ids: tuple[int, ...]


@dataclass(slots=True, kw_only=True)
class _Track:
    """One request in flight."""

    index: int  # in the order of submission
    prompt: TokenisedPrompt
    submitted_s: float
    first_token_s: float | None = None
    last_token_s: float = 0.0
    num_first_tokens: int = 0
    token_ids: list[int] = field(default_factory=list)
    decode_s: float = 0.0

    @property
    def is_decoding(self) -> bool:
        return self.first_token_s is not None

    def add(self, update: RequestUpdate, now_s: float) -> None:
        if not update.new_token_ids and update.finish_reason is None:
            return  # a prompt chunk that was not the last
        if self.first_token_s is None:
            self.first_token_s = now_s
            self.num_first_tokens = len(update.new_token_ids)
        if update.new_token_ids:
            self.last_token_s = now_s
        self.token_ids.extend(update.new_token_ids)

    def finish(self, update: RequestUpdate, now_s: float) -> PromptRecord:
        usage = update.usage
        if usage is None or update.finish_reason in (None, FinishReason.ERROR, FinishReason.ABORT):
            raise EngineFault(
                f"request {update.request_id} ended as {update.finish_reason} ({update.error}) in a benchmark"
            )
        first_token_s = now_s if self.first_token_s is None else self.first_token_s
        return PromptRecord(
            question_id=self.prompt.question_id,
            num_prompt_tokens=len(self.prompt.token_ids),
            token_ids=tuple(self.token_ids),
            finish_reason=str(update.finish_reason),
            submitted_s=self.submitted_s,
            first_token_s=first_token_s,
            last_token_s=max(self.last_token_s, first_token_s),
            decode_s=self.decode_s,
            num_rounds=usage.num_rounds,
            num_decode_tokens=len(self.token_ids) - self.num_first_tokens,
            num_drafted=usage.num_drafted,
            num_accepted=usage.num_accepted,
        )


@dataclass(slots=True, kw_only=True)
class _Totals:
    """Sums over the steps of a pass."""

    prefill_s: float = 0.0
    mixed_s: float = 0.0
    decode_s: float = 0.0
    decode_tokens: int = 0
    num_decode_steps: int = 0
    window_s: float = 0.0
    window_tokens: int = 0
    window_rounds: int = 0
    num_rounds: int = 0
    phase_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))

    def add_phases(self, before: dict[str, float], after: dict[str, float], step_s: float) -> None:
        """Book the parts of a step from running seconds around it; `host` gets the remainder."""
        spent = {name: after[name] - seconds for name, seconds in before.items()}
        for name, seconds in {**spent, "host": step_s - sum(spent.values())}.items():
            self.phase_s[name] += seconds


def _timed_phases(metrics: EngineMetrics) -> dict[str, float]:
    """Running seconds of the parts that the engine times itself."""
    return {
        "propose": metrics.propose_s,
        "forward": metrics.forward_s,
        "accept": metrics.accept_s,
        "commit": metrics.commit_s,
        "observe": metrics.observe_s,
    }


class _Pass:
    """A pass under way. Requests are numbered in the order of submission and take the prompts in rotation."""

    def __init__(
        self,
        engine: SteppingEngine,
        prompts: Sequence[TokenisedPrompt],
        concurrency: int,
        sampling: SamplingParams,
        clock: Callable[[], float],
    ) -> None:
        self._engine, self._prompts, self._concurrency = engine, prompts, concurrency
        self._sampling, self._clock = sampling, clock
        self._num_awaited = max(len(prompts), concurrency)
        self._num_submitted = 0
        self._num_finished = 0  # of those awaited
        self._tracks: dict[str, _Track] = {}
        self._finished: list[tuple[int, PromptRecord]] = []
        self._totals = _Totals()

    def run(self) -> PassRecord:
        metrics = self._engine.metrics
        proposing, spans = metrics.num_proposing_rounds, metrics.num_decode_spans
        drafted, accepted = Counter(metrics.drafted_at), Counter(metrics.accepted_at)
        while self._num_finished < self._num_awaited:
            self._fill()
            self._step()
        for name in self._tracks:
            self._engine.abort(name)
        totals = self._totals
        return PassRecord(
            prompts=self._records(),
            refills_agree=self._refills_agree(),
            prefill_s=totals.prefill_s,
            mixed_s=totals.mixed_s,
            decode_s=totals.decode_s,
            decode_tokens=totals.decode_tokens,
            num_decode_steps=totals.num_decode_steps,
            window_s=totals.window_s,
            window_tokens=totals.window_tokens,
            window_rounds=totals.window_rounds,
            num_rounds=totals.num_rounds,
            num_proposing_rounds=metrics.num_proposing_rounds - proposing,
            num_decode_spans=metrics.num_decode_spans - spans,
            drafted_at=dict(metrics.drafted_at - drafted),
            accepted_at=dict(metrics.accepted_at - accepted),
            phase_s=totals.phase_s,
        )

    def _fill(self) -> None:
        """Take every free seat: with awaited requests, then, if there are several seats, with refills."""
        while len(self._tracks) < self._concurrency:
            index = self._num_submitted
            if index >= self._num_awaited and self._concurrency == 1:
                return
            prompt = self._prompts[index % len(self._prompts)]
            request = Request(
                request_id=str(index),
                prompt_token_ids=prompt.token_ids,
                sampling=self._sampling,
                arrival_time=self._clock(),
            )
            self._tracks[request.request_id] = _Track(index=index, prompt=prompt, submitted_s=request.arrival_time)
            self._engine.submit(request)
            self._num_submitted += 1

    def _step(self) -> None:
        tracks, metrics = self._tracks, self._engine.metrics
        has_prompts = not all(track.is_decoding for track in tracks.values())
        phases_before = _timed_phases(metrics)
        start_s = self._clock()
        updates = self._engine.step()
        end_s = self._clock()
        decoding = [tracks[update.request_id] for update in updates if tracks[update.request_id].is_decoding]
        num_tokens = sum(len(update.new_token_ids) for update in updates)
        self._book(decoding, num_tokens, end_s - start_s, has_prompts)
        if decoding and not has_prompts:
            self._totals.add_phases(phases_before, _timed_phases(metrics), end_s - start_s)
        for update in updates:
            track = tracks[update.request_id]
            track.add(update, end_s)
            if update.finish_reason is not None:
                del tracks[update.request_id]
                self._finished.append((track.index, track.finish(update, end_s)))
                self._num_finished += track.index < self._num_awaited

    def _book(self, decoding: Sequence[_Track], num_tokens: int, step_s: float, has_prompts: bool) -> None:
        """Put the wall time of a step, in which `decoding` decoded, where it belongs."""
        totals = self._totals
        if not decoding:
            totals.prefill_s += step_s
            return
        totals.num_rounds += 1
        for track in decoding:
            track.decode_s += step_s / len(decoding)
        if has_prompts:
            totals.mixed_s += step_s
            return
        totals.decode_s += step_s
        totals.decode_tokens += num_tokens
        totals.num_decode_steps += 1
        if len(decoding) == self._concurrency:
            totals.window_s += step_s
            totals.window_tokens += num_tokens
            totals.window_rounds += 1

    def _records(self) -> tuple[PromptRecord, ...]:
        """The first request of every prompt."""
        of_index = dict(self._finished)
        return tuple(of_index[index] for index in range(len(self._prompts)))

    def _refills_agree(self) -> bool:
        records, num_prompts = self._records(), len(self._prompts)
        finished = all(one.token_ids == records[index % num_prompts].token_ids for index, one in self._finished)
        cut_short = [(records[track.index % num_prompts].token_ids, track.token_ids) for track in self._tracks.values()]
        return finished and all(whole[: len(part)] == tuple(part) for whole, part in cut_short)


def run_pass(
    engine: SteppingEngine,
    prompts: Sequence[TokenisedPrompt],
    *,
    concurrency: int,
    sampling: SamplingParams,
    clock: Callable[[], float] = time.perf_counter,
) -> PassRecord:
    """Run each prompt once with `concurrency` requests in flight.

    A new request starts when one ends. Above a concurrency of 1, every seat stays busy until the last prompt has
    its answer: when the prompts run out they start again from the first, and what is left at the end is aborted.

    Raises:
        EngineFault: a request was aborted or failed.
    """
    return _Pass(engine, prompts, concurrency, sampling, clock).run()
