"""The scripts of perf/ as modules; they import each other by their own names."""

import sys
from pathlib import Path

import torch

from retool_mcore.platforms import get_platform

if not torch.accelerator.is_available():
    get_platform("cpu").activate()  # scripted.py imports verl, which chooses its platform once
PERF = str(Path(__file__).parents[3] / "perf")
sys.path.insert(0, PERF)
try:
    import bench
    import compare
    import interleave
    import scripted
finally:
    sys.path.remove(PERF)

__all__ = ["bench", "compare", "interleave", "scripted"]
