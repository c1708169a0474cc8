"""Named ranges for profilers: visible in torch.profiler and Perfetto, free when nobody records."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch.autograd import profiler

__all__ = ["is_recording", "trace_range"]


def is_recording() -> bool:
    """Whether a profiler is recording."""
    return torch._C._autograd._profiler_enabled()


def trace_range(name: str) -> AbstractContextManager[object]:
    """A range called ``name`` around the ``with`` body; does nothing unless a profiler is recording."""
    if is_recording():
        return profiler.record_function(name)
    return nullcontext()
