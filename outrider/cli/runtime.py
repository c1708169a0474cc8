"""Flags that several commands share, turned into final values."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

import torch

from outrider.errors import ConfigError

__all__ = ["loading_bar", "parse_speculation", "prepare_output", "resolve_dtype", "set_threads", "write_output"]

MAX_THREADS = 1024
MAX_DIGITS = 9  # of a number of drafts; int() itself refuses very long ones


def set_threads(num_threads: int) -> None:
    """Set the CPU threads of this process; 0 keeps PyTorch's default.

    Raises:
        ConfigError: the number is out of range.
    """
    if not 0 <= num_threads <= MAX_THREADS:
        raise ConfigError(f"--threads {num_threads} is outside 0..{MAX_THREADS}; use 1 or more, or 0 for the default")
    if num_threads:
        torch.set_num_threads(num_threads)


def resolve_dtype(dtype: str) -> str | None:
    """None for "auto": the engine then takes the dtype of the checkpoint."""
    return None if dtype == "auto" else dtype


def parse_speculation(text: str) -> str | int:
    """A number of drafts, or the word as it is; the engine refuses words that it does not know."""
    return int(text) if text.isdecimal() and len(text) <= MAX_DIGITS else text


def prepare_output(path: str) -> Path:
    """A file that can be written, checked before the work starts rather than after it.

    Raises:
        ConfigError: the folder cannot be created, or the file cannot be opened.
    """
    output = Path(path)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.open("a", encoding="utf-8").close()
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        raise ConfigError(f"--json {path!r} cannot be written ({reason}); name another file") from error
    return output


def write_output(output: Path, text: str) -> None:
    """Write a whole result.

    Raises:
        ConfigError: the file could be opened before, but not be written now.
    """
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{output} cannot be written ({error.strerror}); free space or name another file") from error


@contextmanager
def loading_bar(name: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on stderr for loading the checkpoint `name`; nothing where stderr is no terminal.

    Yields what a loader calls with bytes done and bytes in total.
    """
    if not sys.stderr.isatty():
        yield lambda _done, _total: None
        return
    with import_module("outrider.cli.bar").bar_of(name) as progress:  # rich takes time that a pipe need not wait for
        yield progress
