"""Tracks the stages of a run's start: its processes record them, and its progress line reads them.

``<run>/start.jsonl`` has one line per stage that has begun, for the latest start only. A command
passes its first stages before it has locked the run's folder; until then, they are stored in an
environment variable.
"""

import json
import os
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

STAGES = {  # of RL
    "checks": "checking settings, data and sandbox; importing the trainer",
    "ray": "starting Ray",
    "driver": "reading the data",
    "workers": "starting the workers, which build the model on Megatron",
    "engines": "starting the rollout engines",
    "agent_loops": "starting the agent loops' processes",
    "weights": "sending the weights to the engines",
    "validation": "validating the model that training starts from",
    "steps": "sampling the first batch",
}
SFT_STAGES = {
    "settings": "checking settings, model and data",
    "processes": "starting a process for each device, which imports the trainer",
    "data": "reading the data",
    "model": "building the model on Megatron",
    "checkpoint": "loading a checkpoint, if there is one",
    "update": "making the first update",
}
STAGE_TEXTS = STAGES | SFT_STAGES
FIRST = ("checks", "settings")
EARLY_ENV = "RETOOL_START"

Mark = dict[str, Any]


def begin_early(stage: str) -> None:
    """Record the start of ``stage`` in the environment, which exec and child processes inherit."""
    marks = [*([] if stage in FIRST else early_stages()), _mark(stage)]
    os.environ[EARLY_ENV] = json.dumps(marks)


def early_stages() -> list[Mark]:
    """Return the stages that began before the run's folder was locked."""
    return json.loads(os.environ.get(EARLY_ENV, "[]"))


def begin(run_dir: Path, stage: str) -> None:
    """Record the start of ``stage``, which ends the stage before it.

    The first stage of a start overwrites the file of an earlier start.
    """
    marks = early_stages()
    os.environ.pop(EARLY_ENV, None)
    anew = bool(marks) or stage in FIRST
    if not marks or marks[-1]["stage"] != stage:
        marks.append(_mark(stage))
    with open(_file(run_dir), "w" if anew else "a", encoding="ascii") as file:
        file.write("".join(json.dumps(mark) + "\n" for mark in marks))


def begun(run_dir: Path) -> list[tuple[str, float]]:
    """Return the stages that have begun, each with its start in Unix seconds.

    Durations use the monotonic clock, so all stages must be of the same machine.
    """
    try:
        lines = _file(run_dir).read_text(encoding="ascii").splitlines(keepends=True)
    except FileNotFoundError:
        return []
    rows = [json.loads(line) for line in lines if line.endswith("\n")]
    return [(row["stage"], rows[0]["unix_s"] + row["clock_s"] - rows[0]["clock_s"]) for row in rows]


def start_times(run_dir: Path) -> dict[str, float]:
    """Return timing_s/start (first check to first step) and timing_s/start/STAGE, in seconds."""
    marks = begun(run_dir)
    times = {f"timing_s/start/{stage}": end - at for (stage, at), (_, end) in pairwise(marks)}
    return times | ({"timing_s/start": marks[-1][1] - marks[0][1]} if marks else {})


def _mark(stage: str) -> Mark:
    assert stage in STAGE_TEXTS, f"unknown stage {stage}"
    return {"stage": stage, "unix_s": time.time(), "clock_s": time.monotonic()}


def _file(run_dir: Path) -> Path:
    return run_dir / "start.jsonl"
