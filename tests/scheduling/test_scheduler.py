"""The scheduler against a fake executor: budgets, order, cuts, and exactly one release."""

import hashlib
import random
from collections.abc import Iterable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from outrider.config import CacheConfig, SchedulerConfig
from outrider.errors import RequestError
from outrider.plan import ScheduledSequence, StepPlan, StepResult
from outrider.request import FinishReason, Request, RequestUpdate, SamplingParams
from outrider.scheduling import Scheduler, SequenceStatus

CHUNK = 4
EOS = frozenset({0})
VOCAB = 12


def next_token(token_ids: tuple[int, ...]) -> int:
    """The fake model: a function of the whole context."""
    return hashlib.blake2b(bytes(token_ids), digest_size=1).digest()[0] % VOCAB


class CountingText:
    """Stop text without a tokenizer: token t is the letter chr(97 + t)."""

    def __init__(self, stop: Iterable[str]) -> None:
        self.stop = tuple(stop)
        self.text = ""
        self.matched_stop: str | None = None
        self.num_tokens_through_stop: int | None = None
        self.num_flushes = 0

    @property
    def stopped(self) -> bool:
        return self.matched_stop is not None

    def push(self, token_ids: Iterable[int]) -> str:
        assert not self.stopped
        new = ""
        for token_id in token_ids:
            self.text += chr(97 + token_id)
            new += chr(97 + token_id)
            self.matched_stop = next((s for s in self.stop if self.text.endswith(s)), None)
            if self.stopped:
                self.num_tokens_through_stop = len(self.text)
                break
        return new

    def flush(self) -> str:
        self.num_flushes += 1
        return ""


def reference(request: Request, max_len: int) -> tuple[tuple[int, ...], FinishReason]:
    """One token at a time, nothing else."""
    sampling = request.sampling
    limit = max_len - len(request.prompt_token_ids) if sampling.max_tokens is None else sampling.max_tokens
    stop_ids = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else EOS)
    token_ids = list(request.prompt_token_ids)
    output: list[int] = []
    text = ""
    while len(output) < limit:
        token_id = next_token(tuple(token_ids))
        if token_id in stop_ids:
            return tuple(output), FinishReason.STOP
        token_ids.append(token_id)
        output.append(token_id)
        text += chr(97 + token_id)
        if any(text.endswith(stop) for stop in sampling.stop):
            return tuple(output), FinishReason.STOP
    return tuple(output), FinishReason.LENGTH


