"""Named ranges for profilers: visible in torch.profiler and Perfetto, free when nobody records."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch.autograd import profiler

__all__ = ["trace_range"]


def trace_range(name: str) -> AbstractContextManager[object]:
    """A range called ``name`` around the ``with`` body; does nothing unless a profiler is recording."""
    if torch._C._autograd._profiler_enabled():
        return profiler.record_function(name)
    return nullcontext()
