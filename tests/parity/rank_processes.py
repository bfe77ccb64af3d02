"""A module in a process for each rank: forked on a CPU, torchrun's where there are devices.

What a run does under torchrun is in tests/e2e.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import wait
from pathlib import Path

from retool_mcore.process import die_with_parent
from tests import forked
from tests.scenario import ROOT


def by_fork(module: str, words: Sequence[Path], count: int, log: Path, timeout_s: float) -> bool:
    """Whether all ranks ended well; the first that fails ends the others."""
    from torch._C._distributed_c10d import TCPStore

    store = TCPStore("127.0.0.1", 0, count, is_master=True, wait_for_workers=False)
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
    shared |= {"OMP_NUM_THREADS": 1, "TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RESTART_COUNT": 0}
    log.write_text("")
    processes = []
    for rank in range(count):
        own = {name: str(value) for name, value in (shared | {"RANK": rank, "LOCAL_RANK": rank}).items()}
        processes.append(forked.start(module, words, {**os.environ, **own}, out=log, err=log))
    end_s = time.monotonic() + timeout_s
    try:
        while running := [each for each in processes if each.exitcode is None]:
            ended = wait([each.sentinel for each in running], max(0.0, end_s - time.monotonic()))
            if not ended or any(each.exitcode for each in processes):
                return False
        return True
    finally:
        for each in processes:
            each.kill()
            each.join()


def by_torchrun(module: str, words: Sequence[Path], count: int, log: Path, timeout_s: float) -> bool:
    """Whether all ranks ended well."""
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={count}", "-m", module, *map(str, words)]
    with log.open("w") as file:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdout=file,
            stderr=file,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            start_new_session=True,
            preexec_fn=die_with_parent,  # noqa: PLW1509  one system call; a killed pytest leaves no ranks
        )
        try:
            return process.wait(timeout_s) == 0
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
