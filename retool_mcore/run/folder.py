"""A run's folder: its lock, atomic writes, full disks, and the temporary directory of a run."""

import contextlib
import errno
import fcntl
import math
import os
import shutil
import socket
import tempfile
import time
import zlib
from collections.abc import Callable, Generator
from pathlib import Path
from typing import IO

from retool_mcore.errors import CheckpointError, ConfigError

POLL_S = 0.05  # polling interval; `is_locked` holds the lock for microseconds
WAIT_FOR_EXIT_S = 3.0
REMOVE_WITHIN_S = 5.0
LONGEST_TMPDIR = 107 - len("/pymp-xxxxxxxx/listener-xxxxxxxx")  # the path of a Unix socket has at most 107 bytes
FULL_BELOW_BYTES = 16 << 20  # a disk with less free space counts as full: some may have been freed meanwhile
KERNELS = "TORCHINDUCTOR_CACHE_DIR"  # in TMPDIR by default, but compiled kernels should outlive a run
# Texts that identify a failed write: shutil.Error has no errno, and PyTorch's archive writer only
# reports an unexpected position.
REFUSED_WRITES = {os.strerror(number): number for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)}
REFUSED_WRITES["unexpected pos"] = errno.ENOSPC


def lock_run(run_dir: Path, another: str = "set another run.name", name: str = ".lock") -> IO[str]:
    """Lock the run's folder for this process; the kernel releases the lock when the process exits.

    ``another``: advice for the error message on how to choose another folder. ``name``: name of the
    lock file. Raises ConfigError when another process holds the lock, or when the file system does
    not support locks.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    handle = (run_dir / name).open("a+", encoding="utf-8")
    try:
        _lock(handle)
    except BlockingIOError as error:
        handle.seek(0)
        raise _in_use(run_dir, handle.read(), another) from error
    except OSError as error:
        raise ConfigError(
            f"{handle.name} cannot be locked ({error.strerror}). run.root must be on a file system with locks."
        ) from error
    handle.truncate(0)
    handle.write(f"{os.getpid()} on {socket.gethostname()}")
    handle.flush()
    return handle


def require_unlocked(run_dir: Path) -> None:
    """Raise lock_run's ConfigError if another process holds the lock; does not take the lock.

    This lets a command fail before its slow imports. Waits up to WAIT_FOR_EXIT_S for the processes
    of a run that was just killed to exit.
    """
    until = time.monotonic() + WAIT_FOR_EXIT_S
    while is_locked(run_dir):
        if time.monotonic() >= until:
            raise _in_use(run_dir, (run_dir / ".lock").read_text(encoding="utf-8"), "set another run.name")
        time.sleep(POLL_S)


def _in_use(run_dir: Path, owner: str, another: str) -> ConfigError:
    owner = owner.strip() or "unknown"
    return ConfigError(f"{run_dir} is in use by process {owner}. Wait for it, stop it, or {another}.")


def _lock(handle: IO[str]) -> None:
    """Take the lock. Retries once, because another process's `is_locked` may briefly hold it."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        time.sleep(POLL_S)
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)


