"""The server speaks SandboxFusion's protocol to its own public client, and survives whatever else
is sent to it.
"""

import asyncio
import base64
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import sandbox_fusion
from sandbox_fusion.models import CommandRunResult

from retool_mcore.errors import ConfigError, SandboxUnavailable
from retool_mcore.sandbox import open_sandbox
from retool_mcore.sandbox.client import RemoteSandbox
from tests.sandbox.sandbox_helpers import ROOT, processes_named, start


def stop(server: subprocess.Popen[str]) -> None:
    server.terminate()
    server.communicate(timeout=300)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    server, url = start("--port", "0", "--workers", "2", "--sessions", "2")
    yield url
    stop(server)


def result_of(answer: sandbox_fusion.RunCodeResponse) -> CommandRunResult:
    assert answer.run_result is not None
    return answer.run_result


def post(url: str, **fields: object) -> httpx.Response:
    return httpx.post(f"{url}/run_code", json={"language": "python", **fields}, timeout=300)


# ---------------------------------------------------- their client, unchanged


def test_the_public_client_runs_code(url: str):
    request = sandbox_fusion.RunCodeRequest(
        code="print(input()); open('out', 'w').write(open('in').read())",
        language="python",
        stdin="given",
        files={"in": base64.b64encode(b"content").decode(), "absent": None},
        fetch_files=["out"],
    )
    answer = sandbox_fusion.run_code(request, endpoint=url, max_attempts=1)
    assert answer.status == sandbox_fusion.RunStatus.Success
    result = result_of(answer)
    assert result.status == sandbox_fusion.CommandRunStatus.Finished
    assert (result.stdout, result.stderr, result.return_code) == ("given\n", "", 0)
    assert answer.files == {"out": base64.b64encode(b"content").decode()}
    assert result.execution_time is not None and 0 < result.execution_time < 5


def test_the_public_client_sees_failure_and_time_limit(url: str):
    failed = sandbox_fusion.run_code(
        sandbox_fusion.RunCodeRequest(code="1/0", language="python"), endpoint=url, max_attempts=1
    )
    result = result_of(failed)
    assert (failed.status, result.return_code) == (sandbox_fusion.RunStatus.Failed, 1)
    assert result.stderr is not None and "ZeroDivisionError" in result.stderr
    slow = sandbox_fusion.run_code(
        sandbox_fusion.RunCodeRequest(code="print('a')\nwhile 1: pass", language="python", run_timeout=0.5),
        endpoint=url,
        max_attempts=1,
    )
    assert slow.status == sandbox_fusion.RunStatus.Failed
    result = result_of(slow)
    assert result.status == sandbox_fusion.CommandRunStatus.TimeLimitExceeded
    assert (result.return_code, result.stdout) == (None, "a\n")


async def test_the_public_async_client(url: str):
    request = sandbox_fusion.RunCodeRequest(code="print(1 + 1)", language="python")
    answers = await asyncio.gather(
        *(sandbox_fusion.run_code_async(request, endpoint=url, max_attempts=1) for _ in range(8))
    )
    assert [result_of(answer).stdout for answer in answers] == ["2\n"] * 8


# ------------------------------------------------------------------ the rest


def test_ping_tells_the_level(url: str):
    answer = httpx.get(f"{url}/v1/ping")
    assert (answer.status_code, answer.json()) == (200, "pong")
    assert answer.headers["x-sandbox-level"] in ("namespaces", "landlock", "rlimits")
    assert post(url, code="1").json()["retool"]["level"] == answer.headers["x-sandbox-level"]


def test_metrics_count_executions_and_refusals(url: str):
    def value(name: str) -> float:
        lines = [line for line in httpx.get(f"{url}/metrics").text.splitlines() if line.startswith(name)]
        return float(lines[0].rsplit(" ", 1)[1]) if lines else 0.0

    finished, refused = (
        'retool_sandbox_executions_total{status="finished"}',
        'retool_sandbox_refused_total{code="422"}',
    )
    before = value(finished), value(refused)
    post(url, code="1")
    post(url, code=5)
    assert (value(finished), value(refused)) == (before[0] + 1, before[1] + 1)


