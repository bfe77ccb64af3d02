"""Changes modules of other people when the model's code first imports them, and not before.

For conveniences only: code may take the change back, and what must hold is held by the kernel.
"""

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Change = Callable[[Any], None]  # takes the module, loaded


def change_on_import(changes: Mapping[str, Change]) -> None:
    """Apply each change to the module of its name once that is loaded; at once where it is."""
    for name, change in changes.items():
        if name in _changes:
            continue
        _changes[name] = change
        if module := sys.modules.get(name):
            change(module)
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


_changes: dict[str, Change] = {}


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the modules that are changed as the path finder does, and changes them once loaded."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        change = _changes.get(fullname)
        spec = None if change is None else importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if change is None or spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def load_and_change(module: types.ModuleType) -> None:
            load(module)
            change(module)

        spec.loader.exec_module = load_and_change
        return spec
