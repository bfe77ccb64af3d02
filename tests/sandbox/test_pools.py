"""Threads and pools of workers as programs start them, within the default limits, at each level."""

import _multiprocessing
import asyncio
import os
import secrets
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retool_mcore.sandbox import pools, runner
from retool_mcore.sandbox.base import Level
from retool_mcore.sandbox.local import LocalSandbox
from tests.sandbox.ordinary import OrdinaryUser

SIMULATED = """
import multiprocessing.context as context
context._default_context._default_context = context._concrete_contexts["forkserver"]  # as from Python 3.14 on
from retool_mcore.sandbox import pools
pools.without_programs_and_sockets()
import multiprocessing
print(multiprocessing.get_start_method(), multiprocessing.get_context().Process.__name__)
"""


def test_a_fork_is_the_default_whatever_pythons_own_is():
    done = subprocess.run([sys.executable, "-c", SIMULATED], capture_output=True, text=True, check=True)
    assert done.stdout == "fork ForkProcess\n"


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


PROGRAMS = {
    "a pool of the default size": (
        "import multiprocessing\nwith multiprocessing.Pool() as pool:\n    print(pool.map(abs, [-1, 2]))",
        "[1, 2]\n",
    ),
    "a pool of four": ("import multiprocessing as m\nwith m.Pool(4) as p: print(p.map(abs, [-1, 2]))", "[1, 2]\n"),
    "a pool of 32": ("import multiprocessing as m\nwith m.Pool(32) as p: print(sum(p.map(abs, range(99))))", "4851\n"),
    "an executor of processes": (
        "from concurrent.futures import ProcessPoolExecutor as Pool\nwith Pool() as p: print(list(p.map(abs, [-1])))",
        "[1]\n",
    ),
    "a manager": (
        "import multiprocessing as m\nwith m.Manager() as g:\n d, l = g.dict(), g.list()\n"
        " def work(i): d[i] = i; l.append(i)\n ps = [m.Process(target=work, args=(i,)) for i in range(4)]\n"
        " for p in ps: p.start()\n for p in ps: p.join()\n print(dict(d) == {i: i for i in range(4)}, sorted(l))",
        "True [0, 1, 2, 3]\n",
    ),
    "a manager's lock in a pool": (
        "import multiprocessing as m\ndef work(pair):\n lock, box = pair\n with lock: box.value += 1\n"
        "with m.Manager() as g, m.Pool(3) as pool:\n box = g.Value('i', 0)\n"
        " lock = g.Lock()\n pool.map(work, [(lock, box)] * 9)\n print(box.value)",
        "9\n",
    ),
    "a manager whose server was killed": (
        "import multiprocessing as m, os\ng = m.Manager(); d = g.dict()\n"
        "os.kill(g._process.pid, 9); g._process.join()\n"
        "try: d[1] = 1\nexcept (EOFError, OSError): print('told')",
        "told\n",
    ),
    "a hundred managers in turn": (
        "import multiprocessing as m\nfor i in range(100):\n with m.Manager() as g: d = g.dict({1: i})\n"
        " del d\nprint(i)",
        "99\n",
    ),
    "a queue": (
        "import multiprocessing as m\nq = m.Queue()\np = m.Process(target=lambda: q.put(5)); p.start()\n"
        "print(q.get()); p.join()",
        "5\n",
    ),
    "a lock around a shared value": (
        "import multiprocessing as m\nl, v = m.Lock(), m.Value('i', 0)\ndef work():\n for _ in range(200):\n"
        "  with l: v.value += 1\nps = [m.Process(target=work) for _ in range(4)]\n"
        "for p in ps: p.start()\nfor p in ps: p.join()\nprint(v.value)",
        "800\n",
    ),
    "other ways to wait": (
        "import multiprocessing as m\ns = m.Semaphore(2)\nprint(s.acquire(), s.acquire(), s.acquire(timeout=0.05))\n"
        "s.release(); e = m.Event(); e.set(); r = m.RLock(); b = m.BoundedSemaphore(1)\n"
        "print(s.get_value(), e.is_set(), r.acquire(), r.acquire(), m.Barrier(1).wait(), m.Array('d', [1, 2])[:])\n"
        "try: b.release()\nexcept ValueError: print('too many')",
        "True True False\n1 True True True 0 [1.0, 2.0]\ntoo many\n",
    ),
    "temporary files": (
        "import os, tempfile\nwith tempfile.NamedTemporaryFile('w+') as f, tempfile.TemporaryDirectory() as d:\n"
        " f.write('x'); print(os.path.exists(f.name), os.path.isdir(d))",
        "True True\n",
    ),
}
SHARED = """
from multiprocessing import Process, shared_memory
own = shared_memory.SharedMemory(create=True, size=100, name=NAME)
def work():
    same = shared_memory.SharedMemory(NAME)
    same.buf[0] = 7
    same.close()
process = Process(target=work)
process.start(); process.join()
print(own.buf[0])
"""


