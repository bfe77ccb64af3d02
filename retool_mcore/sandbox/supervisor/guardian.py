"""The guardian: where there is no pid namespace, it outlives the execution and kills what is left.

It adopts the orphans of its tree (``kernel.adopt_orphans``), so no double fork escapes it. At level
rlimits an ordinary user's code can kill it first: its tree then falls to the zygote
(``end_strays``). Nobody ends what the code leaves after it has killed the zygote too.
"""

import contextlib
import os
import resource
import signal
import time
from collections.abc import Callable, Container, Sequence
from typing import NoReturn

_WAITED = {signal.SIGTERM, signal.SIGCHLD}


def block_signals() -> None:
    """Block the signals that ``outlive`` waits for.

    Call this before the execution is forked, so that it cannot end between fork and wait.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, _WAITED)


def outlive(child: int) -> NoReturn:
    """Wait for ``child``, kill everything it left, and end the way it ended.

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
    """Reap all that ended; return the wait status of ``child`` if it was among them."""
    status = None
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == child:
                status = ended[1]
    return status


def kill_descendants() -> None:
    """SIGKILL every descendant until none is left.

    Needs ``kernel.adopt_orphans``, which makes orphans children of this process. A fork bomb goes
    on forking while it is being killed: so every process found is first forbidden to fork
    (RLIMIT_NPROC 0, which its children inherit), and only then are they killed.
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
    """Kill every child of this process that is not of ``guardians``, with all below it.

    A process that forks guardians only, and adopts orphans, has no other children but the trees of
    guardians that were killed. What ends meanwhile is reaped here: returns the (pid, wait status,
    CPU seconds) of each.
    """
    ended: list[tuple[int, int, float]] = []
    while strays := [pid for pid in _children_of()(os.getpid()) if pid not in guardians]:
        end([pid for stray in strays for pid in (stray, *descendants(stray))])
        with contextlib.suppress(ChildProcessError):
            while (found := os.wait4(-1, os.WNOHANG))[0]:
                ended.append((found[0], found[1], found[2].ru_utime + found[2].ru_stime))
        time.sleep(0)
    return ended


def end(pids: Sequence[int]) -> None:
    """Keep ``pids`` from forking, then SIGKILL them. Those that are gone are skipped."""
    for pid in pids:
        with contextlib.suppress(OSError):
            resource.prlimit(pid, resource.RLIMIT_NPROC, (0, 0))
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def descendants(root: int) -> list[int]:
    """Pids of the tree below ``root``."""
    children_of = _children_of()
    found: list[int] = []
    waiting = [root]
    while waiting:
        children = children_of(waiting.pop())
        found += children
        waiting += children
    return found


def _children_of() -> Callable[[int], list[int]]:
    # A kernel may be built without this file (CONFIG_PROC_CHILDREN).
    return children_listed if os.path.exists(f"/proc/self/task/{os.getpid()}/children") else children_scanned


def children_listed(pid: int) -> list[int]:
    children: list[int] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children", "rb") as file:
                children += map(int, file.read().split())
    return children


def children_scanned(pid: int) -> list[int]:
    """Find the children of ``pid`` by looking at every process: slow, but right on any kernel."""
    children: list[int] = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{entry}/stat", "rb") as stat:
                if int(stat.read().rpartition(b")")[2].split()[1]) == pid:
                    children.append(int(entry))
    return children


def count_tasks(uid: int) -> int:
    """Count the processes and threads of a user on the whole machine."""
    count = 0
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                if os.stat(f"/proc/{entry}").st_uid == uid:
                    count += len(os.listdir(f"/proc/{entry}/task"))
    return count
