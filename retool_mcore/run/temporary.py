"""TMPDIR of a run: what its processes leave in the temporary folder goes with the run.

wandb leaves two folders for each process that imports it, verl a lock for each folder that it
makes, SGLang its sockets, and what Ray ends has no time to delete anything.
"""

import getpass
import os
import re
import shutil
import tempfile
import time
import zlib
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path

GONE_WITHIN_S = 5.0  # processes that were told to end, which may write to the last
LONGEST = 107 - len("/pymp-xxxxxxxx/listener-xxxxxxxx")  # a socket's path has 107 characters at most
INDUCTOR = "TORCHINDUCTOR_CACHE_DIR"  # torch's compiled kernels are in TMPDIR, and outlive a run


@contextmanager
def own_tmpdir(run_dir: Path, part: str = "", clean: Callable[[Path], bool] = lambda folder: True) -> Generator[None]:
    """For this process and what it starts; by a name that the next start knows.

    It removes what a killed one has left. ``part`` tells processes of one run apart. ``clean`` is
    called with the folder before it is removed, until it has left nothing of its own. Where a
    socket's path would get too long, and where another user has made the folder, TMPDIR stays what
    it is.
    """
    parent, mark = tempfile.gettempdir(), zlib.crc32(str(run_dir.resolve()).encode())
    folder = Path(parent, f"retool-{os.getuid()}-{mark}{part}")
    _remove(folder, clean)
    try:
        if len(os.fsencode(folder)) > LONGEST:
            raise FileNotFoundError
        folder.mkdir(mode=0o711)  # the sandbox's executions pass through it under uids of their own
    except OSError:
        yield
        return
    before = {name: os.environ.get(name) for name in ("TMPDIR", INDUCTOR)}
    with suppress(KeyError):  # a user without a name
        user = re.sub(r'[\\/:*?"<>|]', "_", getpass.getuser())
        os.environ.setdefault(INDUCTOR, f"{parent}/torchinductor_{user}")
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
    try:
        yield
    finally:
        tempfile.tempdir = parent
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
        _remove(folder, clean)


def _remove(folder: Path, clean: Callable[[Path], bool]) -> None:
    if not folder.is_dir() or folder.is_symlink() or folder.stat().st_uid != os.getuid():
        return
    end_s = time.monotonic() + GONE_WITHIN_S
    while not clean(folder) and time.monotonic() < end_s:
        time.sleep(0.05)
    remove_when_quiet(folder)


def remove_when_quiet(folder: Path) -> None:
    """Remove a folder into which processes that end may still write."""
    end_s = time.monotonic() + GONE_WITHIN_S
    while folder.exists() and time.monotonic() < end_s:
        shutil.rmtree(folder, ignore_errors=True)
        time.sleep(0.05 if folder.exists() else 0)
