"""A run's folder has one writer."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import IO

from retool_mcore.errors import ConfigError


def lock_run(run_dir: Path) -> IO[str]:
    """Hold the run's folder for this process; the lock goes with the process, however it ends.

    Raises ConfigError when another process is writing to the same run.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    handle = (run_dir / ".lock").open("a+", encoding="utf-8")
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        handle.seek(0)
        owner = handle.read().strip() or "unknown"
        raise ConfigError(
            f"{run_dir} is in use by process {owner}. Wait for it, stop it, or set another run.name."
        ) from error
    handle.truncate(0)
    handle.write(str(os.getpid()))
    handle.flush()
    return handle
