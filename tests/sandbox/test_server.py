"""The server speaks SandboxFusion's protocol to third-party clients.

It refuses unauthorised requests and survives invalid ones.
"""

import asyncio
import base64
import contextlib
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import sandbox_fusion
import uvicorn
from typer.testing import CliRunner

from retool_mcore.errors import ConfigError, SandboxUnavailable
from retool_mcore.sandbox import open_sandbox
from retool_mcore.sandbox.base import ExecRequest, ExecResult, Level
from retool_mcore.sandbox.server import app
from retool_mcore.sandbox.server import command as commands
from retool_mcore.sandbox.server.wire import CommandRunResult, RunCodeRequest, RunCodeResponse, read_token
from retool_mcore.sandbox.supervisor.local import LocalSandbox
from retool_mcore.sandbox.supervisor.slots import MemoryCgroup, remove_stale
from tests.sandbox.sandbox_helpers import ROOT, children_of, longest_stall_s, processes_named, start

verl_client: Any = pytest.importorskip("verl.utils.reward_score.sandbox_fusion.utils")

TOKEN = "a-token-of-thirty-two-characters"
RUN = {"code": "print(6 * 7)", "language": "python"}
HALF = b"POST /run_code HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 999\r\n\r\n{"


def stop(server: subprocess.Popen[str]) -> None:
    server.terminate()
    server.communicate(timeout=300)


def until(condition: Callable[[], object], limit_s: float = 300) -> None:
    end_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.05)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    server, url = start("--port", "0", "--workers", "2", "--sessions", "2")
    yield url
    stop(server)


def post(url: str, **fields: object) -> httpx.Response:
    return httpx.post(f"{url}/run_code", json={"language": "python", **fields}, timeout=300)


@contextlib.asynccontextmanager
async def served(sandbox: LocalSandbox, *, connections: int = 100, **options: object) -> AsyncIterator[str]:
    """Run the server on a free port in this process."""
    with socket.create_server(("127.0.0.1", 0), backlog=4096) as listener:
        config = uvicorn.Config(
            app.create_app(sandbox, **options),  # type: ignore[arg-type]
            http="h11",
            limit_concurrency=connections,
            log_level="error",
            lifespan="off",
            timeout_graceful_shutdown=1,
        )
        server = uvicorn.Server(config)
        serving = asyncio.ensure_future(server._serve(sockets=[listener]))  # pyright: ignore[reportPrivateUsage]
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            await serving


# ------------------------------------------------------------- sandbox-fusion, unchanged


def run(url: str, code: str, **fields: Any) -> sandbox_fusion.RunCodeResponse:
    request = sandbox_fusion.RunCodeRequest(code=code, language="python", **fields)
    return sandbox_fusion.run_code(request, endpoint=url, max_attempts=1)


def test_the_public_client_runs_code(url: str):
    code = "print(input()); open('out', 'w').write(open('in').read())"
    files = {"in": base64.b64encode(b"content").decode(), "absent": None}
    answer = run(url, code, stdin="line", files=files, fetch_files=["out"])
    result = answer.run_result
    assert answer.status == sandbox_fusion.RunStatus.Success and result is not None
    assert result.status == sandbox_fusion.models.CommandRunStatus.Finished
    assert (result.stdout, result.stderr, result.return_code) == ("line\n", "", 0)
    assert answer.files == {"out": base64.b64encode(b"content").decode()}
    assert result.execution_time is not None and 0 < result.execution_time < 5


def test_the_public_client_sees_failure_and_time_limit(url: str):
    failed = run(url, "1/0")
    assert failed.status == sandbox_fusion.RunStatus.Failed and failed.run_result is not None
    assert failed.run_result.return_code == 1 and "ZeroDivisionError" in (failed.run_result.stderr or "")
    slow = run(url, "print('a')\nwhile 1: pass", run_timeout=0.5)
    assert slow.status == sandbox_fusion.RunStatus.Failed and slow.run_result is not None
    assert slow.run_result.status == sandbox_fusion.models.CommandRunStatus.TimeLimitExceeded
    assert (slow.run_result.return_code, slow.run_result.stdout) == (None, "a\n")


@pytest.mark.parametrize(
    "code, stdout",
    [
        ("print('a')\n[1, 2]", "a\n"),
        ("import os\nprint(os.path.isabs(__file__), os.path.dirname(__file__) == os.getcwd())", "True True\n"),
        ("# first line\nprint(open(__file__).readline(), end='')", "# first line\n"),
        ("print('x' * 300_000)", "x" * 300_000 + "\n"),
    ],
    ids=["expression", "__file__", "source", "long"],
)
def test_a_program_is_a_plain_script(url: str, code: str, stdout: str):
    answer = run(url, code)
    assert answer.run_result is not None and answer.run_result.stdout == stdout


