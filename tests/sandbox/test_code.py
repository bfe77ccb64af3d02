"""Results that the model sees: values, output, tracebacks, notebook habits, files, programs."""

import ast
import asyncio
import os
import sys
import tomllib
from contextlib import suppress
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


def rows(*tables: str) -> pytest.MarkDecorator:
    """The rows of tables of code.toml, as ``row``."""
    found = {f"{table} {number}": row for table in tables for number, row in enumerate(TABLES[table])}
    return pytest.mark.parametrize("row", found.values(), ids=found.keys())


@rows("value", "exit", "traceback", "habit", "stream", "script")
async def test_what_the_model_sees(strongest: LocalSandbox, row: dict[str, Any]):
    result = await strongest.execute(row["code"], stdin=row.get("stdin"), notebook=row.get("notebook", True))
    assert (result.status, result.return_code) == ("finished", row.get("return_code", 0)), result.stderr
    assert result.stdout == row.get("stdout", "")
    if "note" in row:
        assert row["note"] in result.stderr
    else:
        assert result.stderr == row.get("stderr", "")
    assert "text" not in row or result.text == row["text"]


async def test_code_without_a_heavy_package_runs_in_the_light_image(strongest: LocalSandbox):
    code = "import sys\nprint([name for name in sys.modules if name in ('nu' + 'mpy', 'sym' + 'py')])"
    assert (await strongest.execute(code)).stdout == "[]\n"
    assert (await strongest.execute("import numpy\n" + code)).stdout.startswith("['numpy'")
    long = await strongest.execute("#" * 32_001 + "\n" + code)  # it is not searched
    assert long.stdout.startswith("['numpy'")


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


@given(st.lists(st.text(alphabet="aé€🎉", max_size=30)), st.integers(8, 64))
def test_head_tail_and_count_for_any_text_in_any_chunks(chunks: list[str], limit_bytes: int):
    """No cut breaks a character."""
    output, whole = BoundedOutput(limit_bytes), "".join(chunks)
    for chunk in chunks:
        output.write(chunk.encode())
    text, dropped_bytes = output.text()
    size_bytes = len(whole.encode())
    if size_bytes <= limit_bytes // 2 * 2:
        assert (text, dropped_bytes) == (whole, 0)
        return
    head, _, tail = text.partition(f"\n[... {dropped_bytes} bytes dropped ...]\n")
    assert whole.startswith(head) and whole.endswith(tail)
    assert len((head + tail).encode()) + dropped_bytes == size_bytes
    assert size_bytes - limit_bytes <= dropped_bytes < size_bytes - limit_bytes + 8


def test_the_text_for_the_model():
    def text(**fields: object) -> str:
        return ExecResult(**{"status": "finished", "return_code": 0, "stdout": "", "stderr": "", **fields}).text

    assert text(stdout="a\n", stderr="Traceback\n", return_code=1) == "a\nTraceback"
    assert text(status="time_limit", return_code=None, run_s=10.04) == "[stopped at the time limit, after 10.0 s]"
    assert text(stdout="x", return_code=2) == "x\n[exit code 2]"
    ending = "[stopped at the memory limit]"
    assert text(stdout="o", stderr="e", status="memory_limit", return_code=None) == f"o\ne\n{ending}"


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
        with suppress(SyntaxError):
            assert notebook.parse_cell(source, "main.py", notebook=True).text.count("\n") == source.count("\n")
    else:
        assert notebook.parse_cell(source, "main.py", notebook=True)[1:] == (source, "")


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


async def test_sixteen_threads_at_the_default_memory_limit(sandbox: LocalSandbox):
    code = """
import threading
from concurrent.futures import ThreadPoolExecutor
barrier = threading.Barrier(16)
with ThreadPoolExecutor(16) as pool: print(len(list(pool.map(lambda _: barrier.wait(), range(16)))))
"""
    result = await sandbox.execute(code)
    assert (result.stdout, result.stderr) == ("16\n", "")


@rows("shared_directory")
async def test_shared_directories_redirect_to_the_working_directory(row: dict[str, Any], landlock: LocalSandbox):
    result = await landlock.execute(("" if row.get("redirected", True) else NOT_REDIRECTED) + row["code"])
    assert (result.stdout, result.stderr) == (row["stdout"], "")
