"""Any history of requests on a real engine, checked after every event against solo plain runs.

Before each round everything that no sequence may read is filled with NaN; after each round the whole device
state of every sequence is compared, bit for bit, with the solo run at the same length, and so is every
proposal of the drafter. Free slots and pages are handed out in a new order each time.

Dims: R cache rows.
"""

import random
from collections import Counter
from collections.abc import Sequence

import torch

from outrider.batch import DraftBlock, ForwardBatch, TargetOutput
from outrider.cache.layout import PagedLayout
from outrider.engine.engine import Engine
from outrider.engine.runner import Runner
from outrider.plan import StepPlan, StepResult
from outrider.request import FinishReason, Request, RequestUpdate, SamplingParams
from outrider.scheduling.scheduler import Scheduler
from outrider.scheduling.sequence import Sequence as RequestSequence
from outrider.scheduling.sequence import SequenceStatus
from outrider.speculative.drafter import Anchors, DSparkDrafter, ObservedSpans
from outrider.testing.scripted import ScriptedDrafter
from outrider.testing.solo import HistoryLimits, Solo, Toy, build_parts

__all__ = ["REAL", "CheckedDrafter", "DeviceFault", "History"]

RUNNING = SequenceStatus.RUNNING
REAL = -1  # in place of an accept count: what the drafter itself proposes


class DeviceFault(Exception):
    """What a history lets the device do."""


