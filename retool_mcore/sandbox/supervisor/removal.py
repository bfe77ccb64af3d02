"""Deletes the files an execution left behind: trees of any depth, permissions and size.

Hostile code made these trees. They may affect only how long their own removal takes.
Every operation takes a single name relative to an open directory fd: no paths are resolved, and no
symbolic links are followed. The depth of a tree costs neither recursion nor fds, because nested
directories are first moved to the top directory and emptied there. No content of the tree makes
these functions raise.
"""

import contextlib
import itertools
import logging
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

logger = logging.getLogger(__name__)

_BATCH = 512  # names read at a time, so that memory use does not depend on the directory's size
_DIRECTORY = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_LIMIT_S = 600.0  # a process that survives at rlimits may keep adding files


def move_aside(path: Path) -> Path:
    """Rename the tree at ``path`` to an unguessable name in the same directory; return that name.

    Raises OSError when the parent directory is not writable.
    """
    aside = path.with_name(f"left-{secrets.token_hex(8)}")
    with contextlib.suppress(FileNotFoundError):
        os.rename(path, aside)
    return aside


def remove_directory(path: Path) -> bool:
    """Delete the tree at ``path``, if it exists. Returns whether it is gone.

    Entries that cannot be deleted are logged and left in place.
    """
    if _unlink(str(path), None):  # most executions leave no files
        return True
    try:
        parent = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            top = _open_own(path.name, parent)
        finally:
            os.close(parent)
        try:
            _empty(top, time.monotonic() + _LIMIT_S)
        finally:
            os.close(top)
        os.rmdir(path)
    except OSError as error:
        logger.warning("%s could not be removed: %s", path, error)
        return False
    return True


def _open_own(name: str, parent: int) -> int:
    """Open a directory for reading, after granting ourselves rwx on it through its fd.

    An O_PATH fd needs no permission on the directory, and pins it: the chmod cannot hit another
    file.
    """
    pinned = os.open(name, os.O_PATH | _DIRECTORY, dir_fd=parent)
    try:
        if os.fstat(pinned).st_mode & 0o700 != 0o700:
            os.chmod(f"/proc/self/fd/{pinned}", 0o700)
        return os.open(".", os.O_RDONLY | _DIRECTORY, dir_fd=pinned)
    finally:
        os.close(pinned)


def _empty(top: int, give_up_at: float) -> None:
    """Delete what can be deleted in ``top``, until ``give_up_at``."""
    fresh_names = (f".{secrets.token_hex(8)}-{number}" for number in itertools.count())
    progress = True
    while progress and time.monotonic() < give_up_at:
        progress = False
        for name in _some_names(top):
            if _unlink(name, top):
                progress = True
                continue
            with contextlib.suppress(OSError):
                directory = _open_own(name, top)
                try:
                    while time.monotonic() < give_up_at and _lift(directory, top, fresh_names):
                        progress = True
                finally:
                    os.close(directory)
                progress |= _unlink(name, top)


def _lift(directory: int, top: int, fresh_names: Iterator[str]) -> bool:
    """Delete some entries of ``directory``, and move its subdirectories up into ``top``.

    Returns whether any entry is gone from ``directory``.
    """
    progress = False
    for name in _some_names(directory):
        if _unlink(name, directory):
            progress = True
            continue
        with contextlib.suppress(OSError):
            os.close(_open_own(name, directory))  # moving a directory needs write access to it
            os.rename(name, next(fresh_names), src_dir_fd=directory, dst_dir_fd=top)
            progress = True
    return progress


def _unlink(name: str, directory: int | None) -> bool:
    """Delete a file, link or empty directory. Returns whether it is gone."""
    for delete in (os.rmdir, os.unlink):
        try:
            delete(name, dir_fd=directory)
        except FileNotFoundError:
            return True
        except OSError:
            continue
        return True
    return False


def _some_names(directory: int) -> list[str]:
    with os.scandir(directory) as entries:
        return [entry.name for entry in itertools.islice(entries, _BATCH)]
