"""Processes, signals, text in and out, and state between runs, at every level of this machine."""

import asyncio
import os
import signal
import time

import pytest

from retool_mcore.sandbox.base import Level
from retool_mcore.sandbox.supervisor.local import LocalSandbox
from tests.sandbox.sandbox_helpers import last_line, processes_named, still_works, until_running

# ---------------------------------------------------------------- processes


@pytest.mark.parametrize("target", ["os.getppid()", "1", "0", "-1"])
async def test_killing_others_leaves_the_supervisor_alive(sandbox: LocalSandbox, target: str):
    if sandbox.level == Level.RLIMITS and os.geteuid() != 0:
        pytest.skip("rlimits as an ordinary user: signals are not contained (README.md)")
    await sandbox.execute(f"import os, signal; os.kill({target}, signal.SIGKILL)", run_timeout_s=2)
    assert await still_works(sandbox)


async def test_the_environment_holds_a_few_safe_keys(sandbox: LocalSandbox):
    result = await sandbox.execute("import os; sorted(os.environ)")
    assert result.stdout == "['HOME', 'LANG', 'OMP_NUM_THREADS', 'OPENBLAS_NUM_THREADS', 'PATH', 'TMPDIR']\n"
    initial = await sandbox.execute("'SECRET' in open('/proc/self/environ').read()")
    assert initial.stdout == "False\n" or "Error: [Errno" in initial.stderr
    if sandbox.level == Level.NAMESPACES:  # mountinfo, cmdline and environ would show paths of the host
        assert (await sandbox.execute("import os; os.path.exists('/proc')")).stdout == "False\n"


async def test_exit_code_is_the_codes_own(strongest: LocalSandbox):
    result = await strongest.execute("import os; os._exit(7)")
    assert (result.status, result.return_code, result.text) == ("finished", 7, "[exit code 7]")


async def test_segfault(strongest: LocalSandbox):
    result = await strongest.execute("import ctypes; ctypes.string_at(0)")
    assert (result.status, result.return_code, result.text) == ("finished", -11, "[killed by signal 11]")


async def test_a_grandchild_holding_stdout_does_not_delay_the_return(sandbox: LocalSandbox):
    started = time.monotonic()
    result = await sandbox.execute("import os, time\nif os.fork() == 0: time.sleep(60)\nelse: print('parent done')")
    assert (result.status, result.stdout) == ("finished", "parent done\n")
    assert time.monotonic() - started < 3


async def test_a_stopped_process_does_not_hang(sandbox: LocalSandbox):
    code = "import os, signal\nif (p := os.fork()) == 0: os.kill(os.getpid(), signal.SIGSTOP)\nos.waitpid(p, 0)"
    result = await sandbox.execute(code, run_timeout_s=0.5)
    assert result.status == "time_limit"


# --------------------------------------------------------------- text in, out


async def test_stdin_given_and_none(strongest: LocalSandbox):
    assert (await strongest.execute("input() + '|' + input()", stdin="é 1\nb\n")).stdout == "'é 1|b'\n"
    result = await strongest.execute("input()")
    assert last_line(result.stderr) == "EOFError: EOF when reading a line"


async def test_bytes_that_are_not_utf8_are_escaped_and_the_rest_kept(strongest: LocalSandbox):
    result = await strongest.execute("import os; os.write(1, b'ok \\xff\\xfe end\\n'); print('rest')")
    assert result.stdout == "ok \\xff\\xfe end\nrest\n"


async def test_surrogates_in_output_and_in_code(strongest: LocalSandbox):
    assert (await strongest.execute("print('\\udc80')")).stdout == "\\udc80\n"
    result = await strongest.execute("x = '\ud800'")
    assert (result.status, result.return_code) == ("finished", 1)
    assert last_line(result.stderr).startswith("UnicodeEncodeError")


async def test_nul_in_code_is_a_syntax_error(strongest: LocalSandbox):
    result = await strongest.execute("x = 1\0")
    assert last_line(result.stderr) == "SyntaxError: source code string cannot contain null bytes"


async def test_threads_work(strongest: LocalSandbox):
    code = "from concurrent.futures import ThreadPoolExecutor as T\nlist(T().map(lambda x: x * x, range(4)))"
    assert (await strongest.execute(code)).stdout == "[0, 1, 4, 9]\n"


async def test_deep_recursion_and_nested_parentheses_are_errors(strongest: LocalSandbox):
    result = await strongest.execute("def f(n): return f(n + 1)\nf(0)")
    assert last_line(result.stderr) == "RecursionError: maximum recursion depth exceeded"
    for code in ("(" * 5_000 + ")" * 5_000, "-" * 100_000 + "1", "[" * 90 + "]" * 90 + "\n" + "x" + ".a" * 50_000):
        result = await strongest.execute(code)
        assert (result.status, result.return_code) == ("finished", 1)
    assert await still_works(strongest)


# ------------------------------------------------------------------- state


async def test_a_monkeypatched_library_is_invisible_to_the_next_run(strongest: LocalSandbox):
    assert (await strongest.execute("import sympy; sympy.factorint = lambda n: 'hacked'; sympy.factorint(6)")).ok
    assert (await strongest.execute("import sympy; sympy.factorint(6)")).stdout == "{2: 1, 3: 1}\n"


@pytest.mark.parametrize(
    "code",
    [
        "import random; random.random()",
        "import numpy as np; np.random.rand()",
        "import numpy, sympy.core.random as r; r.rng.random()",
        "import uuid; uuid.uuid4()",
    ],
)
async def test_two_runs_draw_different_random_numbers(strongest: LocalSandbox, code: str):
    first, second = await asyncio.gather(strongest.execute(code), strongest.execute(code))
    assert first.ok and second.ok and first.stdout != second.stdout


async def test_a_cancelled_call_kills_its_child_and_frees_its_slot(sandbox: LocalSandbox):
    name = f"rt-cancel-{os.getpid() % 10_000}"
    code = f"import ctypes\nctypes.CDLL(None).prctl(15, b'{name}', 0, 0, 0)\nwhile True: pass"
    calls = [asyncio.ensure_future(sandbox.execute(code, run_timeout_s=60)) for _ in range(2)]
    await until_running(name, 2)
    for call in calls:
        call.cancel()
    await asyncio.wait(calls)
    assert processes_named(name) == []
    assert await still_works(sandbox)


async def test_signal_numbers_are_told(sandbox: LocalSandbox):
    # As pid 1 of its namespace a process ignores what it sends itself without a handler: namespaces
    # only.
    result = await sandbox.execute("import os, signal; os.kill(os.getpid(), signal.SIGTERM); print('alive')")
    if sandbox.level == Level.NAMESPACES:
        assert result.stdout == "alive\n"
    else:
        assert result.return_code == -signal.SIGTERM
