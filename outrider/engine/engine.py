"""The loop: submit, abort, step, shutdown. Synchronous, one thread, the same for serving and offline."""

import logging
from dataclasses import replace
from time import perf_counter
from typing import Protocol

from outrider.engine.metrics import EngineMetrics
from outrider.engine.watch import RoundWatch
from outrider.errors import EngineFault, UnsupportedError
from outrider.plan import StepPlan, StepResult
from outrider.request import Request, RequestUpdate
from outrider.scheduling.admission import check_token_ids
from outrider.scheduling.scheduler import Scheduler
from outrider.tokenizer import IncrementalDetokenizer, Tokenizer

__all__ = ["Engine", "PlanRunner"]

logger = logging.getLogger(__name__)


class PlanRunner(Protocol):
    """The device side, as the loop sees it."""

    def run(self, plan: StepPlan) -> StepResult:
        """Run one round."""
        ...


class Engine:
    """Advances requests one round at a time.

    Not thread-safe, and ``abort`` takes effect between rounds: whoever drives the loop calls all
    methods from one thread.

    Args:
        runner: runs plans.
        scheduler: makes plans.
        vocab_size: token ids of a request must be below it.
        tokenizer: gives text and stop strings; None serves token ids only.
        watch: is shown every finished round.
    """

    def __init__(
        self,
        runner: PlanRunner,
        scheduler: Scheduler,
        *,
        vocab_size: int,
        tokenizer: Tokenizer | None = None,
        watch: RoundWatch | None = None,
    ) -> None:
        self._runner = runner
        self._scheduler = scheduler
        self._vocab_size = vocab_size
        self._tokenizer = tokenizer
        self._watch = watch
        self._stopped_by: str | None = None
        self.metrics = EngineMetrics()

    @property
    def has_work(self) -> bool:
        """Whether ``step`` has anything to do."""
        return self._scheduler.has_work

    def submit(self, request: Request) -> RequestUpdate | None:
        """Queue one sample of a request; the update is set when it is finished already (``max_tokens=0``).

        ``sampling.n`` is for callers, who submit each of ``samples_of(request)``. A missing seed is drawn here.

        Raises:
            RequestError: the request is malformed or can never fit; nothing was queued.
            EngineFault: the engine has stopped.
        """
        self._check_alive()
        check_token_ids("prompt_token_ids", request.prompt_token_ids, self._vocab_size)
        check_token_ids("stop_token_ids", request.sampling.stop_token_ids, self._vocab_size)
        check_token_ids("logit_bias", request.sampling.logit_bias, self._vocab_size)
        request = replace(request, sampling=request.sampling.with_seed())
        update = self._scheduler.add(request, self._stop_text(request))
        if update is not None:
            self.metrics.record_updates([update])
        return update

    def abort(self, request_id: str) -> RequestUpdate | None:
        """Give a request up, wherever it is; None when it is unknown or already finished."""
        update = self._scheduler.abort(request_id)
        if update is not None:
            self.metrics.record_updates([update])
            self._release_if_idle()
        return update

    def preempt(self, request_id: str) -> bool:
        """Take its seat from a running request, between rounds; False when it has none.

        Its state goes to the host with the next round and comes back before any other request is
        admitted. The output stays the same, byte for byte.
        """
        return self._scheduler.preempt(request_id)

    def step(self) -> list[RequestUpdate]:
        """Run one round; updates of the sequences that got tokens or ended.

        A fault of the device ends the requests that were in the round, with its message; requests
        that were not in it go on.

        Anything that is no ordinary exception, such as a KeyboardInterrupt, may strike between a change
        of the device and its bookkeeping, so it stops the engine and is raised again.

        Raises:
            EngineFault: an internal invariant broke. Every request is lost and the engine stops.
        """
        self._check_alive()
        if not self.has_work:
            return []
        try:
            return self._round()
        except Exception:
            raise
        except BaseException as interrupt:
            self._stop(f"interrupted by {type(interrupt).__name__}")
            raise

    def _round(self) -> list[RequestUpdate]:
        begin = perf_counter()
        plan = self._scheduler.schedule()
        if not plan.scheduled:
            self._stop("no request can run although some wait")
            raise EngineFault("the scheduler planned nothing although requests wait; its pools have leaked")
        try:
            result = self._runner.run(plan)
            updates = self._scheduler.update(plan, result)
        except (EngineFault, AssertionError) as fault:
            self._stop(f"{type(fault).__name__}: {fault}")
            raise
        except Exception as fault:
            logger.exception("round %d failed; ending its %d requests", plan.step_id, len(plan.scheduled))
            updates = self._scheduler.fail_round(plan, f"{type(fault).__name__}: {fault}")
            self.metrics.record_updates(updates)
            return updates
        self.metrics.record_updates(updates)
        round_s = perf_counter() - begin
        self.metrics.record_round(plan, result, round_s)
        if self._watch is not None:
            self._watch.finish(plan, result, updates, round_s)
        return updates

    def shutdown(self) -> list[RequestUpdate]:
        """Abort every request and refuse further work; returns the last updates. May be repeated."""
        updates = [self.abort(request_id) for request_id in self._scheduler.request_ids]
        self._stopped_by = self._stopped_by or "shutdown"
        return [update for update in updates if update is not None]

    def _release_if_idle(self) -> None:
        """Without work no round follows, whose plan would tell the device what ended requests held."""
        if self._stopped_by is None and not self.has_work:
            self._runner.run(self._scheduler.schedule())

    def _stop(self, cause: str) -> None:
        logger.critical("engine stops, state may be corrupt: %s", cause)
        self._stopped_by = cause
        self.metrics.record_updates(self._scheduler.fail(self._scheduler.request_ids, cause))

    def _check_alive(self) -> None:
        if self._stopped_by is not None:
            raise EngineFault(f"the engine has stopped ({self._stopped_by}); build a new one")

    def _stop_text(self, request: Request) -> IncrementalDetokenizer | None:
        if self._tokenizer is None:
            if request.sampling.stop:
                raise UnsupportedError(
                    f"stop={list(request.sampling.stop)} needs a tokenizer and this engine has none; use stop_token_ids"
                )
            return None
        return IncrementalDetokenizer(self._tokenizer, request.sampling.stop, min_tokens=request.sampling.min_tokens)
