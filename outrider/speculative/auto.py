"""Drafts where they pay: the policy behind ``speculation="auto"``.

Each round in three steps. Before proposing: who is expected to bring more tokens per second with drafts than
without (``decide_proposals``), from what their proposals brought so far; who is not, pauses and is probed now and
then, as far as the loss budget allows. After proposing: which drafts are worth their rows (``decide_rows``), from
calibrated confidence. After the round: costs, survival and gains are corrected by what was seen.

Sequences that accept by coins get their whole budget or nothing, decided from the outcomes of earlier rounds alone.
"""

from collections.abc import Callable, Sequence, Set
from itertools import accumulate
from operator import mul
from time import perf_counter

from outrider.plan import DraftReason, ScheduledSequence, SpeculationReport
from outrider.speculative.confidence import SurvivalEstimator
from outrider.speculative.cost import RoundCosts
from outrider.speculative.decide import decide_proposals, decide_rows
from outrider.speculative.gains import Doubt, GainCurve, LossBudget, Outcomes, Track, spread
from outrider.speculative.lengths import NOBODY, Foresee, RoundRecord, by_coins, no_draft_reason, unforeseen
from outrider.speculative.prospect import Prospect
from outrider.speculative.reads import ReadCost, choose_reads
from outrider.speculative.round_state import RoundState
from outrider.speculative.survival import SurvivalModel

__all__ = ["AutoLengths"]

PLAIN_ROUNDS = 3  # in a row, to learn what a plain step costs: at first without a profile, and now and then
# Rounds with drafts after which a plain one is due, while few plain ones were measured.
CLOSE_REFRESH, FEW_REFRESH, REFRESH = 4, 32, 128
FEW, ENOUGH = 6.0, 24.0  # measurements of a plain step
CLOSE = 1.15  # times the plain rate: below it what a plain step costs decides, and a plain round costs little
FIRST_CONFIDENCE = 0.6  # that a draft stands if all before it do, until a drafter has shown what it is worth
FIRST_WEIGHT = 1.0  # proposals that this first guess counts for
MEAN_MEMORY = 0.03  # weight of a proposal in the mean of all requests
OUTCOME_MEMORY, SUREST, WORTH_MEMORY = 0.98, 0.98, 0.95
ASK_EVERY, ASK_SELDOM = 4, 32  # rounds from one look at what could be read to the next, powers of two
COMMON = 4  # probes fall on every fourth round: a proposal for many costs little more than for one


