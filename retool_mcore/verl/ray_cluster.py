"""Which Ray cluster a run uses: its own on one node, the launch script's otherwise."""

import os
import shutil
import time
import zlib
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from retool_mcore.errors import PlatformError

GONE_WITHIN_S = 5.0  # Ray's processes, which may write to their logs to the last


def ray_init_keys(nodes: int, folder: Path) -> dict[str, Any]:
    """Arguments of ``ray.init`` beside those in the settings; changes RAY_ADDRESS.

    Ray connects to whatever RAY_ADDRESS or /tmp/ray/ray_current_cluster names. On one node that is
    some other user's or program's cluster, or a dead one.
    """
    if nodes > 1:
        return {}
    os.environ.pop("RAY_ADDRESS", None)  # or the run's processes inherit it
    return {"address": "local", "_temp_dir": str(folder)}


@contextmanager
def ray_folder(run_dir: Path) -> Generator[Path]:
    """Where Ray keeps sockets and logs of this run, gone afterwards; launch/nodes.sh has the same.

    Its name is short, since 107 bytes is all that a socket's path may have, and known to the next
    start, which removes what a killed one has left. Raises PlatformError when it is another user's.
    """
    parent = Path(f"/tmp/retool-ray-{os.getuid()}")
    parent.mkdir(mode=0o700, exist_ok=True)
    if parent.lstat().st_uid != os.getuid():
        raise PlatformError(f"{parent} belongs to another user, and Ray's sockets would be theirs to read. Remove it.")
    folder = parent / f"{zlib.crc32(str(run_dir.resolve()).encode())}.0"
    _remove(folder)
    try:
        yield folder
    finally:
        _remove(folder)


def _remove(folder: Path) -> None:
    end_s = time.monotonic() + GONE_WITHIN_S
    while folder.exists() and time.monotonic() < end_s:
        shutil.rmtree(folder, ignore_errors=True)
        time.sleep(0.05 if folder.exists() else 0)
