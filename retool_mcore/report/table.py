"""`retool runs`: table of the runs under a folder."""

import time
from collections.abc import Sequence
from pathlib import Path

from rich.markup import escape
from rich.table import Table

from retool_mcore.errors import DataError
from retool_mcore.report.numbers import duration, number, share
from retool_mcore.report.record import RunRecord, read_run, runs_below
from retool_mcore.report.state import State, state_of
from retool_mcore.report.warnings import warnings_of
from retool_mcore.run.status import printable

COLOURS = {"running": "green", "ended": "default", "killed": "red", "not started": "yellow", "damaged": "red"}
NONE = "-"


def find_runs(root: Path) -> list[Path]:
    """Return the runs under ``root``. Raises DataError if there are none."""
    if not root.is_dir():
        raise DataError(f"{root} is not a folder. Name the one that run.root says, or a run's own.")
    found = runs_below(root)
    if not found:
        raise DataError(f"{root} holds no runs: no folder in it has a config.toml. Name the folder that run.root says.")
    return found


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
        commands.append((label, state.go_on))
        warnings += [(label, each) for each in warnings_of(run, state, time.time())]
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
