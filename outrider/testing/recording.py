"""A target that shows every forward to a watcher and is otherwise the target it wraps."""

from collections.abc import Callable
from typing import Any, cast

import torch

from outrider.batch import ForwardBatch, TargetOutput
from outrider.models.protocol import TargetCaches, TargetModel
from outrider.ops.draws import Purpose, draw_keys, gumbel
from outrider.ops.invariant import island_dtype
from outrider.ops.sampling import tempered

__all__ = ["Watcher", "draw_margins", "recording", "top_margins"]

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


def draw_margins(logits_NV: torch.Tensor, positions_N: torch.Tensor, *, temperature: float, seed: int) -> list[float]:
    """As ``top_margins``, for the draw of the first sample of ``seed``: of the logits with the noise on them.

    A token is the argmax of ``logit / temperature + noise`` (docs/concepts/sampling.md), hence of
    ``logit + temperature * noise``, whose margin says how far a logit must move to change the draw.

    Args:
        logits_NV: of a request without cuts, penalties and bias.
        positions_N: int64, absolute position of the token that each row chooses.
        temperature: above 0.
        seed: of the request.
    """
    logits_NV = logits_NV.to(island_dtype(logits_NV.dtype))
    num_rows, vocab_size = logits_NV.shape
    seeds_N = torch.full((num_rows,), seed, dtype=torch.int64, device=logits_NV.device)
    keys_N = draw_keys(seeds_N, 0, positions_N, Purpose.SAMPLE)
    noise_NV = gumbel(keys_N, torch.arange(vocab_size, device=logits_NV.device), logits_NV.dtype)
    scores_NV = tempered(logits_NV, torch.full((num_rows,), temperature, device=logits_NV.device))
    return [temperature * margin for margin in top_margins(scores_NV + noise_NV)]
