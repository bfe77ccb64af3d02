"""Stops a session's processes between its cells, and tells what they have used.

The code can end its cell early: runner and code are one process, so no frame can carry a secret.
Whatever ran after that would not be charged, so nothing of a session may run between its cells.
"""

import asyncio
import contextlib
import os
import signal
import time

from retool_mcore.sandbox.supervisor import guardian

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_STOP_TIMEOUT_S = 1.0
_PAUSE_S = (0.0002, 0.02)  # between two looks: first, longest


async def stop(root: int, *, with_root: bool) -> bool:
    """Stop the tree below ``root`` (and itself, ``with_root``). False: it withstands.

    Processes can wake each other by SIGCONT, so each is looked at again until all are stopped.
    """
    give_up_at, pause_s = time.monotonic() + _STOP_TIMEOUT_S, _PAUSE_S[0]
    while found := awake(root, with_root=with_root):
        if time.monotonic() > give_up_at:
            return False
        for pid in found:
            _send(pid, signal.SIGSTOP)
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, _PAUSE_S[1])
    return True


def awake(root: int, *, with_root: bool) -> list[int]:
    """The processes of the tree that have a thread which is not stopped."""
    return [pid for pid in _tree(root, with_root=with_root) if _is_awake(pid)]


def go_on(root: int, *, with_root: bool) -> None:
    """Let a stopped tree run again."""
    for pid in _tree(root, with_root=with_root):
        _send(pid, signal.SIGCONT)


def used_s(root: int, *, with_root: bool) -> float:
    """CPU seconds of the tree's processes and of the children that they have reaped."""
    ticks = 0
    for pid in _tree(root, with_root=with_root):
        with contextlib.suppress(OSError):
            ticks += sum(int(field) for field in _fields(f"/proc/{pid}/stat")[11:15])
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


def _is_awake(pid: int) -> bool:
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):
                if _fields(f"/proc/{pid}/task/{task}/stat")[0] not in (b"T", b"Z", b"X"):
                    return True
    return False


def _fields(path: str) -> list[bytes]:
    """The fields of a stat file from the state on."""
    with open(path, "rb") as stat:
        return stat.read().rpartition(b")")[2].split()


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
