"""What rounds cost here, measured on warm rounds before serving.

Random sequences run in the seats of an idle engine: prompts, then decode rounds of the sizes that will run, each
several times. Their drafts are random tokens, because real ones are different tokens too and a mixture of experts
reads more weights the more different tokens a step has; what a drafter proposes after random text may be all the
same. Nothing of it stays: seats are reset when a sequence takes them.
"""

import random
import statistics
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field, replace
from time import perf_counter

import torch

from outrider.batch import DraftBlock, ForwardBatch, TargetOutput
from outrider.config import EngineConfig
from outrider.engine.runner import Runner
from outrider.plan import ScheduledSequence, SpeculationReport, StepPlan
from outrider.scheduling.admission import num_pages_for
from outrider.speculative.cost import RoundCosts
from outrider.speculative.drafter import Anchors, Drafter, ObservedSpans
from outrider.speculative.lengths import NOBODY, Foresee, RoundRecord, unforeseen

__all__ = ["profile_rounds"]

PROMPT, LONG_PROMPT = 32, 1024  # tokens
REPEATS = 4  # of every shape; the first finds cold caches
WEIGHT = 2.0  # measurements while serving that weigh as much as a profiled shape: it is of another moment
LIMIT_S = 3.0


class _RandomDrafts:
    """A drafter whose proposals are replaced by random tokens; the work is done all the same."""

    def __init__(self, drafter: Drafter, vocab_size: int) -> None:
        self._drafter, self._vocab_size = drafter, vocab_size
        self.num_draft_tokens = drafter.num_draft_tokens
        self.aux_layer_ids, self.aux_hidden_stream = drafter.aux_layer_ids, drafter.aux_hidden_stream

    @property
    def lapsed(self) -> Set[int]:
        return self._drafter.lapsed

    def lapse(self, slots: Sequence[int]) -> None:
        self._drafter.lapse(slots)

    def foresee(self, item: ScheduledSequence) -> Sequence[float] | None:
        return self._drafter.foresee(item)

    def propose(self, anchors: Anchors) -> DraftBlock | None:
        block = self._drafter.propose(anchors)
        if block is None:
            return None
        return replace(block, token_ids_SG=torch.randint_like(block.token_ids_SG, self._vocab_size))

    def observe(self, batch: ForwardBatch, output: TargetOutput, spans: ObservedSpans) -> None:
        self._drafter.observe(batch, output, spans)

    def reset(self, slots: Sequence[int]) -> None:
        self._drafter.reset(slots)

    def release(self, slots: Sequence[int]) -> None:
        self._drafter.release(slots)

    def snapshot(self, slot: int, rows_R: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self._drafter.snapshot(slot, rows_R)

    def restore(self, slot: int, rows_R: torch.Tensor, snapshot: tuple[torch.Tensor, ...]) -> None:
        self._drafter.restore(slot, rows_R, snapshot)


class _Scripted:
    """Verifies a given number of drafts in all, spread evenly; with 0 nobody proposes."""

    reads_confidence = True  # as in serving

    def __init__(self, num_drafts: int) -> None:
        self._num_drafts = num_drafts

    def gives_up(self, item: ScheduledSequence, num_sequences: int) -> bool:
        return False

    def proposing(
        self,
        scheduled: Sequence[ScheduledSequence],
        foresee: Foresee = unforeseen,
        lapsed: Set[int] = NOBODY,
    ) -> list[int]:
        return list(range(len(scheduled))) if self._num_drafts else []

    def choose(
        self,
        scheduled: Sequence[ScheduledSequence],
        proposing: Sequence[int],
        num_proposed: int,
        confidence_SG: Sequence[Sequence[float]] | None,
        read: Set[int] = NOBODY,
    ) -> tuple[int, ...]:
        share, rest = divmod(self._num_drafts, len(scheduled))
        return tuple(share + (index < rest) for index in range(len(scheduled)))

    def observe(self, record: RoundRecord) -> None:
        pass

    def report(self) -> SpeculationReport | None:
        return None


@dataclass(slots=True, kw_only=True)
class _Seated:
    """A scratch sequence."""

    slot: int
    page_ids: tuple[int, ...]
    num_tokens: int  # in the caches


@dataclass(slots=True)
class _Measured:
    """Seconds and mean context of every round, by the counts of its shape and whether its context was the long one."""

    step: dict[tuple[tuple[int, ...], bool], list[tuple[float, float]]] = field(default_factory=dict)
    propose: dict[tuple[tuple[int, ...], bool], list[tuple[float, float]]] = field(default_factory=dict)

    def costs(self) -> RoundCosts:
        """The lower quartile of each shape: on a shared host some rounds are far slower than others, none is faster."""
        costs = RoundCosts()
        for cost, rounds in ((costs.step, self.step), (costs.propose, self.propose)):
            for (counts, _), seen in rounds.items():
                seconds, contexts = zip(*seen, strict=True)
                cost.put(counts, sorted(seconds)[len(seen) // 4], statistics.fmean(contexts), WEIGHT)
            if rounds:
                cost.refit()
        costs.is_profiled = costs.step.is_known and costs.propose.is_known
        return costs


def profile_rounds(runner: Runner, config: EngineConfig, vocab_size: int, *, limit_s: float = LIMIT_S) -> RoundCosts:
    """Costs of decode rounds; the engine must be idle.

    Args:
        runner: of the engine.
        config: its budgets.
        vocab_size: of the target.
        limit_s: seconds after which no further shape is begun.
    """
    measured, dice, begin = _Measured(), random.Random(0), perf_counter()
    sizes = _sizes(config.scheduler.max_num_seqs)
    work = [(size, PROMPT) for size in sizes]
    if config.scheduler.max_model_len >= 2 * LONG_PROMPT:
        work.append((1, LONG_PROMPT))  # last: it only tells what context costs
    for num_sequences, wanted in work:
        seats = _seats(config, num_sequences)
        num_prompt = min(wanted, _room(seats, config) // 2)
        if num_prompt < 1 or perf_counter() - begin > limit_s:
            continue
        _prefill(runner, config, seats, num_prompt, vocab_size, dice)
        for num_drafts, counts in _shapes(num_sequences, config.num_draft_tokens):
            if perf_counter() - begin > limit_s or not _has_room(seats, config):
                break
            _measure(runner, measured if counts else _Measured(), seats, num_drafts, vocab_size, dice)
        runner.run(StepPlan(step_id=0, scheduled=(), released_slots=tuple(seat.slot for seat in seats)))
    return measured.costs()


def _sizes(max_num_seqs: int) -> list[int]:
    """Numbers of sequences to measure: powers of two and the most; few first, as in most uses."""
    powers = [1 << exponent for exponent in range(max_num_seqs.bit_length()) if 1 << exponent < max_num_seqs]
    return [*powers, max_num_seqs]


def _shapes(num_sequences: int, num_draft_tokens: int) -> Iterator[tuple[int, bool]]:
    """Drafts of a round and whether it counts; every shape several times, so that a slow moment hits not one alone.

    Plain rounds count from the second in a row: the first finds caches full of what the drafter reads, and where
    drafts do not pay most plain rounds follow another.
    """
    shares = range(1, num_draft_tokens + 1)
    drafts = sorted({1, max(num_sequences // 2, 1), *(num_sequences * count for count in shares)})
    for _ in range(REPEATS):
        yield from ((0, False), (0, True), (0, True))
        yield from ((count, True) for count in drafts)


def _seats(config: EngineConfig, num_sequences: int) -> list[_Seated]:
    """Sequences with an equal share of the pages; none where the cache is too small for them."""
    page_size = config.cache.page_size
    most = num_pages_for(config.scheduler.max_model_len, page_size)
    share = min(config.cache.num_pages // num_sequences, most)
    return [
        _Seated(slot=slot, page_ids=tuple(range(slot * share, (slot + 1) * share)), num_tokens=0)
        for slot in range(num_sequences)
        if share
    ]


def _room(seats: Sequence[_Seated], config: EngineConfig) -> int:
    """Tokens that each sequence may have."""
    return min(len(seats[0].page_ids) * config.cache.page_size, config.scheduler.max_model_len) if seats else 0


def _has_room(seats: Sequence[_Seated], config: EngineConfig) -> bool:
    return max(seat.num_tokens for seat in seats) + 1 + config.num_draft_tokens <= _room(seats, config)


def _prefill(
    runner: Runner,
    config: EngineConfig,
    seats: Sequence[_Seated],
    num_prompt: int,
    vocab_size: int,
    dice: random.Random,
) -> None:
    chunk = config.scheduler.chunk_multiple
    limit = min(config.scheduler.max_prefill_tokens, config.scheduler.max_step_rows)
    longest = max(limit // chunk * chunk, 1) if limit >= chunk else limit
    for seat in seats:
        for start in range(0, num_prompt, longest):
            length = min(longest, num_prompt - start)
            item = ScheduledSequence(
                request_id=f"profile-{seat.slot}",
                state_slot=seat.slot,
                page_ids=seat.page_ids,
                start_position=start,
                query_token_ids=tuple(dice.randrange(vocab_size) for _ in range(length)),
                draft_budget=0,
                is_prompt=True,
                wants_logits=start + length == num_prompt,
                is_first=start == 0,
            )
            runner.run(StepPlan(step_id=0, scheduled=(item,), released_slots=()))
        seat.num_tokens = num_prompt


def _measure(
    runner: Runner,
    measured: _Measured,
    seats: Sequence[_Seated],
    num_drafts: int,
    vocab_size: int,
    dice: random.Random,
) -> None:
    """One decode round."""
    script = _Scripted(num_drafts)
    items = tuple(
        ScheduledSequence(
            request_id=f"profile-{seat.slot}",
            state_slot=seat.slot,
            page_ids=seat.page_ids,
            start_position=seat.num_tokens,
            query_token_ids=(dice.randrange(vocab_size),),
            draft_budget=runner.num_draft_tokens,
            is_prompt=False,
            wants_logits=True,
            is_first=False,
        )
        for seat in seats
    )
    plan = StepPlan(step_id=0, scheduled=items, released_slots=())
    result = runner.run(plan, lengths=script, drafter=_RandomDrafts(runner.drafter, vocab_size))
    for seat, accepted in zip(seats, result.num_accepted, strict=True):
        seat.num_tokens += 1 + accepted
    if result.num_steps > 1:
        return
    count, timings = len(seats), result.timings
    context = sum(item.start_position for item in items) / count
    is_long = context >= LONG_PROMPT
    step = measured.step.setdefault(((count, count + num_drafts), is_long), [])
    step.append((timings.total_s - timings.propose_s, context))
    if num_drafts:
        measured.propose.setdefault(((count,), is_long), []).append((timings.propose_s, context))
