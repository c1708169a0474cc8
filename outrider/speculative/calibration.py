"""What a drafter's confidence is worth, as fitted offline: temperatures and biases by rule and temperature band.

``calibration.json`` lies beside the weights of a drafter. Its fields:

- ``format`` ("outrider-calibration"), ``version`` (1);
- ``confidence_head``: SHA-256 of the head's weights that it was fitted for, see ``confidence_head_digest``;
- ``fitted_on``: free text fields about data and method;
- ``conditions[]``: ``rule`` ("greedy", "match", "rejection", "block"), ``band`` (of the sampling temperature, a name
  of ``BANDS``) and ``positions[]``, one per draft: ``temperature``, ``bias``, ``num_reached`` (outcomes fitted to).

The calibrated confidence of a draft is ``sigmoid(logit / temperature + bias)``: the probability that it stands if all
before it do. Source of the temperatures: sequential temperature scaling, dspark section 3.5.
"""

import json
import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

from outrider.errors import CheckpointError
from outrider.plan import ScheduledSequence
from outrider.request import SamplingParams

__all__ = [
    "BANDS",
    "CALIBRATION_FILE",
    "GREEDY",
    "RULES",
    "Calibration",
    "Condition",
    "PositionFit",
    "condition_of",
    "condition_of_params",
    "load_calibration",
    "parse_calibration",
    "write_calibration",
]

CALIBRATION_FILE = "calibration.json"
FORMAT, VERSION = "outrider-calibration", 1
RULES = ("greedy", "match", "rejection", "block")
BAND_ENDS = (0.5, 0.85)  # largest temperature of all bands but the last; 0.7 and 1.0, what people use, lie well inside
BANDS = ("0-0.5", "0.5-0.85", "0.85+")
GREEDY_BAND = "0"
MAX_FILE_BYTES = 1_000_000
LEAST_TEMPERATURE, LARGEST_TEMPERATURE, LARGEST_BIAS = 0.05, 20.0, 20.0  # what a fit can mean; beyond is a broken file


class Condition(NamedTuple):
    """What changes how often drafts stand, beside the text: drafts drawn differently are different drafts."""

    rule: str  # one of RULES
    band: str  # one of BANDS, or GREEDY_BAND

    def __str__(self) -> str:
        return self.rule if self.rule == "greedy" else f"{self.rule}, T {self.band}"


GREEDY = Condition("greedy", GREEDY_BAND)


def condition_of_params(params: SamplingParams) -> Condition:
    """The condition under which drafts of a request are judged; every rule is the same one at temperature 0."""
    if params.temperature == 0:
        return GREEDY
    return Condition(params.acceptance, BANDS[bisect_left(BAND_ENDS, params.temperature)])


def condition_of(item: ScheduledSequence) -> Condition:
    """See ``condition_of_params``."""
    return GREEDY if item.choice is None else condition_of_params(item.choice.params)


@dataclass(frozen=True, slots=True, kw_only=True)
class PositionFit:
    """One draft position: confidence becomes ``sigmoid(logit / temperature + bias)``."""

    temperature: float = 1.0
    bias: float = 0.0
    num_reached: int = 0  # outcomes that it was fitted to


