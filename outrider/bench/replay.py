"""What another length policy would have done with recorded texts, and how long it would have taken.

Greedy texts, and sampled ones that accept by equality, are the same under any policy, so a replay moves along them
with other lengths. Where it comes to an anchor that was recorded, it accepts what was accepted there, cut at its own
length: that is exact. Where it comes to an anchor that was never one, nothing was drafted from there, and outcomes are
drawn: with the calibrated probability of the same token in the recorded block that covers it, moved in its logit by
what a draft so much nearer to its anchor is better off on average, and behind that block with the mean of the
position. Plain decoding and the recorded policy itself need no draws.

A round costs what rounds of its shape were measured to cost, see ``RoundCosts``.
"""

import math
import random
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from outrider.bench.round_costs import RoundCosts
from outrider.bench.round_file import Anchor, Text
from outrider.errors import RequestError
from outrider.plan import RoundTimings, ScheduledSequence
from outrider.speculative.auto import AutoLengths
from outrider.speculative.confidence import SurvivalEstimator
from outrider.speculative.lengths import AllDrafts, LengthPolicy, RoundRecord

__all__ = ["Replayed", "TextOracle", "policy_named", "recorded_lengths", "replay", "typical_confidence"]

PolicyMaker = Callable[[Callable[[], float]], LengthPolicy]  # clock -> policy


def policy_named(name: str, num_drafts: int) -> tuple[PolicyMaker, int]:
    """What makes the policy of a name, and how many drafts it proposes at most.

    Args:
        name: plain, fixedK or auto.
        num_drafts: of a recorded block.

    Raises:
        RequestError: the name is unknown, or asks for more drafts than were recorded.
    """
    if name == "plain":
        return lambda clock: AllDrafts(), 0
    if name == "auto":
        return lambda clock: AutoLengths(num_drafts, survival=SurvivalEstimator(num_drafts), clock=clock), num_drafts
    number = name.removeprefix("fixed")
    if not name.startswith("fixed") or not number.isdecimal() or not 1 <= len(number) <= 4:
        raise RequestError(f"policy {name!r} is unknown; use plain, fixedK with a number of drafts K, or auto")
    if not 1 <= int(number) <= num_drafts:
        raise RequestError(
            f"policy {name!r}: the recorded blocks have {num_drafts} drafts; use fixed1 to fixed{num_drafts}"
        )
    return lambda clock: AllDrafts(), int(number)


