"""One pass of prompts through an engine at a fixed concurrency, with every step timed."""

import time
from collections import deque
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


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenisedPrompt:
    """A prompt in the form that the engine gets."""

    question_id: str
    token_ids: tuple[int, ...]


@dataclass(slots=True, kw_only=True)
class _Track:
    """One request in flight."""

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
    decode_s: float = 0.0
    window_s: float = 0.0
    window_tokens: int = 0
    num_decode_steps: int = 0
    phase_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))

    def add_step(self, decoding: Sequence[_Track], step_s: float) -> None:
        """Book the wall time of a step in which `decoding` decoded."""
        if not decoding:
            self.prefill_s += step_s
            return
        self.decode_s += step_s
        self.num_decode_steps += 1
        for track in decoding:
            track.decode_s += step_s / len(decoding)

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


def run_pass(
    engine: SteppingEngine,
    prompts: Sequence[TokenisedPrompt],
    *,
    concurrency: int,
    sampling: SamplingParams,
    clock: Callable[[], float] = time.perf_counter,
) -> PassRecord:
    """Run each prompt once; a new one starts when one ends, so that `concurrency` are in flight.

    A step counts as decode time if at least one sequence decoded in it, even when it also held prompt rows;
    a step of prompt rows only is prefill time. With fewer prompts than `concurrency`, the window is the time
    during which all of them were in flight.

    Raises:
        EngineFault: a request was aborted or failed.
    """
    waiting = deque(enumerate(prompts))
    full = min(concurrency, len(prompts))
    tracks: dict[str, _Track] = {}
    finished: dict[str, PromptRecord] = {}
    totals = _Totals()
    while waiting or tracks:
        while waiting and len(tracks) < full:
            index, prompt = waiting.popleft()
            request = Request(
                request_id=str(index), prompt_token_ids=prompt.token_ids, sampling=sampling, arrival_time=clock()
            )
            tracks[request.request_id] = _Track(prompt=prompt, submitted_s=request.arrival_time)
            engine.submit(request)
        phases_before = _timed_phases(engine.metrics)
        start_s = clock()
        updates = engine.step()
        end_s = clock()
        decoding = [tracks[update.request_id] for update in updates if tracks[update.request_id].is_decoding]
        if len(tracks) == full:
            totals.window_s += end_s - start_s
            totals.window_tokens += sum(len(update.new_token_ids) for update in updates)
        if decoding:
            totals.add_phases(phases_before, _timed_phases(engine.metrics), end_s - start_s)
        totals.add_step(decoding, end_s - start_s)
        for update in updates:
            tracks[update.request_id].add(update, end_s)
            if update.finish_reason is not None:
                finished[update.request_id] = tracks.pop(update.request_id).finish(update, end_s)
    return PassRecord(
        prompts=tuple(finished[str(index)] for index in range(len(prompts))),
        prefill_s=totals.prefill_s,
        decode_s=totals.decode_s,
        window_s=totals.window_s,
        window_tokens=totals.window_tokens,
        num_decode_steps=totals.num_decode_steps,
        phase_s=totals.phase_s,
    )
