"""What `outrider doctor` tells people and programs."""

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from rich.table import Table

from outrider.bench.ledger import environment
from outrider.bench.pair_cost import RoundCost
from outrider.bench.pair_doctor import WEAK_TOKENS_PER_ROUND, Diagnosis, Measured, Problem, is_weak
from outrider.bench.pair_outcomes import Outcomes
from outrider.bench.pair_readings import Code
from outrider.cli.arguments_pair import Doctor

__all__ = ["DoctorReport", "neighbour_table", "problem_of", "render", "to_json"]

# What a message about a file that does not load speaks of; the first match wins. Messages name fields by rule.
_CODES: tuple[tuple[Code, tuple[str, ...]], ...] = (
    ("vocab_map", ("d2t", "t2d", "draft_vocab_size", "vocab_size", "eos_token_id", "bos_token_id", "tokenizer")),
    ("mask_id", ("mask_token_id",)),
    ("taps_shifted", ("aux layer", "aux_layer", "aux_hidden_state_layer_ids", "target_layer_ids", "no target layer")),
    ("rope", ("rope", "yarn", "rotary")),
    ("anchor_layout", ("sample_from_anchor", "predicts no token")),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorReport:
    """Everything that was found. Without a diagnosis the drafter does not load, and the problem says why."""

    problems: tuple[Problem, ...]
    diagnosis: Diagnosis | None
    cost: RoundCost | None
    num_texts: int
    seconds: float

    @property
    def verdict(self) -> Literal["ok", "degraded", "wrong"]:
        """wrong: something can be named. degraded: read rightly as far as we can see, but too weak to gain."""
        if self.problems:
            return "wrong"
        return "degraded" if self.diagnosis is not None and is_weak(self.diagnosis.given) else "ok"


def problem_of(error: Exception) -> Problem:
    """A drafter that does not load, as a problem of the kind that its message speaks of."""
    message = " ".join(str(error).split())
    code: Code = next((code for code, words in _CODES if any(word in message for word in words)), "tensor")
    found, _, remedy = message.rpartition("; ")
    return Problem(
        code=code,
        found=found or message,
        expected="files that agree with each other and with the target",
        remedy=remedy if found else "use the drafter trained for this target",
    )


def neighbour_table(diagnosis: Diagnosis) -> Table:
    """The nearest neighbours of each kind, best first."""
    table = Table(title="Neighbouring readings, on the same anchors as the given one", title_justify="left")
    table.add_column("reading")
    table.add_column("kind")
    for heading in ("accepted per\nanchor", "against the\ngiven reading", "99.8 %\ninterval", "anchors"):
        table.add_column(heading, justify="right")
    table.add_column("")
    for one in _nearest(diagnosis):
        table.add_row(
            one.reading.label,
            one.reading.code,
            f"{one.mean_accepted:.2f}",
            f"{one.difference.mean:+.2f}",
            f"{one.difference.low:+.2f} to {one.difference.high:+.2f}",
            str(one.num_anchors),
            "better" if one.is_better else "",
        )
    return table


def _nearest(diagnosis: Diagnosis, per_code: int = 3) -> list[Measured]:
    by_code: dict[str, list[Measured]] = {}
    for one in sorted(diagnosis.measured, key=lambda one: -one.difference.mean):
        by_code.setdefault(one.reading.code, []).append(one)
    return [one for same in by_code.values() for one in same[:per_code]]


def render(report: DoctorReport) -> Iterator[str]:
    """The lines under the table; the verdict is the last one."""
    diagnosis, cost = report.diagnosis, report.cost
    if diagnosis is not None and cost is not None:
        yield from _outcome_lines("as given", diagnosis.given, cost)
        if diagnosis.corrected is not None and report.problems:
            yield from _outcome_lines("corrected", diagnosis.corrected, cost)
        yield (
            f"cost: plain round {cost.plain_ms:.2f} ms; with drafts {cost.round_ms:.2f} ms (propose "
            f"{cost.propose_ms:.2f}, verify {cost.verify_ms:.2f}); pays from {cost.break_even:.2f} tokens per round"
        )
        yield from _calibration_lines(diagnosis.corrected or diagnosis.given)
    for problem in report.problems:
        yield f"problem {problem.code}: found {problem.found}; expected {problem.expected}; {problem.remedy}"
    detail = {
        "ok": "read rightly, and no neighbouring reading is better",
        "degraded": f"under {WEAK_TOKENS_PER_ROUND} tokens per round, and no neighbouring reading is better: train it "
        "more, or on this target's texts",
        "wrong": f"{len(report.problems)} named above",
    }
    yield f"verdict: {report.verdict} ({detail[report.verdict]}), {report.num_texts} texts, {report.seconds:.0f} s"


def _outcome_lines(name: str, outcomes: Outcomes, cost: RoundCost) -> Iterator[str]:
    walk = outcomes.walk()
    shares = " ".join(f"{share:.2f}" for share in outcomes.survival())
    yield f"{name}: drafts 1.. stand at {shares} of {outcomes.num_anchors} anchors"
    yield (
        f"{name}: {walk.tokens_per_round:.2f} tokens per round ({walk.low:.2f} to {walk.high:.2f}), so "
        f"{cost.speed_up(walk.tokens_per_round):.2f} x plain decoding is to be expected here, one request, greedy"
    )


def _calibration_lines(outcomes: Outcomes) -> Iterator[str]:
    calibration = outcomes.calibration()
    if calibration is None:
        return
    pairs = zip(calibration.mean_confidence, calibration.acceptance, strict=True)
    listed = ", ".join(f"{confidence:.2f}/{stood:.2f}" for confidence, stood in pairs)
    error = calibration.expected_error
    yield f"confidence/acceptance of drafts reached: {listed}; expected calibration error {error:.3f}"


def to_json(report: DoctorReport, command: Doctor) -> str:
    """The whole report; fields are in docs/reference/cli.md."""
    diagnosis = report.diagnosis
    row = {
        "verdict": report.verdict,
        "problems": [dataclasses.asdict(problem) for problem in report.problems],
        "acceptance_per_position": [] if diagnosis is None else list(diagnosis.given.survival()),
        "given": None if diagnosis is None else _outcomes_row(diagnosis.given, report.cost),
        "corrected": None
        if diagnosis is None or diagnosis.corrected is None
        else _outcomes_row(diagnosis.corrected, report.cost),
        "readings": [] if diagnosis is None else [_reading_row(one) for one in diagnosis.measured],
        "cost": None
        if report.cost is None
        else {**dataclasses.asdict(report.cost), "pays_from": report.cost.break_even},
        "num_texts": report.num_texts,
        "seconds": report.seconds,
        "settings": dataclasses.asdict(command),
        "environment": environment(),
    }
    return json.dumps(row, indent=1, allow_nan=False)


def _outcomes_row(outcomes: Outcomes, cost: RoundCost | None) -> dict[str, object]:
    walk, calibration = outcomes.walk(), outcomes.calibration()
    return {
        "num_anchors": outcomes.num_anchors,
        "acceptance_per_position": list(outcomes.survival()),
        "conditional_acceptance_per_position": list(outcomes.conditional()),
        "mean_accepted": outcomes.mean_accepted,
        "tokens_per_round": walk.tokens_per_round,
        "tokens_per_round_low": walk.low,
        "tokens_per_round_high": walk.high,
        "expected_speed_up": None if cost is None else cost.speed_up(walk.tokens_per_round),
        "calibration": None if calibration is None else dataclasses.asdict(calibration),
    }


def _reading_row(one: Measured) -> dict[str, object]:
    return {
        "label": one.reading.label,
        "code": one.reading.code,
        "expected": one.reading.expected,
        "mean_accepted": one.mean_accepted,
        "difference": one.difference.mean,
        "difference_low": one.difference.low,
        "difference_high": one.difference.high,
        "num_anchors": one.num_anchors,
        "is_better": one.is_better,
    }
