"""A count of things done, for people who wait."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from outrider.cli.arms import Ticker

__all__ = ["Advance", "Title", "counting_bar"]

Advance = Callable[[int], None]
Title = Callable[[str], None]


@contextmanager
def counting_bar(num_things: int | None, unit: str) -> Iterator[tuple[Title, Advance]]:
    """A bar on a terminal, a line now and then elsewhere; yields how to name the stage and how to advance.

    Args:
        num_things: in all; None where nobody knows.
        unit: what is counted, in the plural.
    """
    console = Console(file=sys.stderr)
    ticker, stage, done = Ticker(), "", 0
    total = "" if num_things is None else f"/{num_things}"
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=num_things)

        def title(text: str) -> None:
            nonlocal stage
            stage = text
            bar.update(task, description=text)

        def advance(count: int) -> None:
            nonlocal done
            done += count
            bar.advance(task, count)
            if not console.is_terminal:
                ticker(f"{stage}: {done}{total} {unit}")

        yield title, advance
