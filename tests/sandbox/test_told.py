"""What the model sees of its code: no path of the host in a traceback, no byte order mark."""

import asyncio
import os
import sys

import pytest

from retool_mcore.sandbox.supervisor.local import LocalSandbox


@pytest.mark.parametrize("notebook", [True, False])
async def test_a_byte_order_mark_is_skipped(strongest: LocalSandbox, notebook: bool):
    result = await strongest.execute("\ufeff# -*- coding: utf-8 -*-\nprint(1 / 0)", notebook=notebook)
    assert "ZeroDivisionError" in result.stderr and "line 2" in result.stderr
    assert (await strongest.execute("\ufeffprint(6 * 7)", notebook=notebook)).stdout == "42\n"
    twice = await strongest.execute("\ufeff\ufeffprint(6 * 7)", notebook=notebook)
    assert "SyntaxError" in twice.stderr, "one mark stands at a file's beginning"


FAILS = {
    "thread": "import threading\nt = threading.Thread(target=fail); t.start(); t.join()",
    "destructor": "class A:\n  def __del__(self): fail()\nA()\nNone",
    "process": "import multiprocessing as m\np = m.get_context('fork').Process(target=fail); p.start(); p.join()",
    "pool": "from concurrent.futures import ProcessPoolExecutor as P\nwith P(1) as p: p.submit(fail).result()",
    "task": "import asyncio\nasync def f(): fail()\nasync def g():\n  t = asyncio.create_task(f())\n"
    "  await asyncio.sleep(0.01)\nasyncio.run(g())",
    "printed": "import traceback\ntry: fail()\nexcept ValueError: traceback.print_exc()",
    "hook": "import sys\ntry: fail()\nexcept ValueError: sys.excepthook(*sys.exc_info())",
    "group": "try: fail()\nexcept ValueError as e: raise ExceptionGroup('several', [e])",
    "logged": "import logging\ntry: fail()\nexcept ValueError: logging.exception('so')",
}


@pytest.mark.parametrize("code", FAILS.values(), ids=FAILS)
async def test_no_traceback_has_a_path_of_the_host(strongest: LocalSandbox, code: str):
    """``json`` fails in a file of its own, below which only the code's lines are to stand."""
    result = await strongest.execute(f"import json\ndef fail(): json.loads('x')\n{code}")
    assert 'File "main.py", line 2, in fail' in result.stderr
    assert "JSONDecodeError: Expecting value" in result.stderr
    for path in (sys.prefix, sys.base_prefix, os.path.dirname(os.__file__), "/proc/self/fd", "retool"):
        assert path not in result.stderr
    assert ".py" not in result.stderr.replace("main.py", "")


async def test_a_thread_that_leaves_by_system_exit_is_silent(strongest: LocalSandbox):
    code = "import sys, threading\nt = threading.Thread(target=sys.exit, args=(3,)); t.start(); t.join()"
    result = await strongest.execute(code)
    assert (result.return_code, result.stderr) == (0, "")


async def test_what_a_thread_prints_after_its_cell_comes_with_the_next(strongest: LocalSandbox):
    code = (
        "import threading, time\ndef late():\n  time.sleep(0.3)\n  print('late')\nthreading.Thread(target=late).start()"
    )
    first = await strongest.execute(code, session="late")
    await asyncio.sleep(0.6)
    second = await strongest.execute("time.sleep(0.6)\nprint('second')", session="late")
    await strongest.end_session("late")
    assert "late" not in first.stdout
    assert second.stdout == "late\nsecond\n"
