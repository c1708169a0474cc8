"""Steps recorded once and run again by one call, as CUDA graphs are for GPUs (docs/decisions/0010-recorded-steps.md).

``record`` runs a function and writes down which native operations it calls with which arguments. The ``Program``
that it returns runs them again: same operations, same addresses, in C without Python in between. So it computes what
the function would, provided that (1) the function computes with native operations only, (2) what it reads lies where
it lay, and (3) its Python would go the same way again. (1) is watched: any other operation of torch that computes is
``NotRecordableError``. (2) and (3) are the caller's: inputs that change are written in place, and whatever decides
shapes or branches is part of what the caller keeps programs by.
"""

import ctypes
import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from outrider.ops.native.library import POINTER, REAL, Library, NativeFunction
from outrider.ops.native.scratch import Scratch, ScratchSession

__all__ = ["NotRecordableError", "Program", "RecordedCall", "record"]

aten = torch.ops.aten
ALLOCATIONS = (aten.empty.memory_format, aten.new_empty.default)


class NotRecordableError(Exception):
    """The function does something that a program could not repeat; the message names it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedCall:
    """One operation of a program."""

    name: str  # of the native function
    arguments: tuple[Any, ...]
    module: int | None  # id of the innermost torch module whose forward made the call


@dataclass(frozen=True, slots=True, kw_only=True)
class _Result:
    """A tensor that the function returned, and where the recording had it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    address: int
    num_bytes: int
    first_call: int


class _ProgramRecord(ctypes.Structure):
    """``Program`` of program.cpp."""

    _fields_ = (
        ("ops", POINTER),
        ("num_ops", ctypes.c_int64),
        ("patches", POINTER),
        ("num_patches", ctypes.c_int64),
    )


class Program:
    """Recorded operations and where their results go. Not re-entrant, and it shares scratch memory with others.

    Args:
        library: whose operations they are.
        calls: in order.
        functions: the function of each call.
        results: what the recorded function returned.
    """

    def __init__(
        self,
        library: Library,
        calls: Sequence[RecordedCall],
        functions: Sequence[NativeFunction],
        results: Sequence[_Result],
    ) -> None:
        self.calls = tuple(calls)
        self._shapes = tuple((result.shape, result.dtype) for result in results)
        words = [_words(function, call.arguments) for function, call in zip(functions, calls, strict=True)]
        begins = np.cumsum([0, *map(len, words)])
        # Held here: the record holds addresses only.
        self._words = np.array([word for each in words for word in each], dtype=np.int64)
        base = self._words.ctypes.data
        self._ops = np.array(
            [
                (function.word_function, base + 8 * int(begin))
                for function, begin in zip(functions, begins[:-1], strict=True)
            ],
            dtype=np.int64,
        ).reshape(-1, 2)
        patches = _patches(functions, self.calls, results, base, begins.tolist())
        self._patches = np.array(patches, dtype=np.int64).reshape(-1, 3)
        self._record = _ProgramRecord(
            ops=self._ops.ctypes.data,
            num_ops=len(self._ops),
            patches=self._patches.ctypes.data,
            num_patches=len(self._patches),
        )
        self._address = ctypes.addressof(self._record)
        self._places = (ctypes.c_void_p * max(1, len(results)))()
        self._places_address = ctypes.addressof(self._places)
        self._run = library.function("program_run", [POINTER, POINTER, POINTER])

    @property
    def num_bytes(self) -> int:
        """Bytes held, without those of the scratch memory."""
        return self._words.nbytes + self._ops.nbytes + self._patches.nbytes

    def run(self) -> tuple[torch.Tensor, ...]:
        """Run it; the results are new tensors, which no later run touches."""
        results = self._new_results()
        self._run(self._address, self._places_address, None)
        return results

    def run_timed(self) -> tuple[tuple[torch.Tensor, ...], list[int]]:
        """As ``run``, and the nanoseconds that each call took."""
        results = self._new_results()
        times = np.zeros(len(self.calls), dtype=np.int64)
        self._run(self._address, self._places_address, times.ctypes.data)
        return results, times.tolist()

    def _new_results(self) -> tuple[torch.Tensor, ...]:
        results = tuple(torch.empty(shape, dtype=dtype) for shape, dtype in self._shapes)
        for index, result in enumerate(results):
            self._places[index] = result.data_ptr()
        return results


