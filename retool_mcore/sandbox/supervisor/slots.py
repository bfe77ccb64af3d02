"""Resources of executions: the state directory, and worker slots with uid, directory and cgroup.

One execution at a time uses a worker slot. RLIMIT_AS limits each process; the slot's memory cgroup
also limits an execution that forks many. If no cgroup is writable, the sandbox runs without one.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import stat
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from retool_mcore.errors import SandboxUnavailable
from retool_mcore.sandbox.base import Level
from retool_mcore.sandbox.supervisor.confine import FIRST_UID, NUM_UIDS
from retool_mcore.sandbox.supervisor.removal import move_aside, remove_directory

# ------------------------------------------------------------------- memory cgroups

_MOUNT = Path("/sys/fs/cgroup")
# Memory charged to the cgroup in addition to the code's own: page tables, pipes, and copied pages
# of the warm image.
OVERHEAD_MB = 160
_CPU_WEIGHT = 10  # one tenth of the default weight


@dataclass(frozen=True)
class MemoryCgroup:
    """A memory cgroup (v1 or v2) for one execution at a time."""

    directory: Path
    version: int

    def limit(self, memory_mb: int) -> None:
        """Set the memory limit of the next execution. Raises OSError when the kernel refuses."""
        limit_bytes = str((memory_mb + OVERHEAD_MB) << 20)
        if self.version == 2:
            (self.directory / "memory.max").write_text(limit_bytes)
            with contextlib.suppress(OSError):  # the file is missing without swap accounting
                (self.directory / "memory.swap.max").write_text("0")
        else:
            (self.directory / "memory.limit_in_bytes").write_text(limit_bytes)

    def open(self) -> int:
        """Open cgroup.procs. A process joins the cgroup by writing "0" to the fd."""
        return os.open(self.directory / "cgroup.procs", os.O_WRONLY | os.O_CLOEXEC)

    def oom_kills(self) -> int:
        """Return how many processes the OOM killer has killed in this cgroup so far."""
        name = "memory.events" if self.version == 2 else "memory.oom_control"
        for line in (self.directory / name).read_text().splitlines():
            key, _, value = line.partition(" ")
            if key == "oom_kill":
                return int(value)
        return 0

    def remove(self) -> None:
        """Remove the empty cgroup. A busy one is left for ``remove_tree``."""
        with contextlib.suppress(OSError):
            self.directory.rmdir()


class CgroupTree:
    """The parent cgroup of all slots' cgroups; ``open`` finds a place for it."""

    def __init__(self, directory: Path, version: int) -> None:
        self.directory = directory
        self._version = version

    @classmethod
    def open(cls, name: str) -> CgroupTree | None:
        """Create a tree called ``name``; None if no memory controller is writable."""
        for parent, version in _candidates():
            directory = parent / name
            with contextlib.suppress(OSError):
                directory.mkdir()
                tree = cls(directory, version)
                if tree._usable():
                    return tree
                remove_tree(directory)
        return None

    def _usable(self) -> bool:
        try:
            if self._version == 2:
                (self.directory / "cgroup.subtree_control").write_text("+memory")
                if (self.directory / "cpu.weight").exists():  # all executions together, relative to the trainer
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
        """Create the cgroup of one slot. Raises OSError when the kernel refuses."""
        directory = self.directory / f"slot{number}"
        directory.mkdir(exist_ok=True)
        return MemoryCgroup(directory, self._version)


def remove_tree(directory: Path) -> None:
    """Remove a tree of empty cgroups. Busy or missing ones are skipped."""
    with contextlib.suppress(OSError):
        for child in directory.iterdir():
            if child.is_dir():
                with contextlib.suppress(OSError):
                    child.rmdir()
        directory.rmdir()


def _candidates() -> list[tuple[Path, int]]:
    """Return candidates (directory, cgroup version): this process's cgroup, then the root."""
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
            found += [(mount / path.lstrip("/"), version), (mount, version)]
    return found


# ---------------------------------------------------------------------------- uids

_BLOCK = 16


class Uids:
    """Assigns uids to the slots of one sandbox, so that no two sandboxes share a uid.

    A slot number always gets the same uid. Uids are claimed in blocks of 16. A claim is an
    exclusive flock on a file in a directory that only root can enter; the kernel releases it when
    the process ends, however it ends. ``close`` releases all claims. Claims under different
    ``name``s are independent.
    """

    def __init__(self, name: str = "retool-sandbox-uids") -> None:
        self._name = name
        self._directory = ""
        self._claims: list[int] = []
        self._starts: list[int] = []

    def of(self, number: int) -> int:
        """Return the uid of slot ``number`` (>= -1). Raises SandboxUnavailable if none is free."""
        block, place = divmod(number + 1, _BLOCK)
        while len(self._starts) <= block:
            self._claim()
        return self._starts[block] + place

    def _claim(self) -> None:
        self._directory = self._directory or _own_directory(self._name)
        num_blocks = NUM_UIDS // _BLOCK
        for number in range(num_blocks):
            start = FIRST_UID + (os.getpid() + number) % num_blocks * _BLOCK
            if start in self._starts:
                continue
            claim = os.open(f"{self._directory}/{start}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(claim)
            else:
                self._claims.append(claim)
                self._starts.append(start)
                return
        raise SandboxUnavailable(
            f"The sandboxes of this machine use all {NUM_UIDS} uids of executions. Stop some, or lower workers or "
            "sessions."
        )

    def close(self) -> None:
        """Release all uids."""
        for claim in self._claims:
            os.close(claim)
        self._claims.clear()
        self._starts.clear()


def _own_directory(name: str) -> str:
    """Create a directory in /run that only root can enter. Raises SandboxUnavailable."""
    path = os.path.join("/run", name)
    try:
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)
        status = os.lstat(path)
    except OSError as error:
        raise SandboxUnavailable(f"{path} cannot be created: {error.strerror}. Root's sandboxes need it.") from error
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise SandboxUnavailable(f"{path} is not a directory that only root can enter. Remove it.")
    return path


