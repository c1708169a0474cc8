"""Steps of a model, recorded once per shape (docs/decisions/0010-recorded-steps.md).

Inputs with a place lie where the last ones of their shape lay. So the operations of a step, once written down with
their addresses, compute any later step of that place, and Python between them is left out. What a program depends on
beside the place is compared before each run: the caches, the number of threads, and what the model was told since
(weights, taps).
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from outrider.batch import BatchPlace
from outrider.config import recorded_steps_wanted
from outrider.ops.native.library import Library
from outrider.ops.native.program import NotRecordableError, Program, record
from outrider.ops.native.scratch import Scratch

__all__ = ["CallTimes", "RecordedSteps"]

logger = logging.getLogger(__name__)

# A shape is recorded when it comes again: recording costs about as much as five steps.
FIRST_RECORDED_BATCH = 2

Step = Callable[[], tuple[torch.Tensor, ...]]
# A program and the nanoseconds of each of its calls.
CallTimes = Callable[[Program, list[int]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    """A program and what it was recorded under."""

    program: Program
    state: object
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

    def run(self, place: BatchPlace | None, state: object, step: Step) -> tuple[torch.Tensor, ...]:
        """What ``step`` gives: same bits, same effects, whichever way it runs.

        Args:
            place: where all that changes from one step to the next lies; None runs ``step``.
            state: whose memory the step reads and writes beside, such as caches; another one is recorded anew.
            step: computes; run twice on the same inputs it must leave behind what it leaves behind once.
        """
        if place is None or self._library is None or self._is_paused:
            return step()
        kept = place.kept.get(self)
        if (
            isinstance(kept, _Kept)
            and kept.state is state
            and kept.era is self._era
            and kept.num_threads == torch.get_num_threads()
        ):
            self.num_replayed += 1
            return self._replay(kept.program)
        if place.num_batches < FIRST_RECORDED_BATCH or self.refusal is not None:
            return step()
        return self._record(place, state, step, self._library)

    def _replay(self, program: Program) -> tuple[torch.Tensor, ...]:
        if self._told_times is None:
            return program.run()
        results, nanoseconds = program.run_timed()
        self._told_times(program, nanoseconds)
        return results

    def _record(self, place: BatchPlace, state: object, step: Step, library: Library) -> tuple[torch.Tensor, ...]:
        """Run the step eagerly, write it down, and run what was written to compare."""
        try:
            program, results = record(library, self._scratch, step)
            self._scratch.poison()
            if not all(map(_same_bits, program.run(), results)):
                raise NotRecordableError("run again, the step gives other bits")
        except NotRecordableError as reason:
            self.refusal = str(reason)
            logger.info("steps run eagerly, as they cannot be recorded: %s", reason)
            return step()
        place.kept[self] = _Kept(program=program, state=state, num_threads=torch.get_num_threads(), era=self._era)
        self.num_recorded += 1
        logger.debug("step recorded: %d operations", len(program.calls))
        return results


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))
