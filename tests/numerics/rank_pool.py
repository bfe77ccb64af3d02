"""Processes for megatron_ranks that stay for the next jobs: torch, verl and Megatron are imported
once for each number of ranks, not once for every test file.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from retool_mcore.process import die_with_parent
from tests.scenario import ROOT

_POLL_S = 0.05
_STARTER = ThreadPoolExecutor(1)  # Linux ends a child with the thread that started it: this one lasts
_LASTING: dict[int, RankPool] = {}


class RankPool:
    """``ranks`` processes under torchrun, which do one folder's jobs after another's."""

    def __init__(self, ranks: int, platform: str) -> None:
        self._own = tempfile.TemporaryDirectory(prefix="retool-ranks-")
        self._folder, self._turn = Path(self._own.name), 0
        command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={ranks}", "-m", "tests.numerics.megatron_ranks", platform, self._own.name]
        self._process = _STARTER.submit(self._start, command).result()

    def _start(self, command: list[str]) -> subprocess.Popen[bytes]:
        with open(self._folder / "log", "w") as log:
            return subprocess.Popen(
                command,
                cwd=ROOT,
                stdout=log,
                stderr=log,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                start_new_session=True,
                preexec_fn=die_with_parent,  # noqa: PLW1509  one system call; a killed pytest leaves no ranks
            )

    def work_on(self, folder: Path, timeout_s: float) -> None:
        """The jobs of ``folder``, until its answers are there."""
        hand_over(self._folder / f"turn{self._turn}", str(folder))
        self._turn += 1
        deadline_s = time.monotonic() + timeout_s
        while not (folder / "out.json").exists():
            ended = self._process.poll() is not None
            assert not ended and time.monotonic() < deadline_s, (self._folder / "log").read_text()[-6000:]
            time.sleep(_POLL_S)

    def close(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._own.cleanup()


def hand_over(file: Path, text: str) -> None:
    """Write a file that is whole as soon as it is there."""
    part = file.with_suffix(".part")
    part.write_text(text)
    part.rename(file)


def folder_of_turn(pool: Path, turn: int) -> Path:
    """In a rank: waits for the pool's next folder of jobs."""
    file = pool / f"turn{turn}"
    while not file.exists():
        time.sleep(_POLL_S)
    return Path(file.read_text())


def work_on(folder: Path, ranks: int, platform: str, timeout_s: float, *, fresh: bool) -> None:
    """``fresh``: in processes that have done nothing before. An idle rank keeps its memory, so only
    pools of one and two ranks on the CPU are kept.
    """
    lasting = platform == "cpu" and ranks <= 2 and not fresh
    pool = (_LASTING.pop(ranks, None) if lasting else None) or RankPool(ranks, platform)
    try:
        pool.work_on(folder, timeout_s)
    except BaseException:
        pool.close()
        raise
    if lasting:
        _LASTING[ranks] = pool
    else:
        pool.close()


def close_all() -> None:
    while _LASTING:
        _LASTING.popitem()[1].close()
