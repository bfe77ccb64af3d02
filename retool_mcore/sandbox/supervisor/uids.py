"""Uids of executions that no other sandbox of this machine uses at the same time (for root)."""

import contextlib
import fcntl
import os
import stat
import tempfile

from retool_mcore.errors import SandboxUnavailable

# Above the uids that distributions hand out and below `nobody`.
FIRST, COUNT = 61_000, 4_480
_BLOCK = 16


class Uids:
    """The uids of one sandbox: a number always has the same one. ``close`` gives them back.

    They are claimed in blocks. A claim is the lock on a file in a directory that only root can
    enter. The kernel gives it to one process alone, and takes it back when that ends, however it
    ends. Sandboxes with another ``name`` are not heeded.
    """

    def __init__(self, name: str = "retool-sandbox-uids") -> None:
        self._name = name
        self._directory = ""
        self._claims: list[int] = []
        self._starts: list[int] = []

    def of(self, number: int) -> int:
        """The uid of slot ``number``, from -1 on. Raises SandboxUnavailable where none is left."""
        block, place = divmod(number + 1, _BLOCK)
        while len(self._starts) <= block:
            self._claim()
        return self._starts[block] + place

    def _claim(self) -> None:
        self._directory = self._directory or _own_directory(self._name)
        num_blocks = COUNT // _BLOCK
        for number in range(num_blocks):
            start = FIRST + (os.getpid() + number) % num_blocks * _BLOCK
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
            f"the sandboxes of this machine hold all {COUNT} uids of executions. End some, or lower workers, sessions."
        )

    def close(self) -> None:
        """Give all uids back."""
        for claim in self._claims:
            os.close(claim)
        self._claims.clear()
        self._starts.clear()


def _own_directory(name: str) -> str:
    """A directory of this user's that others cannot enter. Raises SandboxUnavailable."""
    for parent in ("/run", "/var/lib", tempfile.gettempdir()):
        path = os.path.join(parent, name)
        with contextlib.suppress(OSError):
            with contextlib.suppress(FileExistsError):
                os.mkdir(path, 0o700)
            status = os.lstat(path)
            if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077:
                return path
    raise SandboxUnavailable(f"no directory {name} can be made in /run, /var/lib or {tempfile.gettempdir()}.")
