"""Heartbeat within a step: processes of a run (in SFT, rank 0) touch one file as they progress.

``<run>/alive`` is an empty file. Its mtime is the last time a process sampled a turn, finished a
trajectory, made a pass over a batch, made an update or read a part of a checkpoint.
train/watchdog.py reads it.
"""

import contextlib
import time
from dataclasses import dataclass
from pathlib import Path

FILE = "alive"
EVERY_S = 1.0  # shortest interval per process: the folder may be on a network file system


@dataclass
class _Process:
    file: Path | None = None  # of the run that this process belongs to
    touched_s: float = -EVERY_S


_process = _Process()


def start(run_dir: Path) -> None:
    """Make this process send its heartbeats to the run in ``run_dir``."""
    _process.file, _process.touched_s = run_dir / FILE, -EVERY_S


def send() -> None:
    """Send a heartbeat. Does nothing without a prior ``start``, as in an evaluation."""
    now_s = time.monotonic()
    if _process.file is None or now_s - _process.touched_s < EVERY_S:
        return
    _process.touched_s = now_s
    with contextlib.suppress(OSError):  # a failed heartbeat must not stop the work
        _process.file.touch()
