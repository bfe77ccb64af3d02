"""Resources of executions: the state directory, and worker slots with uid, directory and cgroup.

One execution at a time uses a worker slot. RLIMIT_AS limits each process; the slot's memory cgroup
also limits an execution that forks many. If no cgroup is writable, the sandbox runs without one.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import random
import secrets
import stat
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from retool_mcore.errors import SandboxUnavailable
from retool_mcore.sandbox.base import Level
from retool_mcore.sandbox.supervisor.confine import FIRST_UID, NUM_UIDS

logger = logging.getLogger(__name__)

# ------------------------------------------------------------------- memory cgroups

_MOUNT = Path("/sys/fs/cgroup")
# Memory charged to the cgroup in addition to the code's own: page tables, pipes, and copied pages
# of the warm image.
OVERHEAD_MB = 160
_CPU_WEIGHT = 10  # one tenth of the default weight
_LIMIT_FILE = {1: "memory.limit_in_bytes", 2: "memory.max"}  # by cgroup version
_EVENTS_FILE = {1: "memory.oom_control", 2: "memory.events"}


@dataclass(frozen=True)
class MemoryCgroup:
    """A memory cgroup (v1 or v2): the parent of all slots, or the one of a slot."""

    directory: Path
    version: int

    @classmethod
    def create(cls, name: str) -> MemoryCgroup | None:
        """Create the parent of all slots; None if no memory controller is writable."""
        for place, version in _places():
            parent = cls(place / name, version)
            try:
                parent.directory.mkdir()
                parent.set_up()
            except OSError:
                remove_cgroups(parent.directory)
            else:
                return parent
        return None

    def set_up(self) -> None:
        """Prepare the parent of all slots, and try a child. Raises OSError if one is refused."""
        if self.version == 2:
            (self.directory / "cgroup.subtree_control").write_text("+memory")
            if (self.directory / "cpu.weight").exists():  # all executions together, relative to the trainer
                (self.directory / "cpu.weight").write_text(str(_CPU_WEIGHT))
        probe = self.child("probe")
        probe.limit(64)
        probe.oom_kills()
        os.close(probe.open())

    def child(self, name: str) -> MemoryCgroup:
        """Create the cgroup of a slot. Raises OSError when the kernel refuses."""
        directory = self.directory / name
        directory.mkdir(exist_ok=True)
        return MemoryCgroup(directory, self.version)

    def limit(self, memory_mb: int) -> None:
        """Set the memory limit of the next execution. Raises OSError when the kernel refuses."""
        (self.directory / _LIMIT_FILE[self.version]).write_text(str((memory_mb + OVERHEAD_MB) << 20))
        if (swap := self.directory / "memory.swap.max").exists():  # v2 with swap accounting
            swap.write_text("0")

    def open(self) -> int:
        """Open cgroup.procs. A process joins the cgroup by writing "0" to the fd."""
        return os.open(self.directory / "cgroup.procs", os.O_WRONLY | os.O_CLOEXEC)

    def oom_kills(self) -> int:
        """Return how many processes the OOM killer has killed in this cgroup so far."""
        for line in (self.directory / _EVENTS_FILE[self.version]).read_text().splitlines():
            key, _, value = line.partition(" ")
            if key == "oom_kill":
                return int(value)
        return 0


def remove_cgroups(parent: Path) -> None:
    """Remove a cgroup and its children if they are empty. Busy or missing ones are skipped."""
    with contextlib.suppress(OSError):
        for child in parent.iterdir():
            if child.is_dir():
                with contextlib.suppress(OSError):
                    child.rmdir()
        parent.rmdir()


def _places() -> list[tuple[Path, int]]:
    """Return where a cgroup may be writable, and its version: this process's cgroup, the root."""
    places: list[tuple[Path, int]] = []
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            mounts, version = [_MOUNT / "memory"], 1
        elif controllers == "":
            mounts, version = [_MOUNT, _MOUNT / "unified"], 2
        else:
            continue
        for mount in mounts:
            places += [(mount / path.lstrip("/"), version), (mount, version)]
    return places


