"""Decode and verify steps of a model, recorded once per shape (docs/decisions/0010-recorded-steps.md).

A batch with a place lies where the last batch of its shape lay. So the operations of its forward, once written down
with their addresses, compute any later batch of that place, and Python between them is left out. What a program
depends on beside the place is compared before each run: the caches, the number of threads, and what the model was
told since (weights, taps).
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from outrider.batch import ForwardBatch, TargetOutput
from outrider.config import recorded_steps_wanted
from outrider.models.protocol import TargetCaches
from outrider.ops.native.library import Library
from outrider.ops.native.program import NotRecordableError, Program, record
from outrider.ops.native.scratch import Scratch

__all__ = ["CallTimes", "RecordedSteps"]

logger = logging.getLogger(__name__)

# A shape is recorded when it comes again: recording costs about as much as five steps.
FIRST_RECORDED_BATCH = 2

Forward = Callable[[ForwardBatch, TargetCaches], TargetOutput]
# A program and the nanoseconds of each of its calls.
CallTimes = Callable[[Program, list[int]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    """A program and what it was recorded under."""

    program: Program
    caches: TargetCaches
    num_threads: int
    era: object


class RecordedSteps:
    """Runs the steps of one model, from programs where it can.

    Args:
        library: native operations; None runs every step eagerly.
    """

    def __init__(self, library: Library | None) -> None:
        self._library = library if recorded_steps_wanted() else None
        self._scratch = Scratch()
        self._era = object()  # what the model was told since the last one
        self._is_paused = False
        self._told_times: CallTimes | None = None
        self.refusal: str | None = None  # why steps of this model are not recorded
        self.num_recorded = 0  # programs so far
        self.num_replayed = 0  # steps that ran from a program

    @property
    def scratch_bytes(self) -> int:
        """Memory that the programs share."""
        return self._scratch.num_bytes

    def poison(self) -> None:
        """Overwrite the memory that programs share; nothing in it matters between steps."""
        self._scratch.poison()

    def forget(self) -> None:
        """Record anew: weights lie elsewhere, or the forward does something else."""
        self._era, self.refusal = object(), None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """All steps run eagerly in the ``with`` body, so that whoever hooks into modules sees them."""
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    @contextmanager
    def timed(self, tell: CallTimes) -> Iterator[None]:
        """The clock is read after every call of a program in the ``with`` body, which costs some 30 ns each."""
        before, self._told_times = self._told_times, tell
        try:
            yield
        finally:
            self._told_times = before

    def run(self, forward: Forward, batch: ForwardBatch, caches: TargetCaches) -> TargetOutput:
        """What ``forward`` gives for a batch: same bits, same effects, whichever way it runs."""
        place = batch.place
        if place is None or self._library is None or self._is_paused:
            return forward(batch, caches)
        kept = place.kept.get(self)
        if (
            isinstance(kept, _Kept)
            and kept.caches is caches
            and kept.era is self._era
            and kept.num_threads == torch.get_num_threads()
        ):
            self.num_replayed += 1
            return self._replay(kept.program)
        if place.num_batches < FIRST_RECORDED_BATCH or self.refusal is not None:
            return forward(batch, caches)
        return self._record(forward, batch, caches, self._library)

    def _replay(self, program: Program) -> TargetOutput:
        if self._told_times is None:
            results = program.run()
        else:
            results, times = program.run_timed()
            self._told_times(program, times)
        return TargetOutput(logits_NV=results[0], aux_hidden_TAD=results[1] if len(results) > 1 else None)

    def _record(self, forward: Forward, batch: ForwardBatch, caches: TargetCaches, library: Library) -> TargetOutput:
        """Run the step eagerly, write it down, and run it again to compare: step rows only log, so that is the same."""
        place = batch.place
        assert place is not None, "asked for by run"

        def outputs() -> tuple[torch.Tensor, ...]:
            output = forward(batch, caches)
            return (output.logits_NV,) if output.aux_hidden_TAD is None else (output.logits_NV, output.aux_hidden_TAD)

        try:
            program, results = record(library, self._scratch, outputs)
            self._scratch.poison()
            if not all(map(_same_bits, program.run(), results)):
                raise NotRecordableError("run again, the step gives other bits")
        except NotRecordableError as reason:
            self.refusal = str(reason)
            logger.info("steps run eagerly, as they cannot be recorded: %s", reason)
            return forward(batch, caches)
        place.kept[self] = _Kept(program=program, caches=caches, num_threads=torch.get_num_threads(), era=self._era)
        self.num_recorded += 1
        logger.debug("step of %d rows recorded: %d operations", batch.num_tokens, len(program.calls))
        return TargetOutput(logits_NV=results[0], aux_hidden_TAD=results[1] if len(results) > 1 else None)


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.int16), other.view(torch.int16))
