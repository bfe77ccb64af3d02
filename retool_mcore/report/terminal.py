"""`retool watch` and `retool runs`: show one run, or all runs of a folder, in the terminal.

Both read only the files that runs write.
"""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from retool_mcore.errors import DataError
from retool_mcore.report.numbers import duration, number, share
from retool_mcore.report.record import (
    RunRecord,
    State,
    read_run,
    runs_below,
    stage_of_start,
    state_of,
)
from retool_mcore.report.warnings import warnings_of
from retool_mcore.run.progress import MetricsFile
from retool_mcore.run.start import STAGE_TEXTS
from retool_mcore.run.status import printable

COLOURS = {"running": "green", "ended": "default", "killed": "red", "not started": "yellow", "damaged": "red"}
NONE = "-"
LOOK_EVERY_S = 1.0
SPARK_WIDTH = 40
BLOCKS = "▁▂▃▄▅▆▇█"
SHOWN = {  # kind of run -> metric -> label
    "rl": {
        "accuracy": "accuracy",
        "critic/rewards/mean": "reward",
        "val/accuracy": "validation accuracy",
        "behavior/code_ratio": "code ratio",
        "behavior/executable_fraction": "code that ran",
        "response_length/mean": "response tokens",
        "actor/entropy": "entropy",
        "actor/grad_norm": "gradient norm",
        "rollout_corr/kl": "mismatch (KL)",
        "tokens_per_s": "tokens per second",
        "mfu": "MFU",
        "timing_s/step": "seconds per step",
    },
    "sft": {
        "loss": "loss",
        "val_loss": "validation loss",
        "grad_norm": "gradient norm",
        "lr": "learning rate",
        "tokens_per_s": "tokens per second",
        "mfu": "MFU",
        "memory_gib": "memory (GiB)",
        "timing_s/step": "seconds per step",
    },
}


def watch(path: Path, console: Console, *, once: bool) -> None:
    """Show the run until it ends; with ``once`` or without a terminal, show one frame.

    Raises DataError for a folder that is damaged or not a run's.
    """
    metrics = MetricsFile(path / "metrics.jsonl")
    if once or not console.is_interactive:
        console.print(_look(path, metrics)[0])
        return
    with Live(console=console, auto_refresh=False) as live:
        try:
            while True:
                view, state = _look(path, metrics)
                live.update(view, refresh=True)
                if state.name != "running":
                    return
                time.sleep(LOOK_EVERY_S)
        except KeyboardInterrupt:
            return  # Ctrl-C stops watching; the run continues


def _look(path: Path, metrics: MetricsFile) -> tuple[RenderableType, State]:
    run = read_run(path, metrics)
    state = state_of(run)
    return frame(run, state, time.time()), state


def frame(run: RunRecord, state: State, now_s: float) -> RenderableType:
    """Render the view of the run at ``now_s`` (Unix seconds)."""
    parts: list[RenderableType] = [_progress(run, state)]
    if stage_of_start(run):
        parts += [Text(), _stages(run, now_s)]
    if run.rows:
        parts += [Text(), _metrics(run)]
    parts += [Text(), *_warnings(warnings_of(run, state, now_s))]
    if state.name != "running":
        parts += [Text(printable(f"next: {state.next_command}"), style="dim", overflow="fold")]
    title = Text.assemble((run.name, "bold"), f"  {run.kind}  ", (state.name, COLOURS[state.name]))
    return Panel(Group(*parts), title=title, title_align="left", subtitle=Text(printable(str(run.path)), style="dim"))


def _progress(run: RunRecord, state: State) -> RenderableType:
    parts = [f"step {run.step} of {run.steps}", state.stage]
    if state.seconds_left is not None:
        parts.append(f"{duration(state.seconds_left)} left")
    if run.checkpoints:
        parts.append(f"checkpoint {run.checkpoints[-1]}")
    grid = Table.grid(padding=(0, 2))
    grid.add_column(width=SPARK_WIDTH)
    grid.add_column()
    grid.add_row(ProgressBar(total=run.steps, completed=min(run.step, run.steps)), Text(", ".join(parts)))
    return grid


