"""From requests to plans, and from results to updates: the only place where a verdict is written.

First come, first served: the head of the waiting queue is admitted when its whole life fits (pages
for prompt and ``max_tokens``, one recurrent slot), and nobody overtakes it. Each round carries every
running decode plus up to ``max_prefill_tokens`` prompt tokens, oldest prompt first, so neither kind
of work can starve the other.

With ``oversubscribe`` a sequence is admitted on the pages it needs now and takes more as it grows. When
they run out the youngest running sequence is preempted: its state goes to the host, its seat to the
others. Preempted sequences come back in order of arrival, before anybody is admitted, so running and
preempted ones together never exceed ``max_num_seqs``, and the oldest is never preempted for pages.
"""

from bisect import insort
from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from random import Random

from outrider.config import CacheConfig, SchedulerConfig
from outrider.errors import RequestError
from outrider.plan import ScheduledSequence, SequenceChoice, StepPlan, StepResult
from outrider.request import FinishReason, Request, RequestUpdate
from outrider.scheduling.admission import num_pages_for, resolve_max_new_tokens
from outrider.scheduling.cut import Cut, append_until_end
from outrider.scheduling.drafting import Drafting
from outrider.scheduling.seats import Seats
from outrider.scheduling.sequence import Sequence, SequenceStatus, StopText
from outrider.scheduling.sharing import PromptSharing

__all__ = ["Scheduler"]


