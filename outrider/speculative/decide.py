"""The decision of a round, as pure functions: who proposes, and how many rows of each request are verified.

A round that commits ``tokens`` in ``seconds`` is worth ``tokens - rate * seconds``, where ``rate`` is what a second
is worth: the best rate that this round can reach, or what rounds have earned lately if that is more. With a rate
of its own a round maximises its tokens per second; with a higher one it does not spend time on the poor drafts
of a poor round that the next round would use better (renewal reward).

Whether a draft is verified is decided on the running product of confidences, which does not depend on the draft
itself but on those before it. That is free to choose where drafts stand by equality with the target's own token:
lengths move tokens between rounds, not their values. Where drafts stand by coins (``rejection``, ``block``) the
caller must fix the rows before the drafts are drawn and leaves them out here.

Source: dspark sections 3.4 and 3.6; the whole list is searched, because costs come in stairs.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import neg
from typing import NamedTuple

__all__ = ["Candidate", "ProposalChoice", "RowChoice", "decide_proposals", "decide_rows"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowChoice:
    """How many drafts of each request go to the target."""

    lengths: tuple[int, ...]  # per list of survivals
    rate: float  # expected tokens a second of the choice
    plain_rate: float  # of the same round if no draft were verified
    all_rate: float  # and if all were
    seconds: float  # expected, of the choice


def decide_rows(
    survivals: Sequence[Sequence[float]], seconds: Sequence[float], *, tokens: float, worth: float = 0.0
) -> RowChoice:
    """The drafts, likeliest first, whose round is worth most.

    Args:
        survivals: per request, the probability that each draft and all before it stand, not increasing and cut to
            the budget.
        seconds: of the whole round with 0, 1, 2, ... drafts verified; any staircase.
        tokens: expected without any of these drafts.
        worth: tokens that a second is worth at least; 0 leaves it to the round.
    """
    merged = sorted([survival for drafts in survivals for survival in drafts], reverse=True)
    gained = list(accumulate(merged, initial=tokens))
    rates = [count / duration for count, duration in zip(gained, seconds, strict=False)]
    best_rate = max(rates)
    if best_rate >= worth:
        best = rates.index(best_rate)
    else:
        values = [count - worth * duration for count, duration in zip(gained, seconds, strict=False)]
        best = values.index(max(values))
    return RowChoice(
        lengths=_lengths(survivals, merged, best),
        rate=rates[best],
        plain_rate=rates[0],
        all_rate=rates[-1],
        seconds=seconds[best],
    )


def _lengths(survivals: Sequence[Sequence[float]], merged: list[float], num_chosen: int) -> tuple[int, ...]:
    """How many of each request are among the first ``num_chosen``; of equal ones the first request's come first."""
    if num_chosen == 0:
        return (0,) * len(survivals)
    if num_chosen == len(merged):
        return tuple(map(len, survivals))
    least = merged[num_chosen - 1]
    # Each list falls, so what lies above, or not below, is a prefix of it.
    lengths = [bisect_left(drafts, -least, key=neg) for drafts in survivals]
    num_left = num_chosen - sum(lengths)
    for index, drafts in enumerate(survivals):
        if num_left == 0:
            break
        taken = min(bisect_right(drafts, -least, key=neg) - lengths[index], num_left)
        lengths[index] += taken
        num_left -= taken
    return tuple(lengths)


class Candidate(NamedTuple):
    """What a request's next proposal is expected to bring at the present price of a row."""

    gain: float  # tokens
    rows: float  # drafts verified


@dataclass(frozen=True, slots=True, kw_only=True)
class ProposalChoice:
    """Who proposes."""

    chosen: tuple[int, ...]  # indices of candidates, best first
    rate: float  # expected tokens a second of the choice
    plain_rate: float  # if no candidate proposed
    all_rate: float  # if every candidate did


def decide_proposals(
    candidates: Sequence[Candidate],
    propose_seconds: Sequence[float],
    step_seconds: Sequence[float],
    *,
    tokens: float,
    price: float,
) -> ProposalChoice:
    """The candidates, best first, with whom a round brings most tokens a second.

    Best is who gains most beyond what its rows cost, ``gain - price * rows``.

    Args:
        candidates: who may propose and is not bound to.
        propose_seconds: of everything but the step when 0, 1, 2, ... of them propose.
        step_seconds: of the step with 0, 1, 2, ... of their drafts verified; between counts on the line.
        tokens: expected without them.
        price: tokens that the time of one more row is worth.
    """
    order = sorted(range(len(candidates)), key=lambda index: price * candidates[index].rows - candidates[index].gain)
    rate = plain_rate = best_rate = tokens / (propose_seconds[0] + step_seconds[0])
    best, rows, last = 0, 0.0, len(step_seconds) - 1
    for count, index in enumerate(order, 1):
        candidate = candidates[index]
        tokens += candidate.gain
        rows += candidate.rows
        floor = min(int(rows), last)
        step = step_seconds[floor]
        if floor < last:
            step += (rows - floor) * (step_seconds[floor + 1] - step)
        rate = tokens / (propose_seconds[count] + step)
        if rate > best_rate:
            best, best_rate = count, rate
    return ProposalChoice(chosen=tuple(order[:best]), rate=best_rate, plain_rate=plain_rate, all_rate=rate)
