"""Results that the model sees: values, output, tracebacks, notebook habits, files, programs."""

import ast
import asyncio
import contextlib
import os
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retool_mcore.sandbox.base import ExecResult, Level
from retool_mcore.sandbox.child import notebook
from retool_mcore.sandbox.supervisor.local import LocalSandbox
from retool_mcore.sandbox.supervisor.output import MAX_STREAM_BYTES, BoundedOutput
from tests.sandbox.sandbox_helpers import NOT_REDIRECTED, last_line, still_works

TABLES = tomllib.loads(Path(__file__).with_name("code.toml").read_text(encoding="utf-8"))
MAIN = "import asyncio\nasync def f(x):\n    await asyncio.sleep(0)\n    return x\n"


def rows(table: str) -> pytest.MarkDecorator:
    """The rows of a table of code.toml, as ``row``."""
    found = TABLES[table]
    return pytest.mark.parametrize("row", found, ids=[f"{table} {number}" for number in range(len(found))])


# ------------------------------------------------------------------------------------ values


@rows("value")
async def test_the_last_expression_is_echoed(strongest: LocalSandbox, row: dict[str, Any]):
    result = await strongest.execute(row["code"])
    assert (result.stdout, result.stderr, result.return_code) == (row["stdout"], "", 0)


@rows("exit")
async def test_exits(strongest: LocalSandbox, row: dict[str, Any]):
    result = await strongest.execute(row["code"])
    assert (result.status, result.return_code, result.text) == ("finished", row["return_code"], row["text"])


async def test_code_without_a_heavy_package_runs_in_the_light_image(strongest: LocalSandbox):
    code = "import sys\nprint([name for name in sys.modules if name in ('nu' + 'mpy', 'sym' + 'py')])"
    assert (await strongest.execute(code)).stdout == "[]\n"
    assert (await strongest.execute("import numpy\n" + code)).stdout.startswith("['numpy'")
    long = await strongest.execute("#" * 32_001 + "\n" + code)  # it is not searched
    assert long.stdout.startswith("['numpy'")


async def test_a_changed_library_is_invisible_to_the_next_run(strongest: LocalSandbox):
    assert (await strongest.execute("import sympy; sympy.factorint = lambda n: 'hacked'; sympy.factorint(6)")).ok
    assert (await strongest.execute("import sympy; sympy.factorint(6)")).stdout == "{2: 1, 3: 1}\n"


@pytest.mark.parametrize(
    "code",
    [
        "import random; random.random()",
        "import numpy as np; np.random.rand()",
        "import numpy, sympy.core.random as r; r.rng.random()",
    ],
)
async def test_two_runs_draw_different_random_numbers(strongest: LocalSandbox, code: str):
    first, second = await asyncio.gather(strongest.execute(code), strongest.execute(code))
    assert first.ok and second.ok and first.stdout != second.stdout


# -------------------------------------------------------------------------------- tracebacks


@rows("traceback")
async def test_a_traceback_names_the_models_lines_only(strongest: LocalSandbox, row: dict[str, Any]):
    result = await strongest.execute(row["code"])
    assert (result.stderr, result.return_code) == (row["stderr"], 1)


@rows("failure")
async def test_no_traceback_has_a_path_of_the_host(strongest: LocalSandbox, row: dict[str, Any]):
    result = await strongest.execute(f"import json\ndef fail(): json.loads('x')\n{row['code']}")
    assert 'File "main.py", line 2, in fail' in result.stderr
    assert "JSONDecodeError: Expecting value" in result.stderr
    for path in (sys.prefix, sys.base_prefix, os.path.dirname(os.__file__), "/proc/self/fd", "retool"):
        assert path not in result.stderr
    assert ".py" not in result.stderr.replace("main.py", "")


async def test_deep_recursion_and_nested_parentheses_are_errors(strongest: LocalSandbox):
    result = await strongest.execute("def f(n): return f(n + 1)\nf(0)")
    assert last_line(result.stderr) == "RecursionError: maximum recursion depth exceeded"
    assert "[Previous line repeated" in result.stderr and len(result.stderr) < 600
    for code in ("(" * 5_000 + ")" * 5_000, "-" * 100_000 + "1", "[" * 90 + "]" * 90 + "\n" + "x" + ".a" * 50_000):
        result = await strongest.execute(code)
        assert (result.status, result.return_code) == ("finished", 1)
    assert await still_works(strongest)


# ---------------------------------------------------------------------------- text in and out


async def test_stdin_with_text_and_without(strongest: LocalSandbox):
    assert (await strongest.execute("input() + '|' + input()", stdin="é 1\nb\n")).stdout == "'é 1|b'\n"
    result = await strongest.execute("input()")
    assert last_line(result.stderr) == "EOFError: EOF when reading a line"


async def test_bytes_and_surrogates_in_output_and_code(strongest: LocalSandbox):
    code = "import os; os.write(1, b'ok \\xff\\xfe end\\n'); print('\\udc80')"
    assert (await strongest.execute(code)).stdout == "ok \\xff\\xfe end\n\\udc80\n"
    assert last_line((await strongest.execute("x = '\ud800'")).stderr).startswith("UnicodeEncodeError")


