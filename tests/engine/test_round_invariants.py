"""Invariants I1 to I7 of a round, each a test of its own, on a mixed workload of a K3 toy in float64.

With a delta log nothing is pending between rounds (lag 0), so the recurrent state covers exactly the
positions below the anchor's, as the latents do. The workload is watched from between engine and runner.
What is not below the anchor is filled with NaN before every round: it may hold anything.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch

from outrider.engine.build import EngineLimits, build_engine, resolve_config
from outrider.engine.engine import Engine
from outrider.engine.runner import Runner
from outrider.models.registry import load_target
from outrider.plan import ScheduledSequence, StepPlan, StepResult
from outrider.request import FinishReason, Request, RequestUpdate, SamplingParams
from outrider.speculative.drafter import Anchors
from outrider.testing.scripted import Script, ScriptedDrafter, oracle, random_drafts
from outrider.testing.toy import ToyOptions, write_toy_checkpoint

pytestmark = pytest.mark.gates
CPU = torch.device("cpu")
PAGE, MAX_LEN, SEQS, DRAFTS = 8, 104, 3, 5


class WatchedDrafter(ScriptedDrafter):
    """Notes (anchor position, context tokens) of every proposal."""

    def __init__(self, num_draft_tokens: int, script: Script) -> None:
        super().__init__(num_draft_tokens, script)
        self.seen: list[tuple[int, int]] = []

    def propose(self, anchors: Anchors):  # type: ignore[no-untyped-def]
        self.seen += [(p, len(self._token_ids[s])) for s, p in zip(anchors.slots, anchors.positions, strict=True)]
        return super().propose(anchors)


@dataclass(frozen=True, kw_only=True)
class Watched:
    """One round: what was asked, what came out, and what changed on the device."""

    plan: StepPlan
    result: StepResult
    changed_rows: frozenset[int]
    changed_slots: frozenset[int]


def own_rows(item: ScheduledSequence, start: int, end: int) -> list[int]:
    return [item.page_ids[p // PAGE] * PAGE + p % PAGE for p in range(start, end)]


@dataclass
class Watch:
    """Between engine and runner: fills with NaN what no row may read, and compares the caches."""

    runner: Runner
    rounds: list[Watched] = field(default_factory=list)
    state_after: dict[tuple[str, int], tuple[torch.Tensor, ...]] = field(default_factory=dict)

    def run(self, plan: StepPlan) -> StepResult:
        latents, recurrent = self.runner.caches.latents, self.runner.caches.recurrent
        valid = {row for item in plan.scheduled for row in own_rows(item, 0, item.start_position)}
        stale = [row for row in range(latents.num_pages * PAGE) if row not in valid]
        latents._rows_LRC[:, stale] = torch.nan
        rows_before, state_before = latents._rows_LRC.clone(), recurrent._state_LBHVK.clone()
        result = self.runner.run(plan)
        for item, accepted in zip(plan.scheduled, result.num_accepted, strict=True):
            end = item.start_position + (len(item.query_token_ids) if item.is_prompt else accepted + 1)
            self.state_after[item.request_id, end] = (
                latents._rows_LRC[:, own_rows(item, 0, end)].clone(),
                recurrent._state_LBHVK[:, item.state_slot].clone(),
                recurrent._window_LBWD[:, item.state_slot].clone(),
            )
        bits = torch.int64
        rows_differ = (rows_before.view(bits) != latents._rows_LRC.view(bits)).any(-1).any(0)
        slots_differ = (state_before.view(bits) != recurrent._state_LBHVK.view(bits)).flatten(2).any(-1).any(0)
        self.rounds.append(
            Watched(
                plan=plan,
                result=result,
                changed_rows=frozenset(rows_differ.nonzero().flatten().tolist()),
                changed_slots=frozenset(slots_differ.nonzero().flatten().tolist()),
            )
        )
        return result


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A finished run of all requests."""

    asked: dict[str, Request]
    watch: Watch
    drafter: WatchedDrafter | None
    updates: dict[str, list[RequestUpdate]]

    def stream(self, name: str) -> tuple[int, ...]:
        return tuple(token_id for update in self.updates[name] for token_id in update.new_token_ids)

    def decodes(self):  # type: ignore[no-untyped-def]
        """(decode span, its output ids, its number of drafts) of every round."""
        for one in self.watch.rounds:
            for item, token_ids, drafted in zip(
                one.plan.scheduled, one.result.output_token_ids, one.result.num_drafted, strict=True
            ):
                if not item.is_prompt:
                    yield item, token_ids, drafted


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory):  # type: ignore[no-untyped-def]
    options = ToyOptions(num_layers=5, mla_layers=(2, 4), num_experts=4, num_shards=1)
    return load_target(write_toy_checkpoint(tmp_path_factory.mktemp("toy"), options, seed=3), dtype=torch.float64)


