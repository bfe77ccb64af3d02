"""Prints messages for the user of a command: text, notes, and the stages before the progress bar.

On a terminal, the current stage is a line that counts seconds. Elsewhere, a stage is printed only
once it has lasted LASTED_S, so that a mistake found at once prints nothing but the error.
"""

import logging
import os
import threading
import time
import unicodedata
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console
from rich.progress import Progress, ProgressColumn, Task
from rich.text import Text

from retool_mcore.run import start
from retool_mcore.run.start import WORDS, Mark

LASTED_S = 5.0  # imports alone can take this long on a busy machine

notes = logging.getLogger(__name__)  # for code that has no terminal, such as a tracker


def printable(text: str) -> str:
    """Replace control characters by U+FFFD, except newline and tab."""
    return "".join(each if each in "\n\t" or unicodedata.category(each)[0] != "C" else "\ufffd" for each in text)


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


def tell_stage(console: Console, at_s: float, words: str) -> None:
    """Without a terminal, print a line for a stage that began ``at_s`` s after the command."""
    if not console.is_interactive:
        console.print(line_of_stage(at_s, words), markup=False, highlight=False, soft_wrap=True)


def line_of_stage(at_s: float, words: str) -> str:
    return f"{at_s:7.1f} s  {words}"


@contextmanager
def shown(name: str) -> Generator[None]:
    """Show the current early stage of command ``name`` while the block runs.

    It is written to the stderr of the block's start, even if the block redirects stderr.
    """
    marks = start.early()
    if not marks:
        yield
        return
    with os.fdopen(os.dup(2), "w", encoding="utf-8") as output:
        console = Console(file=output)
        if console.is_interactive:
            block = line_of(console, f"{name}  {WORDS[marks[-1]['stage']]}", marks[-1]["clock_s"])
        else:
            block = _told_early(output, marks)
        with block:
            yield


@contextmanager
def _told_early(output: TextIO, marks: list[Mark]) -> Generator[None]:
    def tell() -> None:
        start.tell_early()
        tell_stage(Console(file=output), marks[-1]["clock_s"] - marks[0]["clock_s"], WORDS[marks[-1]["stage"]])

    if start.early_told() == len(marks):
        yield
        return
    with told_late(tell, marks[-1]["clock_s"]):
        yield


@contextmanager
def told_late(tell: Callable[[], None], since_s: float) -> Generator[None]:
    """Call ``tell`` at ``since_s + LASTED_S`` (time.monotonic()) if the block still runs then."""
    timer = threading.Timer(max(0.0, since_s + LASTED_S - time.monotonic()), tell)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()  # so that it prints nothing after an error


def line_of(console: Console, words: str, since_s: float) -> Progress:
    """Create a transient line with ``words`` and the seconds since ``since_s`` (monotonic)."""
    line = Progress(
        Stage(),
        console=console,
        transient=True,
        disable=not console.is_interactive,
        redirect_stdout=False,
        redirect_stderr=False,
    )
    line.add_task("", total=None, stage=words, since_s=since_s)
    return line


class Stage(ProgressColumn):
    """Renders a task's field ``stage``, and the seconds since its field ``since_s``, if set."""

    def render(self, task: Task) -> Text:
        since_s = task.fields.get("since_s")
        seconds = "" if since_s is None else f", {time.monotonic() - since_s:.0f} s"
        return Text(f"{task.fields['stage']}{seconds}", no_wrap=True, overflow="ellipsis")
