"""The progress bar of loading; a module of its own, imported only where somebody sees it."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

__all__ = ["bar_of"]


@contextmanager
def bar_of(name: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr; yields what a loader calls with bytes done and bytes in total."""
    columns = (
        TextColumn(f"loading {name}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(file=sys.stderr), transient=True) as bar:
        task = bar.add_task("load", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
