"""A run's progress bar: the steps done, the steps in all, and the time that remains."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn


def bar_of_steps(console: Console | None, *more: ProgressColumn) -> Progress:
    """A bar on ``console`` (None: standard output), with ``more`` columns after the time left."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(
        *columns,
        *more,
        console=console,
        redirect_stdout=False,  # or rich shows on the terminal what the engines print for the log
        redirect_stderr=False,
    )