@pytest.mark.parametrize("program", PROGRAMS)
async def test_processes_work_together(program: str, sandbox: LocalSandbox):
    code, expected = PROGRAMS[program]
    result = await sandbox.execute(code, run_timeout_s=60)
    assert (result.stdout, result.stderr) == (expected, "")


AS_USER = """
import asyncio, sys
from retool_mcore.sandbox.base import Level
from retool_mcore.sandbox.local import LocalSandbox
from tests.sandbox.test_pools import PROGRAMS

async def main():
    async with LocalSandbox(min_level=sys.argv[1], max_level=sys.argv[1], workers=1, attempts=1) as sandbox:
        for program, (code, expected) in PROGRAMS.items():
            result = await sandbox.execute(code, run_timeout_s=60)
            if (result.stdout, result.stderr) != (expected, ""):
                print(program, result)
asyncio.run(main())
"""


@pytest.mark.parametrize("level", [Level.NAMESPACES, Level.LANDLOCK], ids=str)
def test_processes_of_an_ordinary_user_work_together(level: Level, ordinary_user: OrdinaryUser):
    result = ordinary_user.run(AS_USER.replace("sys.argv[1]", f"Level({str(level)!r})"))
    assert (result.returncode, result.stdout) == (0, ""), result.stderr


def shared(name: str, then: str = "") -> str:
    return SHARED.replace("NAME", repr(name)) + then


async def test_shared_memory_is_of_one_execution_and_one_call(sandbox: LocalSandbox):
    """Even when the code is killed, nothing is left in the host's /dev/shm or for another."""
    if sandbox.level == Level.RLIMITS:
        pytest.skip("/dev/shm is the host's at this level (README.md)")
    before = set(os.listdir("/dev/shm"))
    kept = asyncio.ensure_future(sandbox.execute(shared("kept", "import time; time.sleep(1)"), run_timeout_s=60))
    await asyncio.sleep(0.5)
    killed = await sandbox.execute(shared("kept", "import os; os.kill(os.getpid(), 11)"), run_timeout_s=60)
    assert (await kept).stdout == killed.stdout == "7\n"
    gone = "from multiprocessing import shared_memory\ntry: shared_memory.SharedMemory('kept')\n"
    gone += "except FileNotFoundError: print('gone')"
    for _ in range(3):
        assert (await sandbox.execute(gone)).stdout == "gone\n"
    assert set(os.listdir("/dev/shm")) - before == set()


async def test_shared_memory_has_the_limit_of_a_file(landlock: LocalSandbox):
    code = "from multiprocessing import shared_memory\nshared_memory.SharedMemory(create=True, size=65 << 20)"
    assert "File too large" in (await landlock.execute(code)).stderr


@pytest.mark.parametrize("name", ["../x", "a/b", "..", "/", "/../../x"])
async def test_shared_memory_stays_in_the_working_directory(name: str, landlock: LocalSandbox):
    code = f"import _posixshmem, os\ntry: _posixshmem.shm_open({name!r}, os.O_CREAT | os.O_RDWR)\n"
    assert (await landlock.execute(code + "except OSError as e: print(e.errno)")).stdout == "22\n"


# ---------------------------------------------- our semaphore beside Python's

_OPERATIONS = st.lists(st.sampled_from(["take", "try", "wait", "give", "look", "count"]), max_size=30)


def behaviour(lock: Any, operations: list[str]) -> list[object]:
    """What each operation returns or raises."""
    seen: list[object] = []
    for operation in operations:
        try:
            if operation == "take" and not lock._is_zero():
                seen.append(lock.acquire())
            elif operation in ("try", "wait"):
                seen.append(lock.acquire(operation == "wait", 0.0))
            elif operation == "give":
                seen.append(lock.release())
            seen.append((lock._count(), lock._is_mine(), lock._is_zero(), lock._get_value()))
        except (ValueError, AssertionError) as error:
            seen.append((type(error), str(error)))
    return seen


@given(kind=st.sampled_from([0, 1]), value=st.integers(0, 3), more=st.integers(0, 2), operations=_OPERATIONS)
def test_a_semaphore_behaves_as_pythons_own(kind: int, value: int, more: int, operations: list[str]):
    value = 1 if kind == 0 else value
    limits = (kind, value, max(1, value + more) if kind else 1)
    theirs = _multiprocessing.SemLock(*limits, f"/retool-test-{secrets.token_hex(4)}", True)
    assert behaviour(pools.SemLock(*limits, "unused", True), operations) == behaviour(theirs, operations)


async def test_a_large_node_is_told_as_a_small_one(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 128)
    assert runner.cores_told() == 8
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    assert runner.cores_told() == 2
