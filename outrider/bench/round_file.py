"""Files of round records, read back: checked line by line, then sorted into texts."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.engine.round_log import FORMAT, VERSION
from outrider.errors import RequestError
from outrider.speculative.calibration import BANDS, RULES

__all__ = ["Anchor", "PromptPart", "RecordedRound", "RoundFile", "Text", "read_round_file", "texts_of"]

_PARTS = ("batch_s", "forward_s", "accept_s", "commit_s", "observe_s")  # the step; propose and host are apart


@dataclass(frozen=True, slots=True, kw_only=True)
class Anchor:
    """A decode span of one recorded round."""

    request: str
    position: int  # of the anchor token
    budget: int
    rule: str
    band: str
    verified: int
    accepted: int  # before any cut at a stop
    survival_G: tuple[float, ...]  # calibrated; () where nothing was proposed
    emitted: int
    finished: bool
    by_length: bool  # it ended at its limit of tokens
    unseen: int  # 1 where a stop id ended it, which is no part of the text


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptPart:
    """A prompt span of one recorded round."""

    request: str
    position: int
    rows: int
    emitted: int
    finished: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRound:
    """One line of the file."""

    anchors: tuple[Anchor, ...]
    prompts: tuple[PromptPart, ...]
    propose_s: float
    step_s: float
    host_s: float
    num_steps: int

    @property
    def num_rows(self) -> int:
        """Rows of the decode spans."""
        return sum(1 + anchor.verified for anchor in self.anchors)

    @property
    def num_prompt_rows(self) -> int:
        """Rows of the prompt spans."""
        return sum(part.rows for part in self.prompts)

    @property
    def num_proposals(self) -> int:
        """Sequences that proposed."""
        return sum(bool(anchor.survival_G) for anchor in self.anchors)

    @property
    def total_s(self) -> float:
        """Seconds of the whole round."""
        return self.propose_s + self.step_s + self.host_s


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundFile:
    """A whole file."""

    settings: Mapping[str, Any]
    rounds: tuple[RecordedRound, ...]
    is_cut: bool  # a limit was met: later rounds are missing


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """One request from its prompt to its end: the same under every policy that accepts by equality."""

    request: str
    prompt_rows: tuple[int, ...]  # per round, in order
    first_emitted: int  # tokens that came with the prompt
    begin: int  # position of the first anchor
    end: int  # tokens of prompt and output: position behind the last one
    unseen: int  # 1 where one more token, a stop id, has to be found
    by_length: bool
    anchors: Mapping[int, Anchor]  # by position


def read_round_file(path: Path) -> RoundFile:
    """Read and check a file of ``--record-rounds``.

    Raises:
        RequestError: it cannot be read, is of another format, or a line is malformed; the message names the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"cannot read rounds from {path}: {error}; give a file of --record-rounds") from error
    rows = [(number, _parsed(line, path, number)) for number, line in enumerate(lines, 1) if line.strip()]
    if not rows or rows[0][1].get("record") != "header":
        raise RequestError(f"{path} has no header line; give a file of --record-rounds")
    header = rows[0][1]
    if header.get("format") != FORMAT or header.get("version") != VERSION:
        raise RequestError(
            f"{path}: format={header.get('format')!r}, version={header.get('version')!r}, expected {FORMAT!r} and "
            f"{VERSION}; record it again"
        )
    rounds, is_cut = [], False
    for number, row in rows[1:]:
        if row.get("record") == "end":
            is_cut = True
            continue
        try:
            rounds.append(_round(row))
        except (KeyError, TypeError, ValueError) as error:
            what = f"lacks {error}" if isinstance(error, KeyError) else str(error)
            raise RequestError(f"{path}:{number} is no round record ({what}); record it again") from error
    settings = header.get("settings")
    return RoundFile(settings=settings if isinstance(settings, dict) else {}, rounds=tuple(rounds), is_cut=is_cut)


def _parsed(line: str, path: Path, number: int) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{path}:{number} is not valid JSON ({error}); the file may have been cut short") from error
    if not isinstance(row, dict):
        raise RequestError(f"{path}:{number} is no JSON object; give a file of --record-rounds")
    return row


