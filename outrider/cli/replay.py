"""`outrider replay`: what another policy would have done with the rounds of a recorded run."""

import json
import logging
import statistics
from pathlib import Path
from typing import Any

from outrider.bench.replay import Replayed, policy_named, recorded_lengths, replay, typical_confidence
from outrider.bench.round_costs import RoundCosts
from outrider.bench.round_file import RoundFile, read_round_file, texts_of
from outrider.cli.arguments import Replay
from outrider.cli.runtime import prepare_output, write_output
from outrider.errors import ConfigError, RequestError

__all__ = ["run_replay"]

logger = logging.getLogger(__name__)


def run_replay(command: Replay) -> int:
    """Read, replay, print and write; returns the exit status.

    Raises:
        UserError: a file or a value cannot be used.
    """
    for name, value, least in (("repeats", command.repeats, 1), ("concurrency", command.concurrency, 0)):
        if value < least:
            raise ConfigError(f"{name}={value} is out of range; use {least} or more")
    output = prepare_output(command.json) if command.json else None
    source = read_round_file(Path(command.file))
    texts, num_left_out = texts_of(source.rounds)
    if not texts:
        raise RequestError(f"{command.file} holds no text; record rounds in which a request decodes")
    typical = typical_confidence(texts)
    if recorded_lengths(texts):
        logger.warning("%s verified less than whole blocks; what lies behind is drawn", command.file)
    further = [read_round_file(Path(name)) for name in command.costs]
    costs = RoundCosts(item for file in (source, *further) for item in file.rounds)
    make_policy, num_drafts = policy_named(command.policy, len(typical))
    concurrency = command.concurrency or max(len(item.anchors) + len(item.prompts) for item in source.rounds)
    runs = [
        replay(
            texts,
            make_policy,
            num_drafts,
            costs,
            concurrency=concurrency,
            typical_G=typical,
            seed=command.seed + number,
        )
        for number in range(command.repeats)
    ]
    known_share = costs.num_known / costs.num_asked
    make_plain, _ = policy_named("plain", len(typical))
    plain = replay(texts, make_plain, 0, costs, concurrency=concurrency, typical_G=typical, seed=command.seed)
    summary = {
        "policy": command.policy,
        "source": _source_fields(command.file, source, num_left_out),
        "concurrency": concurrency,
        **_run_fields(runs),
        "plain": _fields(plain),
        "ratio_to_plain": _spread([run.tokens_per_second / plain.tokens_per_second for run in runs]),
        "costs": {"num_shapes": costs.num_shapes, "known_share": known_share},
    }
    if output is not None:
        write_output(output, json.dumps(summary, indent=1, allow_nan=False))
    print(json.dumps(summary, allow_nan=False))
    return 0


def _run_fields(runs: list[Replayed]) -> dict[str, Any]:
    """The first run's counts, and the spread over all of what the draws change."""
    return {
        **_fields(runs[0]),
        "spread": {
            "tokens_per_round": _spread([run.tokens_per_round for run in runs]),
            "decode_s": _spread([run.decode_s for run in runs]),
            "tokens_per_second": _spread([run.tokens_per_second for run in runs]),
        },
    }


def _fields(run: Replayed) -> dict[str, Any]:
    return {
        "num_texts": run.num_texts,
        "num_output_tokens": run.num_tokens,
        "num_rounds": run.num_rounds,
        "num_spans": run.num_spans,
        "tokens_per_round": run.tokens_per_round,
        "decode_s": run.decode_s,
        "prefill_s": run.prefill_s,
        "tokens_per_second": run.tokens_per_second,
        "num_verified": run.num_verified,
        "num_accepted": run.num_accepted,
        "verify_lengths": {str(length): count for length, count in sorted(run.lengths.items())},
        "stand_in_share": run.num_stand_ins / run.num_proposals if run.num_proposals else 0.0,
    }


def _source_fields(name: str, source: RoundFile, num_left_out: int) -> dict[str, Any]:
    """What was recorded, in the words of the prediction, so that the two can be compared."""
    decoding = [item for item in source.rounds if item.anchors]
    num_tokens = sum(anchor.emitted for item in decoding for anchor in item.anchors)
    num_spans = sum(len(item.anchors) for item in decoding)
    decode_s = sum(item.total_s for item in decoding)
    return {
        "file": Path(name).name,
        "settings": dict(source.settings),
        "is_cut": source.is_cut,
        "num_texts_left_out": num_left_out,
        "num_output_tokens": num_tokens,
        "num_rounds": len(decoding),
        "num_spans": num_spans,
        "tokens_per_round": num_tokens / num_spans if num_spans else 0.0,
        "decode_s": decode_s,
        "prefill_s": sum(item.total_s for item in source.rounds if not item.anchors),
        "tokens_per_second": num_tokens / decode_s if decode_s else 0.0,
    }


def _spread(values: list[float]) -> dict[str, float]:
    return {"mean": statistics.fmean(values), "low": min(values), "high": max(values)}
