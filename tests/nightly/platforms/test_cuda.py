"""An engine that goes to sleep copies nothing to the host."""

import subprocess
import sys

import torch


def test_an_engine_that_goes_to_sleep_copies_nothing_to_the_host():
    """SGLang's own adapter over a recorder, with our plugin loaded as SGLang does, and without."""
    script = """
import os, sys, types
from retool_mcore.platforms import get_platform
from retool_mcore.platforms.base import PLATFORM_ENV
if sys.argv[1] == "cpu":  # where SGLang can be imported
    get_platform("cpu").activate()
from sglang.srt.utils import torch_memory_saver_adapter as adapter
from retool_mcore.platforms.sglang_plugin import load
os.environ.pop(PLATFORM_ENV, None)
if sys.argv[2] == "patched":
    os.environ[PLATFORM_ENV] = "cuda"
load()
adapter._memory_saver = types.SimpleNamespace(region=lambda tag, enable_cpu_backup=False: print(tag, enable_cpu_backup))
adapter._TorchMemorySaverAdapterReal().region("weights", enable_cpu_backup=True)
"""
    backups = {}
    for how in ("patched", "plain"):
        words = [sys.executable, "-W", "ignore", "-c", script, "cuda" if torch.cuda.is_available() else "cpu", how]
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=300)
        assert done.returncode == 0, done.stderr[-2000:]
        backups[how] = done.stdout.splitlines()[-1]
    assert backups == {"patched": "weights False", "plain": "weights True"}
