"""Whole speculative rounds at a chosen acceptance, to measure the engine apart from a drafter's quality.

Everything is real: the drafter proposes, the target judges, the accepted rows are committed and observed. Only the
logits are told, after the forward, to agree with as many drafts as the rates say. The text is meaningless.

Dims: N rows with logits, V vocabulary.
"""

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from outrider.batch import ForwardBatch, TargetOutput
from outrider.bench.closed_loop import SteppingEngine
from outrider.bench.records import MODEL_PHASES
from outrider.bench.step_run import quartiles
from outrider.engine.engine import Engine
from outrider.errors import ConfigError, EngineFault
from outrider.models.protocol import TargetCaches, TargetModel
from outrider.request import Request, SamplingParams

__all__ = [
    "OUTSIDE_OVERHEAD",
    "ROUND_PARTS",
    "ForcedTarget",
    "RoundStats",
    "SyntheticCell",
    "check_rates",
    "expected_tokens",
    "measure_synthetic",
    "tokens_needed",
]

NUM_WARM_UP_ROUNDS = 3
ROUND_PARTS = ("propose", "batch", "forward", "accept", "commit", "observe", "host")
"""Parts of a round in order; `host` is scheduling and bookkeeping."""
OUTSIDE_OVERHEAD = ("propose", "forward", "commit")
"""Parts that the hardware must do; the others are overhead."""


def check_rates(rates: Sequence[float], num_draft_tokens: int) -> None:
    """Refuse rates that are no probabilities, or more of them than there are drafts.

    Raises:
        ConfigError: says which.
    """
    for rate in rates:
        if not 0.0 <= rate <= 1.0:
            raise ConfigError(f"synthetic acceptance {rate:g} is outside 0..1; give the share of drafts that stand")
    if len(rates) > num_draft_tokens:
        raise ConfigError(f"{len(rates)} acceptance rates for {num_draft_tokens} drafts a round; give at most as many")


def expected_tokens(rates: Sequence[float]) -> float:
    """Mean tokens of a round in which draft i stands with ``rates[i]``, given that all before it do."""
    total, survival = 1.0, 1.0
    for rate in rates:
        survival *= rate
        total += survival
    return total


