"""Which Ray cluster a run uses: its own on one node, the launch script's otherwise."""

import os
import zlib
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from retool_mcore.errors import PlatformError
from retool_mcore.run.temporary import remove_when_quiet


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
    remove_when_quiet(folder)
    try:
        yield folder
    finally:
        remove_when_quiet(folder)
