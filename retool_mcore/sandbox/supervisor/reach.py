"""How an ordinary uid reaches root's Python in a directory that is closed to others (/root).

An execution at the weaker levels runs under an ordinary uid and still has to import what is not
preloaded: so it inherits descriptors of Python's directories.
"""

import os
import sys
from typing import cast

from retool_mcore.sandbox.supervisor import confine, kernel


def by_descriptors(first: int) -> tuple[int, str]:
    """Open Python's closed directories as descriptors from ``first`` on, and import from there.

    Each is the root of a mount of its own, above which nothing lies. Without CAP_SYS_ADMIN there is
    no such mount, and `..` leads into the closed directory. Returns how many numbers were taken,
    and a directory that leads out like this, or "".
    """
    taken, led_out = 0, ""
    for index, library in enumerate(confine.visible_paths()):
        inside = [path for path in sys.path if f"{path}/".startswith(f"{library}/")]
        if not inside or all(os.stat(parent).st_mode & 0o001 for parent in _parents(library)):
            continue
        try:
            fd = kernel.open_tree(library)
        except OSError:
            led_out = library
            fd = os.open(library, os.O_PATH)
        os.dup2(fd, first + index, inheritable=True)
        os.close(fd)
        taken = index + 1
        for path in inside:
            _import_from(path, f"/proc/self/fd/{first + index}{path.removeprefix(library)}")
    sys.path_importer_cache.clear()
    return taken, led_out


def _import_from(path: str, other: str) -> None:
    """Have ``other`` searched where ``path`` was, by the packages that are loaded too."""
    sys.path[sys.path.index(path)] = other
    for module in list(sys.modules.values()):
        search = getattr(module, "__path__", None)
        if isinstance(search, list):
            entries = cast(list[str], search)
            entries[:] = [entry.replace(path, other, 1) for entry in entries]


def _parents(path: str) -> list[str]:
    parents: list[str] = []
    path = os.path.realpath(path)
    while path != "/":
        parents.append(path)
        path = os.path.dirname(path)
    return parents
