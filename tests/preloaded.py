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
    from retool_mcore.platforms.cpu.bridge import import_bridge

    import_bridge()
    importlib.import_module("verl.workers.engine_workers")

gc.freeze()  # else a collection in a child writes to, and so copies, all of it
