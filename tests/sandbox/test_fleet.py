"""One client of several servers: no call is lost when servers die, break or restart."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from retool_mcore.errors import ConfigError, SandboxUnavailable
from retool_mcore.sandbox import client as clients
from retool_mcore.sandbox.base import Level
from retool_mcore.sandbox.client import RemoteSandbox

Client = Callable[..., RemoteSandbox]


async def ran() -> httpx.Response:
    result = {"status": "Finished", "return_code": 0, "stdout": "ran\n"}
    return httpx.Response(200, json={"status": "Success", "run_result": result})


async def slowly() -> httpx.Response:
    await asyncio.sleep(0.02)
    return await ran()


async def never() -> httpx.Response:
    await asyncio.sleep(3600)
    return await ran()


async def broken() -> httpx.Response:
    return httpx.Response(500, text="out of order")


async def dies() -> httpx.Response:
    raise httpx.RemoteProtocolError("closed the connection without an answer")


@dataclass
class Server:
    """A server without a sandbox. The test sets its answers; it counts requests."""

    run: Callable[[], Awaitable[httpx.Response]] = ran
    level: str = "namespaces"
    is_down: bool = False
    num_pings: int = 0
    num_calls: int = 0
    num_at_once: int = 0
    most_at_once: int = 0
    limit_s: float = 0.0  # of the last call

    async def answer(self, request: httpx.Request) -> httpx.Response:
        if self.is_down:
            raise httpx.ConnectError("All connection attempts failed")
        if request.url.path == "/v1/ping":
            self.num_pings += 1
            headers = {"x-sandbox-level": self.level} if self.level else {}
            return httpx.Response(200, json="pong", headers={**headers, "x-sandbox-sessions": "2"})
        self.num_calls += 1
        self.num_at_once += 1
        self.most_at_once = max(self.most_at_once, self.num_at_once)
        self.limit_s = request.extensions["timeout"]["read"]
        try:
            return await self.run()
        finally:
            self.num_at_once -= 1


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Client:
    """Returns a client of the servers. tests/unit/test_transport.py has its connections."""

    def of(*servers: Server, **options: Any) -> RemoteSandbox:
        async def transport(request: httpx.Request) -> httpx.Response:
            return await servers[int(request.url.host.removeprefix("server"))].answer(request)

        monkeypatch.setattr(clients, "ConcurrentTransport", lambda **_: httpx.MockTransport(transport))
        return RemoteSandbox([f"http://server{number}" for number in range(len(servers))], **options)

    return of


async def test_the_client_opens_only_if_half_of_the_servers_answer(client: Client):
    well, down = Server(), Server(is_down=True)
    async with client(well, down) as sandbox:
        assert (await sandbox.execute("1")).ok
        down.is_down = False  # the client calls the missing server as soon as it is the least busy
        async with asyncio.timeout(15):
            while not down.num_calls:
                await asyncio.gather(*(sandbox.execute("1") for _ in range(4)))
    with pytest.raises(SandboxUnavailable, match="1 of 3 sandboxes answer, but half are needed"):
        await client(well, Server(is_down=True), Server(is_down=True), attempts=1).open()
    with pytest.raises(ConfigError, match="below min_level = 'namespaces'"):
        await client(well, Server(level="rlimits"), min_level=Level.NAMESPACES).open()


async def test_the_calls_in_flight_are_bounded_and_the_least_busy_server_is_next(client: Client):
    servers = [Server(slowly) for _ in range(4)]
    async with client(*servers, workers_per_url=3) as sandbox:
        await asyncio.gather(*(sandbox.execute("1") for _ in range(120)))
    assert all(server.most_at_once == 3 for server in servers)
    assert min(server.num_calls for server in servers) >= 20


@pytest.mark.parametrize("fails", [broken, dies])
async def test_a_server_that_fails_calls_but_answers_pings_gets_no_calls_for_a_while(client: Client, fails: Any):
    bad, good = Server(fails), Server()
    async with client(bad, good) as sandbox:
        for _ in range(100):
            assert (await sandbox.execute("1")).stdout == "ran\n"
        assert 1 <= bad.num_calls <= 3
        assert good.num_calls == 100
        bad.run = ran
        async with asyncio.timeout(10):
            while bad.num_calls <= 3:
                await sandbox.execute("1")
                await asyncio.sleep(0.02)


async def test_a_busy_server_is_retried_and_not_counted_as_failed(client: Client, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(clients, "_BUSY_PAUSE_S", (0.05, 0.1))

    async def busy() -> httpx.Response:
        if full.num_calls == 3:
            full.run = ran
        return httpx.Response(503, text="try again later")

    full = Server(busy)
    async with client(full, attempts=1) as sandbox:
        assert (await sandbox.execute("1")).ok
    assert full.num_calls == 4


@pytest.mark.parametrize("level", ["", "strong"], ids=["none", "unknown"])
async def test_a_server_without_a_level_is_accepted_only_at_rlimits(client: Client, level: str):
    server = Server(level=level)
    for least in (Level.LANDLOCK, Level.NAMESPACES):
        with pytest.raises(ConfigError, match=f"runs at level 'none', below min_level = '{least}'"):
            await client(server, min_level=least).open()
    async with client(server, min_level=Level.RLIMITS) as sandbox:
        assert (await sandbox.execute("1")).stdout == "ran\n"


async def test_an_answer_may_take_the_run_timeout_and_the_wait_in_the_queue(client: Client):
    async def too_late() -> httpx.Response:
        raise httpx.ReadTimeout("")

    server = Server(too_late)
    async with client(server, attempts=1) as sandbox:
        with pytest.raises(SandboxUnavailable, match="did not answer a call: ReadTimeout"):
            await sandbox.execute("1", run_timeout_s=3.5)
    assert server.limit_s == 3.5 + 120.0


async def test_a_cancelled_call_frees_its_place(client: Client):
    server = Server(never)
    async with client(server, workers_per_url=1) as sandbox:
        calls = [asyncio.ensure_future(sandbox.execute("1")) for _ in range(5)]
        await asyncio.sleep(0.2)
        for call in calls:
            call.cancel()
        await asyncio.wait(calls)
        assert all(call.cancelled() for call in calls)
        server.run = ran
        async with asyncio.timeout(30):  # a place that was not freed would block this call
            assert (await sandbox.execute("1")).ok


@pytest.mark.parametrize(
    ("answer", "session", "error", "num_calls"),
    [
        ((422, "no such file"), None, pytest.raises(ConfigError, match="no such file"), 1),
        # It may have changed the session.
        ((500, "out of order"), "a", pytest.raises(SandboxUnavailable, match="out of order"), 1),
        ((200, '{"status": "Success"}'), None, pytest.raises(SandboxUnavailable, match="without a run_result"), 2),
    ],
)
async def test_a_call_is_tried_again_where_that_is_safe_and_helps(
    client: Client, answer: tuple[int, str], session: str | None, error: Any, num_calls: int
):
    async def fails() -> httpx.Response:
        return httpx.Response(answer[0], text=answer[1])

    servers = [Server(fails), Server(fails)]
    async with client(*servers, sessions=True, attempts=2) as sandbox:
        with error:
            await sandbox.execute("1", session=session)
    assert sum(server.num_calls for server in servers) == num_calls
