"""Queue, cancellation, restart and clean-up of the sandbox."""

import asyncio
import gc
import os
import signal
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import psutil
import pytest

from retool_mcore.errors import SandboxUnavailable
from retool_mcore.sandbox.base import Level
from retool_mcore.sandbox.supervisor.local import LocalSandbox
from tests.sandbox.sandbox_helpers import (
    LEVELS,
    children_of,
    named,
    open_at,
    processes_named,
    still_works,
    until_running,
)


async def test_a_bounded_number_of_calls_executes_in_order_of_arrival():
    async with LocalSandbox(min_level=Level.RLIMITS, workers=2) as sandbox:
        started = time.monotonic()
        results = await asyncio.gather(*(sandbox.execute("import time; time.sleep(0.1)") for _ in range(10)))
        assert time.monotonic() - started >= 0.5  # 10 calls of 0.1 s, two at a time
    queue_s = [result.queue_s for result in results]
    assert all(later > earlier - 0.05 for earlier, later in pairwise(queue_s))
    assert queue_s[9] - queue_s[0] > 0.35  # of 0.4 s: the first two start at once


async def test_the_run_timeout_does_not_count_the_queue():
    async with LocalSandbox(min_level=Level.RLIMITS, workers=1) as sandbox:
        first = sandbox.execute("import time; time.sleep(4.0)", run_timeout_s=60)
        second = sandbox.execute("print('waited')", run_timeout_s=3.5)
        _, result = await asyncio.gather(first, second)
    assert (result.status, result.stdout) == ("finished", "waited\n")
    assert result.queue_s > 3.5


@pytest.mark.parametrize("level", LEVELS, ids=str)
async def test_a_killed_zygote_fails_its_call_and_is_restarted(level: Level):
    async with await open_at(level, workers=2) as sandbox:
        call = asyncio.ensure_future(sandbox.execute("import time; time.sleep(30)", run_timeout_s=60))
        await asyncio.sleep(0.5)
        assert not call.done()
        for pid in children_of(os.getpid(), "retool_mcore.sandbox.supervisor.zygote"):
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(SandboxUnavailable, match="the zygote died"):
            await call
        assert await still_works(sandbox)
        assert (await sandbox.execute("import numpy; int(numpy.int64(3))")).stdout == "3\n"


async def test_close_fails_calls_in_flight_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # other sandboxes use the shared directory
    gc.collect()  # otherwise files of earlier tests may be closed at any time
    fds_before = await open_files()
    sandbox = LocalSandbox(min_level=Level.RLIMITS, workers=2)
    await sandbox.open()
    assert len(list(tmp_path.glob("retool-sandbox-*"))) == 1
    name = f"rt-close-{os.getpid() % 10_000}"
    calls = [asyncio.ensure_future(sandbox.execute(named(name) + "time.sleep(60)")) for _ in range(4)]
    await until_running(name, 2)
    await sandbox.close()
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(outcome, SandboxUnavailable) for outcome in outcomes)
    assert list(tmp_path.glob("retool-sandbox-*")) == []
    assert await open_files() == fds_before
    with pytest.raises(SandboxUnavailable, match="closed"):
        await sandbox.execute("1")


async def test_executions_leak_no_fd_and_no_child(sandbox: LocalSandbox):
    codes = ["1", "1/0", "import os; os._exit(3)", "while True: pass", "import numpy", "import os; os.fork()"]
    await asyncio.gather(*(sandbox.execute(code, run_timeout_s=0.2) for code in codes))
    before = await open_files()
    for _ in range(3):
        await asyncio.gather(*(sandbox.execute(code, run_timeout_s=0.2) for code in codes * 2))
    assert await open_files() == before


async def open_files() -> int:
    """The lowest count within a second: a thread that deletes a tree opens files for a moment."""
    counts: list[int] = []
    for _ in range(20):
        counts.append(len(os.listdir("/proc/self/fd")))
        await asyncio.sleep(0.05)
    return min(counts)


async def test_a_killed_guardian_leaves_no_process(landlock: LocalSandbox):
    """As the supervisor kills one that does not end a fork bomb in time on a busy machine."""
    name = f"rt-left-{os.getpid() % 10_000}"
    code = named(name) + "for _ in range(3):\n    if os.fork() == 0: break\ntime.sleep(60)"
    call = asyncio.ensure_future(landlock.execute(code, run_timeout_s=60))
    await until_running(name, 4)
    oldest = psutil.Process(min(processes_named(name)))
    os.kill(oldest.ppid(), signal.SIGKILL)
    await call
    assert processes_named(name) == []
    assert await still_works(landlock)
