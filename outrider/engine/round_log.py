"""A bounded file of round records, for `outrider replay` and for people who ask why a round drafted what it did.

JSON lines. The first is the header: ``record`` ("header"), ``format`` ("outrider-rounds"), ``version`` (1) and
``settings`` (whatever the writer wants to be known of the run). Every other line is one finished round; its fields
are in docs/guides/why-that-many.md. A last line with ``record`` "end" and a ``reason`` says that a limit was met.
"""

import json
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

from outrider.engine.watch import Proposed, WatchedRound
from outrider.errors import ConfigError
from outrider.plan import ScheduledSequence, SpeculationReport
from outrider.request import RequestUpdate
from outrider.speculative.calibration import condition_of

__all__ = ["FORMAT", "MAX_BYTES", "MAX_ROUNDS", "VERSION", "RoundLog"]

FORMAT, VERSION = "outrider-rounds", 1
MAX_ROUNDS = 200_000
MAX_BYTES = 256 * 2**20
LARGEST_LOGIT = 20.0  # a confidence in float32 may round to 1

logger = logging.getLogger(__name__)


class RoundLog:
    """Writes what a RoundWatch shows; give it to one as its sink.

    Args:
        path: file to write; what it held is lost.
        settings: of the run, JSON values.
        max_rounds: rounds after which nothing more is written.
        max_bytes: likewise bytes.

    Raises:
        ConfigError: the file cannot be written.
    """

    def __init__(
        self,
        path: Path,
        settings: Mapping[str, object],
        *,
        max_rounds: int = MAX_ROUNDS,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self._path, self._max_rounds, self._max_bytes = path, max_rounds, max_bytes
        self._num_rounds, self._num_bytes = 0, 0
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file: TextIO | None = path.open("w", encoding="utf-8")
        except (OSError, ValueError) as error:  # ValueError: a NUL in the name
            reason = (error.strerror if isinstance(error, OSError) else None) or error
            raise ConfigError(
                f"--record-rounds {str(path)!r} cannot be written ({reason}); name another file"
            ) from error
        self._write({"record": "header", "format": FORMAT, "version": VERSION, "settings": dict(settings)})

    def __call__(self, watched: WatchedRound) -> None:
        """Write one round; beyond a limit, nothing."""
        if self._file is None:
            return
        if self._num_rounds >= self._max_rounds:
            self._end("max_rounds")
            return
        line = {"record": "round", "round": self._num_rounds, **_round_fields(watched)}
        if not self._write(line):
            return
        self._num_rounds += 1
        if any(update.finish_reason is not None for update in watched.updates):
            self._flush()  # whole texts are on the disk, whatever ends the process

    def _write(self, line: Mapping[str, object]) -> bool:
        """Whether the line was written; it is not if that would pass the limit of bytes."""
        text = json.dumps(line, allow_nan=False, separators=(",", ":")) + "\n"
        if self._num_bytes + len(text) > self._max_bytes:
            self._end("max_bytes")
            return False
        self._num_bytes += len(text)
        if self._file is not None:
            self._file.write(text)
        return True

    def _flush(self) -> None:
        if self._file is not None:
            self._file.flush()

    def _end(self, reason: str) -> None:
        """Close the file; the line that says so may pass the limit by its own length."""
        logger.warning("%s is full after %d rounds (%s): later ones are not recorded", *self._facts(reason))
        if self._file is not None:
            self._file.write(json.dumps({"record": "end", "reason": reason}) + "\n")
            self._file.close()
            self._file = None

    def _facts(self, reason: str) -> tuple[Path, int, str]:
        return self._path, self._num_rounds, reason


def _round_fields(watched: WatchedRound) -> dict[str, object]:
    result, timings = watched.result, watched.result.timings
    updates = {update.request_id: update for update in watched.updates}
    return {
        "round_s": _rounded(watched.round_s),
        "times": {
            "propose_s": _rounded(timings.propose_s),
            "batch_s": _rounded(timings.batch_s),
            "forward_s": _rounded(timings.forward_s),
            "accept_s": _rounded(timings.accept_s),
            "commit_s": _rounded(timings.commit_s),
            "observe_s": _rounded(timings.observe_s),
            "host_s": _rounded(watched.round_s - timings.total_s),
        },
        "num_steps": result.num_steps,
        "num_rows": result.num_rows,
        "decision": _decision_fields(result.speculation),
        "sequences": [
            _sequence_fields(
                item,
                updates.get(item.request_id),
                watched.proposals.get(index),
                result.num_drafted[index],
                result.num_accepted[index],
            )
            for index, item in enumerate(watched.plan.scheduled)
        ],
    }


def _decision_fields(report: SpeculationReport | None) -> dict[str, object] | None:
    """Null in a round without decode spans."""
    if report is None:
        return None
    return {
        "reasons": [reason.value for reason in report.reasons],
        "break_even": round(report.break_even, 4),
        "expected_rate": round(report.expected_rate, 3),
        "plain_rate": round(report.plain_rate, 3),
    }


def _sequence_fields(
    item: ScheduledSequence, update: RequestUpdate | None, proposed: Proposed | None, verified: int, accepted: int
) -> dict[str, object]:
    emitted = 0 if update is None else len(update.new_token_ids)
    finished = None if update is None or update.finish_reason is None else update.finish_reason.value
    fields: dict[str, object] = {
        "request": item.request_id,
        "position": item.start_position,
        "emitted": emitted,
        "finished": finished,
        # A stop id ends the text without being part of it.
        "unseen": int(update is not None and isinstance(update.stop_reason, int)),
    }
    if item.is_prompt:
        return fields | {"prompt_rows": len(item.query_token_ids)}
    rule, band = condition_of(item)
    fields |= {"budget": item.draft_budget, "rule": rule, "band": band, "verified": verified, "accepted": accepted}
    if proposed is None:
        return fields
    confidence = proposed.confidence_G
    return fields | {
        "confidence": None if confidence is None else [_logit(value) for value in confidence],
        "survival": [round(value, 5) for value in proposed.survival_G],
    }


def _rounded(seconds: float) -> float:
    return round(seconds, 7)


def _logit(probability: float) -> float:
    if 0 < probability < 1:
        return round(min(max(math.log(probability / (1 - probability)), -LARGEST_LOGIT), LARGEST_LOGIT), 4)
    return LARGEST_LOGIT if probability > 0.5 else -LARGEST_LOGIT