class ForcedTarget:
    """A target whose logits agree with a drawn number of drafts of each span, then disagree with the next.

    Args:
        inner: does all the work.
        rates: probability that a draft stands, given that those before it do; drafts beyond them fall.
        seed: of the draws.
        clock: seconds.
    """

    def __init__(
        self,
        inner: TargetModel,
        rates: Sequence[float],
        *,
        seed: int = 0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._inner, self._rates, self._random, self._clock = inner, tuple(rates), random.Random(seed), clock
        self.forcing_s = 0.0  # time spent on the logits, all forwards together

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def as_target(self) -> TargetModel:
        """Itself; everything that is not here is the inner target's."""
        return cast(TargetModel, self)

    def forward(self, batch: ForwardBatch, caches: TargetCaches) -> TargetOutput:
        """The inner forward, with the logits of verify rows changed in place."""
        output = self._inner.forward(batch, caches)
        begin_s = self._clock()
        self._force(batch, output.logits_NV)
        self.forcing_s += self._clock() - begin_s
        return output

    def _force(self, batch: ForwardBatch, logits_NV: torch.Tensor) -> None:
        """Row i of a span judges the token of row i + 1. Decode spans come first in a batch, all rows with logits."""
        rows, signs, begin = [], [], 0
        for length in batch.step.lengths:
            num_accepted = self._draw(length - 1)
            for index in range(min(num_accepted + 1, length - 1)):
                rows.append(begin + index)
                signs.append(1.0 if index < num_accepted else -1.0)
            begin += length
        if not rows:
            return
        device = logits_NV.device
        rows_R = torch.tensor(rows, device=device)
        values_R = torch.tensor(signs, device=device, dtype=logits_NV.dtype) * torch.finfo(logits_NV.dtype).max
        logits_NV.index_put_((rows_R, batch.token_ids_T[rows_R + 1]), values_R)

    def _draw(self, num_drafts: int) -> int:
        """Accepted drafts of one span."""
        accepted = 0
        for rate in self._rates[:num_drafts]:
            if self._random.random() >= rate:
                break
            accepted += 1
        return accepted


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundStats:
    """Rounds of one engine.

    `overhead_ms` is what is left of a round beside propose, forward and commit, `host_ms` beside propose, forward and
    observe, as in other reports.
    """

    num_rounds: int
    tokens_per_round: float  # of one sequence
    round_ms: float  # median
    low_ms: float  # quartiles
    high_ms: float
    mean_ms: float
    part_ms: Mapping[str, float]  # medians by ROUND_PARTS
    overhead_ms: float  # median
    host_ms: float  # median

    @property
    def token_ms(self) -> float:
        """Median time of a round over the tokens that it gives each sequence."""
        return self.round_ms / self.tokens_per_round


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntheticCell:
    """Speculative and plain rounds of as many sequences. Ratios are tokens a second over the fastest plain arm."""

    slots: int
    context: int
    expected_tokens: float  # what the rates say
    arms: Mapping[str, RoundStats]  # "spec", "plain exact", "plain fast"
    fastest_plain: str
    ratio: float  # of median round times
    mean_ratio: float  # of total times


@dataclass(slots=True)
class _Rounds:
    """What one arm has done so far."""

    seconds: list[float]
    tokens: list[int]
    parts: list[dict[str, float]]


def tokens_needed(num_rounds: int, num_draft_tokens: int, prefill_rounds: int) -> int:
    """Tokens that no sequence of an arm may reach: those of all its rounds, the prompts' included, and a full one."""
    return (num_rounds + NUM_WARM_UP_ROUNDS + prefill_rounds + 1) * (1 + num_draft_tokens) + 1


def measure_synthetic(
    arms: Mapping[str, Engine],
    forced: ForcedTarget,
    rates: Sequence[float],
    *,
    slots: int,
    context: int,
    num_rounds: int,
    max_tokens: int,
    vocab_size: int,
    clock: Callable[[], float] = time.perf_counter,
) -> SyntheticCell:
    """Run rounds of all arms in turns: one speculative round, then plain rounds for about as many tokens.

    Args:
        arms: engines without end-of-sequence ids and idle; "spec" drafts, all others do not.
        forced: the target of "spec".
        rates: what ``forced`` draws from.
        slots: sequences that decode together.
        context: their prompt tokens.
        num_rounds: speculative rounds.
        max_tokens: of a sequence, at least ``tokens_needed``.
        vocab_size: prompts are random ids below it, the same for all arms.
        clock: seconds.

    Raises:
        EngineFault: a round left a sequence out.
    """
    for name, engine in arms.items():
        _start(engine, name, slots, context, max_tokens, vocab_size)
        for _ in range(NUM_WARM_UP_ROUNDS):
            _round(engine, forced, slots, clock)
    rounds = {name: _Rounds(seconds=[], tokens=[], parts=[]) for name in arms}
    plain_per_turn = expected_tokens(rates)
    for turn in range(num_rounds):
        num_plain = int((turn + 1) * plain_per_turn) - int(turn * plain_per_turn)
        for name in list(arms) if turn % 2 == 0 else list(arms)[::-1]:
            for _ in range(1 if name == "spec" else num_plain):
                seconds, tokens, parts = _round(arms[name], forced, slots, clock)
                rounds[name].seconds.append(seconds)
                rounds[name].tokens.append(tokens)
                rounds[name].parts.append(parts)
    for name, engine in arms.items():
        for slot in range(slots):
            engine.abort(_request_id(name, slot))
    return _summarise(rounds, rates, slots, context)


def _request_id(arm: str, slot: int) -> str:
    return f"{arm} {slot}"


def _start(engine: Engine, arm: str, slots: int, context: int, max_tokens: int, vocab_size: int) -> None:
    """Submit the prompts and run rounds until all of them decode."""
    draw = random.Random(context)  # the same prompts in every arm
    for slot in range(slots):
        prompt = tuple(draw.randrange(vocab_size) for _ in range(context))
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        engine.submit(Request(request_id=_request_id(arm, slot), prompt_token_ids=prompt, sampling=sampling))
    started: set[str] = set()
    while len(started) < slots:
        started |= {update.request_id for update in engine.step()}


def _round(
    engine: SteppingEngine, forced: ForcedTarget, slots: int, clock: Callable[[], float]
) -> tuple[float, int, dict[str, float]]:
    """Seconds of one round, tokens that it gave all sequences, seconds by part; without the forcing of logits."""
    before = _part_seconds(engine)
    forcing_s, begin_s = forced.forcing_s, clock()
    updates = engine.step()
    seconds = clock() - begin_s
    forcing_s = forced.forcing_s - forcing_s
    if len(updates) != slots or any(update.finish_reason is not None for update in updates):
        raise EngineFault(f"a round gave {len(updates)} of {slots} sequences tokens, or ended one")
    parts = {name: after - before[name] for name, after in _part_seconds(engine).items()}
    parts["forward"] -= forcing_s
    return seconds - forcing_s, sum(len(update.new_token_ids) for update in updates), parts


def _part_seconds(engine: SteppingEngine) -> dict[str, float]:
    metrics = engine.metrics
    return {
        "propose": metrics.propose_s,
        "batch": metrics.batch_s,
        "forward": metrics.forward_s,
        "accept": metrics.accept_s,
        "commit": metrics.commit_s,
        "observe": metrics.observe_s,
        "host": metrics.host_s,
    }


def _summarise(rounds: Mapping[str, _Rounds], rates: Sequence[float], slots: int, context: int) -> SyntheticCell:
    stats = {name: _stats(each, slots) for name, each in rounds.items()}
    plain = {name: each for name, each in stats.items() if name != "spec"}
    fastest = min(plain, key=lambda name: plain[name].round_ms)
    spec = stats["spec"]
    mean_token_ms = spec.mean_ms / spec.tokens_per_round
    return SyntheticCell(
        slots=slots,
        context=context,
        expected_tokens=expected_tokens(rates),
        arms=stats,
        fastest_plain=fastest,
        ratio=plain[fastest].token_ms / spec.token_ms,
        mean_ratio=plain[fastest].mean_ms / plain[fastest].tokens_per_round / mean_token_ms,
    )


def _stats(rounds: _Rounds, slots: int) -> RoundStats:
    low_s, high_s = quartiles(rounds.seconds)

    def rest_ms(names: Sequence[str]) -> float:
        pairs = zip(rounds.seconds, rounds.parts, strict=True)
        return 1000 * statistics.median(seconds - sum(parts[name] for name in names) for seconds, parts in pairs)

    return RoundStats(
        num_rounds=len(rounds.seconds),
        tokens_per_round=sum(rounds.tokens) / (len(rounds.tokens) * slots),
        round_ms=1000 * statistics.median(rounds.seconds),
        low_ms=1000 * low_s,
        high_ms=1000 * high_s,
        mean_ms=1000 * statistics.fmean(rounds.seconds),
        part_ms={name: 1000 * statistics.median(parts[name] for parts in rounds.parts) for name in ROUND_PARTS},
        overhead_ms=rest_ms(OUTSIDE_OVERHEAD),
        host_ms=rest_ms(MODEL_PHASES),
    )
