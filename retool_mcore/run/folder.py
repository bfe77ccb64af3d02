"""A run's folder has one writer, and a file in it is whole or absent."""

import contextlib
import errno
import fcntl
import os
import socket
import tempfile
import time
from collections.abc import Generator
from pathlib import Path
from typing import IO

from retool_mcore.errors import ConfigError

ASKED_S = 0.05  # a look at the lock takes microseconds
ENDING_S = 3.0


def lock_run(run_dir: Path, another: str = "set another run.name") -> IO[str]:
    """Lock the run's folder for this process; the lock ends with the process, however it ends.

    ``another``: how its user names another folder. Raises ConfigError when another process is
    writing to the same run.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    handle = (run_dir / ".lock").open("a+", encoding="utf-8")
    try:
        _lock(handle)
    except BlockingIOError as error:
        handle.seek(0)
        raise _in_use(run_dir, handle.read(), another) from error
    handle.truncate(0)
    handle.write(f"{os.getpid()} on {socket.gethostname()}")
    handle.flush()
    return handle


def require_free(run_dir: Path) -> None:
    """Raise lock_run's ConfigError if a process holds the folder now; takes nothing.

    For a start that would find it out only after its imports. A run that was killed just now has
    ENDING_S to be gone with its processes.
    """
    until = time.monotonic() + ENDING_S
    while is_locked(run_dir):
        if time.monotonic() >= until:
            raise _in_use(run_dir, (run_dir / ".lock").read_text(encoding="utf-8"), "set another run.name")
        time.sleep(ASKED_S)


def _in_use(run_dir: Path, owner: str, another: str) -> ConfigError:
    owner = owner.strip() or "unknown"
    return ConfigError(f"{run_dir} is in use by process {owner}. Wait for it, stop it, or {another}.")


def _lock(handle: IO[str]) -> None:
    """Take the lock; a second try, as `is_locked` of another process may have held it just now."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        time.sleep(ASKED_S)
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)


def is_locked(run_dir: Path) -> bool:
    """Whether a process holds the run's folder; asks for a shared lock, and keeps none."""
    try:
        with (run_dir / ".lock").open("rb") as handle:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False  # no lock file, or a file system without locks
    return False


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Generator[Path]:
    """Yield a draft beside ``path``, which replaces ``path`` when the block ends without an error.

    The draft's bytes are on disk before it takes the name. After an error the draft is deleted and
    ``path`` stays as it was. Raises OSError.
    """
    target = Path(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    except FileExistsError as error:  # of mkdir: a file has the folder's name
        raise NotADirectoryError(errno.ENOTDIR, "is no folder", str(target.parent)) from error
    except FileNotFoundError as error:  # as of /proc, which takes no files
        raise PermissionError(errno.EACCES, "no file can be made there", str(target)) from error
    os.close(descriptor)
    draft = Path(name)
    try:
        yield draft
        draft.chmod(0o644)  # mkstemp gives 0600; these files are shared
        with draft.open("rb") as file:
            os.fsync(file.fileno())
        draft.replace(target)
    finally:
        draft.unlink(missing_ok=True)


def write_whole(path: Path, text: str) -> None:
    """Write ``text`` to ``path``, or leave ``path`` as it was. Raises OSError."""
    with replacing(path) as draft:
        draft.write_text(text, encoding="utf-8")
