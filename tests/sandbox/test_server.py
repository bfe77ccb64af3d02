"""The server speaks SandboxFusion's protocol to third-party clients.

It refuses unauthorised requests and survives invalid ones.
"""

import base64
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import sandbox_fusion
from typer.testing import CliRunner

from retool_mcore.errors import ConfigError, SandboxUnavailable
from retool_mcore.sandbox import open_sandbox
from retool_mcore.sandbox.base import ExecRequest, ExecResult, Level
from retool_mcore.sandbox.client import RemoteServer
from retool_mcore.sandbox.server import app
from retool_mcore.sandbox.server import command as commands
from retool_mcore.sandbox.server.wire import CommandRunResult, RunCodeRequest, RunCodeResponse, read_token
from retool_mcore.sandbox.supervisor.local import LocalSandbox
from retool_mcore.sandbox.supervisor.slots import MemoryCgroup, remove_stale
from tests.sandbox.sandbox_helpers import ROOT, SERVE, children_of, named, processes_named, start

verl_client: Any = pytest.importorskip("verl.utils.reward_score.sandbox_fusion.utils")

TOKEN = "a-token-of-thirty-two-characters"
RUN = {"code": "print(6 * 7)", "language": "python"}


def stop(server: subprocess.Popen[str]) -> None:
    server.terminate()
    server.communicate(timeout=300)


def until(condition: Callable[[], object], limit_s: float) -> None:
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


def http_of(sandbox: LocalSandbox, **options: Any) -> httpx.AsyncClient:
    """Return a client of a server in this process."""
    transport = httpx.ASGITransport(app.create_app(sandbox, **options))
    return httpx.AsyncClient(transport=transport, base_url="http://localhost:8080")


# ------------------------------------------------- sandbox-fusion and verl, unchanged


def run(url: str, code: str, **fields: Any) -> sandbox_fusion.RunCodeResponse:
    request = sandbox_fusion.RunCodeRequest(code=code, language="python", **fields)
    return sandbox_fusion.run_code(request, endpoint=url, max_attempts=1)


def test_the_public_client_runs_code_and_sees_a_time_limit(url: str):
    code = "print(input()); open('out', 'w').write(open('in').read())"
    files = {"in": base64.b64encode(b"content").decode(), "absent": None}
    answer = run(url, code, stdin="line", files=files, fetch_files=["out"])
    result = answer.run_result
    assert answer.status == sandbox_fusion.RunStatus.Success and result is not None
    assert result.status == sandbox_fusion.models.CommandRunStatus.Finished
    assert (result.stdout, result.stderr, result.return_code) == ("line\n", "", 0)
    assert answer.files == {"out": base64.b64encode(b"content").decode()}
    assert result.execution_time is not None and 0 < result.execution_time < 5
    slow = run(url, "print('a')\nwhile 1: pass", run_timeout=0.5)
    assert slow.status == sandbox_fusion.RunStatus.Failed and slow.run_result is not None
    assert slow.run_result.status == sandbox_fusion.models.CommandRunStatus.TimeLimitExceeded
    assert (slow.run_result.return_code, slow.run_result.stdout) == (None, "a\n")


def test_a_program_is_a_plain_script(url: str):
    code = "# first line\nimport os\nprint(open(__file__).readline() + 'x' * 300_000)\n"
    answer = run(url, code + "print(os.path.isabs(__file__), os.path.dirname(__file__) == os.getcwd())")
    assert answer.run_result is not None
    assert answer.run_result.stdout == f"# first line\n{'x' * 300_000}\nTrue True\n"