# ----------------------------------------------------------- uids and removal of files

UID_LOCKS = Path("/run/retool-sandbox-uids")
_REMOVAL_TIMEOUT_S = 600.0  # a process that survives at rlimits may keep adding files


def claim_uid(directory: Path = UID_LOCKS) -> tuple[int, int]:
    """Claim a uid that no other slot on this machine uses; return it and the fd of its lock.

    The lock is on a file in ``directory``, which only root can enter. The kernel releases it when
    the fd is closed or the process ends. Raises SandboxUnavailable if every uid is claimed.
    """
    try:
        directory.mkdir(mode=0o700, exist_ok=True)
        status = directory.lstat()
    except OSError as error:
        raise SandboxUnavailable(
            f"{directory} cannot be created: {error.strerror}. Root's sandboxes need it."
        ) from error
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise SandboxUnavailable(f"{directory} is not a directory that only root can enter. Remove it.")
    start = random.randrange(NUM_UIDS)
    for number in range(NUM_UIDS):
        uid = FIRST_UID + (start + number) % NUM_UIDS
        if (lock_fd := _lock(directory / str(uid), os.O_RDWR | os.O_CREAT)) is not None:
            return uid, lock_fd
    raise SandboxUnavailable(
        f"The sandboxes of this machine use all {NUM_UIDS} execution uids. Stop some, or lower workers or sessions."
    )


def _lock(path: Path, flags: int) -> int | None:
    """Open and lock ``path`` until the returned fd is closed; None if it is locked already."""
    fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    return fd