def engine_for(target, drafter: ScriptedDrafter | None, seqs: int) -> Engine:  # type: ignore[no-untyped-def]
    config = resolve_config(
        EngineLimits(page_size=PAGE, max_prefill_tokens=64),
        max_num_seqs=seqs,
        max_model_len=MAX_LEN,
        num_draft_tokens=drafter.num_draft_tokens if drafter else 0,
        chunk_multiple=target.chunk_multiple,
    )
    return build_engine(target, drafter, config, device=CPU)


def run(target, drafter: WatchedDrafter | None, asked: Sequence[Request], seqs: int) -> Workload:  # type: ignore[no-untyped-def]
    engine = engine_for(target, drafter, seqs)
    runner = engine._runner
    assert isinstance(runner, Runner)
    watch = Watch(runner)
    engine._runner = watch
    updates: dict[str, list[RequestUpdate]] = {request.request_id: [] for request in asked}
    for request in asked:
        engine.submit(request)
    while engine.has_work:
        for update in engine.step():
            updates[update.request_id].append(update)
    return Workload(
        asked={request.request_id: request for request in asked}, watch=watch, drafter=drafter, updates=updates
    )


def ask(name: str, prompt: Sequence[int], max_tokens: int | None, stop: tuple[int, ...] = ()) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens, stop_token_ids=stop)
    return Request(request_id=name, prompt_token_ids=tuple(prompt), sampling=sampling)


@pytest.fixture(scope="module")
def asked() -> list[Request]:
    dice = random.Random(8)
    shapes = [(1, 14), (70, 9), (6, 1), (9, 17), (96, None), (20, 11)]
    return [ask(f"r{i}", [dice.randrange(90) for _ in range(n)], limit) for i, (n, limit) in enumerate(shapes)]


@pytest.fixture(scope="module")
def plain(target, asked: list[Request]) -> Workload:  # type: ignore[no-untyped-def]
    return run(target, None, asked, 1)


@pytest.fixture(scope="module")
def right(plain: Workload) -> Script:
    return oracle([request.prompt_token_ids + plain.stream(name) for name, request in plain.asked.items()])


@pytest.fixture(scope="module")
def spec(target, asked: list[Request], right: Script) -> Workload:  # type: ignore[no-untyped-def]
    done = run(target, WatchedDrafter(DRAFTS, random_drafts(right, 97, 0.7, seed=2)), asked, SEQS)
    counts = {len(token_ids) - 1 for _, token_ids, _ in done.decodes()}
    assert len(counts) >= 4, "the workload accepts too few different numbers of drafts"
    return done


def test_i1_the_anchor_follows_the_committed_context_of_target_and_drafter(spec: Workload) -> None:
    assert spec.drafter is not None and spec.drafter.seen
    assert all(position == context for position, context in spec.drafter.seen)
    committed: dict[str, int] = {}
    for one in spec.watch.rounds:
        for item, accepted in zip(one.plan.scheduled, one.result.num_accepted, strict=True):
            assert item.start_position == committed.get(item.request_id, 0)
            count = len(item.query_token_ids) if item.is_prompt else accepted + 1
            committed[item.request_id] = item.start_position + count


def test_i2_latents_below_the_anchor_are_the_plain_ones_and_no_others_are_read(spec: Workload, plain: Workload) -> None:
    compared = spec.watch.state_after.keys() & plain.watch.state_after.keys()
    assert len(compared) > 20
    for key in compared:
        assert torch.equal(spec.watch.state_after[key][0], plain.watch.state_after[key][0]), key
    # Everything else was NaN before each round, and one NaN read would show in every later token.
    assert all(update.error is None for updates in spec.updates.values() for update in updates)


