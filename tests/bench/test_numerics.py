"""Steps of two engines in turns, with a clock that only the engines move."""

from collections import Counter

import pytest

from outrider.bench.numerics import NUM_WARM_UP_STEPS, compare_steps, max_tokens_of
from outrider.engine.metrics import EngineMetrics
from outrider.errors import EngineFault
from outrider.request import FinishReason, Request, RequestUpdate


class Clock:
    """Seconds that engines add to."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Scripted:
    """One token per sequence and step, in a time per step that a list gives in turn."""

    def __init__(self, name: str, clock: Clock, step_s: list[float], order: list[str], lost_at: int = -1) -> None:
        self.metrics = EngineMetrics()
        self._name, self._clock, self._step_s, self._order, self._lost_at = name, clock, step_s, order, lost_at
        self._left: Counter[str] = Counter()
        self._num_steps = 0
        self.prompts: list[tuple[int, ...]] = []

    def submit(self, request: Request) -> None:
        assert request.sampling.max_tokens is not None
        self._left[request.request_id] = request.sampling.max_tokens
        self.prompts.append(request.prompt_token_ids)

    def step(self) -> list[RequestUpdate]:
        self._order.append(self._name)
        self._clock.now_s += self._step_s[self._num_steps % len(self._step_s)]
        self._num_steps += 1
        running = [name for name, left in self._left.items() if left > 0]
        self._left.subtract(running)
        if self._num_steps == self._lost_at:
            running = running[:-1]
        return [
            RequestUpdate(
                request_id=name,
                new_token_ids=(7,),
                new_text="",
                finish_reason=None if self._left[name] else FinishReason.LENGTH,
            )
            for name in running
        ]

    @property
    def num_left(self) -> int:
        return self._left.total()


def engines(exact_s: list[float], fast_s: list[float], lost_at: int = -1):
    clock, order = Clock(), []
    return (
        clock,
        order,
        {
            "exact": Scripted("exact", clock, exact_s, order),
            "fast": Scripted("fast", clock, fast_s, order, lost_at),
        },
    )


def test_ratio_of_pairs_and_who_goes_first() -> None:
    # The fourth warm-up step included, five values repeat after the four steps that are not measured.
    clock, order, both = engines([9.0, 9.0, 9.0, 9.0, 0.2, 0.3, 0.4], [1.0, 1.0, 1.0, 1.0, 0.1, 0.1, 0.1])
    assert 1 + NUM_WARM_UP_STEPS == 4
    cell = compare_steps(both, num_rows=2, context=5, repeats=3, vocab_size=11, clock=clock)
    assert (cell.num_rows, cell.num_pairs) == (2, 3)
    assert cell.exact_ms == pytest.approx(300) and cell.fast_ms == pytest.approx(100)
    assert cell.ratio == pytest.approx(3.0)
    assert (cell.ratio_low, cell.ratio_high) == pytest.approx((2.5, 3.5))
    assert order[8:] == ["exact", "fast", "fast", "exact", "exact", "fast"]


def test_both_get_the_same_prompts_and_end_with_the_last_step() -> None:
    clock, _, both = engines([0.1], [0.1])
    compare_steps(both, num_rows=3, context=5, repeats=2, vocab_size=11, clock=clock)
    assert both["exact"].prompts == both["fast"].prompts
    assert {len(prompt) for prompt in both["exact"].prompts} == {5}
    assert both["exact"].num_left == both["fast"].num_left == 0
    assert max_tokens_of(2) == 6


def test_one_pair_has_no_spread() -> None:
    clock, _, both = engines([0.2], [0.1])
    cell = compare_steps(both, num_rows=1, context=2, repeats=1, vocab_size=11, clock=clock)
    assert cell.ratio_low == cell.ratio == cell.ratio_high == pytest.approx(2.0)


def test_a_step_that_left_a_sequence_out_is_no_measurement() -> None:
    clock, _, both = engines([0.1], [0.1], lost_at=6)
    with pytest.raises(EngineFault, match=r"\[1\] tokens where 2"):
        compare_steps(both, num_rows=2, context=2, repeats=4, vocab_size=11, clock=clock)
