"""Notebook habits are understood where Python refuses the code, and nothing else is touched."""

import ast
import contextlib
import itertools
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retool_mcore.sandbox.child import habits
from retool_mcore.sandbox.supervisor.local import LocalSandbox
from retool_mcore.sandbox.supervisor.output import CellOutput

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
        ("# given\n    x = 2\n    if x:\n        print(x)", "2\n", ""),
        ("%matplotlib inline\n%load_ext autoreload\n5", "5\n", ""),
        ("!pip install nowhere\n5", "5\n", "packages cannot be installed here; these are there: numpy, scipy"),
        ("%pip install nowhere\n5", "5\n", "packages cannot be installed here"),
        ("if True:\n    !ls 'a\n5", "5\n", "[!ls 'a was not run: programs cannot be run here"),
        ("%nonsense\ns = '''\n%time\n'''\nt = ('%d'\n% 5)\nprint(s, t)", "\n%time\n 5\n", "not known here"),
        (MAIN + "print(await f(3))\nawait f(4)", "3\n4\n", ""),
        (MAIN + "print('before')\nawait f(5)", "before\n5\n", ""),
        (MAIN + "%foo\n[await f(n) async for n in g()]", "", "NameError: name 'g' is not defined"),
        ("%foo\nimport numpy as np\nint(np.int64(5))", "5\n", "not known here"),
        (MAIN + "import numpy as np\nawait f(int(np.int64(5)))", "5\n", ""),
        (
            "x\u00a0= 3\nprint(\u201cit\u2019s\u201d, 'a\u00a0b', x)\u200b",
            "it's a\u00a0b 3\n",
            "special spaces were read as",
        ),
        ("display(1, 'a')", "1\n'a'\n", ""),
        ("def display(x): print('mine', x)\ndisplay(1)", "mine 1\n", ""),
        ("print('display' in dir(), 'display' in globals())", "False False\n", ""),
    ],
)
async def test_a_habit_is_understood_at_every_level(sandbox: LocalSandbox, code: str, stdout: str, said: str):
    result = await sandbox.execute(code)
    assert result.stdout == stdout
    assert said in result.stderr if said else not result.stderr
    assert result.return_code == ("Error" in said)


@pytest.mark.parametrize("code", ["%time sum([20, 22])", "%timeit -n 10 -r 3 sum([20, 22])", "%%time\nx = 42\nx"])
async def test_a_timed_line_or_cell_echoes_and_tells_the_time(strongest: LocalSandbox, code: str):
    lines = (await strongest.execute(code)).stdout.splitlines()
    assert lines[0] == "42"
    assert lines[1].startswith("Wall time: ")
    assert len(lines) == 2


