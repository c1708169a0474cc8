"""The fixed policy: every draft that may still be emitted, and a reason for every sequence without one."""

from outrider.plan import DraftReason
from outrider.speculative.lengths import AllDrafts
from outrider.testing.machine import NUM_DRAFTS, decoding


def test_all_drafts_takes_every_budget():
    scheduled = [decoding(0), decoding(1, 3), decoding(2, 0), decoding(3, 0, speculation="off")]
    policy = AllDrafts()
    assert policy.report() is None
    assert policy.proposing(scheduled) == [0, 1]
    assert policy.choose(scheduled, [0, 1], NUM_DRAFTS, None) == (7, 3, 0, 0)
    report = policy.report()
    assert report is not None
    assert report.reasons == (DraftReason.FIXED, DraftReason.FIXED, DraftReason.NO_ROOM, DraftReason.OFF)
