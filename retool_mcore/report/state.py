"""Determines a run's state (running, ended, killed, not started), progress and next command.

All information comes from the run's files. A running run holds the lock of its folder, and the
kernel releases it when the process exits. Reading over a network requires a file system that shares
locks between machines; otherwise a run on another machine looks killed.
"""

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

from retool_mcore.report.record import Row, RunRecord
from retool_mcore.run.best import read_best
from retool_mcore.run.folder import is_locked
from retool_mcore.run.start import WORDS

RECENT = 20  # number of steps used to estimate the time per step


@dataclass(frozen=True, kw_only=True)
class State:
    """State of a run.

    ``name``: running, ended, killed or not started. ``stage``: what the run is doing or where it
    stopped. ``go_on``: the command that resumes the run or uses its result.
    """

    name: str
    stage: str
    go_on: str
    seconds_left: float | None = None  # only for a running run with at least two rows


def state_of(run: RunRecord) -> State:
    """Return the run's current state."""
    starting = stage_of_start(run)
    if is_locked(run.path):
        stage = WORDS.get(starting, starting) if starting else "steps"
        return State(name="running", stage=stage, go_on=f"retool watch {_quoted(run.path)}", seconds_left=eta_s(run))
    if run.step >= run.steps:
        return State(name="ended", stage="exported" if run.exported else "all steps made", go_on=_next(run))
    best = read_best(run.path)
    if best and best.given_up and run.step in best.values:
        return State(name="ended", stage=f"early, after step {run.step}: {best.words()}", go_on=_next(run))
    saved = f"checkpoint of step {run.checkpoints[-1]}" if run.checkpoints else "no checkpoint"
    if starting or run.rows:
        where = f"while {WORDS.get(starting, starting)}" if starting else f"after step {run.step}"
        return State(name="killed", stage=f"{where}; {saved}", go_on=_resume(run))
    return State(name="not started", stage="no step, no start", go_on=_resume(run))


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
    return " ".join(["retool", run.kind, _quoted(run.path / "config.toml"), *map(shlex.quote, changes)])


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
    export, config = run.path / "export", run.path / "config.toml"
    if run.kind == "sft":
        return f"retool rl CONFIG model.path={_quoted(export)}"
    return f"retool eval {_quoted(config)} --model {shlex.quote(f'{run.name}={export}')} --out {_quoted(run.path)}/eval"


def _quoted(path: Path) -> str:
    return shlex.quote(str(path))
