"""Engines on one target whose every logit row, committed state and round is kept for comparison.

A test runs some requests one way and another, and compares the two traces bit for bit.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from outrider.batch import ForwardBatch, TargetOutput
from outrider.cache.cache_set import CacheSet, CacheSnapshot
from outrider.engine.build import EngineLimits, build_engine, resolve_config
from outrider.engine.engine import Engine
from outrider.engine.preemption import cache_rows
from outrider.engine.runner import Runner
from outrider.models.protocol import TargetModel
from outrider.plan import StepPlan, StepResult
from outrider.request import Request, SamplingParams
from outrider.speculative.drafter import Drafter
from outrider.testing.recording import recording

__all__ = ["Company", "Trace", "Workbench", "ask", "fill_pools", "scramble_ids", "unequal"]


@dataclass(slots=True, kw_only=True)
class Trace:
    """What was seen of some requests, by request id.

    ``logits`` and ``states`` are keyed by position: the logits of the row at a position, as judged last
    (a rejected row is judged again), and the state after that many committed tokens.
    """

    token_ids: dict[str, tuple[int, ...]] = field(default_factory=dict)
    ends: dict[str, str] = field(default_factory=dict)
    logits: dict[tuple[str, int], torch.Tensor] = field(default_factory=dict)
    states: dict[tuple[str, int], CacheSnapshot] = field(default_factory=dict)
    rounds: dict[str, list[tuple[int, int]]] = field(default_factory=dict)  # (drafted, accepted) per decode round

    def stream(self, name: str) -> tuple[tuple[int, ...], str]:
        """Tokens and how they ended."""
        return self.token_ids[name], self.ends[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class Company:
    """How requests share an engine; the defaults leave room for everything."""

    seqs: int = 1  # that run at once
    step_rows: int | None = None
    prefill_tokens: int = 512
    rounds_between: int = 0  # rounds from one submission to the next; 0 = all at once


class Workbench:
    """Builds engines around ``target`` and runs requests in them.

    Args:
        target: shared by all engines.
        page_size: tokens per cache page; small, so that sequences have several.
        max_model_len: tokens of the longest sequence.
    """

    def __init__(self, target: TargetModel, *, page_size: int = 8, max_model_len: int = 64) -> None:
        self.target = target
        self.page_size = page_size
        self.max_model_len = max_model_len

    def engine(self, drafter: Drafter | None = None, company: Company | None = None) -> "WatchedEngine":
        """A new engine with a trace of its own; no drafter decodes plainly."""
        company = company or Company()
        config = resolve_config(
            EngineLimits(
                page_size=self.page_size,
                max_step_rows=company.step_rows,
                max_prefill_tokens=company.prefill_tokens,
            ),
            max_num_seqs=company.seqs,
            max_model_len=self.max_model_len,
            num_draft_tokens=drafter.num_draft_tokens if drafter else 0,
            chunk_multiple=self.target.chunk_multiple,
        )
        watch = _Watch()
        engine = build_engine(recording(self.target, watch.see), drafter, config, device=self.target.embedding.device)
        assert isinstance(engine._runner, Runner)
        watch.runner, engine._runner = engine._runner, watch
        return WatchedEngine(engine, watch)

    def run(self, asked: Sequence[Request], drafter: Drafter | None = None, company: Company | None = None) -> Trace:
        """Run requests to their end in a new engine."""
        company = company or Company()
        return self.engine(drafter, company).run(asked, company.rounds_between)


class WatchedEngine:
    """An engine and the trace of what runs in it."""

    def __init__(self, engine: Engine, watch: "_Watch") -> None:
        self.engine = engine
        self._watch = watch

    @property
    def caches(self) -> CacheSet:
        """The device state."""
        assert self._watch.runner is not None, "set when the engine is built"
        return self._watch.runner.caches

    def run(self, asked: Sequence[Request], rounds_between: int = 0) -> Trace:
        """Run requests to their end; the trace holds these requests only."""
        trace = self._watch.trace = Trace(token_ids={request.request_id: () for request in asked})
        waiting, round_index = list(asked), 0
        while waiting or self.engine.has_work:
            while waiting and (rounds_between == 0 or round_index % rounds_between == 0):
                self.engine.submit(waiting.pop(0))
                if rounds_between:
                    break
            round_index += 1
            for update in self.engine.step():
                trace.token_ids[update.request_id] += update.new_token_ids
                if update.finish_reason is not None:
                    trace.ends[update.request_id] = update.finish_reason.value
        return trace


class _Watch:
    """Stands between engine and runner, and behind the target's forward."""

    def __init__(self) -> None:
        self.runner: Runner | None = None
        self.trace = Trace()
        self._owners: Mapping[int, str] = {}

    def see(self, batch: ForwardBatch, output: TargetOutput) -> None:
        """Keep the logits of every row that has some."""
        slots = torch.cat([batch.step.state_slots_S, batch.chunk.state_slots_S]).tolist()  # order of the batch
        sequences, positions = batch.sequence_T.tolist(), batch.positions_T.tolist()
        for row, logits_V in zip(batch.logits_rows_N.tolist(), output.logits_NV, strict=True):
            self.trace.logits[self._owners[slots[sequences[row]]], positions[row]] = logits_V.clone()

    def run(self, plan: StepPlan) -> StepResult:
        """Run a plan and keep what it committed."""
        assert self.runner is not None, "set when the engine is built"
        self._owners = {item.state_slot: item.request_id for item in plan.scheduled}
        result = self.runner.run(plan)
        for item, drafted, accepted in zip(plan.scheduled, result.num_drafted, result.num_accepted, strict=True):
            end = item.start_position + (len(item.query_token_ids) if item.is_prompt else accepted + 1)
            self.trace.states[item.request_id, end] = self._state(item.state_slot, item.page_ids, end)
            if not item.is_prompt:
                self.trace.rounds.setdefault(item.request_id, []).append((drafted, accepted))
        return result

    def _state(self, slot: int, page_ids: tuple[int, ...], num_tokens: int) -> CacheSnapshot:
        assert self.runner is not None, "set when the engine is built"
        caches = self.runner.caches
        return caches.snapshot(slot, cache_rows(caches, page_ids, num_tokens))


