"""What a loaded engine holds in memory: counted from its tensors, and as the system counts the process."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MemberDescriptorType, MethodType

import torch

from outrider.engine.memory import CacheReport
from outrider.models.inspect import readable_bytes
from outrider.ops.native.arena import Arena

__all__ = ["MemoryReport", "count_memory", "resident_bytes"]

OURS = "outrider."


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReport:
    """Bytes after loading."""

    target_bytes: int  # parameters of the target
    drafter_bytes: int  # parameters of the drafter; 0 without one
    derived_bytes: int  # what was made of them: packed copies, tables, working memory
    cache_bytes: int
    resident_bytes: int  # of the process, interpreter and libraries included; 0 where the system does not tell

    def summary(self) -> str:
        """One line for a person."""
        size = readable_bytes
        drafter = f" + {size(self.drafter_bytes)} of the drafter" if self.drafter_bytes else ""
        resident = f"; the process has {size(self.resident_bytes)} resident" if self.resident_bytes else ""
        return (
            f"memory: weights {size(self.target_bytes)}{drafter}, packed copies and tables {size(self.derived_bytes)}, "
            f"caches {size(self.cache_bytes)}{resident}"
        )


def count_memory(target: object, predictor: object | None, caches: CacheReport) -> MemoryReport:
    """The report of loaded models. Of tensors that share memory, a parameter gives it its name, the target's first.

    Followed are modules, containers, bound functions and attributes of our own classes; what a closure or a C library
    holds is not seen.
    """
    of_target, of_drafter = _storages(target), _storages(predictor)
    target_weights = {place: size for place, (size, is_weight) in of_target.items() if is_weight}
    drafter_weights = {
        place: size for place, (size, is_weight) in of_drafter.items() if is_weight and place not in target_weights
    }
    every = {place: size for place, (size, _) in of_drafter.items()}
    for place, (size, _) in of_target.items():
        every[place] = max(size, every.get(place, 0))
    weight_bytes = sum(target_weights.values()) + sum(drafter_weights.values())
    return MemoryReport(
        target_bytes=sum(target_weights.values()),
        drafter_bytes=sum(drafter_weights.values()),
        derived_bytes=sum(every.values()) - weight_bytes,
        cache_bytes=caches.total_bytes,
        resident_bytes=resident_bytes().get("total", 0),
    )


def _storages(root: object) -> dict[int, tuple[int, bool]]:
    """Address of every storage reachable from ``root``, its bytes in use, and whether a parameter lives there.

    In use is from the first byte of a tensor to the last one: the system gives no memory to the rest of a block in
    which tensors lie side by side (``ops/native/arena.py``).
    """
    ranges: dict[int, tuple[int, int, bool]] = {}
    for tensor in _tensors(root):
        place = tensor.untyped_storage().data_ptr()
        begin, length = int(tensor.storage_offset()), 0
        if tensor.numel():
            steps = zip(tensor.shape, tensor.stride(), strict=True)
            length = 1 + sum((int(size) - 1) * int(stride) for size, stride in steps)
        end = (begin + length) * tensor.itemsize
        first, last, is_weight = ranges.get(place, (begin * tensor.itemsize, end, False))
        is_weight = is_weight or isinstance(tensor, torch.nn.Parameter)
        ranges[place] = (min(first, begin * tensor.itemsize), max(last, end), is_weight)
    return {place: (last - first, is_weight) for place, (first, last, is_weight) in ranges.items()}


def _tensors(root: object) -> Iterator[torch.Tensor]:
    waiting, seen = [root], set[int]()
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            yield value
        else:
            waiting.extend(_parts(value))


def _parts(value: object) -> Iterator[object]:
    """Objects that ``value`` holds; of an arena not the block, but what lies in it counts."""
    if isinstance(value, Arena):
        return
    if isinstance(value, Mapping):
        yield from value.values()
    elif isinstance(value, tuple | list | set | frozenset):
        yield from value
    elif isinstance(value, partial):
        yield from (value.func, value.args, value.keywords)
    elif isinstance(value, MethodType):
        yield value.__self__
    elif isinstance(value, torch.nn.Module) or type(value).__module__.startswith(OURS):
        if type(value).__dictoffset__:
            yield from value.__dict__.values()
        for kind in type(value).__mro__:
            for member in kind.__dict__.values():
                if isinstance(member, MemberDescriptorType):  # a slot
                    with suppress(AttributeError):  # not set yet
                        yield member.__get__(value)


def resident_bytes() -> dict[str, int]:
    """Resident memory by kind, as the system counts it; empty where it does not tell."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    kinds = {"VmRSS": "total", "RssAnon": "anonymous", "RssFile": "file", "VmHWM": "peak"}
    fields = (line.split() for line in lines if line.partition(":")[0] in kinds)
    return {kinds[name.rstrip(":")]: 1024 * int(kilobytes) for name, kilobytes, *_ in fields}
