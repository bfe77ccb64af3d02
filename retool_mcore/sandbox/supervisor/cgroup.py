"""A memory cgroup per slot, where this process may make one.

RLIMIT_AS bounds one process; only a cgroup bounds an execution that forks many. Versions 1 and 2
are supported; where neither is writable, the sandbox runs without cgroups and says so.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

_MOUNT = Path("/sys/fs/cgroup")
# Memory that the kernel charges in addition to the code's own: page tables, pipes, and the private
# copy of the warm image.
OVERHEAD_MB = 160
_CPU_WEIGHT = 10  # a tenth of what a cgroup has by default


@dataclass(frozen=True)
class MemoryCgroup:
    """One directory of the memory controller, used for one execution at a time."""

    directory: Path
    version: int

    def limit(self, memory_mb: int) -> None:
        """Bound the execution to come. Raises OSError when the kernel refuses."""
        limit_bytes = str((memory_mb + OVERHEAD_MB) << 20)
        if self.version == 2:
            (self.directory / "memory.max").write_text(limit_bytes)
            with contextlib.suppress(OSError):  # no swap controller, no swap to bound
                (self.directory / "memory.swap.max").write_text("0")
        else:
            (self.directory / "memory.limit_in_bytes").write_text(limit_bytes)

    def open(self) -> int:
        """An fd on cgroup.procs: a process that writes "0" to it joins the cgroup."""
        return os.open(self.directory / "cgroup.procs", os.O_WRONLY | os.O_CLOEXEC)

    def oom_kills(self) -> int:
        """How many processes the kernel has ever killed in this cgroup for memory."""
        name = "memory.events" if self.version == 2 else "memory.oom_control"
        for line in (self.directory / name).read_text().splitlines():
            key, _, value = line.partition(" ")
            if key == "oom_kill":
                return int(value)
        return 0

    def remove(self) -> None:
        """Remove the (empty) cgroup; one that is still busy is left for ``remove_tree``."""
        with contextlib.suppress(OSError):
            self.directory.rmdir()


class CgroupTree:
    """The directory under which the slots' cgroups lie; ``open`` finds a place for it."""

    def __init__(self, directory: Path, version: int) -> None:
        self.directory = directory
        self._version = version

    @classmethod
    def open(cls, name: str) -> CgroupTree | None:
        """Make a tree called ``name``, or None where no memory controller is writable."""
        for parent, version in _candidates():
            directory = parent / name
            with contextlib.suppress(OSError):
                directory.mkdir()
                tree = cls(directory, version)
                if tree._usable():
                    return tree
                tree.remove()
        return None

    def _usable(self) -> bool:
        try:
            if self._version == 2:
                (self.directory / "cgroup.subtree_control").write_text("+memory")
                if (self.directory / "cpu.weight").exists():  # all executions together, beside the trainer
                    (self.directory / "cpu.weight").write_text(str(_CPU_WEIGHT))
            probe = self.slot(-1)
            try:
                probe.limit(64)
                probe.oom_kills()
                os.close(probe.open())
            finally:
                probe.remove()
        except OSError:
            return False
        return True

    def slot(self, number: int) -> MemoryCgroup:
        """Make the cgroup of one slot. Raises OSError when the kernel refuses."""
        directory = self.directory / f"slot{number}"
        directory.mkdir(exist_ok=True)
        return MemoryCgroup(directory, self._version)

    def remove(self) -> None:
        """Remove the slots and the tree."""
        remove_tree(self.directory)


def remove_tree(directory: Path) -> None:
    """Remove a tree of empty cgroups; one that is still busy, or gone already, is left as it is."""
    with contextlib.suppress(OSError):
        for child in directory.iterdir():
            if child.is_dir():
                with contextlib.suppress(OSError):
                    child.rmdir()
        directory.rmdir()


def _candidates() -> list[tuple[Path, int]]:
    """Where a tree may go: beneath this process's cgroup, else beneath the hierarchy's root."""
    found: list[tuple[Path, int]] = []
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            mounts, version = [_MOUNT / "memory"], 1
        elif controllers == "":
            mounts, version = [_MOUNT, _MOUNT / "unified"], 2
        else:
            continue
        for mount in mounts:
            for directory in (mount / path.lstrip("/"), mount):
                if version == 1 or _has_memory(directory):
                    found.append((directory, version))
    return found


def _has_memory(directory: Path) -> bool:
    """Version 2: whether children of this cgroup get the memory controller."""
    try:
        return "memory" in (directory / "cgroup.subtree_control").read_text().split()
    except OSError:
        return False
