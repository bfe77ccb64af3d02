"""What a command is doing before it has a bar.

On a terminal it is a line that counts seconds; elsewhere each stage is a line.
"""

import os
import time
from collections.abc import Generator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress, ProgressColumn, Task
from rich.text import Text

from retool_mcore.run.start import WORDS, begin_early, early


def begins(stage: str) -> None:
    """A stage of a start begins, before the run's folder is held."""
    at_s = begin_early(stage)
    tell_stage(Console(stderr=True), at_s, WORDS[stage])


def tell_stage(console: Console, at_s: float, words: str) -> None:
    """A line for a stage that began ``at_s`` after the command, where there is no terminal."""
    if not console.is_interactive:
        console.print(line_of_stage(at_s, words), markup=False, highlight=False, soft_wrap=True)


def line_of_stage(at_s: float, words: str) -> str:
    return f"{at_s:7.1f} s  {words}"


@contextmanager
def shown(name: str) -> Generator[None]:
    """On a terminal, until the block ends: the newest stage of ``name``, and its seconds."""
    marks = early()
    if not marks or not Console(stderr=True).is_interactive:
        yield
        return
    with counting(f"{name}  {WORDS[marks[-1]['stage']]}", marks[-1]["clock_s"]):
        yield


@contextmanager
def counting(words: str, since_s: float) -> Generator[None]:
    """On a terminal, until the block ends: ``words``, and the seconds since ``since_s``.

    ``since_s`` is of time.monotonic(). It writes to the terminal that standard error is at the
    beginning of the block, wherever that leads meanwhile.
    """
    with os.fdopen(os.dup(2), "w", encoding="utf-8") as terminal, line_of(Console(file=terminal), words, since_s):
        yield


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