NEUTRAL = PositionFit()


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Fits of one drafter; without any, its confidence is taken as it is."""

    confidence_head: str = ""  # SHA-256 of the weights, "" = any
    conditions: Mapping[Condition, tuple[PositionFit, ...]] = field(default_factory=dict)
    fitted_on: Mapping[str, Any] = field(default_factory=dict)

    def positions(self, condition: Condition, num_positions: int) -> tuple[PositionFit, ...]:
        """Fits of the first positions; those of the nearest band of the rule, or greedy ones, where it has none."""
        fits = self.conditions.get(condition) or self._nearest(condition)
        return (*fits[:num_positions], *(NEUTRAL,) * (num_positions - len(fits)))

    def typical_survival(self, num_positions: int) -> tuple[float, ...] | None:
        """Mean survival of greedy drafts, by position, as it was when they were fitted; None where none were.

        A draft stood as often as the next one was reached; the last one is taken to stand as often as the one before
        it did.
        """
        reached = [fit.num_reached for fit in self.conditions.get(GREEDY, ())][: num_positions + 1]
        if len(reached) == num_positions and num_positions > 1:
            reached.append(round(reached[-1] ** 2 / reached[-2]))
        if len(reached) <= num_positions or not all(reached):
            return None
        return tuple(count / reached[0] for count in reached[1:])

    def _nearest(self, condition: Condition) -> tuple[PositionFit, ...]:
        known = [other for other in self.conditions if other.rule == condition.rule]
        if condition.band not in BANDS or not known:
            return self.conditions.get(GREEDY, ())
        place = BANDS.index(condition.band)
        return self.conditions[min(known, key=lambda other: abs(BANDS.index(other.band) - place))]


def load_calibration(folder: Path) -> Calibration:
    """The calibration beside a drafter's weights; one without fits where there is no file.

    Raises:
        CheckpointError: the file cannot be read or breaks the format; the message names the field.
    """
    path = folder / CALIBRATION_FILE
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise CheckpointError(f"{path} has {path.stat().st_size} bytes, more than {MAX_FILE_BYTES}: {_REMEDY}")
        parsed = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return Calibration()
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path} is not valid JSON ({error}); {_REMEDY}") from None
    return parse_calibration(parsed, str(path))


_REMEDY = "write it again with `outrider calibrate`, or remove it"


def parse_calibration(parsed: object, where: str) -> Calibration:
    """A parsed file as fits; see the module docstring for the fields.

    Raises:
        CheckpointError: a field is missing, of the wrong kind or out of range.
    """
    top = _object(parsed, where)
    if top.get("format") != FORMAT or top.get("version") != VERSION:
        raise CheckpointError(
            f"{where}: format={top.get('format')!r}, version={top.get('version')!r}, expected {FORMAT!r} and "
            f"{VERSION}; {_REMEDY}"
        )
    digest, rows = top.get("confidence_head"), top.get("conditions")
    if not isinstance(digest, str) or not isinstance(rows, list):
        raise CheckpointError(f"{where}: confidence_head must be a text and conditions a list; {_REMEDY}")
    conditions: dict[Condition, tuple[PositionFit, ...]] = {}
    for index, row in enumerate(rows):
        condition, fits = _condition(row, f"{where}: conditions[{index}]")
        if condition in conditions:
            raise CheckpointError(f"{where}: conditions[{index}] is a second one of {condition}; {_REMEDY}")
        conditions[condition] = fits
    fitted_on = _object(top.get("fitted_on", {}), f"{where}: fitted_on")
    return Calibration(confidence_head=digest, conditions=conditions, fitted_on=fitted_on)


def _condition(row: object, where: str) -> tuple[Condition, tuple[PositionFit, ...]]:
    fields = _object(row, where)
    rule, band, positions = fields.get("rule"), fields.get("band"), fields.get("positions")
    bands = (GREEDY_BAND,) if rule == "greedy" else BANDS
    if not isinstance(rule, str) or not isinstance(band, str) or rule not in RULES or band not in bands:
        raise CheckpointError(
            f"{where}: rule={rule!r}, band={band!r}; a rule is one of {', '.join(RULES)}, a band one of "
            f"{', '.join(bands)}; {_REMEDY}"
        )
    if not isinstance(positions, list) or not positions:
        raise CheckpointError(f"{where}: positions must be a list that is not empty; {_REMEDY}")
    fits = tuple(_position(item, f"{where}.positions[{index}]") for index, item in enumerate(positions))
    return Condition(rule, band), fits


def _position(item: object, where: str) -> PositionFit:
    fields = _object(item, where)
    temperature, bias = fields.get("temperature"), fields.get("bias", 0.0)
    if not _is_number(temperature) or not LEAST_TEMPERATURE <= temperature <= LARGEST_TEMPERATURE:
        raise CheckpointError(
            f"{where}: temperature={temperature!r} is no number of {LEAST_TEMPERATURE}..{LARGEST_TEMPERATURE}; "
            f"{_REMEDY}"
        )
    if not _is_number(bias) or abs(bias) > LARGEST_BIAS:
        raise CheckpointError(f"{where}: bias={bias!r} is no number of -{LARGEST_BIAS:g}..{LARGEST_BIAS:g}; {_REMEDY}")
    num_reached = fields.get("num_reached", 0)
    if isinstance(num_reached, bool) or not isinstance(num_reached, int) or num_reached < 0:
        raise CheckpointError(f"{where}: num_reached={num_reached!r} is no count; {_REMEDY}")
    return PositionFit(temperature=float(temperature), bias=float(bias), num_reached=num_reached)


def _object(value: object, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise CheckpointError(f"{where} is no JSON object; {_REMEDY}")
    return value


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def write_calibration(calibration: Calibration, path: Path) -> None:
    """Write the file; positions without an outcome, which can only be the last ones, are left out.

    Raises:
        CheckpointError: the file cannot be written.
    """
    rows = [
        {
            "rule": condition.rule,
            "band": condition.band,
            "positions": [
                {
                    "temperature": round(fit.temperature, 4),
                    "bias": round(fit.bias, 4),
                    "num_reached": fit.num_reached,
                }
                for fit in takewhile(lambda fit: fit.num_reached > 0, fits)
            ],
        }
        for condition, fits in calibration.conditions.items()
    ]
    content = {
        "format": FORMAT,
        "version": VERSION,
        "confidence_head": calibration.confidence_head,
        "fitted_on": dict(calibration.fitted_on),
        "conditions": [row for row in rows if row["positions"]],
    }
    try:
        path.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"cannot write {path}: {error.strerror}; name another file with --out") from error
