"""Sessions: a trajectory keeps its interpreter, new ones wait, and no code runs between cells."""

import asyncio
import os
import time
from pathlib import Path

import pytest

from retool_mcore.errors import ConfigError, SandboxUnavailable
from retool_mcore.sandbox import open_sandbox
from retool_mcore.sandbox.base import ExecResult, Level
from retool_mcore.sandbox.supervisor import sessions
from retool_mcore.sandbox.supervisor.local import LocalSandbox
from tests.sandbox.sandbox_helpers import LEVELS, open_at, processes_named, start


async def _trajectory(sandbox: LocalSandbox, name: str, cells: int = 3) -> list[ExecResult]:
    results = [await sandbox.execute("n = 0", session=name)]
    for _ in range(cells - 1):
        results.append(await sandbox.execute("n += 1\nprint(n)", session=name))
    await sandbox.end_session(name)
    return results


@pytest.mark.parametrize("level", LEVELS)
async def test_more_trajectories_than_sessions_wait_and_lose_nothing(level: Level):
    opened = await open_at(level, workers=2, sessions=2)
    async with opened as sandbox:
        at_once = asyncio.Semaphore(8)

        async def run_trajectory(number: int) -> list[ExecResult]:
            async with at_once:
                return await _trajectory(sandbox, f"t{number}")

        stateless = [sandbox.execute("print(7)") for _ in range(20)]
        results = await asyncio.gather(*(run_trajectory(number) for number in range(24)), *stateless)
    for cells in results[:24]:
        assert isinstance(cells, list)
        assert [cell.stdout for cell in cells] == ["", "1\n", "2\n"]
        assert not any(cell.session_restarted for cell in cells)
    assert all(isinstance(result, ExecResult) and result.stdout == "7\n" for result in results[24:])


async def test_a_new_session_waits_a_bounded_time_while_others_continue():
    async with LocalSandbox(min_level=Level.RLIMITS, workers=1, sessions=1, session_wait_s=0.6) as sandbox:
        await sandbox.execute("x = 1", session="a")
        started = time.monotonic()
        waiting = asyncio.ensure_future(sandbox.execute("1", session="b"))
        await asyncio.sleep(0.1)
        assert (await sandbox.execute("x", session="a")).stdout == "1\n", "the waiting session took a worker"
        assert (await sandbox.execute("print(3)")).stdout == "3\n"
        with pytest.raises(SandboxUnavailable, match="all 1 sessions are in use"):
            await waiting
        assert 0.5 < time.monotonic() - started < 5
        await sandbox.end_session("a")
        assert (await sandbox.execute("2", session="b")).stdout == "2\n"


async def test_an_idle_session_loses_its_interpreter_to_a_new_one_and_reports_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sessions, "IDLE_S", 0.3)
    async with LocalSandbox(min_level=Level.RLIMITS, workers=1, sessions=1, session_wait_s=20) as sandbox:
        await sandbox.execute("x = 1", session="a")
        waited = await sandbox.execute("2", session="b")
        assert waited.stdout == "2\n" and 0.1 < waited.queue_s < 20, "the idle session kept its interpreter"
        again = await sandbox.execute("x", session="a")
        assert again.session_restarted and "NameError" in again.stderr


async def test_a_session_ended_while_it_opens_releases_everything():
    async with LocalSandbox(min_level=Level.RLIMITS, workers=2, sessions=2) as sandbox:
        for number in range(12):
            opening = [asyncio.ensure_future(sandbox.execute("1", session=f"s{number}")) for _ in range(2)]
            await asyncio.sleep(0.002 * (number % 4))
            await asyncio.gather(sandbox.end_session(f"s{number}"), sandbox.end_session("never"))
            opening[0].cancel()
            await asyncio.wait(opening)
            await sandbox.end_session(f"s{number}")
        assert len(sandbox._slots) == 4
        assert (await sandbox.execute("x = 1", session="a")).ok and (await sandbox.execute("x = 1", session="b")).ok