def _round(row: Mapping[str, Any]) -> RecordedRound:
    if row["record"] != "round":
        raise ValueError(f"record={row['record']!r} is unknown")
    times = row["times"]
    items = row["sequences"]
    if not isinstance(times, dict) or not isinstance(items, list):
        raise TypeError("times must be an object and sequences a list")
    return RecordedRound(
        anchors=tuple(_anchor(item) for item in items if "prompt_rows" not in item),
        prompts=tuple(_prompt(item) for item in items if "prompt_rows" in item),
        propose_s=_seconds(times, "propose_s"),
        step_s=sum(_seconds(times, name) for name in _PARTS),
        host_s=_seconds(times, "host_s"),
        num_steps=_count(row, "num_steps"),
    )


def _anchor(item: Mapping[str, Any]) -> Anchor:
    survival = item.get("survival", ())
    rule, band = item["rule"], item["band"]
    if rule not in RULES or (band not in BANDS and rule != "greedy"):
        raise ValueError(f"rule={rule!r}, band={band!r} are unknown")
    if not all(isinstance(value, int | float) and 0 <= value <= 1 for value in survival):
        raise ValueError(f"survival={survival!r} are no probabilities")
    anchor = Anchor(
        request=str(item["request"]),
        position=_count(item, "position"),
        budget=_count(item, "budget"),
        rule=rule,
        band=band,
        verified=_count(item, "verified"),
        accepted=_count(item, "accepted"),
        survival_G=tuple(survival),
        emitted=_count(item, "emitted"),
        finished=item["finished"] is not None,
        by_length=item["finished"] == "length",
        unseen=_count(item, "unseen"),
    )
    if not anchor.accepted <= anchor.verified <= anchor.budget or anchor.emitted > anchor.accepted + 1:
        raise ValueError(
            f"accepted={anchor.accepted}, verified={anchor.verified}, budget={anchor.budget}, "
            f"emitted={anchor.emitted} contradict each other"
        )
    return anchor


def _prompt(item: Mapping[str, Any]) -> PromptPart:
    return PromptPart(
        request=str(item["request"]),
        position=_count(item, "position"),
        rows=_count(item, "prompt_rows"),
        emitted=_count(item, "emitted"),
        finished=item["finished"] is not None,
    )


def _seconds(times: Mapping[str, Any], name: str) -> float:
    value = times[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{name}={value!r} is no time")
    return max(float(value), 0.0)


def _count(item: Mapping[str, Any], name: str) -> int:
    value = item[name]
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{name}={value!r} is no count")
    return value


def texts_of(rounds: Iterable[RecordedRound]) -> tuple[list[Text], int]:
    """Texts in order of their prompts, and how many were left out: without a beginning, or without a decode span.

    A text that was given up, or whose end was not recorded, ends where its record ends. An id may come again for
    another text, as in a bench that runs several cells.
    """
    current: dict[str, list[PromptPart | Anchor]] = {}
    order: list[list[PromptPart | Anchor]] = []
    for recorded in rounds:
        spans: tuple[PromptPart | Anchor, ...] = (*recorded.anchors, *recorded.prompts)
        for part in spans:
            parts = current.get(part.request)
            if parts is None or (isinstance(part, PromptPart) and isinstance(parts[-1], Anchor)):
                parts = current[part.request] = []
                order.append(parts)
            parts.append(part)
            if part.finished:
                del current[part.request]
    kept = [text for text in map(_text, order) if text is not None]
    return kept, len(order) - len(kept)


def _text(parts: Sequence[PromptPart | Anchor]) -> Text | None:
    """The text of its spans; None if its beginning is missing or it had no decode span."""
    prompts = [part for part in parts if isinstance(part, PromptPart)]
    anchors = [part for part in parts if isinstance(part, Anchor)]
    if not prompts or not anchors:
        return None
    last = anchors[-1]
    return Text(
        request=last.request,
        prompt_rows=tuple(part.rows for part in prompts),
        first_emitted=prompts[-1].emitted,
        begin=anchors[0].position,
        end=last.position + last.emitted + 1,
        unseen=last.unseen,
        by_length=last.by_length,
        anchors={anchor.position: anchor for anchor in anchors},
    )
