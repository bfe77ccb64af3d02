"""Scripts of tests/ that need a process, as verl and Megatron do. The last line is the result."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from retool_mcore.platforms.base import get_platform

ROOT = Path(__file__).parents[1]


def print_as_one_rank(found: Callable[[Path], Any]) -> None:
    """Print the result of a scenario as JSON, as the only rank of platform cpu."""
    folder = Path(sys.argv[1])
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    get_platform("cpu").activate()
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    print(json.dumps(found(folder)))
    dist.destroy_process_group()


def run_scenario(module: str, *words: str | Path, timeout_s: float = 500) -> Any:
    """What ``python -m module words`` on platform cpu writes as JSON in its last line."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", module, *map(str, words)],
        env={**os.environ, **get_platform("cpu").process_env()},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout_s,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])
