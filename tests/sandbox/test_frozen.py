"""A session's code that forges the runner's frames gets nothing that is not charged."""

import asyncio

import pytest

from retool_mcore.sandbox.base import Level
from tests.sandbox.sandbox_helpers import LEVELS, open_at

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


@pytest.mark.parametrize("level", LEVELS)
async def test_a_session_tells_the_cpu_time_of_each_cell(level: Level):
    work = "import time\nend = time.process_time() + {s}\nwhile time.process_time() < end: pass"
    async with await open_at(level, workers=1, sessions=1) as sandbox:
        found = [(await sandbox.execute(work.format(s=s), session="t")).cpu_s for s in (0.4, 0.0, 0.2)]
    assert found[0] >= 0.3 and found[1] < 0.15 and found[2] >= 0.15


@pytest.mark.parametrize("level", LEVELS)
async def test_asking_for_the_full_image_gives_no_second_time_limit(level: Level):
    ask = "import os, struct, time\ntime.sleep(2.5)\nos.write(3, struct.pack('=cI', b'H', 0))\ntime.sleep(60)"
    async with await open_at(level, workers=1) as sandbox:
        result = await sandbox.execute(ask, run_timeout_s=3.0)
        assert result.status == "time_limit" and 2.9 < result.run_s < 5.0
        legitimate = await sandbox.execute("print(__import__('numpy').arange(3).sum())")
        assert legitimate.stdout == "3\n"
