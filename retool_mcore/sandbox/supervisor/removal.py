"""Deletes the files an execution left behind: trees of any depth, permissions and size.

Hostile code made these trees. They may influence nothing but how long their own removal takes.
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
from collections.abc import Iterator
from pathlib import Path

logger = logging.getLogger(__name__)

_BATCH = 512  # names read at a time, so that memory use does not depend on the directory's size
_DIRECTORY = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def remove_directory(path: Path, *, max_entries: int | None = None) -> bool:
    """Delete the tree at ``path``, if it exists. Returns whether it is gone.

    With ``max_entries``, stop after about that many entries, to bound the time. Entries that cannot
    be deleted for other reasons are logged and left in place.
    """
    try:
        os.rmdir(path)  # most executions leave no files
    except FileNotFoundError:
        return True
    except OSError:
        return _remove_full(path, max_entries)
    return True


def move_aside(path: Path) -> Path:
    """Rename the tree at ``path`` to an unguessable name in the same directory; return that name.

    Raises OSError when the parent directory is not writable.
    """
    aside = path.with_name(f"left-{secrets.token_hex(8)}")
    with contextlib.suppress(FileNotFoundError):
        os.rename(path, aside)
    return aside


def _remove_full(path: Path, max_entries: int | None) -> bool:
    try:
        parent = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        logger.warning("%s could not be removed: %s", path, error)
        return False
    budget = itertools.repeat(None) if max_entries is None else itertools.repeat(None, max_entries)
    try:
        top = _open_own(path.name, parent)
        try:
            emptied = _empty(top, budget)
        finally:
            os.close(top)
        if emptied:
            os.rmdir(path.name, dir_fd=parent)
        elif next(budget, False) is None:
            logger.warning("%s could not be removed: part of it withstands", path)
        return emptied
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(path.name, dir_fd=parent)  # a file or link replaced the directory
            return True
        logger.warning("%s could not be removed: %s", path, error)
        return False
    finally:
        os.close(parent)


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


def _empty(top: int, budget: Iterator[None]) -> bool:
    """Delete the contents of ``top``. Returns False when the budget is spent or nothing works."""
    fresh_names = (f".{secrets.token_hex(8)}-{number}" for number in itertools.count())
    while names := _some_names(top):
        num_gone = 0
        for name in names:
            if next(budget, False) is False:
                return False
            num_gone += _remove_entry(top, name, fresh_names, budget)
        if not num_gone:
            return False
    return True


def _remove_entry(top: int, name: str, fresh_names: Iterator[str], budget: Iterator[None]) -> bool:
    """Delete one entry of ``top``; move its subdirectories up into ``top``. Never raises OSError.

    Returns whether any progress was made.
    """
    if _unlink(name, top):
        return True
    try:
        directory = _open_own(name, top)
    except OSError:
        return False
    num_gone = 0
    try:
        while names := _some_names(directory):
            num_before = num_gone
            for child in names:
                if next(budget, False) is False:
                    return True
                if _unlink(child, directory):
                    num_gone += 1
                    continue
                with contextlib.suppress(OSError):
                    os.close(_open_own(child, directory))  # moving a directory needs write access to it
                    os.rename(child, next(fresh_names), src_dir_fd=directory, dst_dir_fd=top)
                    num_gone += 1
            if num_gone == num_before:
                break
    except OSError as error:
        logger.warning("a directory that an execution left could not be read: %s", error)
    finally:
        os.close(directory)
    return _unlink(name, top) or num_gone > 0


def _unlink(name: str, directory: int) -> bool:
    """Delete a file, link or empty directory. Returns whether it is gone."""
    for delete in (os.unlink, os.rmdir):
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
