"""Notebook habits are understood where Python refuses the code, and nothing else is touched."""

import ast
import contextlib
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retool_mcore.sandbox.child import habits
from retool_mcore.sandbox.supervisor.local import LocalSandbox

SYNTAX = 'File "main.py", line 1'
MAIN = "import asyncio\nasync def f(x):\n    await asyncio.sleep(0)\n    return x\n"
PIECES = st.sampled_from(
    [
        "x = 1",
        "%time x",
        "!ls 'a",
        "%",
        ">>> y",
        "... z",
        "'''",
        '"""',
        "(",
        ")",
        "%d",
        "  ",
        "    pass",
        "\\",
        "#",
        "if 1:",
    ]
)


@pytest.mark.parametrize(
    "code, stdout, said",
    [
        (">>> x = 3\n>>> for i in [1, 2]:\n...     print(i)\n... \n1\n2\n>>> x * 2", "1\n2\n6\n", "not run: 2]"),
        ("    x = 1\n    x + 1", "2\n", ""),
        (" import math\nround(math.pi)", "3\n", ""),
        ("    x = 1\nif x:\n    print(x)", "1\n", ""),
        ("    if 1:\n        x = 1\n# dedented\n    x", "1\n", ""),
        ("# given\n    x = 2\n    if x:\n        print(x)", "2\n", ""),
        ("%matplotlib inline\n%load_ext autoreload\n5", "5\n", ""),
        ("!pip install nowhere\n5", "5\n", "packages cannot be installed here; these are there: numpy, scipy"),
        ("%pip install nowhere\n5", "5\n", "packages cannot be installed here"),
        ("if True:\n    !ls 'a\n5", "5\n", "[!ls 'a was not run: programs cannot be run here"),
        ("%nonsense\ns = '''\n%time\n'''\nt = ('%d'\n% 5)\nprint(s, t)", "\n%time\n 5\n", "[%nonsense was not run"),
        (MAIN + "print(await f(3))\nawait f(4)", "3\n4\n", ""),
        (MAIN + "print('before')\nawait f(5)", "before\n5\n", ""),
        (MAIN + "%foo\n[await f(n) async for n in g()]", "", "NameError: name 'g' is not defined"),
        ("%foo\nimport numpy as np\nint(np.int64(5))", "5\n", "[%foo was not run"),
        (MAIN + "import numpy as np\nawait f(int(np.int64(5)))", "5\n", ""),
        (
            "x\u00a0= 3\nprint(\u201cit\u2019s\u201d, x)\u200b\ny = 'a\u00a0b'\nprint(ascii(y))",
            "it's 3\n'a\\xa0b'\n",
            "special spaces were read as",
        ),
        ("display(1, 'a')", "1\n'a'\n", ""),
        ("def display(x): print('mine', x)\ndisplay(1)", "mine 1\n", ""),
        ("print('display' in dir(), 'display' in globals())", "False False\n", ""),
    ],
)
async def test_a_habit_is_understood(strongest: LocalSandbox, code: str, stdout: str, said: str):
    result = await strongest.execute(code)
    assert result.stdout == stdout
    assert said in result.stderr if said else not result.stderr
    assert result.return_code == ("Error" in said)


async def test_a_cell_that_is_timed_runs_and_says_nothing(strongest: LocalSandbox):
    result = await strongest.execute("%%time\nx = 42\nx")
    assert (result.stdout, result.stderr) == ("42\n", "")


@pytest.mark.parametrize(
    "code, line, error",
    [
        ("%foo\nx = (1,", "%foo", "invalid syntax"),
        ("x = !ls", "x = !ls", "invalid syntax"),
        ("print?", "print?", "invalid syntax"),
    ],
)
async def test_what_stays_wrong_shows_the_error_of_the_code_as_written(
    strongest: LocalSandbox, code: str, line: str, error: str
):
    result = await strongest.execute(code)
    assert (result.return_code, result.stdout) == (1, "")
    assert result.stderr.startswith(f"  {SYNTAX}\n    {line}\n")
    assert result.stderr.rstrip().endswith(f"Error: {error}")
    assert "During handling" not in result.stderr


