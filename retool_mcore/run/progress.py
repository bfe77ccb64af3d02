"""The terminal while a run goes on: what is done, of how much, how long it will take."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn


def bar_of_steps(console: Console | None, *more: ProgressColumn) -> Progress:
    """``console``: None for standard output. ``more``: columns behind the time that remains."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, *more, console=console)
