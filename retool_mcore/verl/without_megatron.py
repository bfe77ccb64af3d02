"""Keeps Megatron out of a process that has no model.

verl imports every engine that it finds wherever its trainer is imported: in the driver that is
Megatron and Transformer Engine. It goes on without an engine that cannot be imported. Import this
module before verl's trainer.
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