class FakeExecutor:
    """Keeps its own idea of every slot and page; a plan that contradicts it fails the test."""

    def __init__(self, page_size: int, rng: random.Random) -> None:
        self.page_size = page_size
        self.rng = rng
        self.seated: dict[int, str] = {}
        self.state: dict[int, list[int]] = {}  # slot -> tokens that its recurrent state covers
        self.rows: dict[int, tuple[str, int]] = {}  # cache row -> (request, position) written last
        self.copies: dict[str, list[int]] = {}

    def move(self, plan: StepPlan, num_copied: int | None = None) -> None:
        """All that happens before the first forward, up to a fault after ``num_copied`` copies."""
        for slot in plan.released_slots:
            self.seated.pop(slot, None)  # a sequence that never had rows was never seated
        for request_id in plan.dropped_copies:
            self.copies.pop(request_id, None)  # the copy may have faulted
        for item in plan.preempted[:num_copied]:
            assert self.seated.pop(item.state_slot) == item.request_id
            assert item.request_id not in self.copies
            self.check_rows(item.request_id, item.page_ids, item.num_tokens)
            self.copies[item.request_id] = self.state[item.state_slot]
            assert item.num_tokens == len(self.copies[item.request_id])

    def take_seat(self, item: ScheduledSequence) -> None:
        if not (item.is_first or item.is_resumed):
            return
        assert not (item.is_first and item.is_resumed)
        assert item.state_slot not in self.seated
        self.seated[item.state_slot] = item.request_id
        self.state[item.state_slot] = [] if item.is_first else self.copies.pop(item.request_id)
        self.write_rows(item, 0, len(self.state[item.state_slot]))

    def cache_row(self, page_ids: tuple[int, ...], position: int) -> int:
        return page_ids[position // self.page_size] * self.page_size + position % self.page_size

    def write_rows(self, item: ScheduledSequence, start: int, end: int) -> None:
        for position in range(start, end):
            self.rows[self.cache_row(item.page_ids, position)] = (item.request_id, position)

    def check_rows(self, request_id: str, page_ids: tuple[int, ...], num_tokens: int) -> None:
        for position in range(num_tokens):
            assert self.rows.get(self.cache_row(page_ids, position)) == (request_id, position), "latents were lost"

    def run(self, plan: StepPlan, config: SchedulerConfig, num_draft_tokens: int) -> StepResult:
        self.move(plan)
        self.check(plan, config, num_draft_tokens)
        outputs, drafted, accepted = [], [], []
        for item in plan.scheduled:
            self.take_seat(item)
            context = self.state[item.state_slot]
            assert self.seated[item.state_slot] == item.request_id
            assert item.start_position == len(context)
            self.check_rows(item.request_id, item.page_ids, item.start_position)
            self.write_rows(item, item.start_position, item.start_position + len(item.query_token_ids))
            context.extend(item.query_token_ids)
            num_drafts = self.rng.randint(0, item.draft_budget)
            assert item.start_position + len(item.query_token_ids) + num_drafts <= len(item.page_ids) * self.page_size
            num_accepted = self.rng.randint(0, num_drafts)
            tokens: list[int] = []
            while item.wants_logits and len(tokens) <= num_accepted:
                tokens.append(next_token((*context, *tokens)))
            if not item.is_prompt:
                context.extend(tokens[:-1])
                self.write_rows(item, item.start_position, item.start_position + 1 + num_drafts)
            outputs.append(tuple(tokens))
            drafted.append(num_drafts)
            accepted.append(num_accepted)
        return StepResult(output_token_ids=tuple(outputs), num_drafted=tuple(drafted), num_accepted=tuple(accepted))

    def check(self, plan: StepPlan, config: SchedulerConfig, num_draft_tokens: int) -> None:
        pages = [page_id for item in plan.scheduled for page_id in item.page_ids]
        slots = [item.state_slot for item in plan.scheduled]
        assert len(set(pages)) == len(pages), "a page has two owners"
        assert len(set(slots)) == len(slots) <= config.max_num_seqs
        assert sorted(item.is_prompt for item in plan.scheduled) == [item.is_prompt for item in plan.scheduled]
        prompt_rows = sum(len(item.query_token_ids) for item in plan.scheduled if item.is_prompt)
        assert prompt_rows <= config.max_prefill_tokens
        for item in plan.scheduled:
            assert 0 <= item.draft_budget <= num_draft_tokens
            assert 1 <= len(item.query_token_ids) + item.draft_budget <= config.max_step_rows
            if item.is_prompt:
                assert item.start_position % CHUNK == 0
                assert item.wants_logits or len(item.query_token_ids) % CHUNK == 0
            else:
                assert item.wants_logits
                assert len(item.query_token_ids) == 1


class SchedulerHistory(RuleBasedStateMachine):
    @initialize(
        seed=st.integers(0, 10**6),
        num_seqs=st.integers(1, 4),
        num_pages=st.integers(5, 20),
        rows=st.integers(8, 14),
        prefill=st.integers(4, 20),
        drafts=st.integers(0, 7),
        oversubscribe=st.booleans(),
    )
    def start(
        self, seed: int, num_seqs: int, num_pages: int, rows: int, prefill: int, drafts: int, oversubscribe: bool
    ) -> None:
        self.config = SchedulerConfig(
            max_num_seqs=num_seqs,
            max_model_len=40,
            max_step_rows=rows,
            max_prefill_tokens=prefill,
            chunk_multiple=CHUNK,
            oversubscribe=oversubscribe,
        )
        self.cache = CacheConfig(page_size=4, num_pages=num_pages)
        self.drafts = drafts
        self.scheduler = Scheduler(
            self.config, self.cache, num_draft_tokens=drafts, eos_token_ids=EOS, vocab_size=VOCAB
        )
        self.executor = FakeExecutor(4, random.Random(seed))
        self.rng = random.Random(seed + 1)
        self.requests: dict[str, Request] = {}
        self.emitted: dict[str, list[int]] = {}
        self.finished: dict[str, RequestUpdate] = {}
        self.texts: dict[str, CountingText] = {}

    @rule(
        num_prompt=st.integers(1, 20),
        max_tokens=st.one_of(st.none(), st.integers(0, 20)),
        ignore_eos=st.booleans(),
        speculation=st.sampled_from(["auto", "off", 0, 1]),
        stop_ids=st.lists(st.integers(1, VOCAB - 1), max_size=1),
        stop=st.lists(st.sampled_from(["b", "cd", "ed"]), max_size=2),
    )
    def submit(self, num_prompt, max_tokens, ignore_eos, speculation, stop_ids, stop) -> None:  # type: ignore[no-untyped-def]
        name = f"r{len(self.requests)}"
        request = Request(
            request_id=name,
            prompt_token_ids=tuple(self.rng.randrange(VOCAB) for _ in range(num_prompt)),
            sampling=SamplingParams(
                max_tokens=max_tokens,
                ignore_eos=ignore_eos,
                speculation=min(speculation, self.drafts) if isinstance(speculation, int) else speculation,
                stop_token_ids=tuple(stop_ids),
                stop=tuple(stop),
            ),
        )
        text = CountingText(stop)
        try:
            update = self.scheduler.add(request, text)
        except RequestError:
            total = 40 if max_tokens is None else num_prompt + max_tokens
            assert total > 40 or -(-total // 4) > self.cache.num_pages
            return
        self.requests[name], self.texts[name], self.emitted[name] = request, text, []
        if update is not None:
            assert max_tokens == 0
            self.take([update])

    @precondition(lambda self: self.scheduler.has_work)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.scheduler.request_ids))
        update = self.scheduler.abort(name)
        assert update is not None
        assert update.finish_reason is FinishReason.ABORT
        self.take([update])
        assert self.scheduler.abort(name) is None

    @precondition(lambda self: self.scheduler.has_work)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.scheduler.request_ids))
        was_running, num_preempted = name in self.scheduler._running, self.scheduler.num_preempted
        assert self.scheduler.preempt(name) == was_running
        assert self.scheduler.num_preempted == num_preempted + was_running
        assert not self.scheduler.preempt(name)

    @precondition(lambda self: self.scheduler.has_work)
    @rule(num_copied=st.one_of(st.none(), st.integers(0, 2)))
    def fault(self, num_copied: int | None) -> None:
        """Strikes in the forward, or after so many copies to the host."""
        plan = self.scheduler.schedule()
        if num_copied is None:
            self.executor.run(plan, self.config, self.drafts)
        else:
            self.executor.move(plan, num_copied)
        touched = {item.request_id for item in (*plan.scheduled, *plan.preempted)}
        updates = self.scheduler.fail_round(plan, "device fell off")
        assert len(updates) == len(touched)
        assert {update.request_id for update in updates} == touched
        self.take(updates)

    @rule(count=st.integers(1, 4))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.one_round()

    def one_round(self) -> None:
        plan = self.scheduler.schedule()
        assert bool(plan.scheduled) == self.scheduler.has_work, "work is waiting but nothing runs"
        self.take(self.scheduler.update(plan, self.executor.run(plan, self.config, self.drafts)))

    def take(self, updates: list[RequestUpdate]) -> None:
        for update in updates:
            assert update.request_id not in self.finished, "an update after the end"
            self.emitted[update.request_id].extend(update.new_token_ids)
            assert (update.usage is None) == (update.finish_reason is None)
            if update.finish_reason is not None:
                self.finished[update.request_id] = update
                self.check_finished(self.requests[update.request_id], update)

    def check_finished(self, request: Request, update: RequestUpdate) -> None:
        expected, reason = reference(request, 40)
        emitted = tuple(self.emitted[request.request_id])
        usage = update.usage
        assert usage is not None
        assert usage.num_output_tokens == len(emitted)
        assert usage.num_prompt_tokens == len(request.prompt_token_ids)
        assert usage.num_accepted <= usage.num_drafted <= self.drafts * usage.num_rounds
        if request.sampling.speculation in ("off", 0):
            assert usage.num_drafted == 0
        if update.finish_reason in (FinishReason.ABORT, FinishReason.ERROR):
            assert emitted == expected[: len(emitted)]
            return
        assert (emitted, update.finish_reason) == (expected, reason)
        assert self.texts[request.request_id].num_flushes == 1
        assert self.texts[request.request_id].text == "".join(chr(97 + t) for t in expected)

    @invariant()
    def everything_is_accounted_for(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        scheduler, running = self.scheduler, list(self.scheduler._running.values())
        assert scheduler.num_free_slots + scheduler.num_running == self.config.max_num_seqs
        assert scheduler.num_running + scheduler.num_preempted <= self.config.max_num_seqs
        held = [page_id for sequence in running for page_id in sequence.page_ids]
        assert len(set(held)) == len(held) == self.cache.num_pages - scheduler.num_free_pages
        assert len({sequence.state_slot for sequence in running}) == len(running)
        assert all(s.page_ids == () and s.state_slot == -1 for s in (*scheduler._preempted, *scheduler._waiting))
        assert set(self.finished).isdisjoint(self.scheduler.request_ids)
        assert set(self.finished) | set(self.scheduler.request_ids) == set(self.requests)
        # First come, first served: nobody is admitted before an earlier request that still waits.
        admitted = [sequence.status is not SequenceStatus.WAITING for sequence in scheduler._unfinished.values()]
        assert admitted == sorted(admitted, reverse=True)
        for queue in (running, scheduler._preempted, scheduler._waiting):
            arrivals = [sequence.arrival for sequence in queue]
            assert arrivals == sorted(arrivals)

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        for _ in range(60 * (1 + len(self.requests))):
            if not self.scheduler.has_work:
                break
            self.one_round()
        assert not self.scheduler.has_work, f"starved: {self.scheduler.request_ids}"
        assert set(self.finished) == set(self.requests)
        assert self.scheduler.num_free_pages == self.cache.num_pages
        assert self.scheduler.num_free_slots == self.config.max_num_seqs
        self.executor.run(self.scheduler.schedule(), self.config, self.drafts)
        assert not self.executor.seated, "a slot was not released"
        assert not self.executor.copies, "a host copy was not dropped"


SchedulerHistory.TestCase.settings = settings(max_examples=120, stateful_step_count=20, deadline=None)
TestSchedulerHistory = SchedulerHistory.TestCase


def make(num_pages: int = 64, num_seqs: int = 4, prefill: int = 8, drafts: int = 7) -> Scheduler:
    config = SchedulerConfig(
        max_num_seqs=num_seqs, max_model_len=64, max_step_rows=16, max_prefill_tokens=prefill, chunk_multiple=CHUNK
    )
    cache = CacheConfig(page_size=4, num_pages=num_pages)
    return Scheduler(config, cache, num_draft_tokens=drafts, eos_token_ids=EOS, vocab_size=VOCAB)


def ask(name: str, num_prompt: int, **sampling: object) -> Request:
    return Request(
        request_id=name,
        prompt_token_ids=(1,) * num_prompt,
        sampling=SamplingParams(**sampling),  # type: ignore[arg-type]
    )


def result(*spans: tuple[tuple[int, ...], int]) -> StepResult:
    return StepResult(
        output_token_ids=tuple(tokens for tokens, _ in spans),
        num_drafted=tuple(drafted for _, drafted in spans),
        num_accepted=tuple(max(len(tokens) - 1, 0) for tokens, _ in spans),
    )


def round_of(scheduler: Scheduler, *spans: tuple[tuple[int, ...], int]) -> list[RequestUpdate]:
    return scheduler.update(scheduler.schedule(), result(*spans))


@pytest.mark.parametrize(
    ("sampling", "expected", "reason"),
    [
        ({"max_tokens": 6, "stop_token_ids": (9,)}, (2, 3, 4), "stop"),
        ({"max_tokens": 3, "stop_token_ids": (9,)}, (2, 3, 4), "length"),
        ({"max_tokens": 2, "stop_token_ids": (9,)}, (2, 3), "length"),
        ({"max_tokens": 20, "stop_token_ids": (3,)}, (2,), "stop"),
        ({"max_tokens": 3, "stop": ("de",)}, (2, 3, 4), "stop"),
        ({"max_tokens": 2, "stop": ("de",)}, (2, 3), "length"),
        ({"max_tokens": 20, "stop": ("cd",), "stop_token_ids": (4,)}, (2, 3), "stop"),
    ],
)
def test_earliest_terminator_inside_a_span_wins(
    sampling: dict[str, object], expected: tuple[int, ...], reason: str
) -> None:
    scheduler = make()
    request = ask("a", 3, **sampling)
    scheduler.add(request, CountingText(request.sampling.stop))
    (first,) = round_of(scheduler, ((2,), 0))
    plan = scheduler.schedule()
    width = plan.scheduled[0].draft_budget + 1
    (last,) = scheduler.update(plan, result(((3, 4, 9, 5, 6, 7, 8, 8)[:width], width - 1)))
    assert first.new_token_ids + last.new_token_ids == expected
    assert last.finish_reason == reason
    assert last.num_accepted == min(width - 1, len(last.new_token_ids))
    assert last.usage is not None
    assert last.usage.num_output_tokens == len(expected)
    assert not scheduler.has_work


def clipped(scheduler: Scheduler) -> int:
    return scheduler.schedule().scheduled[0].draft_budget


def test_drafts_are_clipped_to_what_may_still_be_emitted() -> None:
    for max_tokens, budget in ((2, 0), (3, 1), (8, 6), (9, 7), (10, 7)):
        scheduler = make()
        scheduler.add(ask("a", 3, max_tokens=max_tokens), None)
        round_of(scheduler, ((2,), 0))
        assert clipped(scheduler) == budget


def test_a_request_may_switch_drafts_off() -> None:
    scheduler = make()
    scheduler.add(ask("a", 3, speculation="off"), None)
    round_of(scheduler, ((2,), 0))
    assert clipped(scheduler) == 0


def test_a_stop_id_as_first_token_emits_nothing() -> None:
    scheduler = make()
    scheduler.add(ask("a", 3), None)
    (update,) = round_of(scheduler, ((0,), 0))
    assert (update.new_token_ids, update.finish_reason, update.stop_reason) == ((), FinishReason.STOP, 0)
    scheduler.add(ask("b", 3, ignore_eos=True), None)
    (update,) = round_of(scheduler, ((0,), 0))
    assert (update.new_token_ids, update.finish_reason) == ((0,), None)


def test_ignore_eos_leaves_the_requests_own_stop_ids_alone() -> None:
    scheduler = make()
    scheduler.add(ask("a", 3, ignore_eos=True, stop_token_ids=(5,)), None)
    (update,) = round_of(scheduler, ((5,), 0))
    assert update.finish_reason is FinishReason.STOP


def test_prefill_and_decode_share_a_round() -> None:
    scheduler = make()
    scheduler.add(ask("a", 3), None)
    round_of(scheduler, ((2,), 0))
    scheduler.add(ask("long", 18), None)
    scheduler.add(ask("next", 2), None)
    seen = []
    for _ in range(3):
        plan = scheduler.schedule()
        seen.append([(i.request_id, i.start_position, len(i.query_token_ids), i.wants_logits) for i in plan.scheduled])
        scheduler.update(plan, result(*((((2,) if i.wants_logits else ()), 0) for i in plan.scheduled)))
    assert seen[0] == [("a", 3, 1, True), ("long", 0, 8, False)]
    assert seen[1] == [("a", 4, 1, True), ("long", 8, 8, False)]
    assert seen[2] == [("a", 5, 1, True), ("long", 16, 2, True), ("next", 0, 2, True)]


def test_the_head_of_the_queue_is_not_overtaken() -> None:
    scheduler = make(num_pages=8)
    scheduler.add(ask("a", 4, max_tokens=8), None)
    round_of(scheduler, ((2,), 0))
    scheduler.add(ask("big", 20, max_tokens=8), None)
    scheduler.add(ask("small", 4, max_tokens=4), None)
    assert [item.request_id for item in scheduler.schedule().scheduled] == ["a"]
    scheduler.abort("a")
    assert [item.request_id for item in scheduler.schedule().scheduled] == ["big"]


def test_zero_tokens_take_no_slot_and_duplicate_ids_are_refused() -> None:
    scheduler = make()
    update = scheduler.add(ask("a", 3, max_tokens=0), None)
    assert update is not None
    assert update.finish_reason is FinishReason.LENGTH
    assert not scheduler.has_work
    scheduler.add(ask("b", 3), None)
    with pytest.raises(RequestError, match="request_id='b' is in use"):
        scheduler.add(ask("b", 3), None)