def ask(
    name: str, prompt_token_ids: Sequence[int], max_tokens: int | None, stop_token_ids: tuple[int, ...] = ()
) -> Request:
    """A greedy request."""
    sampling = SamplingParams(max_tokens=max_tokens, stop_token_ids=stop_token_ids)
    return Request(request_id=name, prompt_token_ids=tuple(prompt_token_ids), sampling=sampling)


def unequal(trace: Trace, reference: Trace, names: Sequence[str]) -> list[str]:
    """Where ``trace`` differs from ``reference``: streams, logits and states, bit for bit.

    States are compared where both traces have one: a speculative run skips positions.
    """
    found = [f"stream of {name}" for name in names if trace.stream(name) != reference.stream(name)]
    for (name, position), logits_V in reference.logits.items():
        if name in names and not _same(trace.logits.get((name, position)), logits_V):
            found.append(f"logits of {name} at {position}")
    for key in reference.states.keys() & trace.states.keys():
        ours, theirs = trace.states[key], reference.states[key]
        pairs = (
            (ours.recurrent.state_LHVK, theirs.recurrent.state_LHVK),
            (ours.recurrent.window_LWD, theirs.recurrent.window_LWD),
            (ours.latents_LRC, theirs.latents_LRC),
        )
        if key[0] in names and not all(_same(one, other) for one, other in pairs):
            found.append(f"state of {key[0]} after {key[1]}")
    return found


def _same(one: torch.Tensor | None, other: torch.Tensor) -> bool:
    """Equal bits; a NaN is never equal, so it cannot pass unseen."""
    return one is not None and one.dtype == other.dtype and torch.equal(one, other)


def fill_pools(caches: CacheSet, fill: Callable[[torch.Tensor], object]) -> None:
    """Apply ``fill`` to all cache memory; for an engine without running requests."""
    recurrent = caches.recurrent
    for tensor in (caches.latents._rows_LRC, *recurrent._tensors()):
        fill(tensor)


def scramble_ids(engine: Engine, seed: int) -> None:
    """Put the free pages and seats in another order; for an engine without running requests."""
    engine._scheduler.shuffle_seats(random.Random(seed))