@dataclass(slots=True, kw_only=True)
class Replayed:
    """Totals of one replay. Tokens that come with a prompt are not counted: no policy changes them."""

    num_texts: int = 0
    num_tokens: int = 0  # emitted by decode spans
    num_spans: int = 0  # (sequence, round) pairs
    num_rounds: int = 0
    num_verified: int = 0
    num_accepted: int = 0  # before any cut at a stop
    num_proposals: int = 0
    num_stand_ins: int = 0  # proposals from anchors that were never recorded
    decode_s: float = 0.0  # rounds in which a sequence decoded
    prefill_s: float = 0.0  # the other rounds
    lengths: Counter[int] = field(default_factory=Counter)  # verify lengths of spans

    @property
    def tokens_per_round(self) -> float:
        """Tokens per sequence and round."""
        return self.num_tokens / self.num_spans if self.num_spans else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Of decode time."""
        return self.num_tokens / self.decode_s if self.decode_s else 0.0


class TextOracle:
    """What is known of drafts along one text.

    Args:
        text: with its recorded anchors.
        typical_G: mean probability of each draft position, for what no recorded block covers.
        dice: draws stand-ins.
    """

    def __init__(self, text: Text, typical_G: Sequence[float], dice: random.Random) -> None:
        if any(anchor.rule in ("rejection", "block") for anchor in text.anchors.values()):
            raise RequestError(
                f"request {text.request} accepts by coins, so its text depends on the lengths; replay greedy runs or "
                "--acceptance match"
            )
        self.text = text
        self._typical_G, self._dice = typical_G, dice

    def is_recorded(self, position: int) -> bool:
        """Whether a block was proposed there in the recorded run."""
        anchor = self.text.anchors.get(position)
        return anchor is not None and bool(anchor.survival_G)

    def confidence(self, position: int) -> tuple[float, ...]:
        """Calibrated probability of each draft of a block at ``position``, given those before it."""
        anchor = self.text.anchors.get(position)
        if anchor is not None and anchor.survival_G:
            return self._padded(_conditional(anchor.survival_G))
        covering = self._covering(position)
        if covering is None:
            return tuple(self._typical_G)
        shift, typical = position - covering.position, self._typical_G
        behind = _conditional(covering.survival_G)[shift:]
        moved = (
            _sigmoid(_logit(value) - _logit(typical[index + shift]) + _logit(typical[index]))
            for index, value in enumerate(behind)
        )
        return self._padded(tuple(moved))

    def accepted(self, position: int, length: int) -> int:
        """Drafts that stand of ``length`` verified ones."""
        anchor, confidence = self.text.anchors.get(position), self.confidence(position)
        known = 0
        if anchor is not None and anchor.survival_G:
            if anchor.accepted < anchor.verified or length <= anchor.accepted:
                return min(anchor.accepted, length)
            known = anchor.accepted
        return next((k for k in range(known, length) if self._dice.random() >= confidence[k]), length)

    def budget(self, position: int, num_drafts: int) -> int:
        """Drafts that may still be emitted: a limit of tokens leaves room for one less than it has left."""
        anchor = self.text.anchors.get(position)
        if anchor is not None:
            return min(anchor.budget, num_drafts) if anchor.budget < len(self._typical_G) else num_drafts
        return min(num_drafts, self.text.end - position - 2) if self.text.by_length else num_drafts

    def _covering(self, position: int) -> Anchor | None:
        reach = range(position - 1, position - len(self._typical_G), -1)
        found = (self.text.anchors.get(before) for before in reach)
        return next((anchor for anchor in found if anchor is not None and anchor.survival_G), None)

    def _padded(self, confidence: Sequence[float]) -> tuple[float, ...]:
        return (*confidence, *self._typical_G[len(confidence) :])


def _conditional(survival_G: Sequence[float]) -> list[float]:
    before, conditional = 1.0, []
    for survival in survival_G:
        conditional.append(survival / before if before > 0 else 0.0)
        before = survival
    return conditional


def _logit(probability: float) -> float:
    probability = min(max(probability, 1e-6), 1 - 1e-6)
    return math.log(probability / (1 - probability))


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


@dataclass(slots=True, kw_only=True)
class _Running:
    """A text on its way."""

    oracle: TextOracle
    slot: int
    number: int  # tells texts apart whose requests share an id
    prompts: deque[int]
    position: int


def replay(
    texts: Sequence[Text],
    make_policy: PolicyMaker,
    num_drafts: int,
    costs: RoundCosts,
    *,
    concurrency: int,
    typical_G: Sequence[float],
    seed: int,
) -> Replayed:
    """Run all texts, in order, at most ``concurrency`` at once, on a machine of the given costs.

    Args:
        texts: as recorded.
        make_policy: gets the clock of that machine.
        num_drafts: proposed at most.
        costs: of its rounds.
        concurrency: texts that run at once; the next one starts when one ends.
        typical_G: see TextOracle; one per draft of a recorded block.
        seed: of the stand-ins.

    Raises:
        RequestError: a text was accepted by coins.
    """
    dice, now, totals = random.Random(seed), [0.0], Replayed(num_texts=len(texts))
    policy = make_policy(lambda: now[0])
    waiting = deque(enumerate(texts))
    free, running = deque(range(concurrency)), list[_Running]()
    while waiting or running:
        while waiting and free:
            number, text = waiting.popleft()
            running.append(
                _Running(
                    oracle=TextOracle(text, typical_G, dice),
                    slot=free.popleft(),
                    number=number,
                    prompts=deque(text.prompt_rows),
                    position=text.begin,
                )
            )
        begin = now[0]
        decoding = [one for one in running if not one.prompts]
        prefilling = [one for one in running if one.prompts]
        _round(decoding, prefilling, policy, num_drafts, costs, now, totals)
        if decoding:
            totals.decode_s += now[0] - begin
        else:
            totals.prefill_s += now[0] - begin
        for one in [one for one in decoding if _remaining(one) <= 0]:
            running.remove(one)
            free.append(one.slot)
    return totals


def _remaining(one: _Running) -> int:
    """Tokens that are still to be found, a stop id included."""
    text = one.oracle.text
    return text.end - 1 - one.position + text.unseen


def _round(
    decoding: list[_Running],
    prefilling: list[_Running],
    policy: LengthPolicy,
    num_drafts: int,
    costs: RoundCosts,
    now: list[float],
    totals: Replayed,
) -> None:
    """One round; moves the texts, the clock and the totals."""
    scheduled = [_decode_item(one, num_drafts) for one in decoding]
    scheduled += [_prompt_item(one) for one in prefilling]
    proposing = policy.proposing(scheduled) if num_drafts else []
    lengths: Sequence[int] = (0,) * len(scheduled)
    if proposing:
        confidence_SG = [
            decoding[index].oracle.confidence(decoding[index].position)[:num_drafts] for index in proposing
        ]
        lengths = policy.choose(scheduled, proposing, num_drafts, confidence_SG)
    accepted = [0] * len(scheduled)
    for index, one in enumerate(decoding):
        accepted[index] = one.oracle.accepted(one.position, lengths[index])
    num_rows = len(decoding) + sum(lengths)
    num_prompt_rows = sum(one.prompts.popleft() for one in prefilling)
    propose_s = costs.propose(len(proposing))
    step_s = costs.step(len(decoding), num_rows, num_prompt_rows)
    now[0] += propose_s + step_s
    policy.observe(
        RoundRecord(
            scheduled=tuple(scheduled),
            verify_lengths=tuple(lengths),
            num_accepted=tuple(accepted),
            proposed=frozenset(proposing),
            num_steps=1,
            timings=RoundTimings(propose_s=propose_s, forward_s=step_s),
        )
    )
    now[0] += costs.host(len(scheduled))
    totals.num_rounds += bool(decoding)
    for index, one in enumerate(decoding):
        found = min(accepted[index] + 1, _remaining(one))
        ends = found == _remaining(one)
        totals.num_tokens += found - one.oracle.text.unseen * ends
        totals.num_spans += 1
        totals.num_verified += lengths[index]
        totals.num_accepted += accepted[index]
        totals.lengths[lengths[index]] += 1
        if index in proposing:
            totals.num_proposals += 1
            totals.num_stand_ins += not one.oracle.is_recorded(one.position)
        one.position += found


def _decode_item(one: _Running, num_drafts: int) -> ScheduledSequence:
    return _item(one, is_prompt=False, rows=1, draft_budget=max(one.oracle.budget(one.position, num_drafts), 0))


def _prompt_item(one: _Running) -> ScheduledSequence:
    return _item(one, is_prompt=True, rows=one.prompts[0], draft_budget=0)


def _item(one: _Running, *, is_prompt: bool, rows: int, draft_budget: int) -> ScheduledSequence:
    return ScheduledSequence(
        request_id=f"{one.oracle.text.request}#{one.number}",
        state_slot=one.slot,
        page_ids=(),
        start_position=one.position,
        query_token_ids=(0,) * rows,
        draft_budget=draft_budget,
        is_prompt=is_prompt,
        wants_logits=not is_prompt or len(one.prompts) == 1,
        is_first=False,
    )


def typical_confidence(texts: Sequence[Text]) -> tuple[float, ...]:
    """Share of reached drafts that stood, by position; a half where none was reached.

    Raises:
        RequestError: no block was recorded.
    """
    reached, stood = Counter[int](), Counter[int]()
    width = 0
    for text in texts:
        for anchor in text.anchors.values():
            width = max(width, len(anchor.survival_G))
            reached.update(range(min(anchor.accepted + 1, anchor.verified)))
            stood.update(range(anchor.accepted))
    if not width:
        raise RequestError("no drafts were recorded; record a run with --speculation and the number of its drafts")
    return tuple(stood[k] / reached[k] if reached[k] else 0.5 for k in range(width))


def recorded_lengths(texts: Sequence[Text]) -> Mapping[int, int]:
    """Recorded verify lengths short of their budget, which leave the rest of a block unknown, by length."""
    short = (anchor.verified for text in texts for anchor in text.anchors.values() if anchor.verified < anchor.budget)
    return Counter(short)
