"""Guardian process: without a pid namespace, it outlives the execution and kills its leftovers.

It is the subreaper of its tree (``kernel.adopt_orphans``), so a double fork does not escape it. At
level rlimits, if the sandbox does not run as root, model code can kill its guardian. The zygote
then adopts the tree and kills it (``end_strays``). If the code also kills the zygote, nothing
kills its remaining processes.
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
        status = _reap_until_none(child)
    kill_descendants()
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(max(code, 0))


def _reap_until_none(child: int) -> int | None:
    """Reap all exited children; return the wait status of ``child`` if it was among them."""
    status = None
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == child:
                status = ended[1]
    return status


def kill_descendants() -> None:
    """SIGKILL every descendant until none is left.

    Requires ``kernel.adopt_orphans``, which makes orphans children of this process. A fork bomb
    keeps forking while it is killed, so each round first sets RLIMIT_NPROC to 0 for every process
    found (their children inherit it) and only then kills them.
    """
    while True:
        try:
            if os.waitpid(-1, os.WNOHANG)[0]:
                continue
        except ChildProcessError:
            return
        end(descendants(os.getpid()))
        time.sleep(0)


def end_strays(guardians: Container[int]) -> list[tuple[int, int, float]]:
    """Kill every child of this process that is not in ``guardians``, with its descendants.

    The zygote forks only guardians and adopts orphans, so any other child belonged to a guardian
    that was killed. Returns (pid, wait status, CPU seconds) of every child reaped meanwhile.
    """
    ended: list[tuple[int, int, float]] = []
    while strays := [pid for pid in children(os.getpid()) if pid not in guardians]:
        end([pid for stray in strays for pid in (stray, *descendants(stray))])
        with contextlib.suppress(ChildProcessError):
            while (exited := os.wait4(-1, os.WNOHANG))[0]:
                ended.append((exited[0], exited[1], exited[2].ru_utime + exited[2].ru_stime))
        time.sleep(0)
    return ended


def end(pids: Sequence[int]) -> None:
    """Prevent ``pids`` from forking, then SIGKILL them. Processes that are gone are skipped."""
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
