"""The directory a sandbox keeps while it is open, and the sweep of those whose owner was killed."""

import contextlib
import fcntl
import os
import tempfile
import time
from pathlib import Path
from typing import Self

from retool_mcore.sandbox.supervisor.cgroup import CgroupTree, remove_tree
from retool_mcore.sandbox.supervisor.removal import remove_directory
from retool_mcore.sandbox.supervisor.uids import Uids

PREFIX = "retool-sandbox-"
_CGROUP = "cgroup"  # this file holds the tree's path: a later owner may live in another cgroup
_YOUNG_S = 60.0  # a directory just made is not locked yet


class StateDirectory:
    """The zygotes' mount points and logs, the working directories (weaker levels), the cgroup tree.

    The owner holds a lock for as long as it lives. A rollout worker is often killed without
    warning: the next sandbox on this machine removes the directories that it finds unlocked.
    """

    def __init__(self, path: Path, lock_fd: int, cgroups: CgroupTree | None) -> None:
        self.path = path
        self.cgroups = cgroups
        self.uids = Uids()
        self._lock_fd = lock_fd

    @classmethod
    def create(cls) -> Self:
        """Make one, after removing what killed owners left.

        Raises OSError when the temporary directory is full.
        """
        remove_stale(Path(tempfile.gettempdir()))
        path = Path(tempfile.mkdtemp(prefix=PREFIX))
        path.chmod(0o711)  # executions under their own uid pass through it
        lock_fd = lock_directory(path)
        assert lock_fd is not None, "nobody else knows a directory just made"
        cgroups = CgroupTree.open(path.name)
        if cgroups is not None:
            (path / _CGROUP).write_text(str(cgroups.directory))
        return cls(path, lock_fd, cgroups)

    def remove(self) -> None:
        """Delete directory and cgroups, give the uids back."""
        self.uids.close()
        if self.cgroups is not None:
            self.cgroups.remove()
        for _ in range(3):  # a thread may still be deleting there what an execution left
            if remove_directory(self.path):
                break
        os.close(self._lock_fd)


def remove_stale(parent: Path, young_s: float = _YOUNG_S) -> bool:
    """Remove state directories whose owner is gone, with their cgroups.

    Other users' directories are left alone, and those made within ``young_s``.
    Returns whether none is left.
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
    """Lock a directory for as long as this process lives; None where another one has locked it."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    return fd
