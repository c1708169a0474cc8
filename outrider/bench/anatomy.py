"""Where a step's time goes: every operation of the model under a stopwatch, in steps that are timed for nothing else.

A step that runs from a recording reads the clock itself after every operation while ``clocked`` is open, which costs
next to nothing. For any other step ``watched`` is there. While it is open, the operations that the model calls
(functions of ``outrider.ops`` in the namespaces of its modules, and the kernels that it was built with) and the model's
modules are wrapped. A wrapper counts its own time only, without that of the wrappers inside it, so the parts of a step
add up to the step. The wrappers cost time; what they cost is shown as a part of its own and is in no median.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch

from outrider.models.kernels import Kernels
from outrider.models.kimi_k3.kda import KdaAttention
from outrider.models.kimi_k3.mla import MlaAttention
from outrider.models.kimi_k3.model import DecoderLayer, KimiK3Model
from outrider.models.kimi_k3.moe import DenseFfn, MoeFfn
from outrider.models.kimi_k3.residual import ResidualMix
from outrider.ops.native.program import Program, RecordedCall
from outrider.ops.rows import RowForm
from outrider.plan import RoundTimings

__all__ = ["MODEL_PARTS", "OTHER", "Anatomy", "PartTime", "Stopwatch", "anatomy_of", "clocked", "watched"]

OPS, FAMILY = "outrider.ops", "outrider.models.kimi_k3."
OTHER = "other"  # between the operations: Python, views, sums
BESIDE = "beside the operations"  # of a whole forward
KDA, MLA, MOE, DENSE = "KDA attention", "MLA attention", "MoE", "dense FFN"
MIX, LAYER, MODEL = "residual mix", "layer", "model"
MODULE_PARTS: tuple[tuple[type[torch.nn.Module], str], ...] = (
    (KdaAttention, KDA),
    (MlaAttention, MLA),
    (MoeFfn, MOE),
    (DenseFfn, DENSE),
    (ResidualMix, MIX),
    (DecoderLayer, LAYER),
)
# Operations that the layer or the model calls itself, but for one of the parts.
OP_PARTS = {"attention_residual_mix": MIX, "mix_norm": MIX}
MODEL_PARTS = {
    KDA: ("KDA attention", "KDA state"),
    MLA: ("MLA attention", "MLA latents"),
    MOE: ("routed experts", "shared experts", "router", "latent projections"),
    DENSE: ("dense MLP",),
    MIX: ("attention residuals",),
    LAYER: ("norms",),
    MODEL: ("embedding", "output head"),
}
"""Parts of a forward, and the kinds of bytes that each must move."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartTime:
    """Own time of one operation within one part of a step."""

    part: str
    op: str
    calls: int
    ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Anatomy:
    """One step taken apart. ``parts`` and ``watching_ms`` add up to ``step_ms``."""

    parts: tuple[PartTime, ...]
    step_ms: float  # median of the steps that nobody watched
    watching_ms: float  # that less the watched step: what the stopwatch cost, as a negative number

    def part_ms(self, part: str) -> float:
        """All operations of a part."""
        return sum(item.ms for item in self.parts if item.part == part)


