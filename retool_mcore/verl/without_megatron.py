"""Keeps Megatron out of a process that has no model.

verl imports every engine that it finds wherever its trainer is imported: in the driver that is
Megatron and Transformer Engine. It goes on without an engine that cannot be imported. Import this
module before verl's trainer.
"""

import importlib
import sys
import warnings

ENGINES = "verl.workers.engine"
NOT_HERE = (f"{ENGINES}.mindspeed", f"{ENGINES}.megatron")


def leave_out() -> None:
    if ENGINES in sys.modules:
        return
    sys.modules.update(dict.fromkeys(NOT_HERE))  # type: ignore[arg-type]  None: it cannot be imported
    try:
        with warnings.catch_warnings(action="ignore"):  # verl's that they are not available
            importlib.import_module(ENGINES)
    finally:
        for name in NOT_HERE:
            del sys.modules[name]
