"""Finds what outlived its zygote, at level rlimits as an ordinary user.

There the code may kill every process of the sandbox: its guardian, its zygote. What it leaves then
belongs to init, in a session, group and environment of its own choice. Some marks of an execution
no process can take off, and its children inherit them: these decide.
"""

import os
import time
from dataclasses import dataclass
from typing import Literal

from retool_mcore.sandbox import guardian

ZYGOTE_ENTRY = "retool_mcore.sandbox.zygote"  # in the command line of zygotes and guardians
_LIMITS_OF_ZERO = (b"Max core file size", b"Max locked memory", b"Max msgqueue size")
_PAUSE_S = 0.005
_GIVE_UP_S = 5.0  # the caller's event loop stands still meanwhile; one who waits for a disk dies later

Kind = Literal["execution", "zygote", "guardian", "stopped guardian", "other"]


@dataclass(frozen=True)
class Process:
    """What is looked at of one process."""

    pid: int
    parent: int
    kind: Kind


def end_orphans() -> int:
    """Kill what is left of this user's executions whose zygote is gone; returns how many processes.

    Executions under way, of this sandbox or another one, are left alone. Does nothing where this
    process bears the marks itself, because it was started in such a sandbox.
    """
    if _is_marked("self"):
        return 0
    killed: set[int] = set()
    give_up_at = time.monotonic() + _GIVE_UP_S
    while time.monotonic() < give_up_at and (found := orphans(_processes(os.geteuid()))):
        guardian.end(found)
        killed.update(found)
        time.sleep(_PAUSE_S)
    return len(killed)


def orphans(processes: dict[int, Process]) -> list[int]:
    """Executions whose line of parents does not lead through a guardian to a zygote.

    A guardian whose zygote has ended ends its own tree, unless it was stopped: then it counts too.
    """
    found: list[int] = []
    for process in processes.values():
        above: Process | None = process
        while above is not None and above.kind == "execution":
            above = processes.get(above.parent)
        if process.kind in ("execution", "stopped guardian") and not _has_zygote(above, processes):
            found.append(process.pid)
    return found


def _has_zygote(process: Process | None, processes: dict[int, Process]) -> bool:
    if process is None or process.kind not in ("guardian", "stopped guardian"):
        return False
    above = processes.get(process.parent)
    return above is not None and above.kind == "zygote"


def _processes(uid: int) -> dict[int, Process]:
    """All living processes of ``uid``, by pid."""
    found: dict[int, Process] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                if _real_uid(entry) == uid and (process := _look(entry)) is not None:
                    found[process.pid] = process
            except (OSError, IndexError):
                continue  # it has ended meanwhile
    return found


def _look(pid: str) -> Process | None:
    state, parent, _, session = _read(pid, "stat").rpartition(b")")[2].split()[:4]
    if state in (b"Z", b"X"):
        return None
    kind: Kind = "other"
    if _is_marked(pid):
        kind = "execution"
    elif ZYGOTE_ENTRY.encode() in _read(pid, "cmdline"):
        kind = "zygote" if session == pid.encode() else "stopped guardian" if state == b"T" else "guardian"
    return Process(int(pid), int(parent), kind)


def _is_marked(pid: str) -> bool:
    """Whether it may get no new privileges and has hard limits of 0, which it cannot raise."""
    if b"\nNoNewPrivs:\t1" not in _read(pid, "status"):
        return False
    lines = _read(pid, "limits").splitlines()
    hard = {name: line[len(name) :].split()[1] for line in lines for name in _LIMITS_OF_ZERO if line.startswith(name)}
    return all(hard.get(name) == b"0" for name in _LIMITS_OF_ZERO)


def _real_uid(pid: str) -> int:
    _, _, after = _read(pid, "status").partition(b"\nUid:")
    return int(after.split(maxsplit=1)[0])


def _read(pid: str, name: str) -> bytes:
    with open(f"/proc/{pid}/{name}", "rb") as file:
        return file.read()
