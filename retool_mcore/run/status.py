"""What a command prints for its user: text, notes, and what it is doing before it has a bar.

On a terminal a stage is a line that counts seconds. Elsewhere a stage is a line, once it has
lasted: a mistake that is found at once is one line then, the error.
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

LASTED_S = 5.0  # imports take as long on a machine that does other things, too

notes = logging.getLogger(__name__)  # for code that has no terminal, such as a tracker


def printable(text: str) -> str:
    """``text`` with a mark for each character on which a terminal acts."""
    return "".join(each if each in "\n\t" or unicodedata.category(each)[0] != "C" else "\ufffd" for each in text)


def print_text(console: Console, text: str) -> None:
    """Print ``text``; only a terminal wraps it, between words."""
    console.print(printable(text), markup=False, highlight=False, emoji=False, soft_wrap=not console.file.isatty())


def print_commands(console: Console, lines: Iterable[str]) -> None:
    """Print lines to copy, which nothing wraps."""
    for line in lines:
        console.print(printable(line), markup=False, highlight=False, emoji=False, soft_wrap=True)


@contextmanager
def notes_on(console: Console, of: logging.Logger = notes) -> Generator[None]:
    """Print warnings of the logger ``of`` on ``console``, above its progress bar if it has one."""
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: print_text(console, f"note: {record.getMessage()}")
    of.addHandler(handler)
    try:
        yield
    finally:
        of.removeHandler(handler)


def tell_stage(console: Console, at_s: float, words: str) -> None:
    """A line for a stage that began ``at_s`` after the command, where there is no terminal."""
    if not console.is_interactive:
        console.print(line_of_stage(at_s, words), markup=False, highlight=False, soft_wrap=True)


def line_of_stage(at_s: float, words: str) -> str:
    return f"{at_s:7.1f} s  {words}"


@contextmanager
def shown(name: str) -> Generator[None]:
    """Until the block ends: the newest early stage of ``name``.

    It is shown where standard error leads at the beginning of the block.
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
    """Call ``tell`` at ``LASTED_S`` after ``since_s`` of time.monotonic(), if the block lasts."""
    timer = threading.Timer(max(0.0, since_s + LASTED_S - time.monotonic()), tell)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()  # what it tells does not come after an error


def line_of(console: Console, words: str, since_s: float) -> Progress:
    """A line of ``words`` and the seconds since ``since_s``; nothing is left of it afterwards."""
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
    """A task's field ``stage``, and where it has ``since_s``, the seconds since then."""

    def render(self, task: Task) -> Text:
        since_s = task.fields.get("since_s")
        seconds = "" if since_s is None else f", {time.monotonic() - since_s:.0f} s"
        return Text(f"{task.fields['stage']}{seconds}", no_wrap=True, overflow="ellipsis")
