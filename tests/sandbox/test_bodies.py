"""What the server spends on bodies that do not arrive, or are too large."""

import asyncio

import httpx
import pytest

from retool_mcore.sandbox.server import app
from retool_mcore.sandbox.supervisor.local import LocalSandbox
from tests.sandbox.test_guard import RUN, served

HALF = b"POST /run_code HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 999\r\n\r\n{"


async def half_sent(port: int, count: int) -> list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Connections on which half of a request has come."""
    held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(count)]
    for _, writer in held:
        writer.write(HALF)
        await writer.drain()
    return held


async def test_half_sent_bodies_hold_up_nobody_and_are_given_up(
    strongest: LocalSandbox, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(app, "BODY_TIMEOUT_S", 1.0)
    async with served(strongest) as url, httpx.AsyncClient(base_url=url) as http:
        held = await half_sent(int(url.rpartition(":")[2]), 5)
        assert (await http.post("/run_code", json=RUN)).json()["run_result"]["stdout"] == "42\n"
        async with asyncio.timeout(30):
            assert [await reader.readline() for reader, _ in held] == [b"HTTP/1.1 408 Request Timeout\r\n"] * 5
        for _, writer in held:
            writer.close()


async def test_aborted_uploads_leave_no_traceback(strongest: LocalSandbox, caplog: pytest.LogCaptureFixture):
    async with served(strongest) as url, httpx.AsyncClient(base_url=url) as http:
        for _, writer in await half_sent(int(url.rpartition(":")[2]), 10):
            writer.transport.abort()
        async with asyncio.timeout(30):
            while 'retool_sandbox_refused_total{code="499"} 10.0' not in (await http.get("/metrics")).text:
                await asyncio.sleep(0.1)
    assert "Traceback" not in caplog.text and "ClientDisconnect" not in caplog.text


async def test_a_body_without_the_token_is_refused_before_it_has_come(strongest: LocalSandbox):
    async with served(strongest, token="a-token-of-thirty-two-characters") as url:
        ((reader, writer),) = await half_sent(int(url.rpartition(":")[2]), 1)
        async with asyncio.timeout(5):
            assert (await reader.readline()).startswith(b"HTTP/1.1 401")
        writer.close()
