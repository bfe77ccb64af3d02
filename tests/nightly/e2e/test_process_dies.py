"""An RL run of which any process is killed ends within 30 s, with one error, and leaves nothing."""

import os
import re
import subprocess
import tempfile
import time
import zlib
from pathlib import Path

import pytest

from retool_mcore.errors import EXIT_RETRYABLE
from tests.e2e.commands import MARK, ROOT, argv_rl, assert_nothing_left, kill, last_step, marked_processes, wait_until
from tests.e2e.test_rl import START_S, settings

pytestmark = [pytest.mark.timeout(900)]

KINDS = {  # what the title of the process has, and what the error calls it
    "queue-controller": ("ray::TransferQueueController", "TransferQueueController"),
    "queue-storage": ("ray::SimpleStorageUnit", "SimpleStorageUnit"),
    "agent-loop": ("ray::LoopWorker", "LoopWorker"),
    "reward": ("ray::RewardLoopWorker", "RewardLoopWorker"),
    "router": ("ray::GlobalRequestLoadBalancer", "GlobalRequestLoadBalancer"),
    "training": ("ray::WorkerDict", "WorkerDict"),
    "raylet": ("/raylet/raylet ", "Ray's raylet"),
    "gcs": ("/gcs/gcs_server ", "Ray's gcs_server"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_loses_a_process_ends_with_one_error(task: Path, tmp_path: Path, mark: str, kind: str):
    title, name = KINDS[kind]
    argv = argv_rl(*settings(task, tmp_path, "run.name=rl", "train.steps=500", "checkpoint.every_steps=500"))
    run_dir = tmp_path / "rl"
    child = subprocess.Popen(argv, cwd=ROOT, env={**os.environ, MARK: mark}, stderr=subprocess.PIPE, text=True)
    try:
        wait_until(lambda: last_step(run_dir) >= 1 or child.poll() is not None, "step 1", START_S)
        found = {pid: each for pid, each in marked_processes(mark).items() if title in each}
        assert found, f"no {title} among {sorted(marked_processes(mark).values())}"
        killed_s = time.monotonic()
        kill(min(found))
        _, stderr = child.communicate(timeout=90)
    finally:
        child.kill()
    assert time.monotonic() - killed_s < 30, stderr[-3000:]
    errors = [line for line in stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and re.match(rf"error: {name}\b.* died", errors[0]), stderr[-3000:]
    assert "Traceback" not in stderr and child.returncode == EXIT_RETRYABLE
    assert_nothing_left(mark, timeout_s=5)
    number = zlib.crc32(str(run_dir.resolve()).encode())
    for folder in (
        f"/tmp/retool-ray-{os.getuid()}/{number}.0",
        f"{tempfile.gettempdir()}/retool-{os.getuid()}-{number}",
    ):
        assert not Path(folder).exists()