def _stages(run: RunRecord, now_s: float) -> RenderableType:
    """Render the stages of a start in progress: the completed ones and the current one."""
    grid = Table.grid(padding=(0, 2))
    ends = [*(at for _, at in run.begun[1:]), now_s]
    for (stage, at), end in zip(run.begun, ends, strict=True):
        newest = end is ends[-1]
        style = "bold" if newest else "dim"
        grid.add_row(Text(duration(max(0.0, end - at)), style=style), Text(STAGE_TEXTS.get(stage, stage), style=style))
    return grid


def _metrics(run: RunRecord) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    table.add_column()
    table.add_column(width=SPARK_WIDTH, no_wrap=True)
    table.add_column(justify="right")
    for metric, label in SHOWN[run.kind].items():
        values = run.values(metric)
        if values:
            table.add_row(label, Text(sparkline(values, SPARK_WIDTH), style="cyan"), number(values[-1]))
    return table


def sparkline(values: Sequence[float], width: int) -> str:
    """Render the values as at most ``width`` block characters; each shows the mean of its bin."""
    means = list(_means(values, width))
    low, high = min(means), max(means)
    if high == low:
        return BLOCKS[0] * len(means)
    top = len(BLOCKS) - 1
    return "".join(BLOCKS[round((mean - low) / (high - low) * top)] for mean in means)


def _means(values: Sequence[float], width: int) -> Iterator[float]:
    count = min(width, len(values))
    for index in range(count):
        part = values[len(values) * index // count : len(values) * (index + 1) // count]
        yield sum(part) / len(part)


def _warnings(warnings: Sequence[str]) -> list[Text]:
    if not warnings:
        return [Text("no warnings", style="dim")]
    return [Text(f"! {warning}", style="yellow", overflow="fold") for warning in warnings]


def find_runs(root: Path) -> list[Path]:
    """Return the runs under ``root``. Raises DataError if there are none."""
    if not root.is_dir():
        raise DataError(f"{root} is not a folder. Name the folder in run.root, or a run's folder.")
    runs = runs_below(root)
    if not runs:
        raise DataError(f"{root} contains no runs: no folder in it has a config.toml. Name the folder in run.root.")
    return runs


def runs_table(root: Path, paths: Sequence[Path]) -> tuple[Table, list[tuple[str, str]], list[tuple[str, str]]]:
    """Return a table with one row per run, the runs' warnings, and their next commands.

    Warnings and commands are pairs of a run's label and a text. A damaged run gets a row with the
    error.
    """
    table = Table(box=None, padding=(0, 2, 0, 0))  # fits 80 columns; only a long stage wraps
    for heading in ("run", "kind", "state", "stage", "step", "accuracy", "tokens/s", "last step"):
        right = heading in ("step", "accuracy", "tokens/s")
        table.add_column(heading, justify="right" if right else "left", no_wrap=heading != "stage")
    commands: list[tuple[str, str]] = []
    warnings: list[tuple[str, str]] = []
    for path in paths:
        label = printable(str(path.relative_to(root)) if path != root else path.name or str(path))
        try:
            run = read_run(path)
        except DataError as error:
            table.add_row(escape(label), NONE, _coloured("damaged"), escape(printable(str(error))), *[NONE] * 4)
            continue
        state = state_of(run)
        table.add_row(escape(label), run.kind, _coloured(state.name), escape(state.stage), *_numbers(run, state))
        commands.append((label, state.next_command))
        warnings += [(label, warning) for warning in warnings_of(run, state, time.time())]
    return table, warnings, commands


def _coloured(state: str) -> str:
    return f"[{COLOURS[state]}]{state}[/]"


def _numbers(run: RunRecord, state: State) -> tuple[str, str, str, str]:
    accuracies, rates = run.values("accuracy"), run.values("tokens_per_s")
    if state.seconds_left is not None:
        when = f"{duration(state.seconds_left)} left"
    elif run.rows and "unix_s" in run.rows[-1]:
        when = f"{duration(max(0.0, time.time() - run.rows[-1]['unix_s']))} ago"
    else:
        when = NONE
    accuracy = share(accuracies[-1]) if accuracies else NONE
    return f"{run.step}/{run.steps}", accuracy, number(rates[-1]) if rates else NONE, when