# ------------------------------------------------------------- the state directory

PREFIX = "retool-sandbox-"
_CGROUP = "cgroup"  # this file records the tree's path: whoever cleans up may be in another cgroup
_YOUNG_S = 60.0  # a directory just created may not be locked yet


class StateDirectory:
    """Files of one sandbox: zygote mount points and logs, working directories, the cgroup tree.

    Working directories are here only at levels landlock and rlimits. The owner keeps the directory
    locked while it is alive. Rollout workers are often killed without warning, so each new sandbox
    removes the unlocked directories on this machine.
    """

    def __init__(self, path: Path, lock_fd: int, cgroups: CgroupTree | None) -> None:
        self.path = path
        self.cgroups = cgroups
        self.uids = Uids()
        self._lock_fd = lock_fd

    @classmethod
    def create(cls) -> Self:
        """Remove what killed owners left, then create and lock a new directory.

        Raises OSError when the temporary directory is full.
        """
        remove_stale(Path(tempfile.gettempdir()))
        path = Path(tempfile.mkdtemp(prefix=PREFIX))
        path.chmod(0o711)  # executions under other uids must be able to traverse it
        lock_fd = lock_directory(path)
        assert lock_fd is not None, "nobody else knows a directory just made"
        cgroups = CgroupTree.open(path.name)
        if cgroups is not None:
            (path / _CGROUP).write_text(str(cgroups.directory))
        return cls(path, lock_fd, cgroups)

    def remove(self) -> None:
        """Delete the directory and the cgroups, and release the uids."""
        self.uids.close()
        if self.cgroups is not None:
            remove_tree(self.cgroups.directory)
        for _ in range(3):  # a thread may still be deleting an execution's files there
            if remove_directory(self.path):
                break
        os.close(self._lock_fd)


def remove_stale(parent: Path, young_s: float = _YOUNG_S) -> bool:
    """Remove state directories in ``parent`` whose owner is gone, with their cgroups.

    Skips directories of other users and those created less than ``young_s`` seconds ago.
    Returns whether no state directory is left.
    """
    for path in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            status = path.stat()
            young = 0 <= time.time() - status.st_mtime < young_s
            if young or status.st_uid != os.geteuid() or (lock_fd := lock_directory(path)) is None:
                continue
            with contextlib.suppress(FileNotFoundError):
                cgroup = Path((path / _CGROUP).read_text())
                if cgroup.name == path.name:
                    remove_tree(cgroup)
            remove_directory(path)
            os.close(lock_fd)
    return next(parent.glob(f"{PREFIX}*"), None) is None


def lock_directory(path: Path) -> int | None:
    """Lock a directory until the returned fd is closed; None if another process has locked it."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    return fd


# --------------------------------------------------------------------------- slots


@dataclass(frozen=True)
class WorkerSlot:
    """Resources of one execution (or session) at a time.

    ``uid`` is set if this process is root, ``directory`` at every level except namespaces, and
    ``cgroup`` if a memory cgroup is available.
    """

    uid: int | None = None
    directory: Path | None = None
    cgroup: MemoryCgroup | None = None
    cgroup_fd: int | None = None

    @classmethod
    def make(cls, level: Level, number: int, state: StateDirectory) -> WorkerSlot:
        """Create slot ``number`` (-1: the probe's).

        Raises OSError when its cgroup cannot be created, SandboxUnavailable when no uid is free.
        """
        cgroup = state.cgroups.slot(number) if state.cgroups else None
        cgroup_fd = cgroup.open() if cgroup else None
        uid = state.uids.of(number) if os.geteuid() == 0 else None
        directory = None if level == Level.NAMESPACES else state.path / f"slot{number}"
        return cls(uid=uid, directory=directory, cgroup=cgroup, cgroup_fd=cgroup_fd)

    def prepare(self, memory_limit_mb: int) -> None:
        """Set the memory limit and create an empty working directory. Raises OSError."""
        if self.cgroup is not None:
            self.cgroup.limit(memory_limit_mb)
        if self.directory is not None:
            move_aside(self.directory)  # left by a cancelled start
            self.directory.mkdir(mode=0o700)
            if self.uid is not None:
                os.chown(self.directory, self.uid, self.uid)

    async def clean(self) -> None:
        """Delete the files the execution left in its directory, whatever they are.

        A thread deletes them, after the tree has got an unguessable name. The slot can therefore be
        reused at once, even if this call is cancelled meanwhile.
        """
        if self.directory is None:
            return
        with contextlib.suppress(OSError):
            self.directory.rmdir()  # most executions leave no files
            return
        await asyncio.shield(asyncio.to_thread(remove_directory, move_aside(self.directory)))

    def oom_kills(self) -> int:
        """Return how many processes the OOM killer killed in this slot; 0 without a cgroup."""
        return self.cgroup.oom_kills() if self.cgroup else 0

    def remove(self) -> None:
        """Delete the slot's directory and cgroup."""
        if self.directory is not None:
            remove_directory(self.directory)
        if self.cgroup_fd is not None:
            os.close(self.cgroup_fd)
        if self.cgroup is not None:
            self.cgroup.remove()