class CheckedDrafter(ScriptedDrafter):
    """A DSpark drafter whose proposals are checked, and then replaced by some that are accepted as asked.

    Attributes:
        accept_counts: for the i-th sequence that drafts, taken in turn: how many right drafts to give before a
            wrong one, or REAL.
        poisoned: whether the wrong ones are the token with the NaN embedding.
        fault_in: name of the method that raises DeviceFault, or None.
    """

    def __init__(self, toy: Toy, inner: DSparkDrafter) -> None:
        super().__init__(inner.num_draft_tokens, self._unused)
        self.aux_layer_ids = inner.aux_layer_ids
        self.inner = inner
        self._toy = toy
        self.accept_counts: tuple[int, ...] = (0,)
        self.poisoned = False
        self.fault_in: str | None = None
        self._expected: dict[int, int] = {}  # slot -> accepted drafts if all of them are verified

    def propose(self, anchors: Anchors) -> DraftBlock:
        """Compare with the solo proposals, then give drafts by ``accept_counts``."""
        self._may_fault("propose")
        block = self.inner.propose(anchors)
        assert block is not None
        proposed = block.token_ids_SG.tolist()
        rows = []
        for index, (slot, position) in enumerate(zip(anchors.slots, anchors.positions, strict=True)):
            self._check_continues(slot, position)
            solo = self._toy.solo(self._token_ids[slot])
            assert proposed[index] == solo.proposals[position], (
                f"slot {slot}, position {position}: the drafter proposes {proposed[index]}, "
                f"alone it proposes {solo.proposals[position]}"
            )
            count = self.accept_counts[index % len(self.accept_counts)]
            rows.append(proposed[index] if count == REAL else self._drafts(solo, position, count))
            right = solo.token_ids[position + 1 :]
            agrees = [draft == token_id for draft, token_id in zip(rows[-1], right, strict=False)]
            self._expected[slot] = (*agrees, False).index(False)
        return DraftBlock(token_ids_SG=torch.tensor(rows, dtype=torch.int64), confidence_SG=None)

    def observe(self, batch: ForwardBatch, output: TargetOutput, spans: ObservedSpans) -> None:
        """Check the accept counts, then take in the committed rows."""
        for slot, committed, length in zip(spans.step_slots, spans.step_committed, batch.step.lengths, strict=True):
            expected = 1 + min(self._expected.get(slot, 0), length - 1)
            assert committed == expected, f"slot {slot}: {committed} rows of {length} committed, not {expected}"
        super().observe(batch, output, spans)
        self.inner.observe(batch, output, spans)
        self._may_fault("observe")

    def reset(self, slots: Sequence[int]) -> None:
        """See Drafter."""
        self._may_fault("reset")
        super().reset(slots)
        self.inner.reset(slots)

    def release(self, slots: Sequence[int]) -> None:
        """See Drafter."""
        super().release(slots)
        self.inner.release(slots)

    def snapshot(self, slot: int, rows_R: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """See Drafter."""
        self._may_fault("snapshot")
        return (*super().snapshot(slot, rows_R), *self.inner.snapshot(slot, rows_R))

    def restore(self, slot: int, rows_R: torch.Tensor, snapshot: tuple[torch.Tensor, ...]) -> None:
        """See Drafter."""
        self._may_fault("restore")
        token_ids, *inner = snapshot
        self._token_ids[slot] = token_ids.tolist()
        self.inner.restore(slot, rows_R, tuple(inner))

    def _drafts(self, solo: Solo, position: int, num_right: int) -> list[int]:
        right = solo.token_ids[position + 1 : position + 1 + self.num_draft_tokens]
        drafts = [*right, *[0] * (self.num_draft_tokens - len(right))]
        if num_right < len(drafts):
            wrong = (drafts[num_right] + 1) % self._toy.target.vocab_size
            drafts[num_right] = self._toy.poison_id if self.poisoned else wrong
        return drafts

    def _may_fault(self, where: str) -> None:
        if self.fault_in == where:
            raise DeviceFault(where)

    @staticmethod
    def _unused(token_ids: tuple[int, ...], count: int) -> Sequence[int]:
        raise AssertionError("propose is overridden")


class PoisoningRunner:
    """Between engine and runner: fills with NaN what the plan's sequences may not read."""

    def __init__(self, runner: Runner, scheduler: Scheduler, drafter: CheckedDrafter, page_size: int) -> None:
        self._runner, self._scheduler, self._drafter = runner, scheduler, drafter
        self._page_size = page_size
        self.plans: list[StepPlan] = []

    def run(self, plan: StepPlan) -> StepResult:
        """See PlanRunner."""
        self.plans.append(plan)
        entering = {
            item.request_id for item in plan.scheduled if item.is_first or item.is_resumed or item.shared_prompt
        }
        slots, rows = set[int](), set[int]()
        for sequence in self._scheduler.sequences:
            if is_on_device(sequence) and sequence.request.request_id not in entering:
                slots.add(sequence.state_slot)
                rows.update(cache_rows(sequence.page_ids, sequence.num_computed_tokens, self._page_size))
        for item in plan.preempted:
            slots.add(item.state_slot)
            rows.update(cache_rows(item.page_ids, item.num_tokens, self._page_size))
        self._poison(slots, rows)
        return self._runner.run(plan)

    def _poison(self, kept_slots: set[int], kept_rows: set[int]) -> None:
        latents, recurrent = self._runner.caches.latents, self._runner.caches.recurrent
        recurrent.poison([slot for slot in range(recurrent.num_slots) if slot not in kept_slots])
        num_rows = latents.num_pages * latents.page_size
        stale_R = torch.tensor([row for row in range(num_rows) if row not in kept_rows], dtype=torch.int64)
        latents.restore(stale_R, torch.full_like(latents.snapshot(stale_R), torch.nan))
        self._drafter.inner._context.rows_2LRJK.index_fill_(2, stale_R, torch.nan)
        self._poison_rings(kept_slots)

    def _poison_rings(self, kept_slots: set[int]) -> None:
        drafter = self._drafter.inner
        ring_BRW = drafter._ring_BRW
        stale_BR = torch.ones(ring_BRW.shape[:2], dtype=torch.bool)
        for slot in kept_slots:
            waiting = range(drafter.stored_tokens(slot), drafter.observed_tokens(slot))
            stale_BR[slot, [position % ring_BRW.shape[1] for position in waiting]] = False
        ring_BRW[stale_BR] = torch.nan


class History:
    """One engine on its way through events, and what its requests must come to.

    All methods may be called in any order, with any unfinished request. AssertionError and EngineFault tell of a
    difference to the solo runs or of broken books.

    Args:
        toy: models and solo runs.
        limits: budgets.
        seed: of the order in which slots and pages are handed out.

    Attributes:
        seen: how often something worth seeing happened; a test of histories asks whether it did.
    """

    def __init__(self, toy: Toy, limits: HistoryLimits, seed: int) -> None:
        self.toy, self.limits = toy, limits
        self._dice = random.Random(seed)
        inner = DSparkDrafter(toy.predictor, num_cache_rows=limits.num_pages * limits.page_size)
        self.drafter = CheckedDrafter(toy, inner)
        self.runner, self.scheduler = build_parts(toy, self.drafter, limits)
        self._poisoning = PoisoningRunner(self.runner, self.scheduler, self.drafter, limits.page_size)
        self.engine = Engine(self._poisoning, self.scheduler, vocab_size=toy.target.vocab_size)
        self.asked: dict[str, Request] = {}
        self.emitted: dict[str, tuple[int, ...]] = {}
        self.finished: dict[str, FinishReason] = {}
        self.seen: Counter[str] = Counter()
        self._forced: set[str] = set()  # preempted since the last round
        self._num_shared = 0  # prompts that several samples were asked for
        self._broken = False  # a round did not come to its end

    @property
    def unfinished(self) -> list[str]:
        """Requests that wait, run, or are preempted."""
        return [name for name in self.asked if name not in self.finished]

    def submit_samples(self, prompt: tuple[int, ...], sampling: SamplingParams, count: int) -> None:
        """Ask for several samples of a prompt, which share the work on it."""
        self._num_shared += 1
        for _ in range(count):
            self.submit(prompt, sampling, prompt_id=f"p{self._num_shared}")

    def submit(self, prompt: tuple[int, ...], sampling: SamplingParams, prompt_id: str | None = None) -> str:
        """Ask for one more continuation; raises RequestError if it can never fit."""
        name = f"r{len(self.asked)}"
        request = Request(request_id=name, prompt_token_ids=prompt, sampling=sampling, prompt_id=prompt_id)
        update = self.engine.submit(request)
        self.asked[name], self.emitted[name] = request, ()
        self._take([] if update is None else [update])
        return name

    def round(self, accept_counts: tuple[int, ...], *, poisoned: bool = False, fault_in: str | None = None) -> None:
        """One round, in which the device may fault."""
        if not self.engine.has_work:
            assert self.engine.step() == []
            return
        self._broken = True
        self.scheduler.shuffle_seats(self._dice)
        self.drafter.accept_counts, self.drafter.poisoned, self.drafter.fault_in = accept_counts, poisoned, fault_in
        updates = self.engine.step()
        self._take(updates)
        self._look(updates)
        self.drafter.fault_in = None
        failed = [update for update in updates if update.finish_reason is FinishReason.ERROR]
        assert all(update.error == f"DeviceFault: {fault_in}" for update in failed), failed
        if not failed:
            self._check_copies()
        self._check_device()
        self._broken = False

    def abort(self, name: str) -> None:
        """Give an unfinished request up."""
        self.seen["aborted while preempted"] += any(
            s.request.request_id == name and s.status is SequenceStatus.PREEMPTED for s in self.scheduler.sequences
        )
        update = self.engine.abort(name)
        assert update is not None and update.finish_reason is FinishReason.ABORT
        self._take([update])
        assert self.engine.abort(name) is None

    def preempt(self, name: str) -> None:
        """Take the seat of a request, if it has one."""
        had_seat = name in {s.request.request_id for s in self.scheduler.sequences if s.status is RUNNING}
        assert self.engine.preempt(name) == had_seat
        assert not self.engine.preempt(name)
        self._forced.add(name)

    def finish(self, *, abort: bool) -> None:
        """Abort what is left, or run it dry with all drafts right; then nothing may be held anywhere.

        Does nothing after a round that failed, so as not to hide its failure behind another.
        """
        if self._broken:
            return
        limits = self.limits
        for name in self.unfinished if abort else ():
            self.abort(name)
        num_rounds = sum(len(request.prompt_token_ids) for request in self.asked.values())
        for _ in range(num_rounds + self.toy.max_model_len * (1 + len(self.asked))):
            if self.engine.has_work:
                self.round((limits.num_draft_tokens,))
        assert not self.engine.has_work, f"starved: {self.unfinished}"
        assert not self.unfinished
        self.check_books()
        assert self.scheduler.num_free_pages == limits.num_pages
        assert self.scheduler.num_free_slots == limits.max_num_seqs
        self.runner.run(self.scheduler.schedule())
        assert not self.drafter.occupied_slots, "a slot was not released"
        assert not self.runner.host_bytes, "a host copy was not dropped"
        assert not self.runner.prompt_bytes, "a copy of a prompt was not dropped"

    def check_books(self) -> None:
        """Each page and slot has one owner or is free; nobody who left holds any; the order of arrival is kept."""
        sequences = self.scheduler.sequences
        assert [s.request.request_id for s in sequences] == self.unfinished
        running = [s for s in sequences if s.status is RUNNING]
        page_ids = [page_id for s in running for page_id in s.page_ids]
        assert len(set(page_ids)) == len(page_ids), "a page has two owners"
        assert len(page_ids) == self.limits.num_pages - self.scheduler.num_free_pages, "a page leaked"
        slots = {s.state_slot for s in running}
        assert len(slots) == len(running), "a slot has two owners"
        assert len(slots) == self.limits.max_num_seqs - self.scheduler.num_free_slots, "a slot leaked"
        assert all(s.page_ids == () and s.state_slot == -1 for s in sequences if s.status is not RUNNING)
        admitted = [s.status is not SequenceStatus.WAITING for s in sequences]
        assert admitted == sorted(admitted, reverse=True), "somebody was overtaken"
        assert sum(admitted) <= self.limits.max_num_seqs
        for s in running:
            assert s.in_prompt or len(s.token_ids) == s.num_computed_tokens + 1

    def _look(self, updates: list[RequestUpdate]) -> None:
        plan, metrics = self._poisoning.plans[-1], self.engine.metrics
        for item in plan.preempted:
            self.seen["preempted by force" if item.request_id in self._forced else "preempted for pages"] += 1
        self._forced.clear()
        self.seen["resumed"] += sum(item.is_resumed for item in plan.scheduled)
        self.seen["prompts copied"] += len(plan.shared_prompts)
        self.seen["prompts taken over"] += sum(item.shared_prompt is not None for item in plan.scheduled)
        self.seen["cut prompts"] += sum(item.is_prompt and not item.wants_logits for item in plan.scheduled)
        self.seen["split rounds"] = metrics.num_steps - metrics.num_rounds
        self.seen["rejected drafts"] = metrics.num_drafted - metrics.num_accepted
        self.seen["stops"] += sum(update.finish_reason is FinishReason.STOP for update in updates)
        if any(update.finish_reason is FinishReason.ERROR for update in updates):
            self.seen[f"fault in {self.drafter.fault_in}"] += 1

    def _take(self, updates: list[RequestUpdate]) -> None:
        for update in updates:
            name = update.request_id
            assert name not in self.finished, f"{name}: an update after the end"
            self.emitted[name] += update.new_token_ids
            request = self.asked[name]
            expected, reason = self.toy.solo(request.prompt_token_ids).expected(
                request.sampling, self.toy.max_model_len
            )
            differs = f"{name}: the stream {self.emitted[name]} differs from the solo run, {expected}"
            if update.finish_reason is None:
                assert self.emitted[name] == expected[: len(self.emitted[name])], differs
                continue
            self.finished[name] = update.finish_reason
            assert update.usage is not None
            assert update.usage.num_output_tokens == len(self.emitted[name])
            if update.finish_reason in (FinishReason.ABORT, FinishReason.ERROR):
                assert self.emitted[name] == expected[: len(self.emitted[name])], differs
            else:
                assert (self.emitted[name], update.finish_reason) == (expected, reason), differs

    def _check_device(self) -> None:
        """The caches and the drafter hold what the solo run had at the same length."""
        caches, context = self.runner.caches, self.drafter.inner._context
        for sequence in self.scheduler.sequences:
            if not is_on_device(sequence):
                continue
            name, slot, length = sequence.request.request_id, sequence.state_slot, sequence.num_computed_tokens
            solo = self.toy.solo(sequence.token_ids)
            rows_R = torch.tensor(cache_rows(sequence.page_ids, length, self.limits.page_size))
            ours, theirs = caches.snapshot(slot, rows_R), solo.recurrent[length]
            num_stored = self.drafter.inner.stored_tokens(slot)  # the taps of the others wait
            for what, mine, alone in (
                ("KDA state", ours.recurrent.state_LHVK, theirs.state_LHVK),
                ("conv window", ours.recurrent.window_LWD, theirs.window_LWD),
                ("latents", ours.latents_LRC, solo.latents_LRC[:, :length]),
                (
                    "drafter context",
                    context.rows_2LRJK.index_select(2, rows_R[:num_stored]),
                    solo.context_2LRJK[:, :, :num_stored],
                ),
            ):
                assert torch.equal(mine, alone), f"{name}: {what} after {length} tokens differs from the solo run"
            assert self.drafter.inner.observed_tokens(slot) == length

    def _check_copies(self) -> None:
        """Exactly the preempted sequences, and prompts that samples wait for, have a copy of the documented size."""
        recurrent = self.runner.caches.recurrent.snapshot(0).num_bytes
        per_token = sum(
            layout.bytes_per_token for layout in self.toy.target.cache_layouts if isinstance(layout, PagedLayout)
        )
        per_token += self.drafter.inner._context.rows_2LRJK[:, :, 0].nbytes + 8  # 8: the script's token id
        expected = {
            s.request.request_id: recurrent + s.num_computed_tokens * per_token
            for s in self.scheduler.sequences
            if s.on_host
        }
        assert self.runner.host_bytes == expected, f"host copies {self.runner.host_bytes}, not {expected}"
        prompts = {name: recurrent + length * per_token for name, length in self.scheduler.copied_prompts.items()}
        assert self.runner.prompt_bytes == prompts, f"copies of prompts {self.runner.prompt_bytes}, not {prompts}"
        assert len(prompts) <= self.limits.max_num_seqs


def is_on_device(sequence: RequestSequence) -> bool:
    """Whether slot and pages of a sequence hold its state."""
    return sequence.status is RUNNING and sequence.num_computed_tokens > 0 and not sequence.on_host


def cache_rows(page_ids: Sequence[int], num_tokens: int, page_size: int) -> list[int]:
    """Flat cache rows of positions ``0..num_tokens-1``."""
    return [page_ids[p // page_size] * page_size + p % page_size for p in range(num_tokens)]