def is_locked(run_dir: Path) -> bool:
    """Whether a process holds the run's lock; tries a shared lock and releases it at once."""
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
    """Yield a temporary file that atomically replaces ``path`` when the block succeeds.

    The file is in the same directory, and fsynced before it is renamed. After an error it is
    deleted, and ``path`` is unchanged. Raises OSError.
    """
    target = Path(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    except FileExistsError as error:  # mkdir: a file has the directory's name
        raise NotADirectoryError(errno.ENOTDIR, "is not a folder", str(target.parent)) from error
    except FileNotFoundError as error:  # for example in /proc, where no file can be created
        raise PermissionError(errno.EACCES, "no file can be created there", str(target)) from error
    os.close(descriptor)
    draft = Path(name)
    try:
        yield draft
        draft.chmod(0o644)  # mkstemp creates files with 0600, but these are shared
        with draft.open("rb") as file:
            os.fsync(file.fileno())
        draft.replace(target)
    finally:
        draft.unlink(missing_ok=True)


def write_atomic(path: Path, text: str) -> None:
    """Write ``text`` to ``path`` atomically. Raises OSError, and then leaves ``path`` unchanged."""
    with replacing(path) as draft:
        draft.write_text(text, encoding="utf-8")


def refused_write(error: BaseException | None) -> int:
    """Return the errno (ENOSPC, EDQUOT or EFBIG) behind ``error`` or one of its causes; else 0."""
    while error is not None:
        for text, number in REFUSED_WRITES.items():
            if text in str(error):
                return number
        error = error.__cause__ or error.__context__
    return 0


def is_full(error: BaseException) -> bool:
    return refused_write(error) in (errno.ENOSPC, errno.EDQUOT)


@contextlib.contextmanager
def explain_full_disk(folder: Path, remedy: str) -> Generator[None]:
    """Convert errors of a full disk to CheckpointError; ``remedy``: what the user can do.

    The full disk may also be that of the file in the error, or of the temporary directory.
    """
    try:
        yield
    except Exception as error:
        if not is_full(error):
            raise
        full = full_folder(error, folder)
        if full != folder:
            remedy = (
                f"The files of {folder} were not written, although its own disk has space. Free some space in {full}."
            )
        raise CheckpointError(f"no space is left for {full}. {remedy}") from error


def full_folder(error: BaseException, folder: Path) -> Path:
    """Return the first full one of ``folder``, the error's file and TMPDIR; else ``folder``."""
    named = [Path(str(name)) for name in (getattr(error, "filename", None), tempfile.gettempdir()) if name]
    return next((place for place in (folder, *named) if _free_bytes(place) < FULL_BELOW_BYTES), folder)


def _free_bytes(place: Path) -> float:
    while not place.exists() and place != place.parent:
        place = place.parent
    try:
        return shutil.disk_usage(place).free
    except OSError:
        return math.inf


@contextlib.contextmanager
def own_tmpdir(run_dir: Path, part: str = "", clean: Callable[[Path], bool] = lambda folder: True) -> Generator[None]:
    """Set a private TMPDIR for this process and its children, and remove it afterwards.

    wandb, verl, SGLang and killed processes leave files in TMPDIR. The name depends only on
    ``run_dir`` and ``part``, so the next start removes what a killed run left. First,
    ``clean(folder)`` removes related resources, such as cgroups; it is retried for up to 5 s until
    it returns True. TMPDIR is unchanged if its path would be too long for Unix sockets, or if the
    folder cannot be removed because another user created it.
    """
    parent = tempfile.gettempdir()
    folder = Path(parent, f"retool-{os.getuid()}-{zlib.crc32(str(run_dir.resolve()).encode())}{part}")
    remove_when_quiet(folder, clean)
    if len(os.fsencode(folder)) > LONGEST_TMPDIR or os.path.lexists(folder):
        yield
        return
    folder.mkdir(mode=0o711)  # the sandbox's processes traverse it under other uids
    before = {name: os.environ.get(name) for name in ("TMPDIR", KERNELS)}
    os.environ.setdefault(KERNELS, f"{parent}/torchinductor_{os.getuid()}")
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
    try:
        with temporary(folder, clean):
            yield
    finally:
        tempfile.tempdir = parent
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


_temporary: dict[Path, Callable[[Path], bool]] = {}  # folder to remove -> its clean function


@contextlib.contextmanager
def temporary(folder: Path, clean: Callable[[Path], bool] = lambda folder: True) -> Generator[None]:
    """Remove ``folder`` afterwards; see ``own_tmpdir``."""
    _temporary[folder] = clean
    try:
        yield
    finally:
        _temporary.pop(folder, None)  # a nested block may have used the same folder
        remove_when_quiet(folder, clean)


def remove_temporary() -> None:
    """Remove the folders of all active ``temporary`` blocks, for an exit that skips their end."""
    for folder, clean in _temporary.items():
        remove_when_quiet(folder, clean)


def remove_when_quiet(folder: Path, clean: Callable[[Path], bool] = lambda folder: True) -> None:
    """Remove a folder that exiting processes may still write to; give up after 5 s."""
    end_s = time.monotonic() + REMOVE_WITHIN_S
    while folder.exists() and time.monotonic() < end_s:
        if clean(folder):
            shutil.rmtree(folder, ignore_errors=True)
        time.sleep(0.05 if folder.exists() else 0)
