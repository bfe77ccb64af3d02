"""Threads, pools and programs: what works at which level, and the one line where it does not."""

import os

import pytest

from retool_mcore.sandbox.base import Level
from retool_mcore.sandbox.child import runner
from retool_mcore.sandbox.supervisor.local import LocalSandbox
from tests.sandbox.sandbox_helpers import last_line


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


WHY = "programs cannot be run here; use Python"
# Code, its output where it works, and the line where it does not.
PROGRAMS = {
    "a process": (
        "import multiprocessing as m\na, b = m.Pipe()\np = m.Process(target=lambda: b.send(5)); p.start()\n"
        "print(a.recv()); p.join()",
        "5\n",
        "",
    ),
    "a pool": (
        "import multiprocessing\nwith multiprocessing.Pool() as pool:\n    print(pool.map(abs, [-1, 2]))",
        "[1, 2]\n",
        "Permission denied",
    ),
    "a pool of 32": (
        "import multiprocessing as m\nwith m.Pool(32) as p: print(sum(p.map(abs, range(99))))",
        "4851\n",
        "Permission denied",
    ),
    "an executor": (
        "from concurrent.futures import ProcessPoolExecutor as Pool\nwith Pool() as p: print(list(p.map(abs, [-1])))",
        "[1]\n",
        "Permission denied",
    ),
    "a queue": (
        "import multiprocessing as m\nq = m.Queue()\np = m.Process(target=lambda: q.put(5)); p.start()\n"
        "print(q.get()); p.join()",
        "5\n",
        "Permission denied",
    ),
    "subprocess": (
        "import subprocess\nprint(subprocess.run(['true']).returncode)",
        "0\n",
        WHY,
    ),
    "a shell": ("import subprocess\nprint(subprocess.check_output('echo 1', shell=True))", "b'1\\n'\n", WHY),
    "popen": ("import os\nprint(os.popen('echo 1').read())", "1\n\n", WHY),
    "asyncio": (
        "import asyncio\nprint((await (await asyncio.create_subprocess_exec('true')).wait()))",
        "0\n",
        WHY,
    ),
}
BY_FORK = ("a process", "a pool", "a pool of 32", "an executor", "a queue")


@pytest.mark.parametrize("program", PROGRAMS)
async def test_a_program_works_or_says_in_one_line_that_it_does_not(program: str, sandbox: LocalSandbox):
    """At landlock only a process works, elsewhere all that forks."""
    code, expected, line = PROGRAMS[program]
    works = program == "a process" or (sandbox.level != Level.LANDLOCK and program in BY_FORK)
    result = await sandbox.execute(code, run_timeout_s=60)
    if works:
        assert result.stderr == "" and result.stdout == (expected or result.stdout)
    else:
        assert last_line(result.stderr).startswith("PermissionError: [Errno 1") and line in last_line(result.stderr)
        assert result.stderr.count("Error") == 1 and result.stdout == ""


async def test_os_system_says_that_it_runs_nothing_and_the_code_goes_on(sandbox: LocalSandbox):
    result = await sandbox.execute("import os\nprint(os.system('exit 3'), os.system(b'exit 4'))")
    assert result.stdout == "32512 32512\n"
    assert result.stderr == "".join(f"[os.system('exit {n}') was not run: {WHY}]\n" for n in (3, 4))


async def test_a_large_node_is_told_as_a_small_one(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 128)
    assert runner.cores_told() == 8
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    assert runner.cores_told() == 2