async def test_a_session_that_a_restarted_server_lost_is_reported():
    server, url = start("--port", "0", "--workers", "1", "--sessions", "2")
    port = url.rpartition(":")[2]
    try:
        async with open_sandbox(url, min_level="rlimits", sessions=2) as remote:
            assert not (await remote.execute("x = 1", session="t")).session_restarted
            assert (await remote.execute("x", session="t")).text == "1"
            server.kill()
            server.communicate()
            server, _ = start("--port", port, "--workers", "1", "--sessions", "2")
            for _ in range(40):
                try:
                    answer = await remote.execute("'x' in globals()", session="t")
                    break
                except SandboxUnavailable:
                    await asyncio.sleep(0.25)
            else:
                raise AssertionError("the restarted server was not found")
            assert answer.stdout == "False\n" and answer.session_restarted
            assert "earlier definitions are gone" in answer.text
            assert not (await remote.execute("1", session="t")).session_restarted
            await remote.end_session("t")
            assert not (await remote.execute("1", session="t")).session_restarted, "it ended the session itself"
    finally:
        server.kill()
        server.communicate()


async def test_definitions_survive_within_a_session_and_only_there(strongest: LocalSandbox):
    assert (await strongest.execute("import numpy as np\nx = np.arange(3)", session="one")).ok
    assert (await strongest.execute("int(x.sum())", session="one")).stdout == "3\n"
    third = await strongest.execute("print(input(), input())\n1/0", session="one", stdin="a\nb\n")
    assert third.stdout == "a b\n" and 'File "cell_3.py", line 2, in <module>' in third.stderr
    assert "NameError" in (await strongest.execute("x", session="two")).stderr
    assert "NameError" in (await strongest.execute("x")).stderr
    await strongest.end_session("one")
    assert "NameError" in (await strongest.execute("x", session="one")).stderr
    await strongest.end_session("one")
    await strongest.end_session("two")


async def test_a_time_limit_ends_the_session_and_the_next_result_reports_it(strongest: LocalSandbox):
    await strongest.execute("x = 1", session="slow")
    assert (await strongest.execute("while True: pass", session="slow", run_timeout_s=0.3)).status == "time_limit"
    result = await strongest.execute("'x' in globals()", session="slow")
    assert result.session_restarted
    assert result.text == "False\n[the interpreter was restarted before this code: earlier definitions are gone]"
    assert not (await strongest.execute("1", session="slow")).session_restarted
    await strongest.end_session("slow")


async def test_sessions_are_off_by_default(sandbox: LocalSandbox):
    with pytest.raises(ConfigError, match="without sessions"):
        await sandbox.execute("1", session="a")


# -------------------------------------------------------------- between the cells

# Work of 60 s that continues after the cell has ended; `n` counts its rounds.
BACKGROUND_WORK = """
import os, struct, threading, time
n = 0
def work():
    global n
    while n < 600:
        n += 1
        time.sleep(0.1)
if {forked}:
    if os.fork() == 0:
        os.setsid()
        with open("rounds", "w", buffering=1) as f:
            for _ in range(600): f.write("x"); f.flush(); time.sleep(0.1)
        os._exit(0)
    time.sleep(0.3)
else:
    threading.Thread(target=work, daemon=True).start()
"""
FORGED_END = "import os, struct, time\nos.write(3, struct.pack('=cIii', b'D', 8, 0, {cell}))\n"


@pytest.mark.long
@pytest.mark.parametrize("level", LEVELS)
async def test_nothing_of_a_session_runs_between_its_cells(level: Level):
    async with await open_at(level, workers=1, sessions=1) as sandbox:
        assert (await sandbox.execute(BACKGROUND_WORK.format(forked=False), session="t")).ok
        before = int((await sandbox.execute("n", session="t")).stdout)
        await asyncio.sleep(1.5)
        assert int((await sandbox.execute("n", session="t")).stdout) - before <= 3, "it ran between the cells"
        result = await sandbox.execute("time.sleep(0.5)\nn", session="t")
        assert int(result.stdout) - before >= 4, "its threads did not resume with the next cell"
        await sandbox.end_session("t")
        assert (await sandbox.execute(BACKGROUND_WORK.format(forked=True), session="f")).ok
        before = int((await sandbox.execute("len(open('rounds').read())", session="f")).stdout)
        await asyncio.sleep(1.5)
        assert int((await sandbox.execute("len(open('rounds').read())", session="f")).stdout) - before <= 3


