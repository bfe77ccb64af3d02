"""Guardian process: without a pid namespace, it outlives the execution and kills its leftovers.

It is the subreaper of its tree (``kernel.adopt_orphans``), so a double fork does not escape it. A
guardian can be killed: by the supervisor, if it does not end in time on a busy machine, and at
level rlimits also by model code, if the sandbox does not run as root. The zygote then adopts the
tree and kills it (``end_strays``). If the code also kills the zygote, nothing kills its remaining
processes.
"""

import contextlib
import os
import resource
import signal
import time
from collections.abc import Container, Sequence
from typing import NoReturn

_WAITED = {signal.SIGTERM, signal.SIGCHLD}


def block_signals() -> None:
    """Block SIGTERM and SIGCHLD, which ``outlive`` waits for.

    Call this before forking the execution; otherwise its exit could be missed.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, _WAITED)


def outlive(child: int) -> NoReturn:
    """Wait for ``child``, kill its remaining descendants, and exit with its status or signal.

    On SIGTERM, kill ``child`` first.
    """
    status: int | None = None
    while status is None:
        if signal.sigwait(_WAITED) == signal.SIGTERM:
            os.kill(child, signal.SIGKILL)
        status = next((status for pid, status, _ in reap() if pid == child), None)
    end_strays(())
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(max(code, 0))


def reap() -> list[tuple[int, int, float]]:
    """Reap all exited children. Returns the pid, wait status and CPU seconds of each."""
    ended: list[tuple[int, int, float]] = []
    with contextlib.suppress(ChildProcessError):
        while (exited := os.wait4(-1, os.WNOHANG))[0]:
            ended.append((exited[0], exited[1], exited[2].ru_utime + exited[2].ru_stime))
    return ended


def end_strays(guardians: Container[int]) -> list[tuple[int, int, float]]:
    """SIGKILL every child that is not in ``guardians``, with its descendants, until none is left.

    The zygote forks only guardians and adopts orphans (``kernel.adopt_orphans``), so any other
    child belonged to a guardian that was killed. Returns what ``reap`` returned meanwhile.
    """
    ended: list[tuple[int, int, float]] = []
    while strays := [pid for pid in children(os.getpid()) if pid not in guardians]:
        _end([pid for stray in strays for pid in (stray, *descendants(stray))])
        ended += reap()
        time.sleep(0)
    return ended


def _end(pids: Sequence[int]) -> None:
    """Prevent ``pids`` from forking, then SIGKILL them. Processes that are gone are skipped.

    A fork bomb keeps forking while it is killed; its new children inherit the limit.
    """
    for pid in pids:
        with contextlib.suppress(OSError):
            resource.prlimit(pid, resource.RLIMIT_NPROC, (0, 0))
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def descendants(root: int) -> list[int]:
    """Return the pids of all descendants of ``root``."""
    pids = children(root)
    for pid in pids:  # the list grows meanwhile
        pids += children(pid)
    return pids


def children(pid: int) -> list[int]:
    """Return the pids of the children of all threads of ``pid``."""
    pids: list[int] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children", "rb") as file:
                pids += map(int, file.read().split())
    return pids


def count_tasks(uid: int) -> int:
    """Count the processes and threads of a user on the whole machine."""
    count = 0
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                if os.stat(f"/proc/{entry}").st_uid == uid:
                    count += len(os.listdir(f"/proc/{entry}/task"))
    return count