def test_i3_recurrent_state_covers_exactly_the_positions_below_the_anchor(spec: Workload, plain: Workload) -> None:
    for key in spec.watch.state_after.keys() & plain.watch.state_after.keys():
        for ours, theirs in zip(spec.watch.state_after[key][1:], plain.watch.state_after[key][1:], strict=True):
            assert torch.equal(ours, theirs), key


def test_i4_the_stream_is_the_committed_lists_and_its_last_token_the_anchor(spec: Workload, plain: Workload) -> None:
    emitted = {name: list(request.prompt_token_ids) for name, request in spec.asked.items()}
    for one in spec.watch.rounds:
        for item, token_ids in zip(one.plan.scheduled, one.result.output_token_ids, strict=True):
            if not item.is_prompt:
                assert item.query_token_ids == (emitted[item.request_id][-1],)
                assert item.start_position == len(emitted[item.request_id]) - 1
            emitted[item.request_id].extend(token_ids)
    for name, request in spec.asked.items():
        assert request.prompt_token_ids + spec.stream(name) == tuple(emitted[name])
        assert spec.stream(name) == plain.stream(name)


def test_i5_a_round_commits_one_token_up_to_one_more_than_its_drafts(spec: Workload) -> None:
    assert all(1 <= len(token_ids) <= drafted + 1 <= DRAFTS + 1 for _, token_ids, drafted in spec.decodes())


def test_i6_tokens_per_round_are_one_plus_accepted_per_round(spec: Workload, plain: Workload) -> None:
    for done in (spec, plain):
        for name, updates in done.updates.items():
            usage = updates[-1].usage
            assert usage is not None and updates[-1].finish_reason is FinishReason.LENGTH
            num_decoded = usage.num_output_tokens - 1  # the first one came from the prompt
            assert num_decoded == usage.num_rounds + usage.num_accepted
            assert usage.num_output_tokens == len(done.stream(name))
            assert usage.num_accepted == sum(update.num_accepted for update in updates)


@pytest.mark.parametrize("num_before_stop", [0, 1, 2, 4, 5])
def test_i6_counts_after_truncation_with_a_stop_inside_a_span(target, num_before_stop: int) -> None:  # type: ignore[no-untyped-def]
    """Drafts behind the stop were never emitted, so neither usage nor updates count them as accepted."""
    prompt = (5, 9, 2, 40, 7)
    free = run(target, None, [ask("a", prompt, 20)], 1).stream("a")
    # The span after the prompt brings tokens 1.. of the stream; the stop is one that was not seen before.
    stop_at = 1 + num_before_stop
    if free[stop_at] in free[:stop_at]:
        pytest.fail("the toy repeats itself; choose another prompt")
    drafter = WatchedDrafter(DRAFTS, oracle([prompt + free]))
    done = run(target, drafter, [ask("a", prompt, 20, stop=(free[stop_at],))], 1)
    usage, last = done.updates["a"][-1].usage, done.updates["a"][-1]
    assert usage is not None and last.finish_reason is FinishReason.STOP
    assert done.watch.rounds[-1].result.num_accepted == (DRAFTS,), "the device accepted all of the span"
    assert done.stream("a") == free[:stop_at]
    assert (usage.num_output_tokens, usage.num_rounds) == (stop_at, 1)
    assert usage.num_accepted == last.num_accepted == num_before_stop  # and no final token of the span
    assert usage.num_output_tokens - 1 == usage.num_rounds + usage.num_accepted - 1


def test_i7_rows_are_mapped_before_launch_and_nothing_foreign_is_written(spec: Workload) -> None:
    for one in spec.watch.rounds:
        allowed: set[int] = set()
        for item, drafted in zip(one.plan.scheduled, one.result.num_drafted, strict=True):
            end = item.start_position + len(item.query_token_ids) + drafted
            assert end <= len(item.page_ids) * PAGE
            allowed |= set(own_rows(item, item.start_position, end))
        owned = [page_id for item in one.plan.scheduled for page_id in item.page_ids]
        assert len(set(owned)) == len(owned)
        assert one.changed_rows == allowed
        assert one.changed_slots <= {item.state_slot for item in one.plan.scheduled}