@pytest.mark.parametrize("level", LEVELS)
async def test_a_forged_end_of_a_cell_gains_no_time(level: Level):
    async with await open_at(level, workers=1, sessions=1) as sandbox:
        work = "deadline = time.process_time() + 1.0\nwhile time.process_time() < deadline: pass\nprint('worked')"
        forged = await sandbox.execute(FORGED_END.format(cell=1) + work, session="t")
        assert forged.run_s < 1.0 and "worked" not in forged.stdout, "the work, which takes a second, was not cut off"
        await asyncio.sleep(1.0)
        second = await sandbox.execute("print('second')", session="t")
        assert second.stdout.endswith("second\n"), "the end of the first cell ended the second"
        assert second.run_s > 0.5 and second.cpu_s > 0.5, "the work was not charged to the cell in which it ran"
        forged = await sandbox.execute(FORGED_END.format(cell=3) + "while True: pass", session="t")
        assert forged.run_s < 1.0
        assert (await sandbox.execute("1", session="t", run_timeout_s=0.5)).status == "time_limit"


WAKERS = """
import os, signal
for number in range(10):
    if os.fork() == 0:
        __import__("ctypes").CDLL(None).prctl(15, b"rt-waker", 0, 0, 0)
        while True: os.killpg(0, signal.SIGCONT)
"""
# It needs a handler, because Linux drops a timer's signal that the process ignores.
WAKING_TIMER = """
import ctypes, os, signal, struct
for number in range(3):  # three, because the stop itself can drop a signal
    if os.fork(): continue
    libc, timer = ctypes.CDLL(None), ctypes.c_void_p()
    libc.prctl(15, b"rt-waker", 0, 0, 0)
    signal.signal(signal.SIGCONT, lambda *_: None)
    libc.timer_create(1, struct.pack("qii48x", 0, signal.SIGCONT, 0), ctypes.byref(timer))
    libc.timer_settime(timer, 0, struct.pack("4q", 0, 10**7, 0, 10**7), None)
    open(f"ready {number}", "w").close()
    while True: pass
while not all(os.path.exists(f"ready {number}") for number in range(3)): __import__("time").sleep(0.02)
"""


def cpu_s_of(name: str) -> float:
    """Return the CPU seconds that the live processes named ``name`` have used."""
    return sum(sum(map(int, stat_of(pid)[11:13])) for pid in processes_named(name)) / os.sysconf("SC_CLK_TCK")


def stat_of(pid: str) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


@pytest.mark.parametrize("level", LEVELS)
async def test_processes_that_wake_each_other_do_not_run_between_cells(level: Level):
    async with await open_at(level, workers=1, sessions=1) as sandbox:
        assert (await sandbox.execute(WAKERS, session="t")).ok
        before = cpu_s_of("rt-waker")
        await asyncio.sleep(1.5)
        assert cpu_s_of("rt-waker") - before < 0.1


@pytest.mark.long
@pytest.mark.parametrize("level", LEVELS)
async def test_a_session_that_a_timer_wakes_is_killed(level: Level):
    async with await open_at(level, workers=1, sessions=1) as sandbox:
        assert (await sandbox.execute(WAKING_TIMER, session="t")).ok
        await asyncio.sleep(4.0)
        before = cpu_s_of("rt-waker")
        await asyncio.sleep(1.0)
        assert cpu_s_of("rt-waker") - before < 0.1
        await sandbox.execute("1", session="t")
        assert (await sandbox.execute("2", session="t")).stdout == "2\n"


@pytest.mark.long
@pytest.mark.parametrize("level", LEVELS)
async def test_a_session_reports_the_cpu_time_of_each_cell(level: Level):
    work = "import time\nend = time.process_time() + {s}\nwhile time.process_time() < end: pass"
    async with await open_at(level, workers=1, sessions=1) as sandbox:
        cpu_s = [(await sandbox.execute(work.format(s=s), session="t")).cpu_s for s in (0.4, 0.0, 0.2)]
        killed = await sandbox.execute("while True: pass", session="t", run_timeout_s=0.1)
    assert cpu_s[0] >= 0.3 and cpu_s[1] < 0.15 and cpu_s[2] >= 0.15
    assert killed.status == "time_limit" and killed.cpu_s < 0.4, "it includes earlier cells"
