"""Who may ask the server, and what it spends on those who take its connections and its time."""

import asyncio
import contextlib
import itertools
import os
import resource
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from retool_mcore.errors import ConfigError, SandboxUnavailable
from retool_mcore.sandbox import open_sandbox
from retool_mcore.sandbox.base import ExecResult, Level
from retool_mcore.sandbox.server.app import create_app
from retool_mcore.sandbox.server.wire import is_loopback, read_token
from retool_mcore.sandbox.supervisor.local import LocalSandbox
from tests.sandbox.test_server import ROOT, start, stop

TOKEN = "a-token-of-thirty-two-characters"
RUN = {"code": "print(6 * 7)", "language": "python"}


@contextlib.asynccontextmanager
async def served(sandbox: LocalSandbox, *, connections: int = 100, **options: object) -> AsyncIterator[str]:
    """The server on a free port, in this process."""
    with socket.create_server(("127.0.0.1", 0), backlog=4096) as listener:
        app = create_app(sandbox, **options)  # type: ignore[arg-type]
        config = uvicorn.Config(
            app,
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


@pytest.fixture(scope="module")
async def sandbox() -> AsyncIterator[LocalSandbox]:
    async with LocalSandbox(min_level=Level.RLIMITS, workers=1) as opened:
        yield opened


# ------------------------------------------------------------------- who asks


async def test_only_the_tokens_bearer_is_served(sandbox: LocalSandbox, monkeypatch: pytest.MonkeyPatch):
    async with served(sandbox, token=TOKEN) as url, httpx.AsyncClient(base_url=url) as http:
        for headers in ({}, {"authorization": TOKEN}, {"authorization": "Bearer " + TOKEN[:-1]}):
            for answer in (
                await http.post("/run_code", json=RUN, headers=headers),
                await http.get("/v1/ping", headers=headers),
                await http.get("/metrics", headers=headers),
                await http.delete("/v1/sessions/a", headers=headers),
            ):
                assert (answer.status_code, answer.json()["status"]) == (401, "SandboxError")
        answer = await http.post("/run_code", json=RUN, headers={"Authorization": f"bearer {TOKEN}"})
        assert answer.json()["run_result"]["stdout"] == "42\n"
        monkeypatch.setenv("RETOOL_SANDBOX_TOKEN", TOKEN)
        async with open_sandbox(url, min_level="rlimits") as remote:
            assert (await remote.execute("6 * 7")).stdout.strip() in ("42", "")


async def test_no_web_page_may_ask(sandbox: LocalSandbox):
    async with served(sandbox) as url, httpx.AsyncClient(base_url=url) as http:

        async def status(**headers: str) -> int:
            return (await http.post("/run_code", json=RUN, headers=headers)).status_code

        assert await status() == 200
        for origin in ("https://evil.example", "null", url):
            assert await status(origin=origin) == 403
        assert await status(origin="http://rebound.example", host="rebound.example") == 403
        for content_type in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
            assert await status(**{"content-type": content_type}) == 415
        assert await status(**{"content-type": "application/json; charset=utf-8"}) == 200
        assert 'retool_sandbox_refused_total{code="403"} 4.0' in (await http.get("/metrics")).text


async def test_a_server_on_loopback_answers_under_no_other_name(sandbox: LocalSandbox):
    """A web page can make its own name lead to this machine."""
    async with served(sandbox, only_local=True) as url, httpx.AsyncClient(base_url=url) as http:
        port = url.rsplit(":", 1)[1]
        for path in ("/v1/ping", "/health", "/metrics"):
            assert (await http.get(path)).status_code == 200
            assert (await http.get(path, headers={"host": f"localhost:{port}"})).status_code == 200
            assert (await http.get(path, headers={"host": f"evil.example:{port}"})).status_code == 403
        for path in ("/docs", "/redoc", "/openapi.json"):
            assert (await http.get(path)).status_code == 404


def test_a_token_is_read_from_a_file_or_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("RETOOL_SANDBOX_TOKEN", raising=False)
    assert read_token(None) is None
    path = tmp_path / "token"
    path.write_text(TOKEN + "\n")
    assert read_token(path) == TOKEN
    for bad in ("short", "", "sixteen characters and spaces", "sixteen-charactérs"):
        path.write_text(bad)
        with pytest.raises(ConfigError, match="openssl rand"):
            read_token(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_token(tmp_path / "missing")
    monkeypatch.setenv("RETOOL_SANDBOX_TOKEN", TOKEN)
    assert read_token(None) == TOKEN


def test_an_open_address_without_a_token_is_warned_of(tmp_path: Path):
    path = tmp_path / "token"
    path.write_text(TOKEN)
    for options, warned in ((["--host", "0.0.0.0"], True), (["--host", "0.0.0.0", "--token-file", str(path)], False)):
        server, _ = start("--port", "0", "--workers", "1", *options)
        server.terminate()
        assert ("whoever reaches this port runs code here" in server.communicate(timeout=300)[1]) == warned
    assert [is_loopback(host) for host in ("127.0.0.1", "127.9.9.9", "::1", "localhost")] == [True] * 4
    assert [is_loopback(host) for host in ("0.0.0.0", "::", "10.0.0.1", "node1")] == [False] * 4


# ------------------------------------------------------------ connections, load


@pytest.mark.long
async def test_above_the_limit_of_connections_a_newcomer_is_answered_at_once(sandbox: LocalSandbox):
    slow = {"code": "import time; time.sleep(3)", "language": "python"}
    async with served(sandbox, connections=5) as url, httpx.AsyncClient(base_url=url) as http:
        calls = [asyncio.ensure_future(http.post("/run_code", json=slow, timeout=300)) for _ in range(4)]
        await asyncio.sleep(0.5)
        answers = [await http.post("/run_code", json=RUN) for _ in range(3)]
        assert [answer.status_code for answer in answers] == [503] * 3
        assert not any(call.done() for call in calls), "the newcomers waited for a connection"
        assert [(await call).status_code for call in calls] == [200] * 4
        assert (await http.post("/run_code", json=RUN)).status_code == 200


async def test_a_client_waits_where_the_server_has_no_connection_left(sandbox: LocalSandbox):
    async with served(sandbox, connections=4) as url, open_sandbox(url, min_level="rlimits") as remote:
        results = await asyncio.gather(*(remote.execute("import time; time.sleep(0.3); 7") for _ in range(8)))
    assert [result.stdout for result in results] == ["7\n"] * 8


def limited(soft: int) -> Callable[[], None]:
    return lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, soft))


