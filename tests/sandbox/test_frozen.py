"""A session's code that forges the runner's frames gets nothing that is not charged."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from retool_mcore.sandbox.base import Level
from retool_mcore.sandbox.supervisor import freeze
from tests.sandbox.sandbox_helpers import LEVELS, open_at, processes_named

# A cell's end, as runner.py sends it, and then 60 s of work; `n` counts its rounds.
FORGE = """
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
DONE = "import os, struct, time\nos.write(3, struct.pack('=cIii', b'D', 8, 0, {cell}))\n"


@pytest.mark.parametrize("level", LEVELS)
async def test_nothing_of_a_session_runs_between_its_cells(level: Level):
    async with await open_at(level, workers=1, sessions=1) as sandbox:
        assert (await sandbox.execute(FORGE.format(forked=False), session="t")).ok
        before = int((await sandbox.execute("n", session="t")).stdout)
        await asyncio.sleep(1.5)
        assert int((await sandbox.execute("n", session="t")).stdout) - before <= 3, "15 rounds when it runs on"
        result = await sandbox.execute("time.sleep(0.5)\nn", session="t")
        assert int(result.stdout) - before >= 4, "its threads go on with its cells"
        await sandbox.end_session("t")
        assert (await sandbox.execute(FORGE.format(forked=True), session="f")).ok
        before = int((await sandbox.execute("len(open('rounds').read())", session="f")).stdout)
        await asyncio.sleep(1.5)
        assert int((await sandbox.execute("len(open('rounds').read())", session="f")).stdout) - before <= 3


@pytest.mark.parametrize("level", LEVELS)
async def test_a_forged_end_of_a_cell_gains_no_time(level: Level):
    async with await open_at(level, workers=1, sessions=1) as sandbox:
        work = "deadline = time.process_time() + 1.0\nwhile time.process_time() < deadline: pass\nprint('worked')"
        forged = await sandbox.execute(DONE.format(cell=1) + work, session="t")
        assert forged.run_s < 1.0 and "worked" not in forged.stdout, "the work alone takes a second"
        await asyncio.sleep(1.0)
        second = await sandbox.execute("print('second')", session="t")
        assert second.stdout.endswith("second\n"), "the first cell's own end does not end the second"
        assert second.run_s > 0.5 and second.cpu_s > 0.5, "the work is charged where it was done"
        forged = await sandbox.execute(DONE.format(cell=3) + "while True: pass", session="t")
        assert forged.run_s < 1.0
        assert (await sandbox.execute("1", session="t", run_timeout_s=0.5)).status == "time_limit"


WAKERS = """
import os, signal
for number in range(10):
    if os.fork() == 0:
        __import__("ctypes").CDLL(None).prctl(15, b"rt-waker", 0, 0, 0)
        while True: os.killpg(0, signal.SIGCONT)
"""
# A handler, because Linux drops a timer's signal that the process ignores.
WAKING_TIMER = """
import ctypes, os, signal, struct
for number in range(3):  # of some the stop itself drops the signal
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
    """CPU seconds that the living processes of this name have used."""
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


async def test_what_is_woken_during_the_stop_is_stopped_again(monkeypatch: pytest.MonkeyPatch):
    target, woken = subprocess.Popen([sys.executable, "-c", "while True: pass"]), set[int]()

    def stop_and_wake(pid: int, number: int) -> None:
        os.kill(pid, number)
        if pid not in woken:  # as another process of the session would do
            woken.add(pid)
            os.kill(pid, signal.SIGCONT)

    monkeypatch.setattr(freeze, "_send", stop_and_wake)
    try:
        assert await freeze.stop(target.pid, with_root=True)
        assert woken and stat_of(str(target.pid))[0] == "T"
    finally:
        target.kill()
        target.wait()


@pytest.mark.parametrize("level", LEVELS)
async def test_a_session_that_a_timer_wakes_does_not_run_on(level: Level):
    async with await open_at(level, workers=1, sessions=1) as sandbox:
        assert (await sandbox.execute(WAKING_TIMER, session="t")).ok
        await asyncio.sleep(4.0)
        before = cpu_s_of("rt-waker")
        await asyncio.sleep(1.0)
        assert cpu_s_of("rt-waker") - before < 0.1
        await sandbox.execute("1", session="t")
        assert (await sandbox.execute("2", session="t")).stdout == "2\n"


@pytest.mark.parametrize("level", LEVELS)
async def test_a_session_tells_the_cpu_time_of_each_cell(level: Level):
    work = "import time\nend = time.process_time() + {s}\nwhile time.process_time() < end: pass"
    async with await open_at(level, workers=1, sessions=1) as sandbox:
        found = [(await sandbox.execute(work.format(s=s), session="t")).cpu_s for s in (0.4, 0.0, 0.2)]
    assert found[0] >= 0.3 and found[1] < 0.15 and found[2] >= 0.15
