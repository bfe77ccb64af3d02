"""Stops a session's processes between its cells, and tells what they have used.

The code can end its cell early: runner and code are one process, so no frame can carry a secret.
Whoever goes on after that must not go on uncharged, so nothing of a session runs between cells.
"""

import contextlib
import os
import signal

from retool_mcore.sandbox.supervisor import guardian

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_MAX_PASSES = 256  # each stops whoever was found: what is stopped forks no more


def stop(root: int, *, with_root: bool) -> float:
    """Stop the tree below ``root`` (and itself, ``with_root``). Returns its CPU seconds so far.

    Looks again until no process is found that was not stopped before.
    """
    stopped: set[int] = set()
    for _ in range(_MAX_PASSES):
        found = set(_tree(root, with_root=with_root)) - stopped
        if not found:
            break
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
        stopped |= found
    return used_s(stopped)


def go_on(root: int, *, with_root: bool) -> None:
    """Let a stopped tree run again."""
    for pid in _tree(root, with_root=with_root):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def used_s(pids: set[int]) -> float:
    """CPU seconds of ``pids`` and of the children that they have reaped."""
    ticks = 0
    for pid in pids:
        with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", "rb") as stat:
            ticks += sum(int(field) for field in stat.read().rpartition(b")")[2].split()[11:15])
    return ticks / _TICKS_PER_S


def pid_of(pidfd: int) -> int:
    """The pid behind ``pidfd``; 0 when the process is gone."""
    with open(f"/proc/self/fdinfo/{pidfd}", encoding="ascii") as info:
        for line in info:
            if line.startswith("Pid:"):
                return max(0, int(line.split()[1]))
    return 0


def _tree(root: int, *, with_root: bool) -> list[int]:
    return [*([root] if with_root else []), *guardian.descendants(root)]