def record(
    library: Library, scratch: Scratch, function: Callable[[], Sequence[torch.Tensor]]
) -> tuple[Program, tuple[torch.Tensor, ...]]:
    """Run ``function`` and record it.

    Args:
        library: whose calls are recorded.
        scratch: where the tensors go that the function allocates.
        function: returns tensors that it allocated, each whole and contiguous.

    Returns:
        The program, and what the function returned, copied out of the scratch memory.

    Raises:
        NotRecordableError: the function computed with anything else, kept a tensor, or another thread records.
    """
    recording = _Recording(scratch)
    if library.tape.recorder is not None:
        raise NotRecordableError("another thread records with this library")
    library.tape.recorder = recording
    try:
        with recording.modules_watched(), recording:
            returned = tuple(function())
    finally:
        library.tape.recorder = None
    if recording.refusal is not None:
        raise NotRecordableError(recording.refusal)
    results = [recording.result(tensor) for tensor in returned]
    copies = tuple(tensor.clone() for tensor in returned)
    del returned
    if recording.session.num_living:
        gc.collect()  # a cycle may hold what nobody can reach
    if recording.session.num_living:
        raise NotRecordableError(
            f"{recording.session.num_living} tensors outlive the step, which the next one overwrites"
        )
    return Program(library, recording.calls, recording.functions, results), copies


class _Recording(TorchDispatchMode):
    """Notes native calls; gives allocations from scratch memory; refuses what computes otherwise."""

    def __init__(self, scratch: Scratch) -> None:
        super().__init__()
        self.calls: list[RecordedCall] = []
        self.functions: list[NativeFunction] = []
        self.session = ScratchSession(scratch)
        self.refusal: str | None = None
        self._thread = threading.get_ident()
        self._modules: list[int] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Asked by torch: a yes would import its compiler at the first recording, which takes a second."""
        return False

    def note(self, function: NativeFunction, arguments: tuple[object, ...]) -> None:
        """See CallRecorder."""
        if threading.get_ident() != self._thread:
            return
        if not function.word_function:
            self._refuse(f"native {function.name}, which has no OUTRIDER_OP")
        if not all(value is None or isinstance(value, int | float) for value in arguments):
            self._refuse(f"native {function.name}, whose arguments are not plain numbers and addresses")
        module = self._modules[-1] if self._modules else None
        self.calls.append(RecordedCall(name=function.name, arguments=arguments, module=module))
        self.functions.append(function)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Every operation of torch passes here."""
        kwargs = kwargs or {}
        if func in ALLOCATIONS:
            return self._allocate(func, args, kwargs)
        if not (func.is_view or func is aten.detach.default):
            self._refuse(str(func))
        return func(*args, **kwargs)

    def _allocate(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        tensor: torch.Tensor = func(*args, **kwargs)
        if tensor.device.type != "cpu" or tensor.numel() == 0:
            return tensor
        return self.session.empty(tuple(tensor.shape), tensor.dtype, len(self.calls))

    def _refuse(self, what: str) -> None:
        if self.refusal is None:
            self.refusal = what

    def result(self, tensor: torch.Tensor) -> _Result:
        """Where a returned tensor lies; the last block at an address is the one that lives."""
        shape, dtype = tuple(tensor.shape), tensor.dtype
        if tensor.numel() == 0:
            return _Result(shape=shape, dtype=dtype, address=0, num_bytes=0, first_call=len(self.calls))
        for block in reversed(self.session.blocks):
            if block.address == tensor.data_ptr() and block.num_bytes == tensor.nbytes and tensor.is_contiguous():
                return _Result(
                    shape=shape,
                    dtype=dtype,
                    address=block.address,
                    num_bytes=block.num_bytes,
                    first_call=block.first_call,
                )
        raise NotRecordableError(f"a result of shape {shape} is no tensor of its own")

    @contextmanager
    def modules_watched(self) -> Iterator[None]:
        """Know which module's forward a call is made in."""

        def enter(module: torch.nn.Module, _inputs: Any) -> None:
            if threading.get_ident() == self._thread:
                self._modules.append(id(module))

        def leave(_module: torch.nn.Module, _inputs: Any, _output: Any) -> None:
            if threading.get_ident() == self._thread:
                self._modules.pop()

        handles = (register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _words(function: NativeFunction, arguments: tuple[Any, ...]) -> list[int]:
    """The arguments as the C side reads them: ``Word`` of program.h."""
    return [_word(kind, value) for kind, value in zip(function.argument_types, arguments, strict=True)]


def _word(kind: type, value: Any) -> int:
    if kind is REAL:
        return int(np.float32(value).view(np.uint32))
    return 0 if value is None else int(value)


def _patches(
    functions: Sequence[NativeFunction],
    calls: Sequence[RecordedCall],
    results: Sequence[_Result],
    base: int,
    begins: Sequence[int],
) -> list[tuple[int, int, int]]:
    """Arguments that point into a result: address of the word, index of the result, byte of it.

    Before a result was allocated, another tensor may have had its block.
    """
    found = []
    for number, result in enumerate(results):
        for index in range(result.first_call, len(calls)):
            pairs = zip(functions[index].argument_types, calls[index].arguments, strict=True)
            for place, (kind, value) in enumerate(pairs):
                offset = -1 if kind is not POINTER or value is None else value - result.address
                if 0 <= offset < result.num_bytes:
                    found.append((base + 8 * (begins[index] + place), number, offset))
    return found
