"""Memory for what every step reads: side by side in the order of asking, in huge pages where the system has them.

A step reads its weights once, front to back. In pages of 4 KiB that is a translation to look up every 64 cache lines,
and the processor's prefetchers stop at the end of each; in pages of 2 MiB the same read runs at the speed of the
memory. Linux hands them out by ``madvise`` where ``/sys/kernel/mm/transparent_hugepage/enabled`` says ``madvise`` or
``always``; elsewhere the same memory lies in small pages.
"""

import mmap
import sys
from collections.abc import Sequence
from contextlib import suppress
from math import prod

import torch

from outrider.errors import allocating

__all__ = ["HUGE_PAGE", "Arena"]

HUGE_PAGE = 1 << 21
CACHE_LINE = 64
BLOCK_BYTES = 32 * HUGE_PAGE  # address space taken at once; a page that nobody writes takes no memory


class Arena:
    """Gives tensors that follow each other in memory. It only grows: a tensor's memory is not given again.

    A tensor keeps its block alive, so the memory goes when the last of its tensors and the arena are gone.
    """

    def __init__(self) -> None:
        self._block_B = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor on the CPU, uninitialised, contiguous, at the begin of a cache line.

        Raises:
            CapacityError: there is not so much memory.
        """
        num_bytes = prod(shape) * dtype.itemsize
        if self._used + num_bytes > self._block_B.numel():
            with allocating(f"a tensor of shape {tuple(shape)} and dtype {dtype}"):
                self._block_B = _huge_pages(max(num_bytes, BLOCK_BYTES))
            self._used = 0
        values_B = self._block_B[self._used : self._used + num_bytes]
        self._used += -(-num_bytes // CACHE_LINE) * CACHE_LINE
        return values_B.view(dtype).view(*shape)


def _huge_pages(num_bytes: int) -> torch.Tensor:
    """Uninitialised bytes from the begin of a huge page to the end of one."""
    num_bytes = -(-num_bytes // HUGE_PAGE) * HUGE_PAGE
    if sys.platform != "linux":
        return torch.empty(num_bytes, dtype=torch.uint8)
    try:
        # Shared memory, the default, has rules of its own; one page more, as the kernel may start anywhere.
        memory = mmap.mmap(-1, num_bytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(error.strerror) from error
    bytes_B = torch.frombuffer(memory, dtype=torch.uint8)
    begin = -bytes_B.data_ptr() % HUGE_PAGE
    with suppress(OSError):  # of a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE, begin, num_bytes)
    return bytes_B[begin : begin + num_bytes]