@pytest.mark.parametrize(
    "fields, reason",
    [
        ({"code": 5}, "code: Input should be a valid string"),
        ({"code": None}, "code: Input should be a valid string"),
        ({}, "code: Field required"),
        ({"code": "1", "language": "cobol"}, "language: Input should be 'python'"),
        ({"code": "1", "language": "cpp"}, "language: Input should be 'python'"),
        ({"code": "1", "run_timeout": "soon"}, "run_timeout: Input should be a valid number"),
        ({"code": "1", "run_timeout": -1}, "run_timeout_s = -1.0 is not a positive number"),
        ({"code": "1", "run_timeout": 0}, "run_timeout_s = 0.0 is not a positive number"),
        ({"code": "1", "memory_limit_MB": -5}, "memory_limit_mb = -5 is not a positive number"),
        ({"code": "1", "files": {"../../x": "aGk="}}, "does not stay inside the working directory"),
        ({"code": "1", "files": {"x": "no base64!"}}, "files.x: Value error, Only base64 data is allowed"),
        ({"code": "1", "fetch_files": ["/etc/passwd"]}, "does not stay inside the working directory"),
        ({"code": "1", "files": ["x"]}, "files: Input should be a valid dictionary"),
    ],
)
def test_a_request_that_cannot_be_run_is_refused_in_their_form(url: str, fields: dict[str, object], reason: str):
    answer = post(url, **fields)
    assert answer.status_code == 422
    body = answer.json()
    assert (body["status"], body["run_result"]) == ("SandboxError", None)
    assert reason in body["message"]


def test_empty_code_and_enormous_limits_run(url: str):
    assert post(url, code="").json()["status"] == "Success"
    answer = post(url, code="print(1 + 1)", run_timeout=1e12, memory_limit_MB=10**9).json()
    assert answer["run_result"]["stdout"] == "2\n"


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b"\xff\xfe", b"[" * 200_000, b'{"code": "\\ud800"', b"null"])
def test_a_body_that_is_no_request_is_a_422(url: str, body: bytes):
    answer = httpx.post(f"{url}/run_code", content=body)
    assert answer.status_code == 422
    assert answer.json()["status"] == "SandboxError"


def test_lone_surrogates_are_the_codes_mistake_and_no_500(url: str):
    answer = httpx.post(f"{url}/run_code", content=b'{"language": "python", "code": "x = \\"\\ud800\\""}')
    assert (answer.status_code, answer.json()["status"]) == (200, "Failed")
    assert "UnicodeEncodeError" in answer.json()["run_result"]["stderr"]
    answer = post(url, code="print('\\udc80'); import os; os.write(1, b'\\xff')")
    assert answer.json()["run_result"]["stdout"] == "\\udc80\n\\xff"


def test_a_huge_body_is_a_413(url: str):
    answer = httpx.post(f"{url}/run_code", content=b"x" * (49 << 20), timeout=300)
    assert answer.status_code == 413
    assert "larger than" in answer.json()["message"]


def test_a_wrong_method_and_a_wrong_path(url: str):
    assert httpx.get(f"{url}/run_code").status_code == 405
    assert httpx.get(f"{url}/nothing").status_code == 404
    assert httpx.get(f"{url}/health", headers={"host": "evil.example"}).status_code == 403


def test_a_client_that_sends_slowly_does_not_hold_up_others(url: str):
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as slow:
        slow.sendall(b"POST /run_code HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{")
        assert post(url, code="print(1 + 1)").json()["run_result"]["stdout"] == "2\n"


def test_a_client_that_hangs_up_kills_its_execution(url: str):
    name = f"rt-hangup-{os.getpid() % 10_000}"
    code = f"import ctypes, time\nctypes.CDLL(None).prctl(15, b'{name}', 0, 0, 0)\ntime.sleep(60)"
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{url}/run_code", json={"code": code, "language": "python", "run_timeout": 60}, timeout=0.7)
    deadline = time.monotonic() + 5
    while processes_named(name) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert processes_named(name) == []


# ----------------------------------------------------------------- our client


async def test_our_client_gives_the_same_result_as_the_local_sandbox(url: str):
    code = "import sys\nprint('out'); print('err', file=sys.stderr); open('f', 'wb').write(b'\\x00\\xff'); 1/0"
    async with open_sandbox(url, min_level="rlimits") as remote, open_sandbox("local", min_level="rlimits") as local:
        there, here = [await s.execute(code, fetch_files=["f"]) for s in (remote, local)]
        for name in ("status", "return_code", "stdout", "stderr", "files", "level", "text"):
            assert getattr(there, name) == getattr(here, name)
        assert there.cpu_s > 0
        assert (await remote.execute("while True: pass", run_timeout_s=0.3)).status == "time_limit"
        assert (await remote.execute("'\ud800'")).return_code == 1
        with pytest.raises(ConfigError, match="working directory"):
            await remote.execute("1", files={"../x": b""})
        big = await remote.execute("print('x' * 1_000_000)")
        assert big.stdout_dropped_bytes == 1_000_001 - (64 << 10)