def remove_directory(path: Path) -> bool:
    """Delete the tree at ``path``, if it exists. Returns whether it is gone.

    Hostile code made the tree. rm(1) handles any depth and number of files, and follows no
    symbolic links.
    """
    remove = ["rm", "-rf", str(path)]
    try:
        failed = subprocess.call(remove, stderr=subprocess.DEVNULL, timeout=_REMOVAL_TIMEOUT_S)
        if failed and os.geteuid() != 0:  # the code may have closed its directories
            open_directories = ["chmod", "-R", "u+rwx", str(path)]
            subprocess.call(open_directories, stderr=subprocess.DEVNULL, timeout=_REMOVAL_TIMEOUT_S)
            failed = subprocess.call(remove, stderr=subprocess.DEVNULL, timeout=_REMOVAL_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        failed = error
    if failed:
        logger.warning("%s could not be removed: rm failed: %s", path, failed)
    return not failed


# ------------------------------------------------------------- the state directory

PREFIX = "retool-sandbox-"
_CGROUP = "cgroup"  # this file records the cgroup's path: whoever cleans up may be in another cgroup
_YOUNG_S = 60.0  # a directory just created may not be locked yet


@dataclass(frozen=True)
class StateDirectory:
    """Files of one sandbox: zygote mount points and logs, working directories, the parent cgroup.

    Working directories are here only at levels landlock and rlimits. The owner keeps the directory
    locked while it is alive. Rollout workers are often killed without warning, so each new sandbox
    removes the unlocked directories on this machine.
    """

    path: Path
    lock_fd: int
    cgroup: MemoryCgroup | None

    @classmethod
    def create(cls) -> Self:
        """Remove what killed owners left, then create and lock a new directory.

        Raises OSError when the temporary directory is full.
        """
        remove_stale(Path(tempfile.gettempdir()))
        path = Path(tempfile.mkdtemp(prefix=PREFIX))
        path.chmod(0o711)  # executions under other uids must be able to traverse it
        lock_fd = _lock(path, os.O_RDONLY | os.O_DIRECTORY)
        assert lock_fd is not None, "nobody else knows a directory just made"
        cgroup = MemoryCgroup.create(path.name)
        if cgroup is not None:
            (path / _CGROUP).write_text(str(cgroup.directory))
        return cls(path, lock_fd, cgroup)

    def remove(self) -> None:
        """Delete the directory and the cgroups."""
        if self.cgroup is not None:
            remove_cgroups(self.cgroup.directory)
        for _ in range(3):  # a thread may still be deleting an execution's files there
            if remove_directory(self.path):
                break
        os.close(self.lock_fd)


def remove_stale(parent: Path, young_s: float = _YOUNG_S) -> bool:
    """Remove state directories in ``parent`` whose owner is gone, with their cgroups.

    Skips directories of other users and those created less than ``young_s`` seconds ago.
    Returns whether no state directory is left.
    """
    for path in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            status = path.stat()
            young = 0 <= time.time() - status.st_mtime < young_s
            if young or status.st_uid != os.geteuid():
                continue
            if (lock_fd := _lock(path, os.O_RDONLY | os.O_DIRECTORY)) is None:
                continue  # its owner is alive
            with contextlib.suppress(FileNotFoundError):
                cgroup = Path((path / _CGROUP).read_text())
                if cgroup.name == path.name:
                    remove_cgroups(cgroup)
            remove_directory(path)
            os.close(lock_fd)
    return next(parent.glob(f"{PREFIX}*"), None) is None


# --------------------------------------------------------------------------- slots


@dataclass(frozen=True)
class WorkerSlot:
    """Resources of one execution (or session) at a time.

    ``uid`` is set if this process is root, ``directory`` at every level except namespaces, and
    ``cgroup`` if a memory cgroup is available.
    """

    uid: int | None = None
    uid_lock: int | None = None
    directory: Path | None = None
    cgroup: MemoryCgroup | None = None
    cgroup_fd: int | None = None

    @classmethod
    def make(cls, level: Level, name: str, state: StateDirectory) -> WorkerSlot:
        """Create the slot ``name``.

        Raises OSError when its cgroup cannot be created, SandboxUnavailable when no uid is free.
        """
        cgroup = state.cgroup.child(name) if state.cgroup else None
        cgroup_fd = cgroup.open() if cgroup else None
        uid, uid_lock = claim_uid() if os.geteuid() == 0 else (None, None)
        directory = None if level == Level.NAMESPACES else state.path / name
        return cls(uid=uid, uid_lock=uid_lock, directory=directory, cgroup=cgroup, cgroup_fd=cgroup_fd)

    def prepare(self, memory_limit_mb: int) -> None:
        """Set the memory limit and create an empty working directory. Raises OSError."""
        if self.cgroup is not None:
            self.cgroup.limit(memory_limit_mb)
        if self.directory is not None:
            self._move_aside(self.directory)  # left by a cancelled start
            self.directory.mkdir(mode=0o700)
            if self.uid is not None:
                os.chown(self.directory, self.uid, self.uid)

    @staticmethod
    def _move_aside(directory: Path) -> Path:
        """Rename ``directory``, if it exists, to an unguessable name next to it; return that."""
        aside = directory.with_name(f"left-{secrets.token_hex(8)}")
        with contextlib.suppress(FileNotFoundError):
            os.rename(directory, aside)
        return aside

    async def clean(self) -> None:
        """Delete the files the execution left in its directory, whatever they are.

        A thread deletes them, after the tree has got an unguessable name. The slot can therefore be
        reused at once, even if this call is cancelled meanwhile.
        """
        if self.directory is None:
            return
        with contextlib.suppress(OSError):
            (self.directory / "main.py").unlink(missing_ok=True)  # of a script; most executions leave nothing else
            self.directory.rmdir()
            return
        await asyncio.shield(asyncio.to_thread(remove_directory, self._move_aside(self.directory)))

    def oom_kills(self) -> int:
        """Return how many processes the OOM killer killed in this slot; 0 without a cgroup."""
        return self.cgroup.oom_kills() if self.cgroup else 0

    def close(self) -> None:
        """Release the uid and the cgroup; the state directory deletes the files."""
        for fd in (self.uid_lock, self.cgroup_fd):
            if fd is not None:
                os.close(fd)
