"""Counters and seconds as plain numbers; nothing here formats, exports or locks."""

from collections import Counter
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from time import perf_counter
from types import TracebackType

from outrider.plan import RoundTimings, StepPlan, StepResult
from outrider.request import RequestUpdate
from outrider.trace import is_recording, trace_range

__all__ = ["EngineMetrics", "PhaseClock"]

VERBS = ("propose", "batch", "forward", "accept", "commit", "observe")  # in order; a round begins with the first


class PhaseClock:
    """Adds up the seconds of each verb of one round and names it for the profiler.

    A verb lasts until the next one begins, and the last one until the ``with`` body ends: so nothing of a round
    falls between two verbs, and one context is entered per round, not seven.

    Seconds are host time. A device that runs behind the host shows its work where the host waits
    for it: in ``accept``, which reads the outcome.
    """

    __slots__ = ("_begin_s", "_range", "_recorded", "_seconds", "_verb")

    def __init__(self) -> None:
        self._seconds = dict.fromkeys(VERBS, 0.0)
        self._verb, self._begin_s = VERBS[0], perf_counter()
        self._recorded = is_recording()
        self._range: AbstractContextManager[object] = nullcontext()

    def __enter__(self) -> "PhaseClock":
        return self

    def begin(self, verb: str) -> None:
        """End the present verb, if there is one, and begin the next."""
        now_s = perf_counter()
        self._seconds[self._verb] += now_s - self._begin_s
        self._verb, self._begin_s = verb, now_s
        if self._recorded:
            self._range.__exit__(None, None, None)
            self._range = trace_range(verb)
            self._range.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._seconds[self._verb] += perf_counter() - self._begin_s
        self._range.__exit__(kind, error, traceback)

    def timings(self) -> RoundTimings:
        """The seconds of all verbs that have ended."""
        propose_s, batch_s, forward_s, accept_s, commit_s, observe_s = self._seconds.values()
        return RoundTimings(
            propose_s=propose_s,
            batch_s=batch_s,
            forward_s=forward_s,
            accept_s=accept_s,
            commit_s=commit_s,
            observe_s=observe_s,
        )


@dataclass(slots=True, kw_only=True)
class EngineMetrics:
    """Running totals since the engine started. Drafts are counted before any cut at a stop."""

    num_rounds: int = 0
    num_steps: int = 0  # target steps; more than rounds when rows exceed the budget
    num_rows: int = 0
    num_prompt_tokens: int = 0  # computed: a prompt that samples share counts once, but for its end
    num_output_tokens: int = 0  # emitted
    num_decode_spans: int = 0  # (sequence, round) pairs
    num_proposals: int = 0  # of these, those that the drafter proposed for
    num_proposing_rounds: int = 0  # rounds with at least one proposal
    num_drafted: int = 0
    num_accepted: int = 0
    num_preempted: int = 0  # sequences copied to the host
    drafted_at: Counter[int] = field(default_factory=Counter)  # by draft position, from 0
    accepted_at: Counter[int] = field(default_factory=Counter)
    finished: Counter[str] = field(default_factory=Counter)  # by finish reason
    draft_reasons: Counter[str] = field(default_factory=Counter)  # why decode spans had drafts or none
    verify_length: float = 0.0  # gauge: drafts per decode span of the last round with any
    break_even: float = 0.0  # gauge: tokens per round that drafting must reach to pay; 0 while unknown
    propose_s: float = 0.0
    batch_s: float = 0.0
    forward_s: float = 0.0
    accept_s: float = 0.0
    commit_s: float = 0.0
    observe_s: float = 0.0
    host_s: float = 0.0  # scheduling and bookkeeping: the rest of the round

    def record_round(self, plan: StepPlan, result: StepResult, round_s: float) -> None:
        """Count one round that took ``round_s`` seconds in all."""
        self.num_rounds += 1
        self.num_steps += result.num_steps
        self.num_rows += result.num_rows
        self.num_preempted += len(plan.preempted)
        drafted_at, accepted_at = self.drafted_at, self.accepted_at
        self.num_proposals += result.num_proposed
        self.num_proposing_rounds += result.num_proposed > 0
        for item, drafted, accepted in zip(plan.scheduled, result.num_drafted, result.num_accepted, strict=True):
            if item.is_prompt:
                self.num_prompt_tokens += len(item.query_token_ids)
                continue
            self.num_decode_spans += 1
            self.num_drafted += drafted
            self.num_accepted += accepted
            for position in range(drafted):
                drafted_at[position] += 1
            for position in range(accepted):
                accepted_at[position] += 1
        report = result.speculation
        if report is not None:
            self.draft_reasons.update(report.reasons)
            self.verify_length = sum(result.num_drafted) / len(report.reasons)
            self.break_even = report.break_even
        timings = result.timings
        self.propose_s += timings.propose_s
        self.batch_s += timings.batch_s
        self.forward_s += timings.forward_s
        self.accept_s += timings.accept_s
        self.commit_s += timings.commit_s
        self.observe_s += timings.observe_s
        self.host_s += round_s - timings.total_s

    def record_updates(self, updates: Iterable[RequestUpdate]) -> None:
        """Count what callers were told."""
        for update in updates:
            self.num_output_tokens += len(update.new_token_ids)
            if update.finish_reason is not None:
                self.finished[update.finish_reason.value] += 1

    @property
    def host_ms(self) -> float:
        """Milliseconds of a round that are neither propose, forward nor observe; 0 before the first round."""
        seconds = self.batch_s + self.accept_s + self.commit_s + self.host_s
        return 1000 * seconds / self.num_rounds if self.num_rounds else 0.0

    @property
    def accepted_length(self) -> float:
        """Mean tokens per decode span, the final token included; 0 before the first round."""
        return 1 + self.num_accepted / self.num_decode_spans if self.num_decode_spans else 0.0