class AutoLengths:
    """Verifies what measured cost and calibrated confidence say will pay.

    Args:
        num_draft_tokens: drafts of a whole proposal.
        survival: calibrates confidence; None starts from the head's own word.
        costs: profiled before; None learns them while serving.
        prior: survival of the drafts of a typical proposal, as measured for this pair; None knows nothing.
        clock: seconds; replaced in tests.
    """

    reads_confidence = True

    def __init__(
        self,
        num_draft_tokens: int,
        *,
        survival: SurvivalModel | None = None,
        costs: RoundCosts | None = None,
        prior: Sequence[float] | None = None,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self.costs = costs or RoundCosts()
        self._num_draft_tokens = num_draft_tokens
        self._survival = survival or SurvivalEstimator(num_draft_tokens)
        self._clock = clock
        self._tracks: dict[int, Track] = {}  # by state slot
        typical = list(prior or (FIRST_CONFIDENCE**count for count in range(1, num_draft_tokens + 1)))
        self._mean = GainCurve.of(typical, FIRST_WEIGHT)
        self._prospect = Prospect(is_measured=prior is not None)
        self._coins_mean = GainCurve.level(sum(typical), num_draft_tokens, FIRST_WEIGHT)
        self._outcomes = Outcomes(OUTCOME_MEMORY)
        self._doubt = Doubt()  # of all requests
        self._budget = LossBudget()
        self._num_rounds = self._since_plain = 0
        self._num_plain_left = 0  # of a few plain rounds in a row
        self._is_close = False  # whether drafting is expected to be hardly faster than plain decoding
        self._earned, self._spent = 1.0, 1.0  # tokens and time of late, in plain rounds
        self._finished: float | None = None
        self._read_cost = ReadCost()
        self._readers: set[int] = set()  # state slots that read in the last round
        self._num_asked, self._ask_every = 0, ASK_EVERY
        self._round: RoundState | None = None

    def gives_up(self, item: ScheduledSequence, num_sequences: int) -> bool:
        """See LengthPolicy: where typical drafts are far from paying, taps and context would be kept in vain."""
        costs = self.costs
        if (
            item.speculation != "auto"
            or item.choice is not None
            or not (costs.step.is_known and costs.propose.is_known)
        ):
            return False
        context = float(item.start_position + len(item.query_token_ids))
        return self._prospect.gives_up(self._mean, *self._costs_of(num_sequences, context), num_sequences)

    def proposing(
        self,
        scheduled: Sequence[ScheduledSequence],
        foresee: Foresee = unforeseen,
        lapsed: Set[int] = NOBODY,
    ) -> list[int]:
        """See LengthPolicy."""
        decodes = [index for index, item in enumerate(scheduled) if not item.is_prompt]
        self._num_asked += 1
        if lapsed and not self._anybody_drafts(scheduled, decodes, foresee, lapsed):
            self._round = self._finished = None
            self._readers.clear()
            return []
        self._measure_host(len(scheduled))
        if not decodes:
            self._round = None
            return []
        now = self._round = self._begin(scheduled, decodes)
        able: list[int] = []
        for index in decodes:
            item = scheduled[index]
            reason = no_draft_reason(item)
            if reason is not None:
                now.reasons[index] = reason
            elif item.speculation != "auto":
                now.reasons[index] = DraftReason.FIXED
                now.forced.append(index)
                now.num_forced_rows += item.draft_budget
            else:
                able.append(index)
        if not able or self._must_learn(now):
            now.reasons.update(dict.fromkeys(able, DraftReason.LEARNING))
            return now.forced
        readers, able = self._choose_readers(scheduled, able, foresee, lapsed, now)
        if lapsed:
            now.reasons.update({index: DraftReason.TOO_DEAR for index in able if scheduled[index].state_slot in lapsed})
            able = [index for index in able if scheduled[index].state_slot not in lapsed]
        asked = self._choose_proposers(scheduled, able, now) if able else []
        return sorted([*now.forced, *readers, *asked])

    def _anybody_drafts(
        self, scheduled: Sequence[ScheduledSequence], decodes: list[int], foresee: Foresee, lapsed: Set[int]
    ) -> bool:
        """Whether anybody has not lapsed, or could read; a round without either costs next to nothing."""
        if self._num_asked % self._ask_every and not self._readers:  # as most rounds of those who have lapsed
            return not {scheduled[index].state_slot for index in decodes} <= lapsed
        items, may_read = [scheduled[index] for index in decodes], self._may_read
        return any(item.state_slot not in lapsed or (may_read(item) and foresee(item) is not None) for item in items)

    def _may_read(self, item: ScheduledSequence) -> bool:
        """Whether to ask what a sequence could read: it read last, or its turn has come; asking takes its time too."""
        return self._num_asked % self._ask_every == 0 or item.state_slot in self._readers

    def _choose_readers(
        self,
        scheduled: Sequence[ScheduledSequence],
        able: list[int],
        foresee: Foresee,
        lapsed: Set[int],
        now: RoundState,
    ) -> tuple[list[int], list[int]]:
        """Who reads in this round, and whom a model might draft. Where it does not pay to read, drafts do not.

        Where somebody draws, a drafter may ask its model for all at once, so nobody who has lapsed reads then.
        """
        reads: dict[int, Sequence[float]] = {}
        somebody_draws = bool(lapsed) and any(item.choice is not None for item in scheduled)
        for index in able:
            item = scheduled[index]
            if (somebody_draws and item.state_slot in lapsed) or not self._may_read(item):
                continue
            if not by_coins(item) and (confidence := foresee(item)) is not None:
                reads[index] = confidence[: item.draft_budget]
        if not reads:
            self._readers.clear()
            return [], able
        lengths = choose_reads(
            list(reads.values()), now.step_s[now.num_forced_rows :],
            beside_s=now.beside_s[0], read_s=self._read_cost.seconds, num_decodes=now.num_decodes,
        )  # fmt: skip
        for index, length in zip(reads, lengths, strict=True):
            now.reasons[index] = DraftReason.PAYS if length else DraftReason.TOO_DEAR
        readers = [index for index, length in zip(reads, lengths, strict=True) if length]
        self._readers = {scheduled[index].state_slot for index in readers}
        self._ask_every = ASK_EVERY if readers else min(2 * self._ask_every, ASK_SELDOM)
        return readers, [index for index in able if index not in reads]

    def _begin(self, scheduled: Sequence[ScheduledSequence], decodes: list[int]) -> RoundState:
        """Costs of this round. Prompt rows in it cost the same whatever is decided, so they are left out."""
        count = len(decodes)
        context = sum([scheduled[index].start_position for index in decodes]) / count
        step_s, beside_s = self._costs_of(count, context)
        return RoundState(num_decodes=count, context=context, step_s=step_s, beside_s=beside_s)

    def _costs_of(self, count: int, context: float) -> tuple[list[float], list[float]]:
        """Seconds of the step by drafts verified, and of the rest by sequences that propose."""
        costs = self.costs
        host = costs.host((count,)) + 1e-9
        return (
            costs.step.table((count,), count, count * (1 + self._num_draft_tokens)).at(context),
            [host, *[host + extra for extra in costs.propose.table((), 1, count).at(context)]],
        )

    def _must_learn(self, now: RoundState) -> bool:
        """Whether what a plain step costs has to be measured first."""
        costs = self.costs
        if not costs.is_profiled and (self._num_rounds < PLAIN_ROUNDS or not costs.step.is_known):
            return True
        if self._num_plain_left:
            self._num_plain_left -= 1
            return True
        if self._since_plain < CLOSE_REFRESH or self._since_plain % CLOSE_REFRESH:
            return False
        weight = costs.step.weight((now.num_decodes, now.num_decodes))
        period = CLOSE_REFRESH if self._is_close else REFRESH if weight >= FEW else FEW_REFRESH
        if weight >= ENOUGH or self._since_plain % period:
            return False
        self._num_plain_left = PLAIN_ROUNDS - 1
        return True

    def _choose_proposers(self, scheduled: Sequence[ScheduledSequence], able: list[int], now: RoundState) -> list[int]:
        tracks = [self._track(scheduled[index]) for index in able]
        step_s, beside_s = now.step_s[now.num_forced_rows :], now.beside_s[len(now.forced) :]
        price = self._worth(now) * (now.step_s[-1] - now.step_s[0]) / (len(now.step_s) - 1)
        ratio = self._outcomes.ratio
        candidates = [
            track.candidate(price, scheduled[index].draft_budget, ratio)
            for index, track in zip(able, tracks, strict=True)
        ]
        choice = decide_proposals(candidates, beside_s, step_s, tokens=float(now.num_decodes), price=price)
        paying = set(choice.chosen)
        self._is_close = choice.rate < CLOSE * choice.plain_rate
        due = []
        for place, track in enumerate(tracks):
            pays = place in paying
            if track.settle(pays):
                due.append(place)
            now.reasons[able[place]] = DraftReason.PAYS if pays else DraftReason.TOO_DEAR
        now.expected = bool(paying)
        if due and self._num_rounds % COMMON == 0:
            self._probe(scheduled, [able[place] for place in due], len(paying), now)
        chosen = [able[place] for place in choice.chosen] + now.probes
        now.coins = [index for index in chosen if by_coins(scheduled[index])]
        if not chosen:
            now.note_nobody(candidates, beside_s[len(able)], step_s)
        return chosen

    def _probe(self, scheduled: Sequence[ScheduledSequence], due: list[int], num_paying: int, now: RoundState) -> None:
        """Let those propose that wait for it, if the budget has room for all: together they cost least."""
        num_before = len(now.forced) + num_paying
        num_rows = sum([scheduled[index].draft_budget if by_coins(scheduled[index]) else 1 for index in due])
        rows_s = now.step_s[min(now.num_forced_rows + num_rows, len(now.step_s) - 1)] - now.step_s[now.num_forced_rows]
        loss = (now.beside_s[num_before + len(due)] - now.beside_s[num_before]) / now.plain_s
        if not self._budget.allows(loss + rows_s / now.plain_s):
            return
        now.probes, now.probe_loss = due, loss
        for index in due:
            self._tracks[scheduled[index].state_slot].probe()
            now.reasons[index] = DraftReason.PROBE

    def choose(
        self,
        scheduled: Sequence[ScheduledSequence],
        proposing: Sequence[int],
        num_proposed: int,
        confidence_SG: Sequence[Sequence[float]] | None,
        read: Set[int] = NOBODY,
    ) -> tuple[int, ...]:
        """See LengthPolicy."""
        now = self._round
        assert now is not None, "lengths are chosen after proposing"
        lengths = [0] * len(scheduled)
        judged: list[int] = []
        cut: list[list[float]] = []
        tokens, num_rows = float(now.num_decodes), 0
        for row, index in enumerate(proposing):
            item = scheduled[index]
            confidence = None if confidence_SG is None else confidence_SG[row]
            whole = item.speculation != "auto" or index in now.coins
            if whole:
                lengths[index] = min(item.draft_budget, num_proposed)
                num_rows += lengths[index]
                tokens += self._tracks[item.state_slot].curve.gains[0] if index in now.coins else 0.0
            if not by_coins(item):
                now.confidence[index] = confidence
                if index in read and confidence is not None:  # measured on this very text: nothing to calibrate
                    survivals = list(accumulate(confidence, mul))
                else:
                    survivals = self._survival.survival(item, confidence)[:num_proposed]
                now.survivals[index] = survivals
                if whole:
                    tokens += sum(survivals[: item.draft_budget])
                else:
                    ratio = 1.0 if index in read else self._outcomes.ratio * self._track(item).doubt.ratio
                    judged.append(index)
                    cut.append([survival * ratio for survival in survivals[: item.draft_budget]])
        beside = now.beside_s[len(proposing) - len(read)]
        seconds = [beside + step for step in now.step_s[num_rows:]]
        choice = decide_rows(cut, seconds, tokens=tokens, worth=self._worth(now))
        for index, length in zip(judged, choice.lengths, strict=True):
            lengths[index] = length
            if length == 0 and index in now.probes:
                lengths[index] = 1  # without an outcome nothing would ever be believed again
            elif length == 0:
                now.reasons[index] = DraftReason.UNLIKELY
        now.rate = choice.rate
        now.seconds = beside + now.step_s[sum(lengths)]
        now.break_even = 1 + (now.seconds / now.plain_s - 1) * now.num_decodes / len(proposing)
        return tuple(lengths)

    def observe(self, record: RoundRecord) -> None:
        """See LengthPolicy. Rounds with prompt rows say nothing about the cost of a decode round."""
        now, costs, timings = self._round, self.costs, record.timings
        pure = now is not None and record.num_steps == 1 and now.num_decodes == len(record.scheduled)
        if now is not None:
            self._num_rounds += 1
            self._learn(record, now)
        if now is not None and pure:
            num_rows = now.num_decodes + sum(record.verify_lengths)
            if record.proposed or self._since_plain == 0:
                # A plain round after one with drafts finds caches full of what the drafter reads; most do not.
                costs.step.add((now.num_decodes, num_rows), timings.total_s - timings.propose_s, now.context)
            self._since_plain = self._since_plain + 1 if record.proposed else 0
            if len(record.proposed) > len(record.read):
                costs.propose.add((len(record.proposed) - len(record.read),), timings.propose_s, now.context)
            self._read_cost.begin(record)
        self._finished = self._clock() if pure else None

    def report(self) -> SpeculationReport | None:
        """See LengthPolicy."""
        now = self._round
        if now is None:
            return None
        known = self.costs.step.is_known
        return SpeculationReport(
            reasons=tuple([now.reasons[index] for index in sorted(now.reasons)]),
            break_even=now.break_even if known else 0.0,
            expected_rate=now.rate if known else 0.0,
            plain_rate=now.num_decodes / now.plain_s if known else 0.0,
        )

    def _learn(self, record: RoundRecord, now: RoundState) -> None:
        curves, probed = [], now.probe_loss
        gained = sum(record.num_accepted) - sum([record.num_accepted[index] for index in now.forced])
        row_loss = now.row_loss(sum(record.verify_lengths))
        for index in now.learners(record, self._num_rounds):
            if index in record.read:
                continue
            item, length, accepted = record.scheduled[index], record.verify_lengths[index], record.num_accepted[index]
            track = self._track(item)
            if index in now.survivals:
                survivals = now.survivals[index]
                self._survival.observe(item, now.confidence[index], length, accepted)
                curve = GainCurve.of(survivals, 1)
                track.learn(curve, accepted)
                curves.append(curve)
                if length:
                    mean, variance = spread(survivals[:length])
                    first = min(survivals[0] * self._outcomes.ratio, SUREST)
                    track.doubt.add(first, accepted > 0)
                    self._doubt.add(first, accepted > 0)
                    self._outcomes.add(mean, variance, accepted)
            else:
                curve = GainCurve.level(accepted, length, 1)
                track.learn(curve, accepted)
                self._coins_mean.learn(curve, MEAN_MEMORY)
            if index in now.probes:
                probed += length * row_loss - accepted / now.num_decodes
        if curves:
            self._mean.learn(GainCurve.mean(curves), MEAN_MEMORY)
        if not self.costs.step.is_known:
            return
        taken = (now.seconds or now.plain_s) / now.plain_s
        base = now.beside_s[len(now.forced)] + now.step_s[now.num_forced_rows]
        loss = taken - base / now.plain_s - gained / now.num_decodes
        self._budget.record(loss, expected=now.expected, probed=max(probed, 0.0))
        self._earned = WORTH_MEMORY * self._earned + 1 + sum(record.num_accepted) / now.num_decodes
        self._spent = WORTH_MEMORY * self._spent + taken

    def _worth(self, now: RoundState) -> float:
        """Tokens that a second has been worth lately, for so many sequences; at least what plain decoding makes."""
        return max(self._earned / self._spent, 1.0) * now.num_decodes / now.plain_s

    def _track(self, item: ScheduledSequence) -> Track:
        """The record of the sequence; a new one, as good as the mean, where the slot changed hands."""
        track = self._tracks.get(item.state_slot)
        if track is None or track.request_id != item.request_id:
            track = (
                Track(item.request_id, self._coins_mean)
                if by_coins(item)
                else Track(item.request_id, self._mean, self._doubt.probability)
            )
            self._tracks[item.state_slot] = track
        return track

    def _measure_host(self, num_sequences: int) -> None:
        """Seconds since the round before, if nothing but scheduling happened in between."""
        if self._finished is None:
            return
        seconds = self._clock() - self._finished
        if not self._read_cost.end(seconds, self.costs.speed.factor):
            self.costs.host.add((num_sequences,), seconds)
        self._finished = None
