"""Reading: rounds of it where they pay, and no word of it in what is known of a model's proposals."""

import pytest

from outrider.plan import DraftReason, RoundTimings
from outrider.speculative.auto import AutoLengths
from outrider.speculative.cost import RoundCosts
from outrider.speculative.lengths import RoundRecord
from outrider.speculative.reads import ReadCost, choose_reads
from outrider.testing.machine import NUM_DRAFTS, decoding

STEP, ROW, PROPOSE, HOST = 4e-4, 1e-4, 5e-4, 1e-4
SURE = [0.95] * NUM_DRAFTS


class Rounds:
    """Rounds of a policy on a machine without noise, where slots in ``reading`` read and ``right`` drafts stand."""

    def __init__(self, num_sequences, *, reading, right=NUM_DRAFTS, read_s=0.0, confidence=None):
        costs = RoundCosts()
        for rows in range(num_sequences, num_sequences * (1 + NUM_DRAFTS) + 1):
            costs.step.put((num_sequences, rows), STEP + ROW * rows, 0, 2.0)
        for count in range(1, num_sequences + 1):
            costs.propose.put((count,), PROPOSE, 0, 2.0)
        costs.step.refit()
        costs.propose.refit()
        costs.is_profiled = True
        self.now = 0.0
        self.policy = AutoLengths(NUM_DRAFTS, costs=costs, clock=lambda: self.now)
        self.num_sequences, self.reading, self.right, self.read_s = num_sequences, reading, right, read_s
        self.confidence = confidence or SURE

    def foresee(self, item):
        return self.confidence if item.state_slot in self.reading else None

    def round(self, **changes):
        """Who proposed and how many drafts were verified."""
        self.now += HOST
        scheduled = [decoding(slot, **changes) for slot in range(self.num_sequences)]
        proposing = self.policy.proposing(scheduled, self.foresee)
        read = frozenset(index for index in proposing if index in self.reading)
        lengths = (0,) * self.num_sequences
        if proposing:
            rows = [self.confidence if index in read else [0.1] * NUM_DRAFTS for index in proposing]
            lengths = self.policy.choose(scheduled, proposing, NUM_DRAFTS, rows, read)
        propose_s = (PROPOSE if len(proposing) > len(read) else 0.0) + (self.read_s if read else 0.0)
        forward_s = STEP + ROW * (self.num_sequences + sum(lengths))
        self.now += propose_s + forward_s
        self.policy.observe(
            RoundRecord(
                scheduled=tuple(scheduled),
                verify_lengths=lengths,
                num_accepted=tuple(min(length, self.right) if i in read else 0 for i, length in enumerate(lengths)),
                proposed=frozenset(proposing),
                read=read,
                num_steps=1,
                timings=RoundTimings(propose_s=propose_s, forward_s=forward_s),
            )
        )
        return proposing, lengths


def test_who_reads_does_not_wait_while_a_model_pauses():
    rounds = Rounds(3, reading=set())
    for _ in range(100):
        rounds.round()
    rounds.reading = {1}
    seen = [rounds.round() for _ in range(40)]
    reads = [lengths for proposing, lengths in seen if 1 in proposing]
    assert len(reads) > 30 and all(lengths[1] >= 5 for lengths in reads)
    assert sum(0 in proposing or 2 in proposing for proposing, _ in seen) < 10


def test_reads_say_nothing_of_a_model():
    """Costs of proposals and what they bring are as without reads."""
    rounds = Rounds(1, reading={0}, read_s=1e-5)
    for _ in range(200):
        rounds.round()
    rounds.reading = set()
    assert rounds.policy.costs.propose((1,)) == pytest.approx(PROPOSE, rel=0.05)
    num_asked = sum(bool(rounds.round()[0]) for _ in range(60))
    assert num_asked < 10, "reads that stood made the model look good"


def test_their_confidence_is_taken_at_its_word():
    rounds = Rounds(1, reading={0}, confidence=[0.9, 0.9, 0.01, 0.9, 0.9, 0.9, 0.9])
    lengths = [rounds.round()[1][0] for _ in range(30)]
    assert set(lengths) <= {0, 2} and lengths.count(2) > 12


def test_a_round_of_reads_that_takes_the_host_too_long_is_not_run():
    for read_s, few in ((0.0, False), (5e-3, True)):
        rounds = Rounds(1, reading={0}, read_s=read_s)
        num_reads = sum(bool(rounds.round()[0]) for _ in range(300))
        assert (num_reads < 30) == few
        assert num_reads > 0, "it is tried now and then"


def test_requests_that_accept_by_coins_are_not_read_for_out_of_turn():
    rounds = Rounds(1, reading={0}, right=0)
    asked = [bool(rounds.round(acceptance="rejection")[0]) for _ in range(100)]
    assert sum(asked[-50:]) < 10, "they pause as their drafts deserve"


def test_reasons_tell_who_reads_and_who_will_not():
    rounds = Rounds(2, reading={0})
    while not rounds.round()[0]:  # it is asked for now and then
        pass
    report = rounds.policy.report()
    assert report is not None and report.reasons[0] is DraftReason.PAYS
    rounds = Rounds(2, reading={0}, confidence=[0.05] * NUM_DRAFTS)
    reasons = set()
    for _ in range(8):
        rounds.round()
        report = rounds.policy.report()
        assert report is not None
        reasons.add(report.reasons[0])
    assert DraftReason.TOO_DEAR in reasons


def test_rows_are_chosen_where_the_round_is_faster_than_plain():
    step_s = [STEP + ROW * rows for rows in range(9)]
    costs = {"beside_s": HOST, "num_decodes": 1}
    assert choose_reads([[0.9, 0.9, 0.01]], step_s, read_s=0.0, **costs) == (2,)
    assert choose_reads([[0.9, 0.9, 0.01]], step_s, read_s=1e-2, **costs) == (0,)
    assert choose_reads([[0.05] * 3, [0.9] * 3], step_s, read_s=0.0, **(costs | {"num_decodes": 2})) == (0, 3)


def test_what_reading_adds_is_learnt_and_slowly_forgotten():
    cost = ReadCost()

    def add(*, read, asked, propose_s, host_s=1e-4, speed=1.0):
        proposed = frozenset({0}) if read or asked else frozenset()
        cost.begin(
            RoundRecord(
                scheduled=(decoding(0),),
                verify_lengths=(0,),
                num_accepted=(0,),
                proposed=proposed,
                read=proposed if read else frozenset(),
                num_steps=1,
                timings=RoundTimings(propose_s=propose_s),
            )
        )
        return cost.end(host_s, speed)

    assert not add(read=False, asked=False, propose_s=1e-5)
    assert cost.seconds == 0
    assert not add(read=False, asked=True, propose_s=1e-3)
    assert cost.seconds == 0, "a model's time is not that of reading"
    for _ in range(30):
        assert add(read=True, asked=False, propose_s=12e-5, host_s=3e-4, speed=2.0)
    assert cost.seconds == pytest.approx(10e-5, rel=0.05)
    for _ in range(1500):
        add(read=False, asked=False, propose_s=1e-5)
    assert cost.seconds < 1e-5