def test_a_forked_child_that_leaves_by_os_exit_sends_no_files(url: str):
    code = "import os\nopen('f', 'w').write('early')\nif os.fork() == 0: os._exit(0)\nos.wait()\n"
    answer = run(url, code + "open('f', 'w').write('late')", fetch_files=["f"])
    assert answer.files == {"f": base64.b64encode(b"late").decode()}


# ------------------------------------------------------------------ verl's code reward


@pytest.mark.parametrize("end", ["print(n + 1)", "print(n + 1)\n[n, n + 1]"])
def test_verls_code_reward_reads_what_was_printed(url: str, end: str):
    cases = {"inputs": ["1\n", "41\n", "5\n"], "outputs": ["2\n", "42\n", "7\n"]}
    results, metadata = verl_client.check_correctness(f"{url}/run_code", cases, f"n = int(input())\n{end}", timeout=10)
    assert results == [True, True, False]
    assert [entry["status"] for entry in metadata] == ["success", "success", "wrong_answer"]


# ------------------------------------------------------------------------ the protocol


def test_each_field_of_a_request_and_of_a_result_arrives():
    limits: Any = {"run_timeout_s": 2.5, "memory_limit_mb": 77, "fetch_files": ("b", "c"), "files": {"a": b"\xff"}}
    request = ExecRequest(code="x", stdin="é", session="s", notebook=True, **limits)
    sent = RunCodeRequest.from_request(request).model_dump_json()
    assert RunCodeRequest.model_validate_json(sent).to_request() == request
    plain = RunCodeRequest(code="x", language="python").to_request()
    assert plain == ExecRequest(code="x", run_timeout_s=10.0, memory_limit_mb=1024, notebook=False)
    kept = {"stdout": "o", "stderr": "e", "run_s": 0.5, "queue_s": 0.25, "cpu_s": 0.125, "files": {"b": b"\xfe"}}
    kept |= {"stdout_dropped_bytes": 1, "stderr_dropped_bytes": 2, "level": Level.LANDLOCK, "session_restarted": True}
    for status, code in (("finished", 3), ("time_limit", None), ("memory_limit", None)):
        result = ExecResult(status=status, return_code=code, **kept)  # type: ignore[arg-type]
        answer = RunCodeResponse.from_result(result).model_dump_json()
        assert RunCodeResponse.model_validate_json(answer).to_result(round_trip_s=9.0) == result
    ran = CommandRunResult(status="Finished", execution_time=1.5, return_code=1, stderr="e")
    of_another = RunCodeResponse(status="Failed", run_result=ran).to_result(round_trip_s=2.0)
    assert of_another == ExecResult(status="finished", return_code=1, stdout="", stderr="e", run_s=1.5, queue_s=0.5)


def test_ping_reports_the_level(url: str):
    answer = httpx.get(f"{url}/v1/ping")
    assert (answer.status_code, answer.json()) == (200, "pong")
    level = post(url, code="1").json()["retool"]["level"]
    assert level == answer.headers["x-sandbox-level"] in ("namespaces", "landlock", "rlimits")
    told = CliRunner().invoke(commands.app, ["ping", url])
    assert (told.exit_code, told.output) == (0, f"{url} runs at level {level}\n")


@pytest.mark.parametrize(
    "fields, reason",
    [
        ({"code": 5}, "code: Input should be a valid string"),
        ({"code": "1", "language": "cpp"}, "language: Input should be 'python'"),
        ({"code": "1", "memory_limit_MB": -5}, "memory_limit_mb = -5 is not a positive number"),
        ({"code": "1", "files": {"../../x": "aGk="}}, "does not stay inside the working directory"),
        ({"code": "1", "files": {"x": "no base64!"}}, "files.x: Value error, Only base64 data is allowed"),
    ],
)
def test_an_invalid_request_is_refused_in_sandboxfusions_form(url: str, fields: dict[str, object], reason: str):
    answer = post(url, **fields)
    assert answer.status_code == 422
    body = answer.json()
    assert (body["status"], body["run_result"]) == ("SandboxError", None)
    assert reason in body["message"]


