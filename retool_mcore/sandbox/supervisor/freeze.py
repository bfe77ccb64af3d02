"""Stops a session's processes between cells and measures their CPU time.

Model code can forge the frame that ends its cell: it shares a process with the runner, so the
runner cannot keep a secret from it. Code that runs after a forged end would count towards no time
limit. Therefore no process of a session may run between cells.
"""

import asyncio
import contextlib
import os
import signal
import time
from functools import cached_property
from pathlib import Path

from retool_mcore.sandbox.supervisor import guardian

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_STOP_TIMEOUT_S = 1.0
_PAUSE_S = (0.0002, 0.02)  # between two checks: first, longest


class Tree:
    """The processes of a session: a root's descendants, and the root unless it is a guardian."""

    def __init__(self, pidfd: int, *, with_root: bool) -> None:
        self._pidfd, self._with_root = pidfd, with_root

    async def stop(self) -> bool:
        """Stop all processes. Returns False on timeout.

        Processes can wake each other with SIGCONT, so this repeats until all are stopped at once,
        for at most 1 s.
        """
        give_up_at, pause_s = time.monotonic() + _STOP_TIMEOUT_S, _PAUSE_S[0]
        while pids := self.running():
            if time.monotonic() > give_up_at:
                return False
            for pid in pids:
                _send(pid, signal.SIGSTOP)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _PAUSE_S[1])
        return True

    def running(self) -> list[int]:
        """Return the pids that have a thread which is not stopped."""
        return [pid for pid in self._pids() if _is_running(pid)]

    def resume(self) -> None:
        """Resume all processes."""
        for pid in self._pids():
            _send(pid, signal.SIGCONT)

    def used_s(self) -> float:
        """Return the CPU seconds of the processes and of the children they have reaped."""
        ticks = 0
        for pid in self._pids():
            with contextlib.suppress(OSError):
                ticks += sum(int(field) for field in _fields(f"/proc/{pid}/stat")[11:15])
        return ticks / _TICKS_PER_S

    @cached_property
    def _root(self) -> int:
        """The root's pid; -1 if it was gone at the first use."""
        info = Path(f"/proc/self/fdinfo/{self._pidfd}").read_text()
        return int(info.partition("Pid:")[2].split()[0])

    def _pids(self) -> list[int]:
        if self._root <= 0:
            return []
        return [*([self._root] if self._with_root else []), *guardian.descendants(self._root)]


def _is_running(pid: int) -> bool:
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):
                if _fields(f"/proc/{pid}/task/{task}/stat")[0] not in (b"T", b"Z", b"X"):
                    return True
    return False


def _fields(path: str) -> list[bytes]:
    """Return the fields of a /proc stat file from ``state`` (the third) on."""
    with open(path, "rb") as stat:
        return stat.read().rpartition(b")")[2].split()


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
