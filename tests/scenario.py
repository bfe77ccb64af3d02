"""A script of tests/ in a process of its own, as verl and Megatron want one: its last line is what
it found.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from retool_mcore.platforms.base import get_platform

ROOT = Path(__file__).parents[1]


def run_scenario(module: str, *words: str | Path, said: str | None = None, timeout_s: float = 240) -> Any:
    """What ``python -m module words`` on platform cpu writes as JSON in its last line; ``said`` is
    its input.
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", module, *map(str, words)],
        input=said,
        env={**os.environ, **get_platform("cpu").process_env()},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout_s,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])
