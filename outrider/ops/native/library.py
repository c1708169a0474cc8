"""Finds, builds and loads the library of native operations that suits this processor.

A wrapper takes a ``Library`` and asks it for its functions once; models get theirs from ``library_for``.
"""

import ctypes
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Protocol

import torch

from outrider.config import native_ops_wanted
from outrider.ops.native.build import VARIANTS, NativeBuildError, build, intact, library_directories

__all__ = [
    "INT",
    "POINTER",
    "REAL",
    "CallRecorder",
    "Library",
    "NativeFunction",
    "Tape",
    "library",
    "library_for",
    "load_variant",
    "runnable_variants",
]

logger = logging.getLogger(__name__)

# Types of arguments: every pointer is passed as an integer (``Tensor.data_ptr()``), every count and stride as int64.
POINTER, INT, REAL = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float

# Processor flags, as Linux names them, that each variant needs; Linux leaves out what it does not let programs use.
NEEDED = {
    "avx2": frozenset({"avx2", "fma", "f16c"}),
    "avx512": frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl", "fma", "f16c"}),
    "avx512bf16": frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16", "fma", "f16c"}),
}


class CallRecorder(Protocol):
    """Who is told of the calls of a library while it records; see ``program``."""

    def note(self, function: "NativeFunction", arguments: tuple[object, ...]) -> None:
        """One call, before it runs."""


class Tape:
    """Who records the calls of a library at the moment; None most of the time."""

    __slots__ = ("recorder",)

    def __init__(self) -> None:
        self.recorder: CallRecorder | None = None


class NativeFunction:
    """A C function that tells the tape of its library about its calls.

    Args:
        name: without the prefix of the library.
        function: the C function, its types set.
        word_function: address of the form that recorded steps call, 0 where there is none (``OUTRIDER_OP``).
        tape: of the library.
    """

    __slots__ = ("_function", "_tape", "argument_types", "name", "word_function")

    def __init__(self, name: str, function: "ctypes._NamedFuncPointer", word_function: int, tape: Tape) -> None:
        self.name, self._function, self.word_function, self._tape = name, function, word_function, tape
        self.argument_types = tuple(function.argtypes or ())

    def __call__(self, *arguments: object) -> int | None:
        """Run it; without the interpreter lock."""
        if self._tape.recorder is not None:
            self._tape.recorder.note(self, arguments)
        result: int | None = self._function(*arguments)
        return result


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Library:
    """A loaded library; one object each, compared by identity."""

    variant: str  # instruction set
    path: Path
    handle: ctypes.CDLL
    tape: Tape = field(default_factory=Tape)

    @property
    def geometry(self) -> str:
        """What a report of the start-up probe calls an operation of this library."""
        return f"native {self.variant}"

    def function(self, name: str, arguments: Sequence[type], result: type | None = None) -> NativeFunction:
        """C function ``outrider_<name>``; it runs without the interpreter lock.

        Raises:
            AttributeError: the sources have none of that name.
        """
        function = self.handle[f"outrider_{name}"]
        function.argtypes, function.restype = list(arguments), result
        return NativeFunction(name, function, self._word_function(name), self.tape)

    def _word_function(self, name: str) -> int:
        try:
            return ctypes.cast(self.handle[f"outrider_op_{name}"], POINTER).value or 0
        except AttributeError:
            return 0


def library_for(dtype: torch.dtype, device: torch.device) -> Library | None:
    """The library, where a model of that dtype on that device can use it; None means torch forms."""
    return library() if dtype == torch.bfloat16 and device.type == "cpu" else None


@cache
def library() -> Library | None:
    """The best library this processor can run, built when missing or damaged; None when there is none.

    Asked once per process; says in one log line why the torch forms run.
    """
    if not native_ops_wanted():
        logger.info("native operations are off (OUTRIDER_NATIVE=0); the torch forms run")
        return None
    variants = runnable_variants()
    if not variants:
        logger.warning("native operations need an x86-64 processor with AVX2 under Linux; the torch forms run")
        return None
    try:
        return load_variant(variants[-1])
    except NativeBuildError as error:
        logger.warning("native operations are not available, the torch forms run: %s", error)
        return None


def load_variant(variant: str) -> Library:
    """The library of one instruction set, built when missing or damaged.

    Raises:
        NativeBuildError: it cannot be built or loaded.
    """
    for directory in library_directories():
        if intact(directory):
            break
    else:
        logger.info("building native operations, once for these sources ...")
        directory = build()
    path = directory / f"{variant}.so"
    try:
        return Library(variant=variant, path=path, handle=ctypes.CDLL(str(path)))
    except OSError as error:
        raise NativeBuildError(f"{path} cannot be loaded ({error})") from error


def runnable_variants() -> tuple[str, ...]:
    """Instruction sets of this processor that libraries are built for, the best last."""
    flags = _processor_flags()
    return tuple(variant for variant in VARIANTS if NEEDED[variant] <= flags)


@cache
def _processor_flags() -> frozenset[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset()
    return next((frozenset(line.split(":", 1)[1].split()) for line in lines if line.startswith("flags")), frozenset())
