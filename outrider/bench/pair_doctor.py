"""Which reading of a drafter checkpoint is right: the given one, or a neighbour that the target's texts prefer."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from outrider.bench.pair_outcomes import Difference, Outcomes, draft_texts, gain_of
from outrider.bench.pair_readings import Code, Facts, Reading, State, given_reading, neighbours
from outrider.bench.pair_texts import PairText
from outrider.models.dspark.block import BlockPredictor
from outrider.models.dspark.checkpoint import TargetTables
from outrider.models.dspark.load import prepare_predictor
from outrider.models.dspark.model import DSparkModel
from outrider.models.numerics import NumericsChoice
from outrider.models.protocol import TargetModel

__all__ = ["Diagnosis", "Examiner", "Measured", "Problem", "damaged_tensors", "is_weak"]

MIN_GAIN = 0.03  # accepted drafts per anchor: a smaller difference is no convention
MAX_PROBLEMS = 4  # readings changed one after the other
SCREEN_ANCHORS = 400  # a neighbour that is worse on so many is not measured on all
WEAK_TOKENS_PER_ROUND = 1.3  # below, a round gains less than drafting costs on any machine we know


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """What is wrong with a pair; the fields are those of the JSON report."""

    code: Code
    found: str
    expected: str
    remedy: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A neighbour and how it compares with the reading it is next to."""

    reading: Reading
    mean_accepted: float  # per anchor, of the texts it was measured on
    difference: Difference
    num_anchors: int
    is_better: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Everything that was measured."""

    given: Outcomes
    measured: tuple[Measured, ...]  # neighbours of the given reading
    problems: tuple[Problem, ...]
    corrected: Outcomes | None  # under the readings named; None without a problem


class Examiner:
    """A loaded drafter, its target and texts, on which any reading can be measured.

    Args:
        model: loaded weights; used as storage only.
        target: the model whose embedding and head the drafter borrows.
        tables: those as tensors.
        texts: what the target wrote.
        facts: what neighbours depend on.
        max_context: positions a sequence may reach.
        numerics: how products are computed.
        progress: gets a label and the number of anchors done under it.
    """

    def __init__(
        self,
        model: DSparkModel,
        target: TargetModel,
        tables: TargetTables,
        texts: Sequence[PairText],
        facts: Facts,
        *,
        max_context: int,
        numerics: NumericsChoice,
        progress: Callable[[str, int], None],
    ) -> None:
        self._stored: Mapping[str, torch.Tensor] = dict(model.state_dict())
        self._config, self._target, self._tables = model.config, target, tables
        self._texts, self._facts, self._numerics, self._progress = tuple(texts), facts, numerics, progress
        self._max_context = max_context

    def predictor(self, reading: Reading, *, with_confidence: bool = False) -> BlockPredictor:
        """The drafter under a reading; weights that it does not change are shared with all others."""
        with torch.device("meta"):
            model = DSparkModel(reading.config)
        state: State = reading.state(self._stored)
        model.load_state_dict(state, assign=True)
        return prepare_predictor(
            model.eval(),
            self._target,
            self._tables,
            max_context=self._max_context,
            with_confidence=with_confidence,
            numerics=self._numerics,
        )

    def measure(self, reading: Reading, *, num_texts: int | None = None, with_confidence: bool = False) -> Outcomes:
        """Outcomes of a reading on the first texts, or on all."""
        columns = [self._facts.tap_ids.index(t) for t in reading.config.aux_layer_ids]
        return draft_texts(
            self.predictor(reading, with_confidence=with_confidence),
            self._texts[:num_texts],
            columns,
            lambda count: self._progress(reading.label, count),
        )

    def diagnose(self) -> Diagnosis:
        """Measure the given reading and its neighbours; change to the best one while one is better."""
        current = given_reading(self._config)
        given = outcomes = self.measure(current, with_confidence=self._config.confidence is not None)
        first: tuple[Measured, ...] = ()
        problems: list[Problem] = []
        for turn in range(MAX_PROBLEMS):
            done = {problem.code for problem in problems}
            candidates = [each for each in neighbours(current, self._stored, self._facts) if each.code not in done]
            results = [self._compare(candidate, outcomes) for candidate in candidates]
            if turn == 0:
                first = tuple(measured for measured, _ in results)
            better = [(measured, found) for measured, found in results if measured.is_better and found is not None]
            if not better:
                break
            best, outcomes = max(better, key=lambda pair: pair[0].difference.mean)
            problems += _problems(best)
            current = best.reading
        confident = self.measure(current, with_confidence=self._config.confidence is not None) if problems else None
        return Diagnosis(given=given, measured=first, problems=tuple(problems), corrected=confident)

    def _compare(self, candidate: Reading, current: Outcomes) -> tuple[Measured, Outcomes | None]:
        """On a part of the texts, and on all of them unless that part already speaks against it."""
        outcomes = self.measure(candidate, num_texts=self._num_screened())
        difference = gain_of(outcomes, current)
        if difference.high <= 0:
            return _measured(candidate, outcomes, difference), None
        if len(outcomes.texts) < len(self._texts):
            outcomes = self.measure(candidate)
            difference = gain_of(outcomes, current)
        return _measured(candidate, outcomes, difference), outcomes

    def _num_screened(self) -> int:
        total = 0
        for index, text in enumerate(self._texts, 1):
            total += text.num_anchors
            if total >= SCREEN_ANCHORS:
                return index
        return len(self._texts)


def damaged_tensors(stored: Mapping[str, torch.Tensor]) -> tuple[Problem, ...]:
    """Tensors that no training leaves behind: all zeros, or values that are no numbers."""
    problems = []
    for name, tensor in stored.items():
        if not tensor.is_floating_point() or tensor.numel() == 1:
            continue
        num_bad = int((~torch.isfinite(tensor)).sum())
        if num_bad:
            found = f"{name} holds {num_bad} values that are not finite"
        elif not int(tensor.count_nonzero()):
            found = f"{name} is all zeros"
        else:
            continue
        remedy = "convert the weights again from their source"
        problems.append(Problem(code="tensor", found=found, expected="trained values", remedy=remedy))
    return tuple(problems)


def is_weak(outcomes: Outcomes) -> bool:
    """Whether so few drafts stand that speculation cannot pay."""
    return outcomes.walk().tokens_per_round < WEAK_TOKENS_PER_ROUND


def _measured(reading: Reading, outcomes: Outcomes, difference: Difference) -> Measured:
    return Measured(
        reading=reading,
        mean_accepted=outcomes.mean_accepted,
        difference=difference,
        num_anchors=outcomes.num_anchors,
        is_better=difference.low > 0 and difference.mean >= MIN_GAIN,
    )


def _problems(best: Measured) -> list[Problem]:
    difference = best.difference
    gain = (
        f"{difference.mean:+.2f} accepted drafts per anchor, {difference.low:+.2f} to {difference.high:+.2f}, "
        f"on {best.num_anchors}"
    )
    readings = [best.reading] if best.reading.also is None else [best.reading, best.reading.also]
    return [
        Problem(code=one.code, found=one.found, expected=f"{one.expected} ({gain})", remedy=one.remedy)
        for one in readings
    ]