@pytest.mark.parametrize("body", [b"[1]", b"\xff\xfe", b"[" * 200_000])
def test_a_body_that_is_not_a_request_gets_a_422(url: str, body: bytes):
    answer = httpx.post(f"{url}/run_code", content=body)
    assert (answer.status_code, answer.json()["status"]) == (422, "SandboxError")


def test_a_huge_body_gets_a_413(url: str):
    answer = httpx.post(f"{url}/run_code", content=b"x" * (49 << 20), timeout=300)
    assert answer.status_code == 413 and "larger than" in answer.json()["message"]


def test_an_execution_is_killed_when_its_client_disconnects(url: str):
    name = f"rt-hangup-{os.getpid() % 10_000}"
    code = f"import ctypes, time\nctypes.CDLL(None).prctl(15, b'{name}', 0, 0, 0)\ntime.sleep(60)"
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{url}/run_code", json={"code": code, "language": "python", "run_timeout": 60}, timeout=0.7)
    until(lambda: not processes_named(name), limit_s=10)


# ----------------------------------------------------------------------------- our client


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
        assert (await remote.execute("import os; os._exit(3)", session="a b/c")).return_code == 3
        restarted = [(await remote.execute("1", session="a b/c")).session_restarted for _ in range(2)]
        assert restarted == [True, False]
        await remote.end_session("a b/c")
    async with open_sandbox(url, min_level="rlimits") as remote:
        with pytest.raises(ConfigError, match="without sessions"):
            await remote.execute("1", session="a")


# ------------------------------------------------------------------------------ refusals


async def test_only_requests_with_the_token_are_served(strongest: LocalSandbox, monkeypatch: pytest.MonkeyPatch):
    async with served(strongest, token=TOKEN) as url, httpx.AsyncClient(base_url=url) as http:
        for headers in ({}, {"authorization": TOKEN}, {"authorization": "Bearer " + TOKEN[:-1]}):
            for answer in (
                await http.post("/run_code", json=RUN, headers=headers),
                await http.get("/v1/ping", headers=headers),
                await http.delete("/v1/sessions/a", headers=headers),
            ):
                assert (answer.status_code, answer.json()["status"]) == (401, "SandboxError")
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        writer.write(HALF)
        async with asyncio.timeout(5):  # before the body has arrived
            assert (await reader.readline()).startswith(b"HTTP/1.1 401")
        writer.close()
        monkeypatch.setenv("RETOOL_SANDBOX_TOKEN", TOKEN)
        async with open_sandbox(url, min_level="rlimits") as remote:
            assert (await remote.execute("6 * 7")).stdout == "42\n"


async def test_requests_of_web_pages_are_refused(strongest: LocalSandbox):
    async with served(strongest, only_local=True) as url, httpx.AsyncClient(base_url=url) as http:
        port = url.rsplit(":", 1)[1]

        async def status(**headers: str) -> int:
            return (await http.post("/run_code", json=RUN, headers=headers)).status_code

        for origin in ("https://evil.example", "null", url):
            assert await status(origin=origin) == 403
        for content_type in ("text/plain", "application/x-www-form-urlencoded"):
            assert await status(**{"content-type": content_type}) == 415
        assert await status(**{"content-type": "application/json; charset=utf-8"}) == 200
        for path in ("/v1/ping", "/health"):  # a web page can point its own name at this machine
            assert (await http.get(path, headers={"host": f"localhost:{port}"})).status_code == 200
            assert (await http.get(path, headers={"host": f"evil.example:{port}"})).status_code == 403
        for path in ("/docs", "/redoc", "/openapi.json", "/metrics"):
            assert (await http.get(path)).status_code == 404