class Scheduler:
    """Owns all sequences, page ids and slot ids.

    Args:
        config: row, token and seat budgets.
        cache: page size and number of pages.
        num_draft_tokens: drafts per round at most; 0 = plain decoding.
        drafter_context: tokens of context behind which nothing is drafted; None = everywhere.
        eos_token_ids: ids that end a request unless it sets ``ignore_eos``.
        vocab_size: an output id that is not below it marks logits that are not finite.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        cache: CacheConfig,
        *,
        num_draft_tokens: int,
        eos_token_ids: frozenset[int],
        vocab_size: int,
        drafter_context: int | None = None,
    ) -> None:
        self._config = config
        self._cache = cache
        self._drafting = Drafting(num_draft_tokens=num_draft_tokens, drafter_context=drafter_context)
        self._eos_token_ids = eos_token_ids
        self._vocab_size = vocab_size
        self._seats = Seats(config.max_num_seqs, cache)
        self._sharing = PromptSharing(config.chunk_multiple, max_copies=config.max_num_seqs)
        self._unfinished: dict[str, Sequence] = {}  # in order of arrival
        self._waiting: deque[Sequence] = deque()
        self._running: dict[str, Sequence] = {}  # in order of arrival
        self._preempted: list[Sequence] = []  # in order of arrival
        self._num_plans = self._num_arrivals = 0

    @property
    def has_work(self) -> bool:
        """Whether any request is waiting or running."""
        return bool(self._unfinished)

    @property
    def num_waiting(self) -> int:
        """Requests that were never admitted."""
        return len(self._waiting)

    @property
    def num_preempted(self) -> int:
        """Admitted requests without pages and slot."""
        return len(self._preempted)

    @property
    def num_running(self) -> int:
        """Requests with pages and slot."""
        return len(self._running)

    @property
    def num_free_pages(self) -> int:
        """Pages without an owner."""
        return self._seats.pages.num_free

    @property
    def num_free_slots(self) -> int:
        """Slots without an owner."""
        return self._seats.slots.num_free

    @property
    def request_ids(self) -> tuple[str, ...]:
        """Unfinished requests, in order of arrival."""
        return tuple(self._unfinished)

    @property
    def sequences(self) -> tuple[Sequence, ...]:
        """Unfinished sequences, in order of arrival, for inspection."""
        return tuple(self._unfinished.values())

    @property
    def copied_prompts(self) -> dict[str, int]:
        """Prompts whose copy waits on the host for further samples, and the tokens of each."""
        return self._sharing.copied_prompts

    def shuffle_seats(self, dice: Random) -> None:
        """Hand out free slots and pages in another order from now on, on which nothing may depend."""
        self._seats.slots.shuffle(dice)
        self._seats.pages.shuffle(dice)

    def add(self, request: Request, text: StopText | None) -> RequestUpdate | None:
        """Queue a request; ``max_tokens=0`` finishes at once, without a slot.

        Raises:
            RequestError: the request id is in use, or the request can never run here.
        """
        if request.request_id in self._unfinished:
            raise RequestError(f"request_id={request.request_id!r} is in use; choose another")
        self._drafting.check(request.sampling.speculation)
        eos = frozenset() if request.sampling.ignore_eos else self._eos_token_ids
        sequence = Sequence(
            request=request,
            max_new_tokens=resolve_max_new_tokens(request, self._config, self._cache),
            stop_token_ids=eos | frozenset(request.sampling.stop_token_ids),
            text=text,
            token_ids=list(request.prompt_token_ids),
            arrival=self._num_arrivals,
        )
        if request.sampling.min_tokens and len(sequence.stop_token_ids) >= self._vocab_size:
            raise RequestError(
                f"every token of the vocabulary of {self._vocab_size} is a stop id, so "
                f"min_tokens={request.sampling.min_tokens} leaves none; use 0 or fewer stop ids"
            )
        if sequence.max_new_tokens == 0:
            return self._finish(sequence, FinishReason.LENGTH, Cut())
        self._sharing.join(sequence)
        self._num_arrivals += 1
        self._unfinished[request.request_id] = sequence
        self._waiting.append(sequence)
        return None

    def abort(self, request_id: str) -> RequestUpdate | None:
        """End a request wherever it is, between rounds; None when there is no such request."""
        return self._end(request_id, FinishReason.ABORT, None)

    def fail(self, request_ids: Iterable[str], error: str) -> list[RequestUpdate]:
        """End those of the requests that are unfinished, because a fault touched them."""
        updates = [self._end(request_id, FinishReason.ERROR, error) for request_id in request_ids]
        return [update for update in updates if update is not None]

    def fail_round(self, plan: StepPlan, error: str) -> list[RequestUpdate]:
        """End every request that a faulted round touched: those with rows and those it was to copy out."""
        self._seats.clear_after(plan)
        self._sharing.clear_after(plan.shared_prompts, plan.spent_prompts)
        with_rows = [item.request_id for item in plan.scheduled]
        return self.fail([*with_rows, *(item.request_id for item in plan.preempted)], error)

    def preempt(self, request_id: str) -> bool:
        """Take its seat from a running request, between rounds; False when it has none.

        It comes back before any request is admitted: with the plan after next, or with the next one if
        nothing else runs. Its output does not change.
        """
        sequence = self._running.pop(request_id, None)
        if sequence is None:
            return False
        self._seats.preempt(sequence)
        sequence.status = SequenceStatus.PREEMPTED
        insort(self._preempted, sequence, key=lambda item: item.arrival)
        return True

    def schedule(self) -> StepPlan:
        """Plan the next round: rows of running sequences first, then admit, then drafts, then prompt chunks."""
        if self._config.oversubscribe:  # otherwise who runs has the pages of its whole life
            self._reserve_next_rows()
        if self._preempted or self._waiting:
            self._admit()
        shared_prompts = self._sharing.new_copies()
        decodes, in_prompt = [], []
        for sequence in self._running.values():
            if sequence.num_computed_tokens < sequence.num_prompt_tokens:
                in_prompt.append(sequence)
            else:
                decodes.append(self._decode_span(sequence))
        scheduled = (*decodes, *self._prompt_chunks(in_prompt)) if in_prompt else tuple(decodes)
        news = self._seats.take_news()
        plan = StepPlan(
            step_id=self._num_plans,
            scheduled=scheduled,
            released_slots=news.released_slots,
            preempted=news.preempted,
            dropped_copies=news.dropped_copies,
            shared_prompts=shared_prompts,
            spent_prompts=self._sharing.spent_copies(),
        )
        self._num_plans += 1
        return plan

    def update(self, plan: StepPlan, result: StepResult) -> list[RequestUpdate]:
        """Write the outcome of a round into the sequences; one update per sequence with tokens."""
        logprobs = result.logprobs or (None,) * len(plan.scheduled)
        outcomes = zip(
            plan.scheduled, result.output_token_ids, result.num_drafted, result.num_accepted, logprobs, strict=True
        )
        updates: list[RequestUpdate] = []
        for item, output_token_ids, num_drafted, num_accepted, token_logprobs in outcomes:
            sequence = self._running.get(item.request_id)
            if sequence is None:  # ended between the run and this call
                continue
            if item.is_prompt:
                sequence.num_computed_tokens += len(item.query_token_ids)
            else:
                assert len(output_token_ids) == num_accepted + 1 <= num_drafted + 1 <= item.draft_budget + 1, (
                    f"{item.request_id}: {output_token_ids} for {num_accepted} accepted of {num_drafted} drafts"
                )
                sequence.num_computed_tokens += num_accepted + 1
                sequence.num_rounds += 1
                sequence.num_drafted += num_drafted
            if item.wants_logits:
                update = self._emit(sequence, output_token_ids, num_drafted, num_accepted)
                if token_logprobs is not None:  # cut where the tokens are cut
                    update = replace(update, logprobs=token_logprobs[: len(update.new_token_ids)])
                updates.append(update)
        return updates

    def _reserve_next_rows(self) -> None:
        """A page for the next row of every running sequence, oldest first; the youngest give way."""
        for sequence in list(self._running.values()):
            num_tokens = sequence.num_computed_tokens + 1
            while sequence.status is SequenceStatus.RUNNING and self._seats.grow(sequence, num_tokens) < num_tokens:
                self.preempt(next(reversed(self._running)))

    def _admit(self) -> None:
        while (self._preempted or self._waiting) and self._seats.slots.num_free:
            sequence = self._preempted[0] if self._preempted else self._waiting[0]
            if self._seats.is_leaving(sequence) and self._running:
                return  # to come back with the plan that copies it out would gain nothing
            num_pages = self._num_entry_pages(sequence)
            if num_pages + self._num_headroom_pages() > self._seats.pages.num_free:
                return
            self._seats.take(sequence, num_pages)
            self._running[sequence.request.request_id] = sequence
            if sequence.status is SequenceStatus.PREEMPTED:
                del self._preempted[0]
                self._running = dict(sorted(self._running.items(), key=lambda item: item[1].arrival))
            else:
                self._waiting.popleft()
            sequence.status = SequenceStatus.RUNNING

    def _num_life_pages(self, sequence: Sequence) -> int:
        """Pages that a sequence can need at most."""
        return num_pages_for(sequence.num_prompt_tokens + sequence.max_new_tokens, self._cache.page_size)

    def _num_entry_pages(self, sequence: Sequence) -> int:
        if not self._config.oversubscribe:
            return self._num_life_pages(sequence)
        return num_pages_for(max(sequence.num_prompt_tokens, sequence.num_computed_tokens + 1), self._cache.page_size)

    def _num_headroom_pages(self) -> int:
        """A page for each running sequence that may grow, or whoever enters would be preempted at once."""
        return sum(len(s.page_ids) < self._num_life_pages(s) for s in self._running.values())

    def _decode_span(self, sequence: Sequence) -> ScheduledSequence:
        # More drafts than tokens that may still follow the final one could never be emitted. Nor are drafts
        # worth a seat: they take free pages, and are clipped to those.
        request, start = sequence.request, sequence.num_computed_tokens
        num_drafts = self._drafting.num_wanted(request.sampling.speculation, start + 1)
        if num_drafts:
            num_drafts = min(num_drafts, sequence.max_new_tokens - sequence.num_output_tokens - 1)
            num_drafts = min(num_drafts, self._seats.grow(sequence, start + 1 + num_drafts) - (start + 1))
        resumed, sequence.on_host = sequence.on_host, False  # this plan copies it in
        return ScheduledSequence(
            request_id=request.request_id,
            state_slot=sequence.state_slot,
            page_ids=sequence.page_ids,
            start_position=start,
            query_token_ids=(sequence.token_ids[-1],),
            draft_budget=num_drafts,
            is_prompt=False,
            wants_logits=True,
            is_first=False,
            is_resumed=resumed,
            choice=None if sequence.takes_argmax else _choice(sequence),
            speculation=request.sampling.speculation,
        )

    def _prompt_chunks(self, in_prompt: list[Sequence]) -> list[ScheduledSequence]:
        chunks = []
        budget = self._config.max_prefill_tokens
        for sequence in in_prompt:
            shared = self._sharing.start(sequence)
            if shared is None:  # an older sample computes the prompt
                continue
            start = shared.begin
            length = self._chunk_length(shared.end - start, budget)
            if length == 0:
                break
            budget -= length
            sequence.num_computed_tokens = start
            is_last = start + length == sequence.num_prompt_tokens
            resumed, sequence.on_host = sequence.on_host, False
            chunks.append(
                ScheduledSequence(
                    request_id=sequence.request.request_id,
                    state_slot=sequence.state_slot,
                    page_ids=sequence.page_ids,
                    start_position=start,
                    query_token_ids=tuple(sequence.token_ids[start : start + length]),
                    draft_budget=0,
                    is_prompt=True,
                    wants_logits=is_last,
                    is_first=start == 0,
                    is_resumed=resumed,
                    shared_prompt=shared.copy,
                    choice=_choice(sequence) if is_last and not sequence.takes_argmax else None,
                )
            )
        return chunks

    def _chunk_length(self, num_left: int, budget: int) -> int:
        limit = min(budget, self._config.max_step_rows)
        if num_left <= limit:
            return num_left
        # Cutting a prompt anywhere else than at a multiple of the KDA chunk would change its bits.
        return limit - limit % self._config.chunk_multiple

    def _emit(
        self, sequence: Sequence, output_token_ids: tuple[int, ...], num_drafted: int, num_accepted: int
    ) -> RequestUpdate:
        cut = append_until_end(sequence, output_token_ids, self._vocab_size)
        num_accepted = min(num_accepted, len(cut.token_ids))
        sequence.num_accepted += num_accepted
        if cut.reason is not None:
            last = self._finish(sequence, cut.reason, cut)
            return replace(last, num_drafted=num_drafted, num_accepted=num_accepted)
        assert len(sequence.token_ids) - sequence.num_computed_tokens == 1, (
            f"{sequence.request.request_id}: {len(sequence.token_ids)} tokens, "
            f"{sequence.num_computed_tokens} computed; exactly the anchor must be pending"
        )
        return RequestUpdate(
            request_id=sequence.request.request_id,
            new_token_ids=cut.token_ids,
            new_text=cut.text,
            num_drafted=num_drafted,
            num_accepted=num_accepted,
            sample_index=sequence.request.sample_index,
        )

    def _end(self, request_id: str, reason: FinishReason, error: str | None) -> RequestUpdate | None:
        sequence = self._unfinished.get(request_id)
        if sequence is None:
            return None
        if sequence.status is SequenceStatus.WAITING:
            self._waiting.remove(sequence)
        elif sequence.status is SequenceStatus.PREEMPTED:
            self._preempted.remove(sequence)
        return self._finish(sequence, reason, Cut(error=error))

    def _finish(self, sequence: Sequence, reason: FinishReason, cut: Cut) -> RequestUpdate:
        """Give everything back, once, and write the last update."""
        assert sequence.status is not SequenceStatus.FINISHED, f"{sequence.request.request_id} ended twice"
        self._seats.end(sequence)
        self._sharing.leave(sequence)
        sequence.status = SequenceStatus.FINISHED
        self._unfinished.pop(sequence.request.request_id, None)
        self._running.pop(sequence.request.request_id, None)
        held_text = ""
        if sequence.text is not None and reason in (FinishReason.STOP, FinishReason.LENGTH):
            held_text = sequence.text.flush()
        return RequestUpdate(
            request_id=sequence.request.request_id,
            new_token_ids=cut.token_ids,
            new_text=cut.text + held_text,
            finish_reason=reason,
            stop_reason=cut.stop_reason,
            error=cut.error,
            usage=sequence.usage(),
            seed=sequence.request.sampling.seed,
            sample_index=sequence.request.sample_index,
        )


def _choice(sequence: Sequence) -> SequenceChoice:
    """How the tokens of a sequence are chosen that does not just take the argmax."""
    sampling = sequence.request.sampling
    return SequenceChoice(
        params=sampling,
        sample_index=sequence.request.sample_index,
        num_prompt_tokens=sequence.num_prompt_tokens,
        stop_token_ids=sequence.stop_token_ids,
        history=tuple(sequence.token_ids) if sampling.counts_tokens else (),
    )
