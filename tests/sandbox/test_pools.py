"""Threads and pools of workers as programs start them, within the default limits, at each level."""

from __future__ import annotations

import os

import pytest

from retool_mcore.sandbox import runner
from retool_mcore.sandbox.base import Level
from retool_mcore.sandbox.local import LocalSandbox

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_sixteen_threads_at_the_default_memory_limit(sandbox: LocalSandbox):
    code = """
import threading
barrier = threading.Barrier(17)
def work():
    x = [0] * 100_000
    barrier.wait()
threads = [threading.Thread(target=work, daemon=True) for _ in range(16)]
for t in threads: t.start()
barrier.wait()
for t in threads: t.join()
print("all")
"""
    result = await sandbox.execute(code)
    assert (result.stdout, result.stderr) == ("all\n", "")


async def test_a_thread_pool_of_the_default_size(sandbox: LocalSandbox):
    code = """
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor() as pool:
    print(sum(pool.map(lambda x: x * x, range(100))))
"""
    assert (await sandbox.execute(code)).stdout == "328350\n"


async def test_a_process_pool_of_the_default_size(sandbox: LocalSandbox):
    if sandbox.level == Level.LANDLOCK:
        pytest.skip("landlock closes /dev/shm, which semaphores need (README.md)")
    code = "import multiprocessing\nwith multiprocessing.Pool() as pool:\n    print(pool.map(abs, [-1, 2]))"
    assert (await sandbox.execute(code)).stdout == "[1, 2]\n"


async def test_a_large_node_is_told_as_a_small_one(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 128)
    assert runner.cores_told() == 8
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    assert runner.cores_told() == 2
