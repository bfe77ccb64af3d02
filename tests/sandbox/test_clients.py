"""Clients that nobody here wrote, unchanged, against our server: verl's code reward
and PyPI's sandbox-fusion. What a grader compares is what the program printed, and nothing else.
"""

import base64
from collections.abc import Iterator
from typing import Any

import pytest
import sandbox_fusion

from tests.sandbox.sandbox_helpers import start

verl_client: Any = pytest.importorskip("verl.utils.reward_score.sandbox_fusion.utils")


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    server, url = start("--port", "0", "--workers", "2")
    yield url
    server.terminate()
    server.communicate(timeout=300)


def run(url: str, code: str, **fields: Any) -> sandbox_fusion.RunCodeResponse:
    asked = sandbox_fusion.RunCodeRequest(code=code, language="python", **fields)
    return sandbox_fusion.run_code(asked, endpoint=url, max_attempts=1)


def stdout_of(answer: sandbox_fusion.RunCodeResponse) -> str | None:
    assert answer.run_result is not None
    return answer.run_result.stdout


# ------------------------------------------------------------------------ verl


@pytest.mark.parametrize(
    "program",
    [
        "print(int(input()) + 1)",
        "import sys\nsys.stdout.write(str(int(sys.stdin.read()) + 1) + '\\n')",
        "import sys\nn = int(input())\nprint(n + 1)\n[n, n + 1]",
        "def main():\n    n = int(input())\n    print(n + 1)\n    return n\nmain()",
    ],
)
def test_verls_code_reward_reads_what_was_printed(url: str, program: str):
    cases = {"inputs": ["1\n", "41\n", "5\n"], "outputs": ["2\n", "42\n", "7\n"]}
    results, metadata = verl_client.check_correctness(f"{url}/run_code", cases, program, timeout=10)
    assert results == [True, True, False]
    assert [entry["status"] for entry in metadata] == ["success", "success", "wrong_answer"]


def test_verls_code_reward_calls_a_named_function(url: str):
    cases = {"inputs": ["3\n4"], "outputs": ["7"], "fn_name": "add"}
    program = "def add(a, b):\n    return a + b\n"
    assert verl_client.check_correctness(f"{url}/run_code", cases, program, timeout=10)[0] == [True]


@pytest.mark.parametrize(
    "program, result, status",
    [
        ("1 / 0", -2, "runtime_error"),
        ("def f(:", -2, "runtime_error"),
        ("while True: pass", -3, "timeout"),
    ],
)
def test_verls_code_reward_tells_failures_apart(url: str, program: str, result: int, status: str):
    cases = {"inputs": [""], "outputs": ["x"]}
    results, metadata = verl_client.check_correctness(f"{url}/run_code", cases, program, timeout=1)
    assert (results, metadata[0]["status"]) == ([result], status)


# -------------------------------------------------------------- sandbox-fusion


@pytest.mark.parametrize(
    "code, stdout",
    [
        ("1 + 1", ""),
        ("print('a')\n[1, 2]", "a\n"),
        ("import sys\nsys.stdout.write('yes')", "yes"),
        ("import os\nprint(os.path.isabs(__file__), os.path.dirname(__file__) == os.getcwd())", "True True\n"),
        ("# first line\nprint(open(__file__).readline(), end='')", "# first line\n"),
        ("print('x' * 300_000)", "x" * 300_000 + "\n"),
    ],
    ids=["expression", "print", "write", "__file__", "source", "long"],
)
def test_a_program_is_a_plain_script(url: str, code: str, stdout: str):
    answer = run(url, code)
    assert answer.status == sandbox_fusion.RunStatus.Success
    assert stdout_of(answer) == stdout


def test_a_forked_child_that_leaves_by_os_exit_sends_no_files(url: str):
    code = """
import os
open("f", "w").write("early")
if os.fork() == 0:
    os._exit(0)
os.wait()
open("f", "w").write("late")
"""
    answer = run(url, code, fetch_files=["f"])
    assert answer.files == {"f": base64.b64encode(b"late").decode()}
