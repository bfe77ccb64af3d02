"""Reads and shows a run's progress: the stages of its start, its steps and its alarms.

On a terminal, the current stage is a line that counts seconds, and the steps are a progress bar.
Elsewhere, each stage and step is a line. A run prints its stages once its folder is locked and its
log is open. If it fails before that, it prints only the error.
"""

import json
import math
import os
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress, TaskID

from retool_mcore.config import RunConfig, SftConfig
from retool_mcore.config.base import is_table
from retool_mcore.errors import DataError
from retool_mcore.run.alarms import alarms
from retool_mcore.run.metrics import Row, add_row
from retool_mcore.run.start import STAGE_TEXTS, begun
from retool_mcore.run.status import SLOW_AFTER_S, bar_of_steps, line_of_stage, notes_on, print_text

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
BAR_METRICS = ("loss", "critic/rewards/mean")  # metrics on the bar, of SFT and RL
LINE_EVERY_S = 1.0
POLL_S = 0.5


class MetricsFile:
    """Incremental reader of a ``metrics.jsonl`` that may still grow.

    Each ``read`` reads only new lines. A resumed run replaces the file, which is then read again
    from the start.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: list[Row] = []
        self._inode, self._offset, self._lines = 0, 0, 0

    def read(self) -> list[Row]:
        """Return all rows so far, without an incomplete last line. Raises DataError."""
        try:
            with self.path.open("rb") as file:
                self._read_new(file)
        except FileNotFoundError:
            self.rows, self._offset, self._lines = [], 0, 0
        except OSError as error:
            raise DataError(f"{self.path} cannot be read: {error.strerror}") from error
        return self.rows

    def _read_new(self, file: Any) -> None:
        status = os.fstat(file.fileno())
        if status.st_ino != self._inode or status.st_size < self._offset:
            self.rows, self._inode, self._offset, self._lines = [], status.st_ino, 0, 0
        file.seek(self._offset)
        for line in file:
            if not line.endswith(b"\n"):
                break  # truncated by a kill, or still being written
            self._offset += len(line)
            self._lines += 1
            add_row(self.rows, self._row(line, self._lines))

    def _row(self, line: bytes, number: int) -> Row:
        try:
            row: Any = json.loads(line)
        except ValueError as error:
            raise DataError(f"{self.path}, line {number}, is not JSON: {error}. The file is damaged.") from error
        numeric = is_table(row) and all(isinstance(value, int | float) for value in row.values())
        if not numeric or "step" not in row or not math.isfinite(row["step"]):
            raise DataError(f"{self.path}, line {number}, is not a row of metrics: an object of numbers with a step.")
        return row


@contextmanager
def progress(config: RunConfig, console: Console) -> Generator[Callable[[int], None]]:
    """Show the stages of the start, then the steps, as the run writes them to its files.

    In a terminal this is a progress bar, which stays on screen if the run made a step. Elsewhere it
    prints a line per stage and step. Yields a function that sets the step from which the run
    resumes.
    """
    name = "sft" if isinstance(config, SftConfig) else "rl"
    metrics, ended = MetricsFile(config.run.dir / "metrics.jsonl"), threading.Event()
    lines, alarm_lines = StepLines(console, config.num_steps), AlarmLines(console, config)
    earlier: set[float | None] | None = None  # times of the rows that an earlier start wrote
    last_shown = 0
    with notes_on(console), bar_of_steps(console) as bars:
        bar = bars.add_task(name, total=config.num_steps)
        stages = StartStages(config.run.dir, bars, bar)

        def follow(*, over: bool = False) -> bool:
            """Show new stages and steps; returns whether this process has finished a step.

            ``over``: the run has ended without an error.
            """
            nonlocal earlier, last_shown
            with suppress(DataError):  # the writer drops damaged rows
                metrics.read()
            rows = metrics.rows
            if earlier is None:
                earlier = {row.get("unix_s") for row in rows}
            if name == "sft":  # its alarms read only the newest row, and it may have 100,000 steps
                del rows[:-1]
            stepped = bool(rows) and rows[-1].get("unix_s") not in earlier
            stages.show(over=over or stepped)
            if stepped:
                value = [STEP_METRICS[metric].format(rows[-1][metric]) for metric in BAR_METRICS if metric in rows[-1]]
                bars.update(bar, completed=rows[-1]["step"], description="  ".join([name, *value]))
            if stepped and rows[-1]["step"] > last_shown:
                last_shown = int(rows[-1]["step"])
                lines.print(rows[-1])
                alarm_lines.print(rows)
            return stepped

        def follow_until_end() -> None:
            while not ended.wait(POLL_S):
                follow()

        follow()
        follower = threading.Thread(target=follow_until_end, daemon=True)
        follower.start()
        succeeded = False
        try:
            yield lambda step: bars.update(bar, completed=step)
            succeeded = True
        finally:
            ended.set()
            follower.join()
            bars.live.transient = not follow(over=succeeded)


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
                line = line_of_stage(at - began[0][1], STAGE_TEXTS[stage])
                console.print(line, markup=False, highlight=False, soft_wrap=True)
        self._printed = max(self._printed, end)
        if not over:
            text = f"{self._name}  {STAGE_TEXTS[began[-1][0]]}, {now_s - self._since_s:.0f} s"
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


class AlarmLines:
    """Prints each alarm of a run once."""

    def __init__(self, console: Console, config: RunConfig) -> None:
        self._console, self._settings = console, config.model_dump()
        self._printed: set[str] = set()

    def print(self, rows: Sequence[Row]) -> None:
        """Print the alarms of ``rows`` that have not been printed yet."""
        for name, sentence in alarms(rows, self._settings).items():
            if name not in self._printed:
                self._printed.add(name)
                print_text(self._console, f"warning: {sentence}")
