"""What exact numerics costs: the same decode steps with exact and with fast numerics, in turns."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal

from rich.table import Table

from outrider.bench.closed_loop import SteppingEngine
from outrider.errors import EngineFault
from outrider.request import Request, SamplingParams

__all__ = ["MODES", "NumericsCell", "compare_steps", "max_tokens_of", "numerics_table"]

MODES: tuple[Literal["exact"], Literal["fast"]] = ("exact", "fast")
NUM_WARM_UP_STEPS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class NumericsCell:
    """Steps of one number of rows. The ratio is of the two steps of a pair, exact over fast."""

    num_rows: int
    num_pairs: int
    exact_ms: float  # median
    fast_ms: float  # median
    ratio: float  # median over the pairs
    ratio_low: float  # quartiles over the pairs
    ratio_high: float


def max_tokens_of(repeats: int) -> int:
    """Tokens that a measured request emits: the prompt's, the warm-up's and one per pair."""
    return 1 + NUM_WARM_UP_STEPS + repeats


def compare_steps(
    engines: Mapping[str, SteppingEngine],
    *,
    num_rows: int,
    context: int,
    repeats: int,
    vocab_size: int,
    clock: Callable[[], float] = time.perf_counter,
) -> NumericsCell:
    """Step both engines in turns while each decodes ``num_rows`` sequences, one row each.

    The engine that goes first changes with every pair, so that a drift of the machine falls on both alike.

    Args:
        engines: by mode, "exact" and "fast"; idle, without a drafter and end-of-sequence ids, with seats for all
            rows and a prompt budget of ``num_rows * context`` tokens a round.
        num_rows: rows of a step.
        context: prompt tokens.
        repeats: pairs of steps.
        vocab_size: prompts are random ids below it, the same for both.
        clock: seconds.

    Raises:
        EngineFault: a step did not give every sequence one token.
    """
    for engine in engines.values():
        _fill(engine, num_rows, context, max_tokens_of(repeats), vocab_size)
        for _ in range(1 + NUM_WARM_UP_STEPS):  # the first round is the prompts
            _timed_step(engine, num_rows, clock)
    seconds: dict[str, list[float]] = {mode: [] for mode in MODES}
    for pair in range(repeats):
        for mode in MODES if pair % 2 == 0 else MODES[::-1]:
            seconds[mode].append(_timed_step(engines[mode], num_rows, clock))
    ratios = [exact / fast for exact, fast in zip(seconds["exact"], seconds["fast"], strict=True)]
    low, high = _quartiles(ratios)
    return NumericsCell(
        num_rows=num_rows,
        num_pairs=repeats,
        exact_ms=1000 * statistics.median(seconds["exact"]),
        fast_ms=1000 * statistics.median(seconds["fast"]),
        ratio=statistics.median(ratios),
        ratio_low=low,
        ratio_high=high,
    )


def _fill(engine: SteppingEngine, num_rows: int, context: int, max_tokens: int, vocab_size: int) -> None:
    """Submit one request per row; all of them end with the last measured step."""
    random = Random(num_rows)  # the same prompts for both engines
    for row in range(num_rows):
        prompt = tuple(random.randrange(vocab_size) for _ in range(context))
        sampling = SamplingParams(max_tokens=max_tokens)
        engine.submit(Request(request_id=f"{num_rows}-{row}", prompt_token_ids=prompt, sampling=sampling))


def _timed_step(engine: SteppingEngine, num_rows: int, clock: Callable[[], float]) -> float:
    """Seconds of one step in which every sequence gets a token."""
    begin_s = clock()
    updates = engine.step()
    end_s = clock()
    num_tokens = [len(update.new_token_ids) for update in updates]
    if num_tokens != [1] * num_rows:
        raise EngineFault(f"a step gave {num_tokens} tokens where {num_rows} sequences were to get one each")
    return end_s - begin_s


def _quartiles(values: Sequence[float]) -> tuple[float, float]:
    """First and third quartile; of a single value, the value twice."""
    if len(values) == 1:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


def numerics_table(cells: Sequence[NumericsCell]) -> Table:
    """One line per number of rows."""
    table = Table(title="Time of a decode step, exact and fast numerics", title_justify="left")
    for heading in ("rows", "exact ms", "fast ms", "exact / fast", "quartiles"):
        table.add_column(heading, justify="right", no_wrap=True)
    for cell in cells:
        table.add_row(
            str(cell.num_rows),
            f"{cell.exact_ms:.2f}",
            f"{cell.fast_ms:.2f}",
            f"{cell.ratio:.2f}",
            f"{cell.ratio_low:.2f}-{cell.ratio_high:.2f}",
        )
    return table