async def test_another_language_is_not_run(strongest: LocalSandbox):
    result = await strongest.execute("%%bash\nls")
    assert (result.return_code, result.stdout) == (1, "")
    assert "[%%bash was not run: programs cannot be run here; use Python]" in result.stderr


async def test_a_traceback_has_the_line_numbers_of_the_code(strongest: LocalSandbox):
    result = await strongest.execute("\n>>> def f():\n...     return 1 / 0\n>>> f()")
    assert 'line 4, in <module>\n    f()\n  File "main.py", line 3, in f\n    return 1 / 0\n' in result.stderr


@pytest.mark.parametrize("code", ["%foo\n1", " x = 1\nx", MAIN + "await f(1)", ">>> 1"])
async def test_a_script_stays_a_script(strongest: LocalSandbox, code: str):
    result = await strongest.execute(code, notebook=False)
    assert (result.return_code, result.stdout) == (1, "")
    assert "SyntaxError" in result.stderr or "IndentationError" in result.stderr
    raw = await strongest.execute("import sys\nsys.stdout.write('a\\rb\\n')\ndisplay", notebook=False)
    assert raw.stdout == "a\rb\n"
    assert "name 'display' is not defined" in raw.stderr


async def test_tasks_live_on_in_a_session(strongest: LocalSandbox):
    start = "import asyncio\nseen = []\nasync def g():\n    await asyncio.sleep(0.01)\n    seen.append(1)\n"
    first = await strongest.execute(start + "t = asyncio.create_task(g())\nawait asyncio.sleep(0)", session="s")
    second = await strongest.execute("await t\nseen", session="s")
    await strongest.end_session("s")
    assert (first.stdout, first.stderr, second.stdout, second.stderr) == ("", "", "[1]\n", "")


async def test_a_progress_line_keeps_its_last_state(strongest: LocalSandbox):
    code = "import sys\nfor i in range(3_000):\n    sys.stdout.write(f'\\r{i:4} of 3000')\nprint('\\nx\\r\\ny')"
    assert (await strongest.execute(code)).stdout == "2999 of 3000\nx\r\ny\n"


# ------------------------------------------------------------------------------ the rewriter


@settings(max_examples=400)
@given(st.lists(PIECES, max_size=12), st.sampled_from(["", "    ", " "]))
def test_the_number_of_lines_is_kept_and_valid_python_is_never_changed(lines: list[str], indent: str):
    source = "\n".join(indent + line for line in lines)
    try:
        ast.parse(source)
    except SyntaxError:
        with contextlib.suppress(SyntaxError):
            assert habits.parse_cell(source, "main.py", notebook=True).text.count("\n") == source.count("\n")
    else:
        assert habits.parse_cell(source, "main.py", notebook=True)[1:] == (source, "")


@pytest.mark.parametrize("inner", ["%time x", "!ls", "% 3", "%%bash"])
@pytest.mark.parametrize("around", ["s = '''\n{}\n'''", "x = (7\n{}\n)", "x = 7 \\\n{}"])
def test_only_a_line_that_starts_a_statement_is_a_notebook_line(inner: str, around: str):
    source = "%first\n" + around.format(inner)
    if inner == "% 3" or around.startswith("s"):
        assert habits.parse_cell(source, "main.py", notebook=True).text == source.replace("%first", "pass")


@pytest.mark.parametrize("piece", ["%a\n", "%%a\n", "(", ")\n", "\\\n", ">>> a\n", "'", "    \n", "!'\n", "\u201c\n"])
def test_the_work_on_a_source_is_bounded(piece: str):
    started = time.process_time()
    with contextlib.suppress(SyntaxError):
        habits.parse_cell("%x\n" + piece * (400_000 // len(piece)) + "\\", "main.py", notebook=True)
    assert time.process_time() - started < 10
