"""Ways to read every byte of a buffer once; the fastest of them shows what the memory gives."""

import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

__all__ = ["ABSENT_BYTE", "reading_ways"]

ABSENT_BYTE = 0xAA  # not a byte of float32 ones


def reading_ways(buffer_RC: torch.Tensor, pool: ThreadPoolExecutor | None) -> dict[str, Callable[[], object]]:
    """Calls, by name, that each read the whole of a float32 buffer of ones.

    The search of the C library for a byte that is not there does nothing but read, so that small buffers are not
    limited by arithmetic. ``pool`` has the workers it may use; None is the calling thread alone.
    """
    vector_C = torch.ones(buffer_RC.shape[1], device=buffer_RC.device)
    out_R = torch.empty(buffer_RC.shape[0], device=buffer_RC.device)
    ways: dict[str, Callable[[], object]] = {
        "sum": buffer_RC.sum,
        "maximum": buffer_RC.amax,
        "matrix times vector": lambda: torch.mv(buffer_RC, vector_C, out=out_R),
        "integer sum": lambda: buffer_RC.view(torch.int64).sum(),
    }
    if buffer_RC.device.type == "cpu":
        ways["byte search"] = _searching(buffer_RC, pool)
    return ways


def _searching(buffer_RC: torch.Tensor, pool: ThreadPoolExecutor | None) -> Callable[[], object]:
    search = ctypes.CDLL(None).memchr
    search.argtypes, search.restype = (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t), ctypes.c_void_p
    address, num_bytes = buffer_RC.data_ptr(), buffer_RC.nbytes
    if pool is None:
        return lambda: search(address, ABSENT_BYTE, num_bytes)
    part = -(-num_bytes // torch.get_num_threads())
    starts = range(0, num_bytes, part)

    def read_part(start: int) -> object:
        return search(address + start, ABSENT_BYTE, min(part, num_bytes - start))

    return lambda: list(pool.map(read_part, starts))
