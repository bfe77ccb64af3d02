"""Queue, cancellation, restart and clean-up of the sandbox."""

import asyncio
import gc
import os
import signal
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import pytest

from retool_mcore.errors import SandboxUnavailable
from retool_mcore.sandbox.base import Level
from retool_mcore.sandbox.supervisor.local import LocalSandbox
from tests.sandbox.sandbox_helpers import (
    LEVELS,
    children_of,
    open_at,
    processes_named,
    start_owner,
    still_works,
    until_running,
)


async def test_a_bounded_number_of_calls_executes_in_order_of_arrival():
    sandbox = LocalSandbox(min_level=Level.RLIMITS, workers=2)
    async with sandbox:
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
    sandbox = await open_at(level, workers=2)
    async with sandbox:
        call = asyncio.ensure_future(sandbox.execute("import time; time.sleep(30)", run_timeout_s=60))
        await asyncio.sleep(0.5)
        assert not call.done()
        for pid in children_of(os.getpid(), "retool_mcore.sandbox.supervisor.zygote"):
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(SandboxUnavailable, match="the zygote died"):
            await call
        assert (await sandbox.execute("1 + 1")).stdout == "2\n"
        assert (await sandbox.execute("import numpy; int(numpy.int64(3))")).stdout == "3\n"


async def test_close_fails_calls_in_flight_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # other sandboxes use the shared directory
    gc.collect()  # otherwise files of earlier tests may be closed at any time
    fds_before = await open_files()
    sandbox = LocalSandbox(min_level=Level.RLIMITS, workers=2)
    await sandbox.open()
    assert len(list(tmp_path.glob("retool-sandbox-*"))) == 1
    name = f"rt-close-{os.getpid() % 10_000}"
    code = f"import ctypes, time; ctypes.CDLL(None).prctl(15, b'{name}', 0, 0, 0); time.sleep(60)"
    calls = [asyncio.ensure_future(sandbox.execute(code)) for _ in range(4)]
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
    code = f"""
import ctypes, os, time
ctypes.CDLL(None).prctl(15, b"{name}", 0, 0, 0)
for _ in range(3):
    if os.fork() == 0: break
time.sleep(60)
"""
    call = asyncio.ensure_future(landlock.execute(code, run_timeout_s=60))
    async with asyncio.timeout(30):
        while len(pids := processes_named(name)) < 4:
            await asyncio.sleep(0.05)
    oldest = min(map(int, pids))
    guardian = int(Path(f"/proc/{oldest}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(guardian, signal.SIGKILL)
    await call
    assert processes_named(name) == []
    assert await still_works(landlock)


async def test_a_killed_owner_leaves_no_process_and_its_directory_is_removed(tmp_path: Path):
    owner = start_owner(Level.RLIMITS, tmp_path)
    await asyncio.sleep(0.3)
    zygotes = children_of(owner.pid, "retool_mcore.sandbox.supervisor.zygote")
    assert zygotes
    owner.kill()
    owner.wait()
    async with asyncio.timeout(10):
        while any(Path(f"/proc/{pid}").exists() for pid in zygotes):
            await asyncio.sleep(0.05)
    (left,) = tmp_path.glob("retool-sandbox-*")
    os.utime(left, (time.time() - 3600, time.time() - 3600))
    sweep = "from retool_mcore.sandbox.supervisor.slots import remove_stale; from pathlib import Path; "
    subprocess.run([sys.executable, "-c", f"{sweep}remove_stale(Path({str(tmp_path)!r}))"], check=True)
    assert list(tmp_path.glob("retool-sandbox-*")) == []


async def test_a_call_cancelled_as_its_child_starts_leaves_no_child():
    """The caller is cancelled after the zygote's answer is read, but before it has the answer."""
    async with LocalSandbox(min_level=Level.RLIMITS, workers=1) as sandbox:
        image = sandbox._light[0]
        await sandbox.execute("1")  # the zygote runs
        children = []

        def read_and_cancel() -> None:
            image._on_message()
            exits = [job.exit for job in image._jobs.values() if job.started.done()]
            if not call.done() and not call.cancelling() and exits:
                children.extend(exits)
                call.cancel()

        asyncio.get_running_loop().remove_reader(image._channel)
        asyncio.get_running_loop().add_reader(image._channel, read_and_cancel)
        call = asyncio.ensure_future(sandbox.execute("import time; time.sleep(60)", run_timeout_s=60))
        with pytest.raises(asyncio.CancelledError):
            await call
        assert len(children) == 1, "the call was not cancelled as its child started"
        ended = await asyncio.wait_for(asyncio.shield(children[0]), 5)
        assert ended.status != 0, "the child was not killed"
        assert (await sandbox.execute("print(6 * 7)")).stdout == "42\n"