@pytest.mark.parametrize(
    "code, line, error",
    [
        ("%foo\nx = (1,", "%foo", "invalid syntax"),
        ("    x = 1\n  y = 2", "x = 1", "unexpected indent"),
        ("%foo\nreturn 3", "%foo", "invalid syntax"),
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


async def test_another_language_is_told(strongest: LocalSandbox):
    result = await strongest.execute("%%bash\nls")
    assert (result.return_code, result.stdout) == (1, "")
    assert result.stderr == "[a %%bash cell was not run: only Python is run here]\n"


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


async def test_a_progress_line_keeps_its_last_state(sandbox: LocalSandbox):
    code = "import sys\nfor i in range(30_000):\n    sys.stdout.write(f'\\r{i:5} of 30000')\nprint('\\nx\\r\\ny')"
    assert (await sandbox.execute(code)).stdout == "29999 of 30000\nx\r\ny\n"


async def test_a_figure_is_one_line_of_text(strongest: LocalSandbox):
    pytest.importorskip("matplotlib", reason="the extra `sandbox` is not installed")
    code = "import matplotlib.pyplot as plt\nplt.plot([1])\nplt.show()\nplt.show()\nfig, ax = plt.subplots(1, 2)\n"
    line = "<Figure size 640x480 with {} Axes>\n"
    shown = await strongest.execute(code + "fig.show()\nfig", run_timeout_s=60)
    assert (shown.stdout, shown.stderr) == (line.format(1) + 2 * line.format(2), "")
    script = await strongest.execute(code + "fig", run_timeout_s=60, notebook=False)
    assert script.stdout == ""
    import_only = await strongest.execute("import sys, numpy\n'matplotlib' in sys.modules")
    assert import_only.stdout == "False\n"


# ------------------------------------------------------------------------------ the rewriter


@settings(max_examples=400)
@given(st.lists(PIECES, max_size=12), st.sampled_from(["", "    ", " "]))
def test_the_number_of_lines_is_kept(lines: list[str], indent: str):
    source = "\n".join(indent + line for line in lines)
    for rewrite in habits.rewrites(source):
        assert rewrite.text.count("\n") == source.count("\n")


@settings(max_examples=400)
@given(st.lists(PIECES, max_size=8))
def test_valid_python_is_never_changed(lines: list[str]):
    source = "\n".join(lines)
    with contextlib.suppress(SyntaxError):
        tree = ast.parse(source)
        assert habits.parse_cell(source, "main.py", notebook=True)[1] is None
        # Even asked for, a rewrite of valid code at most strips prompts that were within strings.
        for rewrite in habits.rewrites(source):
            assert ast.dump(ast.parse(rewrite.text)) == ast.dump(tree)


@pytest.mark.parametrize("inner", ["%time x", "!ls", "% 3", "%%bash"])
@pytest.mark.parametrize(
    "around", ["s = '''\n{}\n'''", 's = r"""\\"""\n', "x = (7\n{}\n)", "x = 7 \\\n{}", "# '''\n# (\n{}"]
)
def test_only_a_line_that_starts_a_statement_is_a_notebook_line(inner: str, around: str):
    source = "%first\n" + around.format(inner)
    (rewrite,) = habits.rewrites(source)
    first, _, rest = rewrite.text.partition("\n")
    assert first == "__line_magic__('%', 'first')"
    assert (rest == source.partition("\n")[2]) == (not around.startswith("# '''"))


@pytest.mark.parametrize(
    "piece", ["%a\n", "%%a\n", "'''\\", '"""\\"', "(", ")\n", "\\\n", ">>> a\n", "'", "    \n", "!'\n", '\\"""']
)
def test_time_is_linear_in_the_source(piece: str):
    source = "%x\n" + piece * (400_000 // len(piece)) + "\\"
    started = time.process_time()
    for _ in habits.rewrites(source):
        pass
    assert time.process_time() - started < 5


# ------------------------------------------------------------------------------ carriage returns


def terminal(text: str) -> str:
    """A terminal, character by character: what lies at the end of an overwritten line is kept."""
    lines: list[str] = []
    for line in text.split("\n"):
        ending = "\r" if line.endswith("\r") and len(lines) < text.count("\n") else ""
        cells: list[str] = []
        for part in line.split("\r"):
            cells[: len(part)] = part
        is_overwritten = sum(map(bool, line.split("\r"))) > 1
        lines.append(("".join(cells).rstrip(" ") if is_overwritten else "".join(cells)) + ending)
    return "\n".join(lines)


@settings(max_examples=400)
@given(st.text(alphabet="ab é🎉\r\n", max_size=60), st.lists(st.integers(0, 120)))
def test_lines_are_folded_as_by_a_terminal_however_they_arrive(text: str, cuts: list[int]):
    data = text.encode()
    output = CellOutput()
    for start, end in itertools.pairwise([0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]):
        output.write(data[start:end])
    assert output.text() == (terminal(text), 0)
    assert output.text() == (terminal(text), 0)


@settings(max_examples=200)
@given(st.lists(st.text(alphabet="abcdef ", max_size=5), min_size=40, max_size=80))
def test_a_long_line_is_folded_before_it_is_cut(parts: list[str]):
    whole = "\r".join(parts)
    output = CellOutput(16)
    for part in parts:
        output.write(part.encode() + b"\r")
    assert output.text() == (terminal(whole + "\r").rstrip("\r"), 0)


@pytest.mark.parametrize("piece", [b"\r", b"a\r", b"a\rb\n", b"a\r\n", b"x" * 999 + b"\r", b"a", b"\n", "é\r".encode()])
def test_a_flood_is_folded_in_bounded_time_and_memory(piece: bytes):
    chunk = (piece * (1 + (64 << 10) // len(piece)))[: 64 << 10]
    output = CellOutput()
    started = time.process_time()
    for _ in range(512):  # 32 MiB
        output.write(chunk)
        assert len(output._line) <= 200 << 10  # pyright: ignore[reportPrivateUsage]
    assert output.is_flood
    assert len(output.text()[0]) < 70 << 10
    assert time.process_time() - started < 4
