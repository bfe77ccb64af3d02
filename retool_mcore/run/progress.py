"""Shows a run's progress: a bar on a terminal, one line per step elsewhere."""

import time
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Column

from retool_mcore.run.start import WORDS, begun
from retool_mcore.run.status import LASTED_S, tell_stage

# Metrics shown in a step's line: name -> format.
SAID = {
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


class StartShown:
    """Shows the stages of a start, read from ``start.jsonl``: on the bar, or as one line per stage.

    A stage's line is printed once the stage has lasted LASTED_S or the next one has begun. ``told``
    is the number of stages already printed before the bar existed.
    """

    def __init__(self, run_dir: Path, bars: Progress, bar: TaskID, told: int = 0) -> None:
        self._dir, self._bars, self._bar, self._told = run_dir, bars, bar, told
        self._name = bars.tasks[bar].description
        self._seen, self._since_s = 0, time.monotonic()

    def look(self, *, over: bool = False) -> None:
        """Show new stages, and the seconds in the current one. ``over``: the start is complete."""
        began, now_s = begun(self._dir), time.monotonic()
        if not began:
            return
        if len(began) != self._seen:
            self._seen, self._since_s = len(began), now_s
        newest_too = over or now_s - self._since_s >= LASTED_S
        upto = len(began) if newest_too else len(began) - 1
        for stage, at in began[self._told : upto]:
            tell_stage(self._bars.console, at - began[0][1], WORDS[stage])
        self._told = max(self._told, upto)
        words = f"{self._name}  {WORDS[began[-1][0]]}, {now_s - self._since_s:.0f} s"
        if not over:
            self._bars.update(self._bar, description=words)


class StepLines:
    """Prints a line per step, at most one per second, when there is no terminal for a bar."""

    def __init__(self, console: Console, steps: int) -> None:
        self._console, self._steps = console, steps
        self._first: tuple[int, float] | None = None  # the first printed step, and its time
        self._last_s = 0.0

    def tell(self, metrics: Mapping[str, float]) -> None:
        """Print a step's metrics, unless a line was printed within the last second.

        The last step is always printed.
        """
        now_s, step = time.monotonic(), int(metrics["step"])
        if self._console.is_interactive or (now_s - self._last_s < LINE_EVERY_S and step < self._steps):
            return
        self._last_s = now_s
        self._first = self._first or (step, now_s)
        said = [form.format(metrics[name]) for name, form in SAID.items() if name in metrics]
        if (done := step - self._first[0]) and step < self._steps:
            left_s = (now_s - self._first[1]) / done * (self._steps - step)
            said.append(f"{left_s:.0f} s left" if left_s < 60 else f"{left_s / 60:.1f} min left")
        self._console.print(
            f"step {step}/{self._steps}  {'  '.join(said)}", markup=False, highlight=False, soft_wrap=True
        )