@pytest.mark.parametrize("notebook", [True, False])
async def test_a_byte_order_mark_is_skipped(strongest: LocalSandbox, notebook: bool):
    assert (await strongest.execute("\ufeffprint(6 * 7)", notebook=notebook)).stdout == "42\n"
    twice = await strongest.execute("\ufeff\ufeffprint(6 * 7)", notebook=notebook)
    assert "SyntaxError" in twice.stderr


async def test_5_mb_of_output_is_capped_and_the_dropped_bytes_are_counted(strongest: LocalSandbox):
    result = await strongest.execute("print('head'); print('x' * 5_000_000); print('tail')")
    assert (result.status, result.return_code) == ("finished", 0)
    assert result.stdout_dropped_bytes == 5 + 5_000_001 + 5 - MAX_STREAM_BYTES
    assert result.stdout.startswith("head\nxxx") and result.stdout.endswith("xxx\ntail\n")
    assert f"[... {result.stdout_dropped_bytes} bytes dropped ...]" in result.text
    result = await strongest.execute("import sys; print('x' * 70_000, file=sys.stderr)")
    assert (result.stdout_dropped_bytes, result.stderr_dropped_bytes) == (0, 70_001 - MAX_STREAM_BYTES)


async def test_files_are_written_and_fetched(strongest: LocalSandbox):
    code = "data = open('in/a.bin', 'rb').read()\nopen('out.bin', 'wb').write(data[::-1])"
    files = {"in/a.bin": bytes(range(256)), "module.py": b"y = 7"}
    result = await strongest.execute(code, files=files, fetch_files=["out.bin", "absent", "in"])
    assert dict(result.files) == {"out.bin": bytes(range(255, -1, -1))}
    assert (await strongest.execute("import module; module.y", files=files)).stdout == "7\n"
    result = await strongest.execute("print('ran')", files={"a": b"", "a/b": b""})
    assert (result.return_code, result.stdout) == (1, "")
    assert result.stderr == "the file 'a/b' could not be written: File exists\n"


async def test_a_large_input_and_a_large_file_arrive_whole(strongest: LocalSandbox):
    result = await strongest.execute("import sys\nlen(sys.stdin.read())", stdin="é" * 3_000_000)
    assert result.stdout == "3000000\n"
    result = await strongest.execute("open('f', 'wb').write(bytes(20 << 20))", fetch_files=["f"])
    assert len(result.files["f"]) == 20 << 20
    code = f"x = {'1' * 500!r}\n" * 4_000 + "len(x)"  # 2 MB of source
    assert (await strongest.execute(code)).stdout == "500\n"


@given(st.lists(st.binary(max_size=50)), st.integers(8, 64))
def test_head_tail_and_count_for_any_bytes_in_any_chunks(chunks: list[bytes], limit_bytes: int):
    whole, output = b"".join(chunks), BoundedOutput(limit_bytes)
    for chunk in chunks:
        output.write(chunk)
    text, dropped_bytes = output.text()
    if len(whole) <= limit_bytes // 2 * 2:
        assert (text, dropped_bytes) == (whole.decode(errors="backslashreplace"), 0)
    else:
        head, _, rest = text.partition(f"\n[... {dropped_bytes} bytes dropped ...]\n")
        assert len(whole) - limit_bytes - 1 <= dropped_bytes < len(whole) - limit_bytes + 8
        assert whole.decode(errors="backslashreplace").startswith(head)
        assert len(rest) <= limit_bytes * 4


@given(st.text(alphabet="aé€🎉", min_size=40), st.integers(8, 32))
def test_a_cut_never_breaks_a_character(text: str, limit_bytes: int):
    output = BoundedOutput(limit_bytes)
    output.write(text.encode())
    shown, dropped_bytes = output.text()
    assert "\\x" not in shown
    note = f"\n[... {dropped_bytes} bytes dropped ...]\n"
    assert len(shown.replace(note, "").encode()) + dropped_bytes == len(text.encode())


def test_the_text_for_the_model():
    def text(**fields: object) -> str:
        return ExecResult(**{"status": "finished", "return_code": 0, "stdout": "", "stderr": "", **fields}).text

    assert text(stdout="a\n", stderr="Traceback\n", return_code=1) == "a\nTraceback"
    assert text(status="time_limit", return_code=None, run_s=10.04) == "[stopped at the time limit, after 10.0 s]"
    assert text(stdout="x", return_code=2) == "x\n[exit code 2]"
    ending = "[stopped at the memory limit]"
    assert text(stdout="o", stderr="e", status="memory_limit", return_code=None) == f"o\ne\n{ending}"


# -------------------------------------------------------------------------- notebook habits


@rows("habit")
async def test_notebook_habits_are_repaired(strongest: LocalSandbox, row: dict[str, Any]):
    result, note = await strongest.execute(row["code"]), row["note"]
    assert result.stdout == row["stdout"]
    assert note in result.stderr if note else not result.stderr
    assert result.return_code == ("Error" in note)


