"""Code runs as a notebook cell: last value echoed through the AST, tracebacks that name the model's
lines only.
"""

import pytest

from retool_mcore.sandbox.supervisor.local import LocalSandbox


@pytest.mark.parametrize(
    "code, stdout",
    [
        ("1 + 1", "2\n"),
        ("x = 3\nx * 2", "6\n"),
        ("None", ""),
        ("print('a')", "a\n"),
        ("x = 5", ""),
        ("'a\\nb'", "'a\\nb'\n"),
        ("for i in range(2):\n    i", ""),
        ("1; 2", "2\n"),
        ("def f():\n    return 1\nf()", "1\n"),
        ("(1,\n 2,\n)", "(1, 2)\n"),
        ("x = 1\nx  # the answer", "1\n"),
        ("if True:\n    7", ""),
        ('"""only a docstring"""', "'only a docstring'\n"),
        ("from __future__ import annotations\ndef f(x: nonsense): return 4\nf(0)", "4\n"),
        ("", ""),
        ("# nothing", ""),
        ("print('x', end='')", "x"),
        ("if __name__ == '__main__':\n    print('main')", "main\n"),
        ("import __main__; __main__.__name__", "'__main__'\n"),
        ("import pickle\nclass A: pass\ntype(pickle.loads(pickle.dumps(A()))).__name__", "'A'\n"),
    ],
)
async def test_the_last_expression_is_echoed(strongest: LocalSandbox, code: str, stdout: str):
    result = await strongest.execute(code)
    assert (result.stdout, result.stderr, result.return_code) == (stdout, "", 0)


@pytest.mark.parametrize(
    "code, stderr",
    [
        (
            "x = 0\ndef f(y):\n    return 1 / y\nf(x)",
            'Traceback (most recent call last):\n  File "main.py", line 4, in <module>\n    f(x)\n'
            '  File "main.py", line 3, in f\n    return 1 / y\n           ~~^~~\n'
            "ZeroDivisionError: division by zero\n",
        ),
        ("x = (1,\n", "  File \"main.py\", line 1\n    x = (1,\n        ^\nSyntaxError: '(' was never closed\n"),
        (
            "import json\njson.loads('[')",
            "Traceback (most recent call last):\n  File \"main.py\", line 2, in <module>\n    json.loads('[')\n"
            "json.decoder.JSONDecodeError: Expecting value: line 1 column 2 (char 1)\n",
        ),
        (
            "try:\n    1/0\nexcept ZeroDivisionError as e:\n    raise ValueError('second') from e",
            'Traceback (most recent call last):\n  File "main.py", line 2, in <module>\n    1/0\n    ~^~\n'
            "ZeroDivisionError: division by zero\n\n"
            "The above exception was the direct cause of the following exception:\n\n"
            'Traceback (most recent call last):\n  File "main.py", line 4, in <module>\n'
            "    raise ValueError('second') from e\nValueError: second\n",
        ),
        (
            "import sympy\nsympy.Matrix([[1, 2]]).inv()",
            'Traceback (most recent call last):\n  File "main.py", line 2, in <module>\n'
            "    sympy.Matrix([[1, 2]]).inv()\n"
            "sympy.matrices.exceptions.NonSquareMatrixError: A Matrix must be square to invert.\n",
        ),
    ],
)
async def test_a_traceback_names_the_models_lines_only(strongest: LocalSandbox, code: str, stderr: str):
    result = await strongest.execute(code)
    assert (result.stderr, result.return_code) == (stderr, 1)


async def test_a_deep_traceback_is_short(strongest: LocalSandbox):
    result = await strongest.execute("def f(n): return f(n + 1)\nf(0)")
    assert "[Previous line repeated" in result.stderr
    assert len(result.stderr) < 600


