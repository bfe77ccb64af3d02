"""The scripts of perf/ as modules; they import each other by their file names."""

import sys
from pathlib import Path

PERF = str(Path(__file__).parents[3] / "perf")
sys.path.insert(0, PERF)
try:
    import bench
    import compare
    import history
    import interleave
finally:
    sys.path.remove(PERF)

__all__ = ["bench", "compare", "history", "interleave"]
