"""What the server spends on bodies that do not arrive, or are too large."""

import asyncio

import httpx
import pytest

from retool_mcore.sandbox.supervisor.local import LocalSandbox
from tests.sandbox.test_guard import RUN, served

HALF = b"POST /run_code HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 999\r\n\r\n{"


async def half_sent(port: int, count: int) -> list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Connections on which half of a request has come."""
    held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(count)]
    for _, writer in held:
        writer.write(HALF)
    await asyncio.sleep(0.3)
    return held


async def test_half_sent_bodies_take_no_place_among_the_waiting(strongest: LocalSandbox):
    async with served(strongest, max_pending=4) as url, httpx.AsyncClient(base_url=url) as http:
        held = await half_sent(int(url.rpartition(":")[2]), 20)
        assert (await http.post("/run_code", json=RUN)).json()["run_result"]["stdout"] == "42\n"
        for _, writer in held:
            writer.close()


async def test_bodies_that_arrive_together_are_told_to_come_back_beyond_the_bound(strongest: LocalSandbox):
    slow = b'{"code": "import time; time.sleep(1)", "language": "python"}'
    async with served(strongest, max_pending=2) as url:
        held = await half_sent(int(url.rpartition(":")[2]), 5)
        for _, writer in held:
            writer.write(slow[1:].ljust(998))
        answers = [await reader.readuntil(b"\r\n\r\n") for reader, _ in held]
        refused = [answer for answer in answers if answer.startswith(b"HTTP/1.1 503")]
        assert len(refused) == 3 and all(b"retry-after: 1" in answer for answer in refused)
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


async def test_a_body_announced_too_large_is_refused_at_once(strongest: LocalSandbox):
    async with served(strongest) as url:
        for length in (10**14, (48 << 20) + 1):
            reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
            writer.write(HALF.replace(b"999", str(length).encode()))
            async with asyncio.timeout(2):
                assert (await reader.read(12)).endswith(b"413")
            writer.close()
