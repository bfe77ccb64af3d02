"""How far the start of an RL run has come: its processes write it, its progress line reads it.

``<run>/start.jsonl`` has a line for each stage that has begun, of the newest start alone.
"""

import json
import time
from itertools import pairwise
from pathlib import Path

STAGES = {
    "checks": "checking settings, data and sandbox; importing the trainer",
    "ray": "starting Ray",
    "driver": "reading the data, while the transfer queue starts",
    "workers": "starting the workers' processes",
    "model": "building the model on Megatron",
    "reward": "starting the reward's processes",
    "engines": "starting the rollout engines",
    "checkpoint": "loading a checkpoint, if there is one",
    "agent_loops": "starting the agent loops' processes",
    "weights": "sending the weights to the engines",
    "validation": "validating the model that training starts from",
    "steps": "sampling the first batch",
}


def begin(run_dir: Path, stage: str) -> None:
    """Write that ``stage`` begins, and so that the one before it has ended.

    The first stage replaces what an earlier start has left.
    """
    assert stage in STAGES, f"{stage} is none of {', '.join(STAGES)}"
    with open(_file(run_dir), "w" if stage == next(iter(STAGES)) else "a", encoding="ascii") as file:
        file.write(json.dumps({"stage": stage, "unix_s": time.time()}) + "\n")


def begun(run_dir: Path) -> list[tuple[str, float]]:
    """The stages that have begun, with the time of each in seconds since 1970."""
    try:
        lines = _file(run_dir).read_text(encoding="ascii").splitlines(keepends=True)
    except FileNotFoundError:
        return []
    rows = [json.loads(line) for line in lines if line.endswith("\n")]
    return [(row["stage"], row["unix_s"]) for row in rows]


def start_times(run_dir: Path) -> dict[str, float]:
    """time_start_s, from the first check to the first step; time_start/STAGE_s of its stages."""
    marks = begun(run_dir)
    times = {f"time_start/{stage}_s": end - at for (stage, at), (_, end) in pairwise(marks)}
    return times | ({"time_start_s": marks[-1][1] - marks[0][1]} if marks else {})


def _file(run_dir: Path) -> Path:
    return run_dir / "start.jsonl"
