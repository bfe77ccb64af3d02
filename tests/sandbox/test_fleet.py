"""One client of several servers: no call is lost when servers die, break or restart."""

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from retool_mcore.errors import ConfigError, SandboxUnavailable
from retool_mcore.sandbox import client as clients
from retool_mcore.sandbox.base import Level
from retool_mcore.sandbox.client import RemoteSandbox

# ------------------------------------------------- scripted servers


@dataclass
class ScriptedServer:
    """A server without a sandbox. The test sets its answers; it counts requests."""

    ping: Callable[[], Awaitable[str]]
    run: Callable[[], Awaitable[str]]
    headers: str = "x-sandbox-level: namespaces\r\n"
    num_pings: int = 0
    num_calls: int = 0
    num_at_once: int = 0
    most_at_once: int = 0
    url: str = ""
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while line := await reader.readline():
                length = 0
                while (header := await reader.readline()) not in (b"\r\n", b""):
                    if header.lower().startswith(b"content-length:"):
                        length = int(header.split(b":")[1])
                await reader.readexactly(length)
                text = await (self._ping() if b"ping" in line else self._run())
                status, _, body = text.partition(" ")
                head = f"HTTP/1.1 {status} x\r\n{self.headers}content-length: {len(body)}\r\n\r\n"
                writer.write((head + body).encode())
                await writer.drain()
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    async def _ping(self) -> str:
        self.num_pings += 1
        return await self.ping()

    async def _run(self) -> str:
        self.num_calls += 1
        self.num_at_once += 1
        self.most_at_once = max(self.most_at_once, self.num_at_once)
        try:
            return await self.run()
        finally:
            self.num_at_once -= 1


RESULT = {"status": "Success", "run_result": {"status": "Finished", "return_code": 0, "stdout": "ran\n"}}


async def pong() -> str:
    return '200 "pong"'


async def ran() -> str:
    return "200 " + json.dumps(RESULT)


async def slowly() -> str:
    await asyncio.sleep(0.05)
    return await ran()


async def never() -> str:
    await asyncio.sleep(3600)
    return ""


async def broken() -> str:
    return "500 out of order"


async def dies() -> str:
    raise ConnectionError  # closes the connection without an answer


@asynccontextmanager
async def listening(*servers: ScriptedServer) -> AsyncIterator[Sequence[ScriptedServer]]:
    opened = [await asyncio.start_server(server.answer, "127.0.0.1", 0) for server in servers]
    for server, listener in zip(servers, opened, strict=True):
        server.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    try:
        yield servers
    finally:
        for listener in opened:
            listener.close()


def dead_url() -> str:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        return f"http://127.0.0.1:{unused.getsockname()[1]}"


@asynccontextmanager
async def client(*servers: ScriptedServer | str, **options: Any) -> AsyncIterator[RemoteSandbox]:
    urls = [server if isinstance(server, str) else server.url for server in servers]
    async with RemoteSandbox(urls, **options) as sandbox:
        yield sandbox


