"""Reads a run's folder and determines its state. Raises DataError if it is damaged or not a run's.

Settings are taken from config.toml as they are. They are not validated against the current schema,
so that runs of older versions can still be reported.

A running run locks its folder, and the kernel releases the lock when the process exits. To read a
run on another machine, the file system must share locks between machines; otherwise the run looks
killed.
"""

import math
import os
import shlex
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from retool_mcore.config.base import is_table
from retool_mcore.config.shared import CONFIG_FILE
from retool_mcore.errors import DataError
from retool_mcore.run import start
from retool_mcore.run.checkpoint import STATE_FILE, read_best, step_folders
from retool_mcore.run.environment import read_environment
from retool_mcore.run.folder import is_locked
from retool_mcore.run.metrics import Row
from retool_mcore.run.progress import MetricsFile
from retool_mcore.run.start import STAGE_TEXTS
from retool_mcore.run.status import printable

DEPTH = 4  # levels of folders that `runs_below` searches
RECENT = 20  # number of steps used to estimate the time per step


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """Contents of a run's folder. ``rows``: metrics.jsonl, oldest first, one row per step."""

    path: Path
    kind: str  # "sft" or "rl"
    settings: dict[str, Any]
    steps: int  # train.steps
    rows: Sequence[Row]
    begun: Sequence[tuple[str, float]]  # stages of the latest start: name, Unix seconds
    checkpoints: Sequence[int]  # steps of the complete checkpoints
    exported: bool
    environment: dict[str, dict[str, str]]

    @property
    def name(self) -> str:
        return printable(str(self.settings["run"]["name"]))

    @property
    def step(self) -> int:
        return int(self.rows[-1]["step"]) if self.rows else 0

    def setting(self, key: str, default: Any = None) -> Any:
        """Return the value of ``section.key`` in config.toml."""
        section, _, name = key.partition(".")
        table = self.settings.get(section)
        return table.get(name, default) if is_table(table) else default

    def series(self, metric: str) -> list[tuple[int, float]]:
        """Return (step, value) for each row with a finite value of this metric."""
        pairs = [(int(row["step"]), row[metric]) for row in self.rows if metric in row]
        return [(step, value) for step, value in pairs if math.isfinite(value)]

    def values(self, metric: str) -> list[float]:
        return [value for _, value in self.series(metric)]


def read_run(path: Path, metrics: MetricsFile | None = None) -> RunRecord:
    """Read a run's folder; ``metrics`` is an existing reader of its metrics.jsonl, if any.

    Raises DataError when it is not a run's folder, or when one of its files is damaged.
    """
    settings = _settings(path)
    checkpoints = step_folders(path / "checkpoints")
    return RunRecord(
        path=path,
        kind="rl" if "rollout" in settings else "sft",
        settings=settings,
        steps=settings["train"]["steps"],
        rows=(metrics or MetricsFile(path / "metrics.jsonl")).read(),
        begun=_begun(path),
        checkpoints=[step for step, folder in checkpoints.items() if (folder / STATE_FILE).is_file()],
        exported=(path / "export" / "config.json").is_file(),
        environment=read_environment(path),
    )


def _settings(path: Path) -> dict[str, Any]:
    file = path / CONFIG_FILE
    if not file.is_file():
        inside, what = "", "it is a file" if path.exists() else "there is no such folder"
        if path.is_dir():
            inside, what = ", ".join(map(str, runs_below(path))), f"it has no {CONFIG_FILE}"
        raise DataError(f"{path} is not a run's folder: {what}.{f' Name one of these: {inside}' if inside else ''}")
    try:
        settings = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{file} cannot be read as a run's settings: {error}") from error
    run, train = settings.get("run"), settings.get("train")
    known = is_table(run) and isinstance(run.get("name"), str) and is_table(train)
    if not known or not isinstance(settings["train"].get("steps"), int):
        raise DataError(f"{file} has no settings of a run: run.name, or train.steps as a whole number, is missing.")
    return settings


def _begun(path: Path) -> list[tuple[str, float]]:
    try:
        return [(str(stage), float(at)) for stage, at in start.begun(path)]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path / 'start.jsonl'} is damaged: each line must have a stage and its unix_s.") from error


