"""Hundreds of requests in flight: each has a connection, and none looks at those of the others."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator

import httpx
import pytest

from retool_mcore.rollout.sglang_http import SglangEngine
from retool_mcore.sandbox.client import RemoteServer
from retool_mcore.transport import ConcurrentTransport

WAVE = 120


class Server:
    """Answers POST /wave when WAVE of them wait, POST /now at once, POST /never not at all."""

    def __init__(self) -> None:
        self.connections = 0  # that were ever made
        self.open: list[asyncio.StreamWriter] = []
        self.url = ""
        self._wave = asyncio.Barrier(WAVE)

    async def converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.open.append(writer)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                path = (await reader.readuntil(b"\r\n\r\n")).split(b" ")[1]
                if path == b"/wave":
                    await self._wave.wait()
                if path != b"/never":
                    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
        self.open.remove(writer)

    def hang_up(self) -> None:
        """Close all connections, as a server does with those that are idle for long."""
        for writer in self.open:
            writer.close()


@pytest.fixture
async def server() -> AsyncGenerator[Server]:
    here = Server()
    listening = await asyncio.start_server(here.converse, "127.0.0.1", 0, backlog=2 * WAVE)
    here.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    yield here
    here.hang_up()
    listening.close()  # from Python 3.12 on, its context manager also waits for clients that keep their connections


def client(server: Server, transport: ConcurrentTransport) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=server.url, transport=transport)


@pytest.mark.parametrize("client_of", [lambda url: SglangEngine(url)._client, lambda url: RemoteServer(url).http])
async def test_a_second_wave_takes_the_connections_of_the_first_and_looks_at_its_own_alone(
    server: Server, client_of, monkeypatch: pytest.MonkeyPatch
) -> None:
    from httpcore import AsyncHTTPConnection

    looks, look = [], AsyncHTTPConnection.has_expired
    monkeypatch.setattr(AsyncHTTPConnection, "has_expired", lambda self: looks.append(self) or look(self))
    async with client_of(server.url) as sender, asyncio.timeout(60):
        for _ in range(2):
            answers = await asyncio.gather(*(sender.post("/wave") for _ in range(WAVE)))
            assert [answer.text for answer in answers] == ["ok"] * WAVE
        assert len(server.open) == WAVE
    await asyncio.sleep(0.1)
    assert (len(server.open), server.connections) == (0, WAVE)
    assert len(looks) <= 4 * 2 * WAVE  # one pool for all of them looks more than WAVE * WAVE times


async def test_a_connection_that_the_server_has_closed_is_not_used_again(server: Server) -> None:
    async with client(server, ConcurrentTransport()) as sender:
        await sender.post("/now")
        server.hang_up()
        await asyncio.sleep(0.05)  # until this end knows
        assert (await sender.post("/now")).text == "ok"
    assert server.connections == 2


async def test_a_request_that_is_given_up_holds_nothing(server: Server) -> None:
    transport = ConcurrentTransport()
    async with client(server, transport) as sender:
        for _ in range(3):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await sender.post("/never")
            async with sender.stream("POST", "/now"):
                pass  # closed before its body is read
        assert (await sender.post("/now")).text == "ok"
    assert len(transport._all) == 1


async def test_an_idle_connection_is_kept_for_its_time_alone(server: Server) -> None:
    async with client(server, ConcurrentTransport(keep_alive_s=0.05)) as sender:
        for pause in (0, 0.2, 0):
            await sender.post("/now")
            await asyncio.sleep(pause)
        assert len(server.open) == 1
    assert server.connections == 2