@pytest.mark.parametrize(
    "code, return_code, stderr",
    [
        ("exit()", 0, ""),
        ("import sys; sys.exit(3)", 3, ""),
        ("import sys; sys.exit('bad input')", 1, "bad input\n"),
        ("raise SystemExit", 0, ""),
        ("import atexit; atexit.register(lambda: print('bye'))\n3", 0, ""),
        ("raise KeyboardInterrupt", 1, None),
    ],
)
async def test_exits(strongest: LocalSandbox, code: str, return_code: int, stderr: str | None):
    result = await strongest.execute(code)
    assert result.return_code == return_code
    assert stderr is None or result.stderr == stderr


async def test_threads_are_waited_for_and_exit_handlers_run(strongest: LocalSandbox):
    code = """
import atexit, threading, time
atexit.register(lambda: print("handler"))
threading.Thread(target=lambda: (time.sleep(0.1), print("thread"))).start()
print("main")
"""
    assert (await strongest.execute(code)).stdout == "main\nthread\nhandler\n"


# A library of the full image, reached in ways that the text does not show.
@pytest.mark.parametrize(
    "code",
    [
        "import numpy as np\nint(np.int64(5))",
        "import os, numpy\nint(numpy.int64(5))",
        "import os, \\\n    numpy\nint(numpy.int64(5))",
        "__import__('numpy').int64(5).item()",
        "import importlib\nimportlib.import_module('num' + 'py').int64(5).item()",
        "exec('import num' + 'py as n'); n.int64(5).item()",
        "from numpy import int64; int64(5).item()",
        "import random\nif random: import numpy\nnumpy.int64(5).item()",
    ],
)
async def test_numpy_can_be_imported_however_it_is_asked_for(strongest: LocalSandbox, code: str):
    assert (await strongest.execute(code)).stdout == "5\n"


async def test_code_that_names_no_package_does_not_pay_for_one(strongest: LocalSandbox):
    code = "import sys\nprint([name for name in sys.modules if name in ('nu' + 'mpy', 'sym' + 'py')])"
    assert (await strongest.execute(code)).stdout == "[]\n"
    assert (await strongest.execute("import numpy\n" + code)).stdout.startswith("['numpy'")


async def test_what_mathematics_traces_use_is_there(strongest: LocalSandbox):
    code = """
import cmath, collections, decimal, fractions, functools, heapq, itertools, math, mpmath, random, statistics
import numpy as np, scipy.optimize, scipy.integrate, scipy.special, scipy.linalg, sympy as sp
x = sp.symbols("x")
print(sp.integrate(sp.exp(-x**2), (x, -sp.oo, sp.oo)), round(scipy.optimize.brentq(math.cos, 1, 2), 6))
mpmath.mp.dps = 20
+mpmath.pi
"""
    assert (await strongest.execute(code)).stdout == "sqrt(pi) 1.570796\nmpf('3.141592653589793238462')\n"


async def test_files_go_in_and_come_out(strongest: LocalSandbox):
    code = "data = open('in/a.bin', 'rb').read()\nopen('out.bin', 'wb').write(data[::-1])"
    files = {"in/a.bin": bytes(range(256)), "module.py": b"y = 7"}
    result = await strongest.execute(code, files=files, fetch_files=["out.bin", "absent", "in"])
    assert dict(result.files) == {"out.bin": bytes(range(255, -1, -1))}
    assert (await strongest.execute("import module; module.y", files=files)).stdout == "7\n"


async def test_files_that_exclude_each_other_are_told(strongest: LocalSandbox):
    result = await strongest.execute("print('ran')", files={"a": b"", "a/b": b""})
    assert (result.return_code, result.stdout) == (1, "")
    assert result.stderr == "the file 'a/b' could not be laid out: File exists\n"


async def test_a_large_input_and_a_large_file_arrive_whole(strongest: LocalSandbox):
    big = "é" * 3_000_000
    result = await strongest.execute("import sys\nlen(sys.stdin.read())", stdin=big)
    assert result.stdout == "3000000\n"
    result = await strongest.execute("open('f', 'wb').write(bytes(20 << 20))", fetch_files=["f"])
    assert len(result.files["f"]) == 20 << 20
    code = f"x = {'1' * 500!r}\n" * 4_000 + "len(x)"  # 2 MB of source
    assert (await strongest.execute(code)).stdout == "500\n"