async def test_sessions_over_http(url: str):
    async with open_sandbox(url, min_level="rlimits", sessions=2) as remote:
        await remote.execute("x = 5", session="a b/c")
        assert (await remote.execute("x", session="a b/c")).stdout == "5\n"
        await remote.end_session("a b/c")
        assert "NameError" in (await remote.execute("x", session="a b/c")).stderr
    async with open_sandbox(url, min_level="rlimits") as remote:
        with pytest.raises(ConfigError, match="without sessions"):
            await remote.execute("1", session="a")


def test_an_answer_tells_that_its_session_was_restarted(url: str):
    """A client that has not seen the session before learns it from the answer alone."""
    assert post(url, code="x = 1", session="r", run_timeout=20).json()["retool"]["session_restarted"] is False
    assert post(url, code="import os; os._exit(3)", session="r").json()["run_result"]["return_code"] == 3
    told = [post(url, code="1", session="r").json()["retool"]["session_restarted"] for _ in range(2)]
    assert told == [True, False]
    httpx.delete(f"{url}/v1/sessions/r")


async def test_several_urls_share_the_load_and_survive_the_loss_of_one(url: str, tmp_path: Path):
    other, other_url = start("--socket", str(tmp_path / "sandbox.sock"), "--workers", "2")
    try:
        assert other_url == f"unix://{tmp_path}/sandbox.sock"
        async with open_sandbox([url, other_url], min_level="rlimits") as sandbox:
            assert all(result.ok for result in await asyncio.gather(*(sandbox.execute("1") for _ in range(40))))
            for endpoint in (url, other_url):
                socket = endpoint.removeprefix("unix://") if endpoint.startswith("unix://") else None
                with httpx.Client(transport=httpx.HTTPTransport(uds=socket)) as http:
                    metrics = http.get("http://sandbox/metrics" if socket else f"{endpoint}/metrics")
                    count = next(line for line in metrics.text.splitlines() if 'executions_total{status="fin' in line)
                    assert float(count.split()[-1]) >= 10
            calls = [asyncio.ensure_future(sandbox.execute("import time; time.sleep(0.2); 7")) for _ in range(12)]
            await asyncio.sleep(0.3)
            other.send_signal(signal.SIGKILL)
            assert [result.stdout for result in await asyncio.gather(*calls)] == ["7\n"] * 12
    finally:
        other.kill()
        other.communicate()


async def test_a_server_that_is_none_is_an_outage_not_a_result():
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = (await reader.readline()).decode()
        body = b'"pong"' if "ping" in request else json.dumps({"status": "Success"}).encode()
        writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    sandbox = RemoteSandbox([f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"], attempts=2)
    with pytest.raises(SandboxUnavailable, match="without a run_result"):
        await sandbox.execute("1")
    await sandbox.close()
    server.close()


# -------------------------------------------------------------------- command


def test_serve_stops_cleanly_and_removes_its_socket(tmp_path: Path):
    path = tmp_path / "s.sock"
    server, _ = start("--socket", str(path))
    assert path.stat().st_mode & 0o777 == 0o600
    stop(server)
    assert not path.exists()


def test_a_taken_port_is_one_line(url: str):
    command = [sys.executable, "-m", "retool_mcore.sandbox", "serve", "--port", url.rsplit(":", 1)[1]]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert result.returncode == 2
    assert result.stderr.startswith("error: cannot listen on 127.0.0.1:") and len(result.stderr.splitlines()) == 1


def test_the_launcher_prints_the_url_runs_the_command_and_stops(tmp_path: Path):
    launcher = ["bash", "launch/sandbox.sh", "--port", "0", "--min-level", "rlimits", "--"]
    command = [*launcher, "bash", "-c", 'echo "given $SANDBOX_URL"; exit 7']
    environment = dict(os.environ, PYTHON=sys.executable, TMPDIR=str(tmp_path))
    result = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=300
    )
    first, second = result.stdout.splitlines()
    assert (result.returncode, second) == (7, f"given {first}")
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{first}/v1/ping")
    assert list(tmp_path.iterdir()) == []