class Stopwatch:
    """Own time by (part, operation). Frames nest; the inner one's time is taken off the outer one's.

    Args:
        clock: seconds.
        barrier: waits for the device, before every reading of the clock.
    """

    def __init__(self, clock: Callable[[], float], barrier: Callable[[], None]) -> None:
        self._clock, self._barrier = clock, barrier
        self._frames: list[list[Any]] = []  # part, op, begin, seconds of the frames inside
        self.seconds: Counter[tuple[str, str]] = Counter()
        self.calls: Counter[tuple[str, str]] = Counter()

    def clear(self) -> None:
        """Forget what was counted."""
        self.seconds.clear()
        self.calls.clear()

    def enter(self, part: str | None, op: str) -> None:
        """Open a frame; without a part it belongs to that of the frame around it."""
        self._barrier()
        inherited = self._frames[-1][0] if self._frames else MODEL
        self._frames.append([part or inherited, op, self._clock(), 0.0])

    def leave(self) -> None:
        """Close the innermost frame."""
        self._barrier()
        part, op, begin_s, inside_s = self._frames.pop()
        seconds = self._clock() - begin_s
        self.seconds[part, op] += seconds - inside_s
        self.calls[part, op] += 1
        if self._frames:
            self._frames[-1][3] += seconds

    def around(self, function: Callable[..., Any], op: str) -> Callable[..., Any]:
        """``function`` under the watch."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            self.enter(OP_PARTS.get(op), _label(op, args))
            try:
                return function(*args, **kwargs)
            finally:
                self.leave()

        return timed

    def take(self, part: str, op: str, seconds: float) -> None:
        """Count an operation that was timed elsewhere."""
        own: Any = seconds  # a Counter is typed for whole numbers
        self.seconds[part, op] += own
        self.calls[part, op] += 1


def _label(op: str, args: tuple[Any, ...]) -> str:
    """Products are told apart by the shape of their weight."""
    if op in ("linear", "router") and len(args) > 1 and isinstance(args[1], torch.Tensor) and args[1].dim() == 2:
        return f"{op} {args[1].shape[0]}x{args[1].shape[1]}"
    return op


@contextmanager
def clocked(target: KimiK3Model, watch: Stopwatch) -> Iterator[None]:
    """Steps from recordings tell ``watch`` what their operations took, when the body is left; others tell nothing."""
    kinds = {id(module): part for module in target.modules() for kind, part in MODULE_PARTS if isinstance(module, kind)}

    runs: list[tuple[Program, list[int]]] = []
    with target.steps.timed(lambda program, nanoseconds: runs.append((program, nanoseconds))):
        yield
    for program, nanoseconds in runs:
        for call, duration in zip(program.calls, nanoseconds, strict=True):
            part = OP_PARTS.get(call.name) or (MODEL if call.module is None else kinds.get(call.module, LAYER))
            watch.take(part, _call_label(call), 1e-9 * duration)


def _call_label(call: RecordedCall) -> str:
    """Products are told apart by the shape of their weight: arguments 4 and 5 of ``outrider_linear``."""
    return f"linear {call.arguments[4]}x{call.arguments[5]}" if call.name == "linear" else call.name


@contextmanager
def watched(target: KimiK3Model, watch: Stopwatch) -> Iterator[None]:
    """The model with every operation under ``watch``, run one by one; as it was afterwards."""
    with ExitStack() as stack:
        stack.enter_context(target.steps.paused())
        for module in [module for name, module in sys.modules.items() if name.startswith(FAMILY)]:
            for name, value in list(vars(module).items()):
                if isinstance(value, FunctionType) and _is_op(value):
                    stack.enter_context(_replaced(module, name, watch.around(value, name)))
        for layer in target.modules():
            _watch_module(stack, layer, watch)
        stack.enter_context(_replaced(target, "forward", watch.around(target.forward, OTHER)))
        yield


def _watch_module(stack: ExitStack, module: torch.nn.Module, watch: Stopwatch) -> None:
    for name, value in list(vars(module).items()):
        if isinstance(value, Kernels):
            kernels = {field.name: getattr(value, field.name) for field in fields(value)}
            wrapped: dict[str, Any] = {each: watch.around(form, each) for each, form in kernels.items() if _is_op(form)}
            rows = {field.name: getattr(value.rows, field.name) for field in fields(RowForm)}
            wrapped["rows"] = RowForm(**{each: watch.around(form, f"{each}_rows") for each, form in rows.items()})
            stack.enter_context(_replaced(module, name, replace(value, **wrapped)))
        elif _is_op(value):
            stack.enter_context(_replaced(module, name, watch.around(value, name)))
    part = next((part for kind, part in MODULE_PARTS if isinstance(module, kind)), None)
    if part is not None:
        before = module.register_forward_pre_hook(lambda _module, _inputs, part=part: watch.enter(part, OTHER))
        after = module.register_forward_hook(lambda _module, _inputs, _output: watch.leave())
        stack.callback(before.remove)
        stack.callback(after.remove)


def _is_op(value: object) -> bool:
    """Whether a value is an operation, in whatever form: a function, a bound choice, or an object with weights."""
    if isinstance(value, FunctionType | MethodType):
        return value.__module__.startswith(OPS)
    return callable(value) and (isinstance(value, partial) or type(value).__module__.startswith(OPS))


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """``owner.name`` set to ``value``; what was there comes back, or nothing if it was the class's."""
    own = name in vars(owner)
    before = vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)


def anatomy_of(watch: Stopwatch, timings: RoundTimings, watched_s: float, step_ms: float) -> Anatomy:
    """Put a watched step together from the stopwatch, the round's own clock and its time on the wall.

    Args:
        watch: holds this step alone.
        timings: seconds by verb of the round; what the forward took beside what was watched is the model's.
        watched_s: seconds of the step, the handing over of drafts left out.
        step_ms: median of the unwatched steps.
    """
    parts = [
        PartTime(part=part, op=op, calls=watch.calls[part, op], ms=1000 * seconds)
        for (part, op), seconds in watch.seconds.items()
    ]
    parts.append(PartTime(part=MODEL, op=BESIDE, calls=1, ms=1000 * (timings.forward_s - watch.seconds.total())))
    verbs = {
        "batch": timings.batch_s,
        "accept": timings.accept_s,
        "commit": timings.commit_s,
        "observe": timings.observe_s,
        "round": watched_s - (timings.total_s - timings.propose_s),
    }
    parts += [PartTime(part=verb, op=OTHER, calls=1, ms=1000 * seconds) for verb, seconds in verbs.items()]
    return Anatomy(parts=tuple(parts), step_ms=step_ms, watching_ms=step_ms - sum(part.ms for part in parts))
