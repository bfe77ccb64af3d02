"""Libraries that an import does not find: other people's code goes on without an optional one."""

import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from typing import Any

MEGATRON = "megatron.core"  # with which Transformer Engine comes


class _Absence(MetaPathFinder):
    def __init__(self, names: tuple[str, ...]) -> None:
        self._names, self._thread = names, threading.get_ident()

    def find_spec(self, fullname: str, *_: Any) -> None:
        if fullname in self._names and threading.get_ident() == self._thread:
            raise ModuleNotFoundError(f"No module named {fullname!r} here", name=fullname)


@contextmanager
def absent(*names: str) -> Generator[None]:
    """Let this thread's imports of these modules fail inside the block.

    Those already imported stay. Other threads import as ever.
    """
    absence = _Absence(names)
    sys.meta_path.insert(0, absence)
    try:
        yield
    finally:
        sys.meta_path.remove(absence)
