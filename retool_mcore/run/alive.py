"""Signs of life within a step: each of a run's processes touches one file when it has done a part.

``<run>/alive`` is empty; its time of change is when a turn was sampled, a trajectory ended, a pass
over a batch or an update was made. train/watchdog.py reads it.
"""

import contextlib
import time
from dataclasses import dataclass
from pathlib import Path

FILE = "alive"
EVERY_S = 1.0  # at most so often per process: the folder may be on a network


@dataclass
class _Process:
    file: Path | None = None  # of the run that this process belongs to
    touched_s: float = -EVERY_S


_process = _Process()


def belong_to(run_dir: Path) -> None:
    """From now on this process gives signs for the run in ``run_dir``."""
    _process.file, _process.touched_s = run_dir / FILE, -EVERY_S


def sign() -> None:
    """Something was done; without ``belong_to``, as in an evaluation, nobody is told."""
    now_s = time.monotonic()
    if _process.file is None or now_s - _process.touched_s < EVERY_S:
        return
    _process.touched_s = now_s
    with contextlib.suppress(OSError):  # a sign that cannot be given is none, and work itself goes on
        _process.file.touch()