async def test_the_client_opens_only_if_half_of_the_servers_answer(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(clients, "_CONNECT_TIMEOUT_S", 0.5)
    async with listening(ScriptedServer(pong, ran), ScriptedServer(never, ran)) as (well, hung):
        async with client(well, hung) as sandbox:
            assert (await sandbox.execute("1")).ok
            hung.ping = pong  # the client calls the missing server as soon as it is the least busy
            async with asyncio.timeout(15):
                while not hung.num_calls:
                    await asyncio.gather(*(sandbox.execute("1") for _ in range(4)))
        with pytest.raises(SandboxUnavailable, match="1 of 3 sandboxes answer, but half are needed"):
            async with client(well, dead_url(), dead_url(), attempts=1):
                pass
        weak = ScriptedServer(pong, ran, headers="x-sandbox-level: rlimits\r\n")
        async with listening(weak):
            with pytest.raises(ConfigError, match="below min_level = 'namespaces'"):
                async with RemoteSandbox([well.url, weak.url], min_level=Level.NAMESPACES):
                    pass


async def test_the_calls_in_flight_are_bounded_and_the_least_busy_server_is_next():
    async with (
        listening(*(ScriptedServer(pong, slowly) for _ in range(4))) as servers,
        client(*servers, workers_per_url=3) as sandbox,
    ):
        await asyncio.gather(*(sandbox.execute("1") for _ in range(120)))
        assert all(server.most_at_once == 3 for server in servers)
        assert min(server.num_calls for server in servers) >= 20


@pytest.mark.parametrize("fails", [broken, dies])
async def test_a_server_that_fails_calls_but_answers_pings_gets_no_calls_for_a_while(fails: Any):
    async with (
        listening(ScriptedServer(pong, fails), ScriptedServer(pong, ran)) as (bad, good),
        client(bad, good) as sandbox,
    ):
        for _ in range(100):
            assert (await sandbox.execute("1")).stdout == "ran\n"
        assert 1 <= bad.num_calls <= 3
        assert good.num_calls == 100
        bad.run = ran
        async with asyncio.timeout(10):
            while bad.num_calls <= 3:
                await sandbox.execute("1")
                await asyncio.sleep(0.02)


async def test_a_busy_server_is_retried_and_not_counted_as_failed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(clients, "_BUSY_PAUSE_S", (0.05, 0.1))

    async def busy() -> str:
        return "503 try again later"

    async with listening(ScriptedServer(pong, busy)) as (full,), client(full, attempts=1) as sandbox:
        call = asyncio.ensure_future(sandbox.execute("1"))
        async with asyncio.timeout(30):
            while full.num_calls < 3:
                await asyncio.sleep(0.01)
        full.run = ran
        assert (await call).ok


async def test_a_server_that_comes_back_at_a_weaker_level_gets_no_calls():
    well, other = ScriptedServer(pong, ran), ScriptedServer(pong, broken)
    async with listening(well, other), client(well, other, min_level=Level.NAMESPACES) as sandbox:
        while not other.num_calls:
            await sandbox.execute("1")
        other.headers, other.run, before = "x-sandbox-level: rlimits\r\n", ran, other.num_calls
        sandbox._servers[1].paused_until = 0.0  # pyright: ignore[reportPrivateUsage]
        async with asyncio.timeout(15):
            while other.num_pings < 2:
                assert (await sandbox.execute("1")).ok
        assert other.num_calls == before


async def test_a_refused_request_is_not_retried():
    async def refused() -> str:
        return "422 no such file"

    async with (
        listening(ScriptedServer(pong, refused), ScriptedServer(pong, refused)) as servers,
        client(*servers) as sandbox,
    ):
        with pytest.raises(ConfigError, match="no such file"):
            await sandbox.execute("1")
        assert sum(server.num_calls for server in servers) == 1


@pytest.mark.parametrize("level", ["", "x-sandbox-level: strong\r\n"], ids=["none", "unknown"])
async def test_a_server_without_a_level_is_accepted_only_at_rlimits(level: str):
    async with listening(ScriptedServer(pong, ran, headers=level)) as servers:
        for least in (Level.LANDLOCK, Level.NAMESPACES):
            with pytest.raises(ConfigError, match=f"runs at level 'none', below min_level = '{least}'"):
                async with client(*servers, min_level=least) as sandbox:
                    await sandbox.execute("1")
        assert servers[0].num_calls == 0
        async with client(*servers, min_level=Level.RLIMITS) as sandbox:
            assert (await sandbox.execute("1")).stdout == "ran\n"


SESSIONS = "x-sandbox-level: namespaces\r\nx-sandbox-sessions: 2\r\n"


async def test_an_answer_may_take_the_run_timeout_and_the_wait_in_the_queue(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(clients, "_QUEUE_ALLOWANCE_S", 0.3)
    async with listening(ScriptedServer(pong, never)) as servers, client(*servers, attempts=1) as sandbox:
        began_s = time.monotonic()
        with pytest.raises(SandboxUnavailable, match="did not answer a call: ReadTimeout"):
            await sandbox.execute("1", run_timeout_s=0.5)
        assert 0.8 <= time.monotonic() - began_s < 3.0


async def test_a_failed_call_of_a_session_is_not_retried():
    """Its code may have run and changed the session."""
    servers = [ScriptedServer(pong, broken, headers=SESSIONS) for _ in range(2)]
    async with listening(*servers), client(*servers, sessions=True, attempts=5) as sandbox:
        with pytest.raises(SandboxUnavailable):
            await sandbox.execute("x += 1", session="a")
        assert sum(server.num_calls for server in servers) == 1


async def test_a_cancelled_call_frees_its_place():
    async with listening(ScriptedServer(pong, never)) as (server,), client(server, workers_per_url=1) as sandbox:
        calls = [asyncio.ensure_future(sandbox.execute("1")) for _ in range(5)]
        await asyncio.sleep(0.2)
        for call in calls:
            call.cancel()
        assert all(
            isinstance(got, asyncio.CancelledError) for got in await asyncio.gather(*calls, return_exceptions=True)
        )
        server.run = ran
        async with asyncio.timeout(30):  # a place that was not freed would block this call
            assert (await sandbox.execute("1")).ok


async def test_an_answer_of_another_service_counts_as_an_outage():
    async def no_result() -> str:
        return '200 {"status": "Success"}'

    async with listening(ScriptedServer(pong, no_result)) as servers, client(*servers, attempts=2) as sandbox:
        with pytest.raises(SandboxUnavailable, match="without a run_result"):
            await sandbox.execute("1")