def runs_below(root: Path) -> list[Path]:
    """Return the run folders under ``root`` (or ``root`` itself), sorted by name."""
    return sorted(_walk(root, DEPTH))


def _walk(folder: Path, depth: int) -> Iterator[Path]:
    if (folder / CONFIG_FILE).is_file():
        yield folder
        return  # run folders are not nested
    if depth:
        try:
            inner = [child for child in folder.iterdir() if child.is_dir() and not child.is_symlink()]
        except OSError:
            return
        for child in inner:
            yield from _walk(child, depth - 1)


@dataclass(frozen=True, kw_only=True)
class State:
    """State of a run.

    ``name``: running, ended, killed or not started. ``stage``: what the run is doing or where it
    stopped. ``next_command``: the command that resumes the run or uses its result.
    """

    name: str
    stage: str
    next_command: str
    seconds_left: float | None = None  # only for a running run with at least two rows


def state_of(run: RunRecord) -> State:
    """Return the run's current state."""
    starting = stage_of_start(run)
    if is_locked(run.path):
        stage = STAGE_TEXTS.get(starting, starting) if starting else "steps"
        return State(
            name="running", stage=stage, next_command=f"retool watch {_quoted(run.path)}", seconds_left=eta_s(run)
        )
    if run.step >= run.steps:
        return State(name="ended", stage="exported" if run.exported else "all steps done", next_command=_next(run))
    best = read_best(run.path)
    if best and best.stopped_early and run.step in best.values:
        return State(name="ended", stage=f"early, after step {run.step}: {best.summary()}", next_command=_next(run))
    saved = f"checkpoint of step {run.checkpoints[-1]}" if run.checkpoints else "no checkpoint"
    if starting or run.rows:
        where = f"while {STAGE_TEXTS.get(starting, starting)}" if starting else f"after step {run.step}"
        return State(name="killed", stage=f"{where}; {saved}", next_command=_resume(run))
    return State(name="not started", stage="never started", next_command=_resume(run))


def stage_of_start(run: RunRecord) -> str:
    """Return the current stage of the latest start, or "" if that start has completed a step.

    The first row after a start contains the start's duration. Comparing this is more reliable than
    comparing timestamps, because clocks may be set back.
    """
    if not run.begun:
        return ""
    stage, at = run.begun[-1]
    took_s = at - run.begun[0][1]
    if took_s and any(row.get("timing_s/start") == took_s for row in run.rows):
        return ""
    return stage if not run.rows or run.rows[-1].get("unix_s", 0.0) < at else ""


def step_seconds(rows: Sequence[Row]) -> float | None:
    """Return the median seconds between the last 20 rows; None with fewer than two."""
    times = [row["unix_s"] for row in rows[-RECENT - 1 :] if "unix_s" in row]
    return median(after - before for before, after in pairwise(times)) if len(times) > 1 else None


def eta_s(run: RunRecord) -> float | None:
    """Return the estimated seconds until the last step; None with fewer than two rows."""
    one_s = step_seconds(run.rows)
    return None if one_s is None else one_s * max(0, run.steps - run.step)


def _resume(run: RunRecord) -> str:
    changes = [*_moved(run), *(["checkpoint.resume=auto"] if run.setting("checkpoint.resume") == "never" else [])]
    return " ".join(["retool", run.kind, _quoted(run.path / CONFIG_FILE), *map(shlex.quote, changes)])


def _moved(run: RunRecord) -> list[str]:
    """Return overrides for the folder's current location, if the run's folder was moved."""
    before = Path(str(run.setting("run.root", "runs"))) / run.name
    if os.path.abspath(before) == os.path.abspath(run.path):
        return []
    return [f"run.root={run.path.parent}", f"run.name={run.path.name}"]


def _next(run: RunRecord) -> str:
    if not run.exported:
        which = " --checkpoint best" if run.setting("best.metric") else ""
        return f"retool export {_quoted(run.path)} --to {_quoted(run.path / 'export')}{which}"
    export, config = run.path / "export", run.path / CONFIG_FILE
    if run.kind == "sft":
        return f"retool rl CONFIG model.path={_quoted(export)}"
    return f"retool eval {_quoted(config)} --model {shlex.quote(f'{run.name}={export}')} --out {_quoted(run.path)}/eval"


def _quoted(path: Path) -> str:
    return shlex.quote(str(path))
