"""Requests whose drafts are far from paying are given up from their first token, and nobody else."""

import pytest

from outrider.speculative.auto import AutoLengths
from outrider.speculative.cost import RoundCosts
from outrider.speculative.gains import GainCurve
from outrider.speculative.prospect import SCOUTS, SEEN, Prospect
from outrider.testing.machine import NUM_DRAFTS, decoding

STEP, ROW, PROPOSE = 1e-3, 2e-4, 1e-3
POOR, GOOD = [0.4**k for k in range(1, NUM_DRAFTS + 1)], [0.97**k for k in range(1, NUM_DRAFTS + 1)]
SURE = [0.95] * NUM_DRAFTS


def costs(num_sequences: int = 4) -> RoundCosts:
    known = RoundCosts()
    for count in range(1, num_sequences + 1):
        for rows in range(count, count * (1 + NUM_DRAFTS) + 1):
            known.step.put((count, rows), STEP + ROW * rows, 0, 2.0)
        known.propose.put((count,), PROPOSE, 0, 2.0)
    known.step.refit()
    known.propose.refit()
    known.is_profiled = True
    return known


def policy(prior: list[float] | None, *, profiled: bool = True) -> AutoLengths:
    return AutoLengths(NUM_DRAFTS, costs=costs() if profiled else None, prior=prior, clock=lambda: 0.0)


def test_all_but_a_scout_where_typical_drafts_are_far_from_paying() -> None:
    lengths = policy(POOR)
    given_up = [lengths.gives_up(decoding(0), 1) for _ in range(3 * SCOUTS)]
    assert given_up.count(False) == 3 and not any(given_up[SCOUTS - 1 :: SCOUTS])


@pytest.mark.parametrize("changes", [{"speculation": 3}, {"speculation": "off"}, {"acceptance": "rejection"}])
def test_nobody_who_asked_for_drafts_or_draws(changes: dict[str, object]) -> None:
    lengths = policy(POOR)
    assert not any(lengths.gives_up(decoding(0, **changes), 1) for _ in range(10))  # type: ignore[arg-type]


def test_nobody_where_drafts_pay_or_nothing_is_known() -> None:
    assert not any(policy(GOOD).gives_up(decoding(0), count) for count in (1, 2, 4))
    assert not policy(POOR, profiled=False).gives_up(decoding(0), 1), "costs are not known"
    assert not policy(None).gives_up(decoding(0), 1), "what drafts are worth is not known"


def test_company_decides_too() -> None:
    """Drafts that pay alone do not pay where the rows of four sequences are dear."""
    middling = [0.7**k for k in range(1, NUM_DRAFTS + 1)]
    assert [policy(middling).gives_up(decoding(0), count) for count in (1, 2, 4)] == [False, False, True]


def test_without_a_measurement_of_the_pair_the_mean_must_rest_on_enough() -> None:
    prospect, mean = Prospect(is_measured=False), GainCurve.of(POOR, 1.0)
    step_s, beside_s = [STEP + ROW * rows for rows in range(1, 9)], [1e-5, 1e-5 + PROPOSE]
    assert not prospect.gives_up(mean, step_s, beside_s, 1)
    for _ in range(SEEN):
        mean.learn(GainCurve.of(POOR, 1), 0.03)
    assert prospect.gives_up(mean, step_s, beside_s, 1)


def test_who_was_given_up_never_asks_a_model_but_may_read() -> None:
    lengths = policy(GOOD)
    scheduled = [decoding(slot) for slot in range(3)]
    reading: set[int] = set()

    def rounds(count: int) -> list[list[int]]:
        return [
            lengths.proposing(scheduled, lambda item: SURE if item.state_slot in reading else None, frozenset({0, 1}))
            for _ in range(count)
        ]

    proposing = rounds(12)
    assert not {index for chosen in proposing for index in chosen} & {0, 1} and any(2 in chosen for chosen in proposing)
    reading.add(1)
    assert any(1 in chosen for chosen in rounds(12))
    assert not any(0 in chosen for chosen in rounds(12))


def test_rounds_of_such_requests_alone_decide_nothing() -> None:
    lengths = policy(POOR)
    asked = []
    for _ in range(64):
        assert lengths.proposing([decoding(0)], asked.append, frozenset({0})) == []
        assert lengths.report() is None
    assert 0 < len(asked) <= 64 // 4, "a look now and then"
