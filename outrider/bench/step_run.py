"""Measure the steps of a grid in turns, with the floor of each and where its time goes."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from outrider.bench.anatomy import Anatomy, Stopwatch, anatomy_of, clocked, watched
from outrider.bench.floor import (
    MachineSpeed,
    ModelCost,
    StepBytes,
    StepShape,
    device_barrier,
    step_bytes,
    step_floor_s,
    step_operations,
)
from outrider.bench.routing import counted_experts
from outrider.bench.step_grid import StepGrid, StepPoint, one_row
from outrider.bench.step_rig import StepRig, TimedStep
from outrider.models.kimi_k3.model import KimiK3Model

__all__ = ["StepCell", "StepResults", "measure_steps", "quartiles"]

NUM_WATCHED = 7  # watched steps of a point; the one in the middle is shown


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCell:
    """One point as measured. Times are medians with quartiles; a ratio is over the one-row step of its context."""

    point: StepPoint
    median_ms: float
    low_ms: float
    high_ms: float
    ratio_to_one_row: float
    ratio_low: float  # quartiles of the ratios of one turn each
    ratio_high: float
    verb_ms: Mapping[str, float]  # medians; "round" is the rest of the step
    host_ms: float  # median of what is neither forward nor observe
    bytes: StepBytes
    operations: int
    distinct_experts: tuple[int, ...]  # of each sparse layer, in the step that was measured
    floor_ms: float
    bytes_floor_ms: float  # bytes over the streaming read
    operations_floor_ms: float
    bandwidth_gb_s: float  # the fastest streaming read of a buffer of this size
    anatomy: Anatomy | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResults:
    """All cells that were asked for, and the speeds that their floors rest on."""

    cells: tuple[StepCell, ...]
    read_rates: Mapping[int, Mapping[str, float]]  # buffer bytes -> way of reading -> bytes/s
    product_rates: Mapping[str, float]  # operations/s
    num_repeats: int


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """First and third quartile; of a single value, the value twice."""
    if len(values) == 1:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


def measure_steps(
    target: KimiK3Model,
    cost: ModelCost,
    grid: StepGrid,
    device: torch.device,
    *,
    repeats: int,
    progress: Callable[[str], None],
    clock: Callable[[], float] = time.perf_counter,
) -> StepResults:
    """Run every point once per turn, ``repeats`` turns, forward and backward in the list by turns.

    A drift of the machine or a busy neighbour so falls on all points alike. A turn before the first one is not
    timed: in it the experts of each point are counted. The machine's speeds are measured before and after.

    Args:
        target: without taps.
        cost: sizes of its checkpoint.
        grid: what to measure.
        device: where the target is.
        repeats: turns.
        progress: gets a line now and then.
        clock: seconds.
    """
    rig = StepRig(target, grid, device, clock=clock)
    experts = {}
    for point in grid.measured:
        progress(f"first step of {point.name}")
        with counted_experts(target) as counts:
            rig.run(point)
        experts[point] = tuple(counts)
    shapes = {point: _shape(point, experts[point]) for point in grid.measured}
    moved = {point: step_bytes(cost, shape) for point, shape in shapes.items()}
    speed = MachineSpeed(device, clock)
    _measure_speed(speed, moved, target.dtype)
    steps: dict[StepPoint, list[TimedStep]] = {point: [] for point in grid.measured}
    for turn in range(repeats):
        progress(f"turn {turn + 1}/{repeats} of {len(steps)} steps")
        for point in grid.measured if turn % 2 == 0 else grid.measured[::-1]:
            steps[point].append(rig.run(point))
    _measure_speed(speed, moved, target.dtype)
    medians = {point: statistics.median(step.seconds for step in timed) for point, timed in steps.items()}
    first_context, first_slots = grid.contexts[0], min(point.slots for point in grid.asked)
    cells = []
    for point in grid.measured:
        if point not in grid.asked:
            continue
        watching = point.context == first_context and point.slots == first_slots
        anatomy = _take_apart(target, rig, point, 1000 * medians[point], clock, device) if watching else None
        cells.append(
            _cell(point, steps, cost, shapes[point], moved[point], speed, experts=experts[point], anatomy=anatomy)
        )
    return StepResults(
        cells=tuple(cells),
        read_rates=dict(speed.read_rates),
        product_rates=dict(speed.product_rates),
        num_repeats=repeats,
    )


def _measure_speed(speed: MachineSpeed, moved: Mapping[StepPoint, StepBytes], dtype: torch.dtype) -> None:
    speed.measure_reads([each.total for each in moved.values()])
    speed.measure_products(dtype)


def _shape(point: StepPoint, experts: Sequence[int]) -> StepShape:
    return StepShape(num_rows=point.rows, num_slots=point.slots, context=point.context, num_experts=sum(experts))


def _cell(
    point: StepPoint,
    steps: Mapping[StepPoint, Sequence[TimedStep]],
    cost: ModelCost,
    shape: StepShape,
    moved: StepBytes,
    speed: MachineSpeed,
    *,
    experts: tuple[int, ...],
    anatomy: Anatomy | None,
) -> StepCell:
    seconds = [step.seconds for step in steps[point]]
    base = [step.seconds for step in steps[one_row(point.context)]]
    ratios = [one / other for one, other in zip(seconds, base, strict=True)]
    low_s, high_s = quartiles(seconds)
    ratio_low, ratio_high = quartiles(ratios)
    operations, bytes_per_s = step_operations(cost, shape), speed.bytes_per_s(moved.total)
    floor_s = step_floor_s(moved.total, operations, bytes_per_s=bytes_per_s, operations_per_s=speed.operations_per_s)
    return StepCell(
        point=point,
        median_ms=1000 * statistics.median(seconds),
        low_ms=1000 * low_s,
        high_ms=1000 * high_s,
        ratio_to_one_row=statistics.median(seconds) / statistics.median(base),
        ratio_low=ratio_low,
        ratio_high=ratio_high,
        verb_ms=_verbs(steps[point]),
        host_ms=1000 * statistics.median(_host_s(step) for step in steps[point]),
        bytes=moved,
        operations=operations,
        distinct_experts=experts,
        floor_ms=1000 * floor_s,
        bytes_floor_ms=1000 * moved.total / bytes_per_s,
        operations_floor_ms=1000 * operations / speed.operations_per_s,
        bandwidth_gb_s=bytes_per_s / 1e9,
        anatomy=anatomy,
    )


def _verbs(steps: Sequence[TimedStep]) -> dict[str, float]:
    """Median milliseconds of each verb of the round, and of what is left of the step."""
    timings = [step.result.timings for step in steps]
    columns = {
        "batch": [each.batch_s for each in timings],
        "forward": [each.forward_s for each in timings],
        "accept": [each.accept_s for each in timings],
        "commit": [each.commit_s for each in timings],
        "observe": [each.observe_s for each in timings],
        "round": [step.seconds - (each.total_s - each.propose_s) for step, each in zip(steps, timings, strict=True)],
    }
    return {name: 1000 * statistics.median(values) for name, values in columns.items()}


def _host_s(step: TimedStep) -> float:
    timings = step.result.timings
    return step.seconds - timings.forward_s - timings.observe_s


def _take_apart(
    target: KimiK3Model,
    rig: StepRig,
    point: StepPoint,
    step_ms: float,
    clock: Callable[[], float],
    device: torch.device,
) -> Anatomy:
    """The watched step in the middle of NUM_WATCHED, by its time; from a recording where the model has one."""
    watch = Stopwatch(clock, device_barrier(device))
    with clocked(target, watch):
        rig.run(point)
    look = clocked if watch.calls else watched
    found: list[tuple[float, Anatomy]] = []
    for _ in range(NUM_WATCHED):
        watch.clear()
        with look(target, watch):
            step = rig.run(point)
        found.append((step.seconds, anatomy_of(watch, step.result.timings, step.seconds, step_ms)))
    return sorted(found, key=lambda pair: pair[0])[NUM_WATCHED // 2][1]
