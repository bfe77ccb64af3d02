"""Deletes what an execution left: trees of any depth, with any permissions, of any size.

What lies there was made by hostile code, so nothing of it may decide more than how long its own
removal takes. No path is walked: every step is one name in an open directory, and no symbolic link
is followed. There is no recursion and no descriptor per level: a directory inside a directory is
moved to the top first, and emptied there. Nothing here raises for what was found.
"""

import contextlib
import itertools
import logging
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

logger = logging.getLogger(__name__)

_BATCH = 512  # names read before they are deleted: memory does not grow with the directory
_DIRECTORY = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def remove_directory(path: Path, *, max_entries: int | None = None) -> bool:
    """Delete the tree ``path``; a missing one is fine. Returns whether it is gone.

    With ``max_entries``, stop after about so many entries: a bound on the time that it takes. What
    cannot be deleted for another reason is logged and left.
    """
    try:
        os.rmdir(path)  # most executions leave nothing
    except FileNotFoundError:
        return True
    except OSError:
        return _remove_full(path, max_entries)
    return True


def move_aside(path: Path) -> Path:
    """Free the name ``path``: rename the tree beside it, to a name that nobody knows.

    Raises OSError when the directory that holds it cannot be written.
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
            os.unlink(path.name, dir_fd=parent)  # a file or a link in place of the directory
            return True
        logger.warning("%s could not be removed: %s", path, error)
        return False
    finally:
        os.close(parent)


def _open_own(name: str, parent: int) -> int:
    """Open a directory for reading, after making it ours to change: by descriptor, not by name.

    An O_PATH descriptor needs no permission on the directory itself, and pins what is changed.
    """
    pinned = os.open(name, os.O_PATH | _DIRECTORY, dir_fd=parent)
    try:
        if os.fstat(pinned).st_mode & 0o700 != 0o700:
            os.chmod(f"/proc/self/fd/{pinned}", 0o700)
        return os.open(".", os.O_RDONLY | _DIRECTORY, dir_fd=pinned)
    finally:
        os.close(pinned)


def _empty(top: int, budget: Iterator[None]) -> bool:
    """Delete all that lies in ``top``. Returns False when the budget is spent or nothing yields."""
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
    """Delete one entry of ``top``, whose subdirectories move up into ``top``. Never raises.

    Returns whether anything has changed for the better.
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
                    os.close(_open_own(child, directory))  # to move a directory takes the right to write in it
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
    """Delete a file, a link or an empty directory."""
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
