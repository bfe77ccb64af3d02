"""Signs of life within a step: each of a run's processes touches one file when it has done a part.

``<run>/alive`` is empty; its time of change is when a turn was sampled, a trajectory ended, a pass
over a batch or an update was made. train/watchdog.py reads it.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

FILE = "alive"
EVERY_S = 1.0  # at most so often per process: the folder may be on a network

_file: Path | None = None  # of the run that this process belongs to
_touched_s = 0.0


def belong_to(run_dir: Path) -> None:
    """From now on this process gives signs for the run in ``run_dir``."""
    global _file, _touched_s
    _file, _touched_s = run_dir / FILE, 0.0


def sign() -> None:
    """Something was done; without ``belong_to``, as in an evaluation, nobody is told."""
    global _touched_s
    now_s = time.monotonic()
    if _file is None or now_s - _touched_s < EVERY_S:
        return
    _touched_s = now_s
    with contextlib.suppress(OSError):  # a sign that cannot be given is none, and work itself goes on
        _file.touch()