def test_a_server_bounds_its_connections_by_its_descriptors():
    """160 open files leave 16 connections: the least."""
    command = [sys.executable, "-m", "retool_mcore.sandbox", "serve", "--min-level", "rlimits", "--port", "0"]
    server = subprocess.Popen(
        [*command, "--workers", "1"], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=limited(160),  # noqa: PLW1509  this process has one thread here
    )  # fmt: skip
    assert server.stdout is not None
    url = server.stdout.readline().strip()
    try:
        port = int(url.rpartition(":")[2])
        held = [socket.create_connection(("127.0.0.1", port)) for _ in range(20)]
        assert httpx.get(f"{url}/v1/ping", timeout=60).status_code == 503
        for connection in held:
            connection.close()
        time.sleep(0.5)
        assert httpx.post(f"{url}/run_code", json=RUN, timeout=60).json()["status"] == "Success"
    finally:
        stop(server)


def with_free_descriptors(count: int) -> int:
    """A limit with so many free numbers below it: other tests leave gaps and high ones."""
    taken = {int(name) for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}")}
    free = (number for number in itertools.count() if number not in taken)
    return next(itertools.islice(free, count - 1, None)) + 1


@pytest.mark.long
async def test_a_lack_of_descriptors_is_an_outage_that_is_retried(monkeypatch: pytest.MonkeyPatch):
    """It ends with the first attempt: the time between attempts is drawn, and may be none."""
    async with LocalSandbox(min_level=Level.RLIMITS, workers=1) as sandbox:
        await sandbox.execute("1")
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        attempt = sandbox._execute_once  # pyright: ignore[reportPrivateUsage]
        refused: list[Exception] = []

        async def execute_once(*arguments: Any) -> ExecResult:
            try:
                return await attempt(*arguments)
            except (OSError, SandboxUnavailable) as error:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
                refused.append(error)
                raise

        monkeypatch.setattr(sandbox, "_execute_once", execute_once)
        resource.setrlimit(resource.RLIMIT_NOFILE, (with_free_descriptors(4), hard))
        try:
            assert (await sandbox.execute("print(6 * 7)")).stdout == "42\n"
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert len(refused) == 1


# ---------------------------------------------------- the event loop goes on


async def stalls_of(call: asyncio.Future[object]) -> float:
    """The longest work that the event loop did for nobody else while ``call`` was under way.

    Its thread's own: on a busy machine it also waits for a core.
    """
    longest_s = 0.0
    while not call.done():
        before = time.thread_time()
        await asyncio.sleep(0.002)
        longest_s = max(longest_s, time.thread_time() - before)
    return longest_s


FORGED = {
    "files nobody asked for": "struct.pack('=cII', b'N', 4, 9) * 100_000",
    "the same file": "struct.pack('=cII', b'N', 4, 0) * 100_000",
    "unknown frames": "struct.pack('=cI', b'?', 0) * 100_000",
}


@pytest.mark.parametrize("frames", FORGED.values(), ids=FORGED)
async def test_forged_frames_cost_others_nothing(sandbox: LocalSandbox, frames: str):
    code = (
        f"import os, struct\nframes = {frames}\ntry:\n  for _ in range(60): os.write(3, frames)\nexcept OSError: pass"
    )
    call = asyncio.ensure_future(sandbox.execute(code, fetch_files=["a"], run_timeout_s=5))
    stall_s = await stalls_of(call)  # type: ignore[arg-type]
    assert len((await call).files) <= 1
    assert stall_s < 0.2
