"""Prints a command's progress: messages, the stages of its start, its steps.

On a terminal, the current stage is a line that counts seconds, and the steps are a progress bar.
Elsewhere, each stage and step is a line. A run prints its stages once its folder is locked and its
log is open. If it fails before that, it prints only the error.
"""

import logging
import os
import threading
import time
import unicodedata
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Column
from rich.text import Text

from retool_mcore.run.start import WORDS, begun, early

SLOW_AFTER_S = 5.0  # imports alone can take this long on a busy machine
STEP_METRICS = {  # metrics in a step's line: name -> format
    "loss": "loss {:.4f}",
    "actor/pg_loss": "loss {:.4f}",
    "val_loss": "val_loss {:.4f}",
    "critic/rewards/mean": "reward {:+.3f}",
    "accuracy": "accuracy {:.3f}",
    "val/accuracy": "val/accuracy {:.3f}",
    "tokens_per_s": "{:,.0f} tokens/s",
    "timing_s/step": "{:.1f} s",
}
LINE_EVERY_S = 1.0

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


def line_of_stage(at_s: float, text: str) -> str:
    """Return the log line of a stage that began ``at_s`` seconds after the command."""
    return f"{at_s:7.1f} s  {text}"


@contextmanager
def show_early_stage(name: str) -> Generator[None]:
    """On a terminal, show the current early stage of command ``name`` while the block runs."""
    marks = early()
    with open(os.dup(2), "w", encoding="utf-8") as output:  # the block may redirect stderr
        console = Console(file=output)
        if not marks or not console.is_interactive:
            yield
            return
        with counting_line(console, f"{name}  {WORDS[marks[-1]['stage']]}", marks[-1]["clock_s"]):
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
        Stage(),
        console=console,
        transient=True,
        disable=not console.is_interactive,
        redirect_stdout=False,
        redirect_stderr=False,
    )
    line.add_task("", total=None, stage=text, since_s=since_s)
    return line


class Stage(ProgressColumn):
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


class StartStages:
    """Shows the stages of a start, read from ``start.jsonl``: on the bar, or as one line per stage.

    A stage's line is printed after SLOW_AFTER_S, or once the next one has begun.
    """

    def __init__(self, run_dir: Path, bars: Progress, bar: TaskID) -> None:
        self._dir, self._bars, self._bar = run_dir, bars, bar
        self._name = bars.tasks[bar].description
        self._printed = self._seen = 0
        self._since_s = time.monotonic()

    def show(self, *, over: bool = False) -> None:
        """Show new stages, and the seconds in the current one. ``over``: the start is complete."""
        began, now_s = begun(self._dir), time.monotonic()
        if not began:
            return
        if len(began) != self._seen:
            self._seen, self._since_s = len(began), now_s
        newest_too = over or now_s - self._since_s >= SLOW_AFTER_S
        end = len(began) if newest_too else len(began) - 1
        console = self._bars.console
        for stage, at in began[self._printed : end]:
            if not console.is_interactive:
                line = line_of_stage(at - began[0][1], WORDS[stage])
                console.print(line, markup=False, highlight=False, soft_wrap=True)
        self._printed = max(self._printed, end)
        if not over:
            text = f"{self._name}  {WORDS[began[-1][0]]}, {now_s - self._since_s:.0f} s"
            self._bars.update(self._bar, description=text)


class StepLines:
    """Prints a line per step, at most one per second, when there is no terminal for a bar."""

    def __init__(self, console: Console, steps: int) -> None:
        self._console, self._steps = console, steps
        self._first: tuple[int, float] | None = None  # the first printed step, and its time
        self._last_s = 0.0

    def print(self, metrics: Mapping[str, float]) -> None:
        """Print a step's metrics, unless a line was printed within the last second.

        The last step is always printed.
        """
        now_s, step = time.monotonic(), int(metrics["step"])
        if self._console.is_interactive or (now_s - self._last_s < LINE_EVERY_S and step < self._steps):
            return
        self._last_s = now_s
        self._first = self._first or (step, now_s)
        parts = [form.format(metrics[name]) for name, form in STEP_METRICS.items() if name in metrics]
        if (done := step - self._first[0]) and step < self._steps:
            left_s = (now_s - self._first[1]) / done * (self._steps - step)
            parts.append(f"{left_s:.0f} s left" if left_s < 60 else f"{left_s / 60:.1f} min left")
        self._console.print(
            f"step {step}/{self._steps}  {'  '.join(parts)}", markup=False, highlight=False, soft_wrap=True
        )
