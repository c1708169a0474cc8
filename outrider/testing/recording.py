"""A target that shows every forward to a watcher and is otherwise the target it wraps."""

from collections.abc import Callable
from typing import Any, cast

import torch

from outrider.batch import ForwardBatch, TargetOutput
from outrider.models.protocol import TargetCaches, TargetModel

__all__ = ["Watcher", "recording", "top_margins"]

Watcher = Callable[[ForwardBatch, TargetOutput], None]


class _RecordingTarget:
    """Passes everything on, so that it stays a ``TargetModel`` whatever that protocol asks for."""

    def __init__(self, inner: TargetModel, watch: Watcher) -> None:
        self._inner = inner
        self._watch = watch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def forward(self, batch: ForwardBatch, caches: TargetCaches) -> TargetOutput:
        """The forward of the wrapped target, shown to the watcher."""
        output = self._inner.forward(batch, caches)
        self._watch(batch, output)
        return output


def recording(target: TargetModel, watch: Watcher) -> TargetModel:
    """``target``, with ``watch`` called after each of its forwards."""
    return cast(TargetModel, _RecordingTarget(target, watch))


def top_margins(logits_NV: torch.Tensor) -> list[float]:
    """Per row the largest logit less the second largest; 0 is a tie, NaN stays NaN.

    The difference is taken in float64, where logits of every compute dtype are exact.
    """
    top_N2 = logits_NV.double().topk(2, dim=-1).values
    return [float(margin) for margin in (top_N2[:, 0] - top_N2[:, 1]).tolist()]
