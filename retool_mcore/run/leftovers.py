"""Finds and ends what an earlier start of a run has left running on this node.

A launcher that is killed with SIGKILL cannot stop what it started: Ray's daemons, and under them
workers and engines that hold devices. All of them inherit its environment, where the run's folder
stands.
"""

import contextlib
import os
from collections import Counter
from pathlib import Path

from retool_mcore.errors import RunError

RUN_ENV = "RETOOL_RUN_DIR"
GRACE_S = 5.0  # between SIGTERM, on which raylet ends its workers, and SIGKILL


def end_leftovers(run_dir: Path) -> str:
    """End what bears the mark of ``run_dir``, and mark what this process starts from here on.

    The caller holds the run (``folder.lock_run``), so whoever started them has ended. Processes of
    other users and of other runs are left alone. Returns a note for the user, or "".

    Raises RunError when a process does not end, because it waits for a device or a disk.
    """
    mark = str(run_dir.resolve())
    ended: Counter[str] = Counter()
    while names := _end_marked(mark):
        ended.update(names)
    os.environ[RUN_ENV] = mark
    if not ended:
        return ""
    told = ", ".join(f"{count} {name}" if count > 1 else name for name, count in ended.most_common())
    count = f"{ended.total()} process{'es' if ended.total() > 1 else ''}"
    return f"note: an earlier start of {run_dir} was killed and had left {count}; ended: {told}"


def _end_marked(mark: str) -> list[str]:
    """End the processes that run at this moment; returns their names."""
    import psutil

    def is_marked(process: psutil.Process) -> bool:
        try:
            return process.environ().get(RUN_ENV) == mark and process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:  # of another user, or gone
            return False

    spared = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    found = [process for process in psutil.process_iter() if process.pid not in spared and is_marked(process)]
    names: list[str] = []
    for process in found:
        with contextlib.suppress(psutil.NoSuchProcess):
            names.append(process.name())
            process.terminate()
    _, alive = psutil.wait_procs(found, timeout=GRACE_S)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    _, stuck = psutil.wait_procs(alive, timeout=GRACE_S)
    if stuck:
        raise RunError(
            f"an earlier start of {mark} has left {', '.join(f'process {each.pid}' for each in stuck)}, which SIGKILL "
            "does not end: it waits for a device or a disk. Start again when it has gone, or restart this machine."
        )
    return names