def test_a_token_is_read_from_a_file_or_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("RETOOL_SANDBOX_TOKEN", raising=False)
    assert read_token(None) is None
    path = tmp_path / "token"
    path.write_text(TOKEN + "\n")
    assert read_token(path) == TOKEN
    for bad in ("short", "sixteen characters and spaces", "sixteen-charactérs"):
        path.write_text(bad)
        with pytest.raises(ConfigError, match="openssl rand"):
            read_token(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_token(tmp_path / "missing")
    monkeypatch.setenv("RETOOL_SANDBOX_TOKEN", TOKEN)
    assert read_token(None) == TOKEN


def test_an_open_address_without_a_token_gets_a_warning(tmp_path: Path):
    path = tmp_path / "token"
    path.write_text(TOKEN)
    for options, warned in ([], True), (["--token-file", str(path)], False):
        server, _ = start("--port", "0", "--workers", "1", "--host", "0.0.0.0", *options)
        server.terminate()
        assert ("everyone who can reach this port can run code" in server.communicate(timeout=300)[1]) == warned


# --------------------------------------------------------------------- slow and many clients


async def test_incomplete_bodies_delay_nobody_and_time_out(strongest: LocalSandbox, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(app, "BODY_TIMEOUT_S", 1.0)
    async with served(strongest) as url, httpx.AsyncClient(base_url=url) as http:
        port = int(url.rpartition(":")[2])
        connections = [await asyncio.open_connection("127.0.0.1", port) for _ in range(6)]
        for _, writer in connections:
            writer.write(HALF)
        connections.pop()[1].transport.abort()
        assert (await http.post("/run_code", json=RUN)).json()["run_result"]["stdout"] == "42\n"
        async with asyncio.timeout(30):
            assert [await reader.readline() for reader, _ in connections] == [b"HTTP/1.1 408 Request Timeout\r\n"] * 5
        for _, writer in connections:
            writer.close()


def test_a_server_bounds_its_connections_by_its_descriptors():
    """With a limit of 160 open files, 16 connections are left, which is the minimum."""
    command = [sys.executable, "-m", "retool_mcore.sandbox", "serve", "--min-level", "rlimits", "--port", "0"]
    server = subprocess.Popen(
        [*command, "--workers", "1"], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (160, 160)),  # noqa: PLW1509  one thread
    )  # fmt: skip
    assert server.stdout is not None
    url = server.stdout.readline().strip()
    try:
        connections = [socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) for _ in range(20)]
        assert httpx.get(f"{url}/v1/ping", timeout=60).status_code == 503
        for connection in connections:
            connection.close()
        until(lambda: httpx.get(f"{url}/v1/ping", timeout=60).status_code == 200, limit_s=60)
        assert post(url, code="1").json()["status"] == "Success"
    finally:
        stop(server)


@pytest.mark.parametrize("frame", ["'=cII', b'N', 4, 0", "'=cI', b'?', 0"])
async def test_forged_frames_do_not_delay_others(strongest: LocalSandbox, frame: str):
    """Frames with the same file again, and of an unknown kind."""
    code = f"import os, struct\nframes = struct.pack({frame}) * 100_000\n"
    code += "try:\n  for _ in range(60): os.write(3, frames)\nexcept OSError: pass"
    call = asyncio.ensure_future(strongest.execute(code, fetch_files=["a"], run_timeout_s=5))
    stall_s = await longest_stall_s(call)
    assert len((await call).files) <= 1
    assert stall_s < 0.2


# ------------------------------------------------------------------------------- operation


async def test_health_fails_after_three_failures_and_recovers(monkeypatch: pytest.MonkeyPatch):
    async with LocalSandbox(min_level=Level.RLIMITS, max_level=Level.RLIMITS, workers=1) as sandbox:
        transport = httpx.ASGITransport(app.create_app(sandbox))
        async with httpx.AsyncClient(transport=transport, base_url="http://sandbox") as http:
            assert (await http.get("/health")).json() == {"status": "ok", "level": "rlimits", "workers": 1}

            async def refuse(*_: object, **__: object) -> object:
                raise SandboxUnavailable("no free process")

            for _ in range(2):  # two failures, a result, two failures: never three in a row
                with monkeypatch.context() as broken:
                    broken.setattr(sandbox._light[0], "spawn", refuse)  # pyright: ignore[reportPrivateUsage]
                    for _ in range(2):
                        await http.post("/run_code", json={"code": "1", "language": "python"})
                    assert (await http.get("/health")).status_code == 200
                answer = await http.post("/run_code", json={"code": "1", "language": "python"})
                assert answer.json()["status"] == "Success"
            with monkeypatch.context() as broken:
                broken.setattr(sandbox._light[0], "spawn", refuse)  # pyright: ignore[reportPrivateUsage]
                for _ in range(3):
                    answer = await http.post("/run_code", json={"code": "1", "language": "python"})
                    assert (answer.status_code, answer.json()["status"]) == (200, "SandboxError")
                answer = await http.get("/health")
                body = answer.json()
                assert (answer.status_code, body["status"], body["reason"]) == (503, "failing", "no free process")
            assert (await http.get("/health")).status_code == 200


