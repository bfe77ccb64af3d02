"""What a process of tests/forked.py has imported before it begins: torch, Megatron and verl on
platform cpu.
"""

import gc
import importlib
import os
from contextlib import suppress

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported

from retool_mcore.errors import PlatformError
from retool_mcore.platforms.base import get_platform

with suppress(PlatformError):  # on a machine with an accelerator each process imports what it wants
    get_platform("cpu").activate()
    for name in ("mbridge", "megatron.core.optimizer", "verl.workers.engine_workers"):
        importlib.import_module(name)

gc.freeze()  # else a collection in a child writes to, and so copies, all of it
