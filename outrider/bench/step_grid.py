"""Which steps are measured: every combination of rows, slots and context that makes a step."""

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.errors import ConfigError

__all__ = ["SkippedPoint", "StepGrid", "StepPoint", "one_row", "step_grid"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPoint:
    """One kind of step: ``rows`` query rows in all, spread as evenly as they go over ``slots`` sequences."""

    rows: int
    slots: int
    context: int  # committed tokens of each sequence before the step

    @property
    def spans(self) -> tuple[int, ...]:
        """Rows of each sequence: the anchor and its drafts. They differ by one at most."""
        least, more = divmod(self.rows, self.slots)
        return tuple(least + (slot < more) for slot in range(self.slots))

    @property
    def name(self) -> str:
        """As a table says it."""
        return f"{self.rows} rows, {self.slots} slots, context {self.context}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SkippedPoint:
    """A combination that is no step, and why."""

    rows: int
    slots: int
    context: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StepGrid:
    """What is measured. The one-row steps that ratios refer to are in ``measured`` even where not asked for."""

    measured: tuple[StepPoint, ...]
    asked: frozenset[StepPoint]
    skipped: tuple[SkippedPoint, ...]

    @property
    def max_slots(self) -> int:
        """Sequences of the widest step."""
        return max(point.slots for point in self.measured)

    @property
    def max_rows(self) -> int:
        """Rows of the largest step."""
        return max(point.rows for point in self.measured)

    @property
    def max_span(self) -> int:
        """Rows of the longest span."""
        return max(max(point.spans) for point in self.measured)

    @property
    def contexts(self) -> tuple[int, ...]:
        """Contexts, ascending."""
        return tuple(sorted({point.context for point in self.measured}))


def one_row(context: int) -> StepPoint:
    """The plain decode step of one sequence, which ratios refer to."""
    return StepPoint(rows=1, slots=1, context=context)


def step_grid(
    rows: Sequence[int], slots: Sequence[int], contexts: Sequence[int], *, limit: int, model: str
) -> StepGrid:
    """All combinations, smallest context first; fewer rows than slots are skipped.

    Args:
        rows: query rows of a step.
        slots: sequences of a step.
        contexts: committed tokens of each sequence.
        limit: positions of the model.
        model: its name, for messages.

    Raises:
        ConfigError: a number is out of range, a context exceeds the model's, or nothing is left to measure.
    """
    for name, values in (("rows", rows), ("slots", slots), ("context", contexts)):
        if not values or min(values) < 1:
            raise ConfigError(f"{name}={','.join(map(str, values))} is out of range; use numbers of 1 or more")
    for context in contexts:
        if context > limit:
            raise ConfigError(f"context={context} exceeds the {limit} positions of {model}; use up to {limit}")
    asked, skipped = [], []
    for context in sorted(set(contexts)):
        for num_slots in sorted(set(slots)):
            for num_rows in sorted(set(rows)):
                if num_rows < num_slots:
                    reason = f"{num_rows} rows cannot give {num_slots} sequences one row each"
                    skipped.append(SkippedPoint(rows=num_rows, slots=num_slots, context=context, reason=reason))
                else:
                    asked.append(StepPoint(rows=num_rows, slots=num_slots, context=context))
    if not asked:
        raise ConfigError(f"every step has fewer rows than slots ({max(rows)} < {min(slots)}); raise --rows")
    bases = [one_row(context) for context in sorted(set(contexts))]
    measured = (*(base for base in bases if base not in asked), *asked)
    return StepGrid(measured=measured, asked=frozenset(asked), skipped=tuple(skipped))