async def test_executions_have_a_lower_priority_than_the_trainer():
    before = os.getpriority(os.PRIO_PROCESS, 0)
    async with LocalSandbox(min_level=Level.RLIMITS, workers=1) as sandbox:
        result = await sandbox.execute("import os; print(os.getpriority(os.PRIO_PROCESS, 0))")
        assert result.stdout == "5\n"
        for pid in children_of(os.getpid(), "retool_mcore.sandbox.supervisor.zygote"):
            assert Path(f"/proc/{pid}/oom_score_adj").read_text() == "1000\n"
            if (autogroup := Path(f"/proc/{pid}/autogroup")).exists():
                assert autogroup.read_text().endswith("nice 5\n")
    assert os.getpriority(os.PRIO_PROCESS, 0) == before


def test_all_executions_together_have_a_small_cpu_weight(tmp_path: Path):
    for name in ("cgroup.subtree_control", "cpu.weight"):
        (tmp_path / name).write_text("100")
    with contextlib.suppress(FileNotFoundError):  # of the other files of a cgroup
        MemoryCgroup(tmp_path, 2).set_up()
    assert (tmp_path / "cpu.weight").read_text() == "10"


def stdout_of(url: str) -> str:
    return str(post(url, code="print(6 * 7)").json()["run_result"]["stdout"])


@pytest.mark.long
@pytest.mark.parametrize("kill_signal", [signal.SIGKILL, signal.SIGSTOP])
def test_two_processes_share_an_address_and_dead_ones_are_replaced(kill_signal: signal.Signals):
    server, url = start("--port", "0", "--workers", "2", "--processes", "2")
    try:
        assert {stdout_of(url) for _ in range(20)} == {"42\n"}
        pids = children_of(server.pid, "spawn_main")
        assert len(pids) == 2
        os.kill(pids[0], kill_signal)
        until(lambda: stdout_of(url) == "42\n", limit_s=60)  # the other process serves
        until(lambda: len(set(children_of(server.pid, "spawn_main")) - set(pids)) == 1, limit_s=120)
        pids = children_of(server.pid, "spawn_main")
    finally:
        stop(server)
    assert server.returncode == 0
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_processes_end_with_their_parent_and_leave_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    server, url = start("--port", "0", "--workers", "2", "--processes", "2")
    assert stdout_of(url) == "42\n"
    assert not remove_stale(tmp_path, young_s=0)  # those in use stay
    pids = children_of(server.pid, "spawn_main")
    server.kill()
    server.communicate()
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/v1/ping")
    assert remove_stale(tmp_path, young_s=0) and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--workers", "2", "--processes", "3"], "processes = 3 is too high for workers = 2"),
        (["--workers", "2", "--processes", "2", "--sessions", "4"], "sessions need --processes 1"),
        (["--workers", "2", "--processes", "2", "--python", "/nowhere/python"], "python' cannot be started"),
    ],
)
def test_a_wrong_option_prints_one_error(options: list[str], message: str):
    command = [sys.executable, "-m", "retool_mcore.sandbox", "serve", "--port", "0", "--min-level", "rlimits"]
    done = subprocess.run([*command, *options], cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 2 and done.stderr.count(message) == 1
    assert "Traceback" not in done.stderr


def test_serve_stops_cleanly_and_removes_its_socket(tmp_path: Path):
    path = tmp_path / "s.sock"
    server, _ = start("--socket", str(path))
    assert path.stat().st_mode & 0o777 == 0o600
    command = [sys.executable, "-m", "retool_mcore.sandbox", "serve", "--min-level", "rlimits", "--socket", str(path)]
    second = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert second.returncode == 2 and second.stderr.startswith("error: cannot listen on the Unix socket")
    assert path.exists(), "the second server removed the socket of the first"
    stop(server)
    assert not path.exists()


def test_a_port_in_use_prints_one_line(url: str):
    command = [sys.executable, "-m", "retool_mcore.sandbox", "serve", "--port", url.rsplit(":", 1)[1]]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert result.returncode == 2
    assert result.stderr.startswith("error: cannot listen on 127.0.0.1:") and len(result.stderr.splitlines()) == 1


def test_the_launcher_prints_the_url_runs_the_command_and_stops(tmp_path: Path):
    launcher = ["bash", "launch/sandbox.sh", "--port", "0", "--min-level", "rlimits", "--"]
    command = [*launcher, "bash", "-c", 'echo "URL $SANDBOX_URL"; exit 7']
    environment = dict(os.environ, PYTHON=sys.executable, TMPDIR=str(tmp_path))
    result = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=300
    )
    first, second = result.stdout.splitlines()
    assert (result.returncode, second) == (7, f"URL {first}")
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{first}/v1/ping")
    assert list(tmp_path.iterdir()) == []
