"""Prints a command's messages, its early stages and bars. run/progress.py prints those of a run."""

import logging
import os
import threading
import time
import unicodedata
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Column
from rich.text import Text

from retool_mcore.run.start import STAGE_TEXTS, early_stages

SLOW_AFTER_S = 5.0  # imports alone can take this long on a busy machine

notes = logging.getLogger(__name__)  # for code that has no terminal, such as a tracker


def printable(text: str) -> str:
    """Replace control characters with U+FFFD, except newline and tab."""
    return "".join(char if char in "\n\t" or unicodedata.category(char)[0] != "C" else "\ufffd" for char in text)


def print_text(console: Console, text: str) -> None:
    """Print ``text``; wrap it between words on a terminal, not in a log file."""
    console.print(printable(text), markup=False, highlight=False, emoji=False, soft_wrap=not console.file.isatty())


def print_commands(console: Console, lines: Iterable[str]) -> None:
    """Print lines that users copy; never wrap them."""
    for line in lines:
        console.print(printable(line), markup=False, highlight=False, emoji=False, soft_wrap=True)


@contextmanager
def notes_on(console: Console, of: logging.Logger = notes) -> Generator[None]:
    """Print warnings of the logger ``of`` on ``console``, above its progress bar, if any."""
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: print_text(console, f"note: {record.getMessage()}")
    of.addHandler(handler)
    try:
        yield
    finally:
        of.removeHandler(handler)


def line_of_stage(at_s: float, text: str) -> str:
    """Return the log line of a stage that began ``at_s`` seconds after the command."""
    return f"{at_s:7.1f} s  {text}"


@contextmanager
def show_early_stage(name: str) -> Generator[None]:
    """On a terminal, show the current early stage of command ``name`` while the block runs."""
    marks = early_stages()
    with open(os.dup(2), "w", encoding="utf-8") as output:  # the block may redirect stderr
        console = Console(file=output)
        if not marks or not console.is_interactive:
            yield
            return
        with counting_line(console, f"{name}  {STAGE_TEXTS[marks[-1]['stage']]}", marks[-1]["clock_s"]):
            yield


@contextmanager
def call_if_slow(function: Callable[[], None], since_s: float) -> Generator[None]:
    """Call ``function`` SLOW_AFTER_S after ``since_s`` (monotonic) if the block still runs."""
    timer = threading.Timer(max(0.0, since_s + SLOW_AFTER_S - time.monotonic()), function)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()  # so that it prints nothing after an error


def counting_line(console: Console, text: str, since_s: float) -> Progress:
    """Create a transient line with ``text`` and the seconds since ``since_s`` (monotonic)."""
    line = Progress(
        StageColumn(),
        console=console,
        transient=True,
        disable=not console.is_interactive,
        redirect_stdout=False,
        redirect_stderr=False,
    )
    line.add_task("", total=None, stage=text, since_s=since_s)
    return line


class StageColumn(ProgressColumn):
    """Renders a task's field ``stage``, and the seconds since its field ``since_s``, if set."""

    def render(self, task: Task) -> Text:
        since_s = task.fields.get("since_s")
        seconds = "" if since_s is None else f", {time.monotonic() - since_s:.0f} s"
        return Text(f"{task.fields['stage']}{seconds}", no_wrap=True, overflow="ellipsis")


def bar_of_steps(console: Console | None, *more: ProgressColumn) -> Progress:
    """Create a progress bar on ``console`` (None: stdout), with ``more`` columns at the end.

    Without a terminal it is disabled, because rich would print its final state.
    """
    console = console or Console()
    steps, left = (kind(table_column=Column(no_wrap=True)) for kind in (MofNCompleteColumn, TimeRemainingColumn))
    columns = (TextColumn("{task.description}"), BarColumn(), steps, left)  # on a narrow terminal, only the bar shrinks
    return Progress(
        *columns,
        *more,
        console=console,
        disable=not console.is_interactive,
        redirect_stdout=False,  # otherwise rich shows the engines' log output on the terminal
        redirect_stderr=False,
    )
