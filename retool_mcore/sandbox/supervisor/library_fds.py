"""Lets executions import from a Python in a directory that only its owner can enter (/root).

When root runs the sandbox at level landlock or rlimits, executions run under an unprivileged uid
but must still import modules that are not preloaded. They inherit file descriptors of Python's
directories for this.
"""

import os
import sys
from pathlib import Path
from typing import cast

from retool_mcore.sandbox.supervisor import confine, kernel


def import_from_descriptors(first: int) -> tuple[int, str]:
    """Open the Python directories that only root can enter, and import through these fds.

    The fds are numbered from ``first`` on. Each is the root of a detached mount, so `..` does not
    lead out of it. Without CAP_SYS_ADMIN it is a plain O_PATH fd, and `..` leads into the closed
    directory. Returns how many fd numbers are reserved, and a directory whose fd leads out in this
    way, or "".
    """
    taken, reachable = 0, ""
    for index, library in enumerate(confine.visible_paths()):
        inside = [path for path in sys.path if f"{path}/".startswith(f"{library}/")]
        real = Path(library).resolve()
        if not inside or all(parent.stat().st_mode & 0o001 for parent in (real, *real.parents)):
            continue
        try:
            fd = kernel.open_tree(library)
        except OSError:
            reachable = library
            fd = os.open(library, os.O_PATH)
        os.dup2(fd, first + index, inheritable=True)
        os.close(fd)
        taken = index + 1
        for path in inside:
            _import_from(path, f"/proc/self/fd/{first + index}{path.removeprefix(library)}")
    sys.path_importer_cache.clear()
    return taken, reachable


def _import_from(path: str, other: str) -> None:
    """Replace ``path`` by ``other`` in ``sys.path`` and in ``__path__`` of loaded packages."""
    sys.path[sys.path.index(path)] = other
    for module in list(sys.modules.values()):
        search = getattr(module, "__path__", None)
        if isinstance(search, list):
            entries = cast(list[str], search)
            entries[:] = [entry.replace(path, other, 1) for entry in entries]