def test_verls_code_reward_reads_what_was_printed(url: str):
    cases = {"inputs": ["1\n", "41\n", "5\n"], "outputs": ["2\n", "42\n", "7\n"]}
    code = "n = int(input())\nprint(n + 1)\n[n, n + 1]"  # no script echoes its last line
    results, metadata = verl_client.check_correctness(f"{url}/run_code", cases, code, timeout=10)
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
    "body, reason",
    [
        (b'{"code": 5, "language": "python"}', "code: Input should be a valid string"),
        (b'{"code": "1", "language": "cpp"}', "language: Input should be 'python'"),
        (b'{"code": "1", "language": "python", "memory_limit_MB": -5}', "memory_limit_mb = -5 is not a positive"),
        (b'{"code": "1", "language": "python", "files": {"../x": "aGk="}}', "does not stay inside the working"),
        (b'{"code": "1", "language": "python", "files": {"x": "no base64!"}}', "files.x: Value error, Only base64"),
        (b"[1]", "body: "),
        (b"\xff\xfe", "not JSON"),
        (b"[" * 200_000, "not JSON"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_an_invalid_request_is_refused_in_sandboxfusions_form(url: str, body: bytes, reason: str):
    answer = httpx.post(f"{url}/run_code", content=body)
    told = answer.json()
    assert (answer.status_code, told["status"], told["run_result"]) == (422, "SandboxError", None)
    assert reason in told["message"]


def test_a_huge_body_gets_a_413(url: str):
    answer = httpx.post(f"{url}/run_code", content=b"x" * (49 << 20), timeout=300)
    assert answer.status_code == 413 and "larger than" in answer.json()["message"]


def test_an_execution_is_killed_when_its_client_disconnects(url: str):
    name = f"rt-hangup-{os.getpid() % 10_000}"
    body = {"code": named(name) + "time.sleep(60)", "language": "python", "run_timeout": 60}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{url}/run_code", json=body, timeout=0.7)
    until(lambda: not processes_named(name), limit_s=10)


async def test_our_client_gives_the_same_result_as_the_local_sandbox(url: str):
    code = "import sys\nprint('out'); print('err', file=sys.stderr); open('f', 'wb').write(b'\\x00\\xff'); 1/0"
    async with open_sandbox(url, min_level="rlimits") as remote, open_sandbox("local", min_level="rlimits") as local:
        there, here = [await s.execute(code, fetch_files=["f"]) for s in (remote, local)]
        for name in ("status", "return_code", "stdout", "stderr", "files", "level", "text"):
            assert getattr(there, name) == getattr(here, name)
        assert there.cpu_s > 0
        assert (await remote.execute("while True: pass", run_timeout_s=0.3)).status == "time_limit"
        assert (await remote.execute("'\ud800'")).return_code == 1
        big = await remote.execute("print('x' * 1_000_000)")
        assert big.stdout_dropped_bytes == 1_000_001 - (64 << 10)
        with pytest.raises(ConfigError, match="without sessions"):
            await remote.execute("1", session="a")


# ------------------------------------------------------------------------------ refusals


async def test_only_requests_with_the_token_are_served(strongest: LocalSandbox, monkeypatch: pytest.MonkeyPatch):
    async with http_of(strongest, token=TOKEN) as http:
        for headers in ({}, {"authorization": TOKEN}, {"authorization": "Bearer " + TOKEN[:-1]}):
            for answer in (
                await http.post("/run_code", json=RUN, headers=headers),
                await http.get("/v1/ping", headers=headers),
                await http.delete("/v1/sessions/a", headers=headers),
            ):
                assert (answer.status_code, answer.json()["status"]) == (401, "SandboxError")
        monkeypatch.setenv("RETOOL_SANDBOX_TOKEN", TOKEN)
        ours = RemoteServer("http://localhost:8080").http.headers
        assert (await http.post("/run_code", json=RUN, headers=ours)).json()["run_result"]["stdout"] == "42\n"


async def test_requests_of_web_pages_are_refused(strongest: LocalSandbox):
    async with http_of(strongest, only_local=True) as http:

        async def status(**headers: str) -> int:
            return (await http.post("/run_code", json=RUN, headers=headers)).status_code

        for origin in ("https://evil.example", "null", "http://localhost:8080"):
            assert await status(origin=origin) == 403
        for content_type in ("text/plain", "application/x-www-form-urlencoded"):
            assert await status(**{"content-type": content_type}) == 415
        assert await status(**{"content-type": "application/json; charset=utf-8"}) == 200
        for path in ("/v1/ping", "/health"):  # a web page can point its own name at this machine
            assert (await http.get(path)).status_code == 200
            assert (await http.get(path, headers={"host": "evil.example:8080"})).status_code == 403
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


# ------------------------------------------------------------------------------- operation


async def test_health_fails_after_three_failures_in_a_row_and_recovers(monkeypatch: pytest.MonkeyPatch):
    async def refuse(*_: object, **__: object) -> object:
        raise SandboxUnavailable("no free process")

    async with LocalSandbox(min_level=Level.RLIMITS, max_level=Level.RLIMITS, workers=1) as sandbox:
        http = http_of(sandbox)
        assert (await http.get("/health")).json() == {"status": "ok", "level": "rlimits", "workers": 1}
        for failures, code in ((2, 200), (2, 200), (3, 503)):
            with monkeypatch.context() as broken:
                broken.setattr(sandbox._light[0], "spawn", refuse)  # pyright: ignore[reportPrivateUsage]
                for _ in range(failures):
                    answer = await http.post("/run_code", json=RUN)
                    assert (answer.status_code, answer.json()["status"]) == (200, "SandboxError")
                health = await http.get("/health")
            assert health.status_code == code
            assert (await http.get("/health")).status_code == 200
            assert (await http.post("/run_code", json=RUN)).json()["status"] == "Success"
        assert (health.json()["status"], health.json()["reason"]) == ("failing", "no free process")


async def test_executions_have_a_lower_priority_than_the_trainer():
    async with LocalSandbox(min_level=Level.RLIMITS, workers=1) as sandbox:
        result = await sandbox.execute("import os; print(os.getpriority(os.PRIO_PROCESS, 0))")
        assert result.stdout == "5\n"
        for pid in children_of(os.getpid(), "retool_mcore.sandbox.supervisor.zygote"):
            assert Path(f"/proc/{pid}/oom_score_adj").read_text() == "1000\n"
            if (autogroup := Path(f"/proc/{pid}/autogroup")).exists():
                assert autogroup.read_text().endswith("nice 5\n")


def test_all_executions_together_have_a_small_cpu_weight(tmp_path: Path):
    for name in ("cgroup.subtree_control", "cpu.weight"):
        (tmp_path / name).write_text("100")
    with contextlib.suppress(FileNotFoundError):  # of the other files of a cgroup
        MemoryCgroup(tmp_path, 2).set_up()
    assert (tmp_path / "cpu.weight").read_text() == "10"


def test_processes_end_with_their_parent_and_leave_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    server, url = start("--port", "0", "--workers", "2", "--processes", "2")
    assert post(url, code="print(6 * 7)").json()["run_result"]["stdout"] == "42\n"
    assert not remove_stale(tmp_path, young_s=0), "those in use stay"
    pids = children_of(server.pid, "spawn_main")
    assert len(pids) == 2
    server.kill()
    server.communicate()
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), limit_s=300)
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/v1/ping")
    assert remove_stale(tmp_path, young_s=0) and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--workers 2 --processes 3", "processes = 3 is too high for workers = 2"),
        ("--workers 2 --processes 2 --sessions 4", "sessions need --processes 1"),
    ],
)
def test_a_wrong_option_prints_one_error(options: str, message: str):
    done = CliRunner().invoke(commands.app, ["serve", "--port", "0", *options.split()])
    assert (done.exit_code, done.stderr.count("error: "), done.stderr.count(message)) == (2, 1, 1)


def test_serve_stops_cleanly_and_removes_its_socket(tmp_path: Path):
    path = tmp_path / "s.sock"
    server, _ = start("--socket", str(path))
    assert path.stat().st_mode & 0o777 == 0o600
    command = [*SERVE, "--socket", str(path)]
    second = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert second.returncode == 2 and second.stderr.startswith("error: cannot listen on the Unix socket")
    assert path.exists(), "the second server removed the socket of the first"
    stop(server)
    assert not path.exists()


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
