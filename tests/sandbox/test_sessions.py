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


async def _trajectory(sandbox: LocalSandbox, name: str) -> list[ExecResult]:
    results = [await sandbox.execute("n = 0", session=name)]
    for _ in range(2):
        results.append(await sandbox.execute("n += 1\nprint(n)", session=name))
    await sandbox.end_session(name)
    return results


@pytest.mark.parametrize("level", LEVELS)
async def test_more_trajectories_than_sessions_wait_and_lose_nothing(level: Level):
    async with await open_at(level, workers=2, sessions=2) as sandbox:
        others = asyncio.gather(*(sandbox.execute("print(7)") for _ in range(20)))
        trajectories = await asyncio.gather(*(_trajectory(sandbox, f"t{number}") for number in range(24)))
        assert {result.stdout for result in await others} == {"7\n"}
    for cells in trajectories:
        assert [(cell.stdout, cell.session_restarted) for cell in cells] == [
            ("", False),
            ("1\n", False),
            ("2\n", False),
        ]


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


async def test_a_session_over_http_and_one_that_a_restarted_server_lost():
    server, url = start("--port", "0", "--workers", "1", "--sessions", "2")
    name = "a b/c"
    try:
        async with open_sandbox(url, min_level="rlimits", sessions=2) as remote:
            assert not (await remote.execute("x = 1", session=name)).session_restarted
            assert (await remote.execute("x", session=name)).text == "1"
            server.kill()
            server.communicate()
            server, _ = start("--port", url.rpartition(":")[2], "--workers", "1", "--sessions", "2")
            answer = None
            async with asyncio.timeout(30):
                while answer is None:
                    try:
                        answer = await remote.execute("'x' in globals()", session=name)
                    except SandboxUnavailable:  # on the connection to the killed one
                        await asyncio.sleep(0.25)
            assert answer.stdout == "False\n" and answer.session_restarted
            assert not (await remote.execute("x = 2", session=name)).session_restarted
            await remote.end_session(name)
            ended = await remote.execute("x", session=name)
            assert "NameError" in ended.stderr and not ended.session_restarted, "it ended the session itself"
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


async def test_sessions_are_off_by_default(landlock: LocalSandbox):
    with pytest.raises(ConfigError, match="without sessions"):
        await landlock.execute("1", session="a")


# -------------------------------------------------------------- between the cells

FORGED_END = "import os, struct, time\nos.write(3, struct.pack('=cIii', b'D', 8, 0, {cell}))\n"
WORK = "import time\nend = time.process_time() + {s}\nwhile time.process_time() < end: pass\n"


@pytest.mark.parametrize("level", LEVELS)
async def test_a_forged_end_of_a_cell_gains_no_time(level: Level):
    async with await open_at(level, workers=1, sessions=1) as sandbox:
        work = FORGED_END.format(cell=1) + WORK.format(s=1.0) + "print('worked')"
        forged = await sandbox.execute(work, session="t")
        assert forged.run_s < 1.0 and "worked" not in forged.stdout, "the work, which takes a second, was not cut off"
        await asyncio.sleep(1.0)
        second = await sandbox.execute("print('second')", session="t")
        assert second.stdout.endswith("second\n"), "the end of the first cell ended the second"
        assert second.run_s > 0.5 and second.cpu_s > 0.5, "the work was not charged to the cell in which it ran"
        forged = await sandbox.execute(FORGED_END.format(cell=3) + "while True: pass", session="t")
        assert forged.run_s < 1.0
        assert (await sandbox.execute("1", session="t", run_timeout_s=0.5)).status == "time_limit"


async def test_a_session_reports_the_cpu_time_of_each_cell(strongest: LocalSandbox):
    cpu_s = [(await strongest.execute(WORK.format(s=s), session="t")).cpu_s for s in (0.4, 0.0, 0.2)]
    killed = await strongest.execute("while True: pass", session="t", run_timeout_s=0.1)
    await strongest.end_session("t")
    assert cpu_s[0] >= 0.3 and cpu_s[1] < 0.15 and cpu_s[2] >= 0.15
    assert killed.status == "time_limit" and killed.cpu_s < 0.4, "it includes earlier cells"


WAKERS = """
import os, signal
for number in range(10):
    if os.fork() == 0:
        __import__("ctypes").CDLL(None).prctl(15, b"rt-waker", 0, 0, 0)
        while True: os.killpg(0, signal.SIGCONT)
"""


def cpu_s_of(name: str) -> float:
    """Return the CPU seconds that the live processes named ``name`` have used."""
    ticks = 0
    for pid in processes_named(name):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += sum(map(int, fields[11:13]))
    return ticks / os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize("level", LEVELS)
async def test_processes_that_wake_each_other_do_not_run_between_cells(level: Level):
    async with await open_at(level, workers=1, sessions=1) as sandbox:
        assert (await sandbox.execute(WAKERS, session="t")).ok
        before = cpu_s_of("rt-waker")
        await asyncio.sleep(1.5)
        assert cpu_s_of("rt-waker") - before < 0.1
