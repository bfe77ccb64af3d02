"""Keeps Megatron and Transformer Engine out of a process that has no model.

verl imports every engine that it finds wherever its trainer is imported, and goes on without one
that cannot be: call ``leave_out`` before that. SGLang's dumper imports Megatron wherever its
model runner is imported: do that in ``platforms.absent``'s ``absent(MEGATRON)``.
"""

import importlib
import sys
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from types import ModuleType

from retool_mcore.platforms.absent import absent

ENGINES = "verl.workers.engine"
NOT_HERE = (f"{ENGINES}.mindspeed", f"{ENGINES}.megatron")


def leave_out() -> None:
    with absent(*NOT_HERE), warnings.catch_warnings(action="ignore"):  # verl's that they are not available
        importlib.import_module(ENGINES)


@contextmanager
def put_off(module: str | None) -> Generator[None]:
    """Let an import of ``module`` inside the block do nothing; the next one outside it imports.

    verl's model configuration imports ``model.external_lib``, which imports Megatron.
    """
    if module is None or module in sys.modules:
        yield
        return
    sys.modules[module] = ModuleType(module)
    try:
        yield
    finally:
        del sys.modules[module]