@pytest.mark.parametrize("code, line", [("%foo\nx = (1,", "%foo"), ("x = !ls", "x = !ls")])
async def test_code_that_cannot_be_repaired_shows_its_original_error(strongest: LocalSandbox, code: str, line: str):
    result = await strongest.execute(code)
    assert (result.return_code, result.stdout) == (1, "")
    assert result.stderr.startswith(f'  File "main.py", line 1\n    {line}\n')
    assert result.stderr.rstrip().endswith("Error: invalid syntax")


async def test_a_traceback_has_the_line_numbers_of_the_original_code(strongest: LocalSandbox):
    result = await strongest.execute("\n>>> def f():\n...     return 1 / 0\n>>> f()")
    assert 'line 4, in <module>\n    f()\n  File "main.py", line 3, in f\n    return 1 / 0\n' in result.stderr


@pytest.mark.parametrize("code", ["%foo\n1", " x = 1\nx", MAIN + "await f(1)", ">>> 1"])
async def test_a_script_is_not_repaired(strongest: LocalSandbox, code: str):
    result = await strongest.execute(code, notebook=False)
    assert (result.return_code, result.stdout) == (1, "")
    assert "SyntaxError" in result.stderr or "IndentationError" in result.stderr


async def test_a_script_has_no_display_and_keeps_carriage_returns(strongest: LocalSandbox):
    raw = await strongest.execute("import sys\nsys.stdout.write('a\\rb\\n')\ndisplay", notebook=False)
    assert raw.stdout == "a\rb\n"
    assert "name 'display' is not defined" in raw.stderr


async def test_asyncio_tasks_survive_between_cells_of_a_session(strongest: LocalSandbox):
    start = "import asyncio\nseen = []\nasync def g():\n    await asyncio.sleep(0.01)\n    seen.append(1)\n"
    first = await strongest.execute(start + "t = asyncio.create_task(g())\nawait asyncio.sleep(0)", session="s")
    second = await strongest.execute("await t\nseen", session="s")
    await strongest.end_session("s")
    assert (first.stdout, first.stderr, second.stdout, second.stderr) == ("", "", "[1]\n", "")


PIECES = st.sampled_from(
    ["x = 1", "%time x", "!ls 'a", "%", ">>> y", "... z", "'''", '"""', "(", ")", "%d", "  ", "    pass", "\\", "#"]
)


@settings(max_examples=300)
@given(st.lists(PIECES, max_size=12), st.sampled_from(["", "    ", " "]))
def test_the_number_of_lines_is_kept_and_valid_python_is_never_changed(lines: list[str], indent: str):
    source = "\n".join(indent + line for line in lines)
    try:
        ast.parse(source)
    except SyntaxError:
        with contextlib.suppress(SyntaxError):
            assert notebook.parse_cell(source, "main.py", notebook=True).text.count("\n") == source.count("\n")
    else:
        assert notebook.parse_cell(source, "main.py", notebook=True)[1:] == (source, "")


@pytest.mark.parametrize("piece", ["%a\n", "(", "\\\n", ">>> a\n", "!'\n", "\u201c\n"])
def test_the_time_to_repair_a_cell_is_bounded(piece: str):
    started = time.process_time()
    with contextlib.suppress(SyntaxError):
        notebook.parse_cell("%x\n" + piece * (400_000 // len(piece)) + "\\", "main.py", notebook=True)
    assert time.process_time() - started < 10


# ------------------------------------------------------------------------ threads and programs

REFUSED = "programs cannot be run here; use Python"


@rows("program")
async def test_a_program_works_or_fails_with_one_clear_line(row: dict[str, Any], sandbox: LocalSandbox):
    works = row["name"] == "a process" or (sandbox.level != Level.LANDLOCK and row["stdout"])
    result = await sandbox.execute(row["code"], run_timeout_s=60)
    if works:
        assert (result.stdout, result.stderr) == (row["stdout"], "")
    else:
        line = last_line(result.stderr)
        assert line.startswith("PermissionError: [Errno 1") and row["error"] in line
        assert result.stderr.count("Error") == 1 and result.stdout == ""


async def test_os_system_prints_a_note_and_the_code_continues(strongest: LocalSandbox):
    result = await strongest.execute("import os\nprint(os.system('exit 3'), os.cpu_count() <= 8)")
    assert result.stdout == "32512 True\n"
    assert result.stderr == f"[os.system('exit 3') was not run: {REFUSED}]\n"


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


# ------------------------------------------------------- /tmp and /dev/shm at level landlock


@rows("shared_directory")
async def test_shared_directories_redirect_to_the_working_directory(row: dict[str, Any], landlock: LocalSandbox):
    result = await landlock.execute(("" if row.get("redirected", True) else NOT_REDIRECTED) + row["code"])
    assert (result.stdout, result.stderr) == (row["stdout"], "")
