"""Several servers behind one client: killed, hung, broken and restarted ones lose no call."""

import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from retool_mcore.errors import ConfigError, SandboxUnavailable
from retool_mcore.sandbox import client as clients
from retool_mcore.sandbox.base import Level
from retool_mcore.sandbox.client import RemoteSandbox
from tests.sandbox.sandbox_helpers import Ticks

ROOT = Path(__file__).resolve().parents[2]


# ------------------------------------------------- servers that do as they are told


@dataclass
class Told:
    """A server without a sandbox: how it answers is set by the test. It counts what it sees."""

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


@asynccontextmanager
async def told(*servers: Told) -> AsyncIterator[Sequence[Told]]:
    opened = [await asyncio.start_server(server.answer, "127.0.0.1", 0) for server in servers]
    for server, listening in zip(servers, opened, strict=True):
        server.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    try:
        yield servers
    finally:
        for listening in opened:
            listening.close()


def dead_url() -> str:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        return f"http://127.0.0.1:{unused.getsockname()[1]}"


@asynccontextmanager
async def client(*servers: Told | str, **options: Any) -> AsyncIterator[RemoteSandbox]:
    urls = [server if isinstance(server, str) else server.url for server in servers]
    async with RemoteSandbox(urls, **options) as sandbox:
        yield sandbox


async def test_a_server_that_hangs_gets_no_more_calls_and_its_own_are_started_again(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(clients, "_PING_EVERY_S", 0.3)
    monkeypatch.setattr(clients, "_PING_TIMEOUT_S", 1.0)
    async with told(Told(pong, slowly), Told(pong, slowly), Told(pong, slowly)) as servers, client(*servers) as sandbox:
        servers[0].ping = servers[0].run = never
        async with Ticks() as passed:
            results = await asyncio.gather(*(sandbox.execute("1") for _ in range(60)))
        assert [result.stdout for result in results] == ["ran\n"] * 60
        assert passed.seconds < 5.0
        assert 1 <= servers[0].num_calls <= 25
        # Each call of the hung server was started once more, and no other was.
        assert sum(server.num_calls for server in servers) == 60 + servers[0].num_calls
        before = servers[0].num_calls
        servers[0].ping, servers[0].run = pong, slowly
        async with asyncio.timeout(10):
            while servers[0].num_calls == before:
                await sandbox.execute("1")


async def test_it_opens_with_half_of_the_servers_and_not_with_less():
    async with told(Told(pong, ran), Told(never, ran)) as (well, hung):
        async with Ticks() as passed, client(well, hung) as sandbox:
            assert passed.seconds < 4
            assert (await sandbox.execute("1")).ok
            hung.ping = pong
            async with asyncio.timeout(15):
                while not hung.num_calls:
                    await sandbox.execute("1")
        with pytest.raises(SandboxUnavailable, match="1 of 3 sandboxes answer, and 2 are needed"):
            async with client(well, dead_url(), dead_url(), attempts=1):
                pass
        async with client(well, dead_url(), dead_url(), min_nodes=1) as sandbox:
            assert (await sandbox.execute("1")).ok
        weak = Told(pong, ran, headers="x-sandbox-level: rlimits\r\n")
        async with told(weak):
            with pytest.raises(ConfigError, match="below min_level = 'namespaces'"):
                async with RemoteSandbox([well.url, weak.url], min_level=Level.NAMESPACES):
                    pass


async def test_the_calls_in_flight_are_bounded_and_the_least_busy_server_is_next():
    async with told(*(Told(pong, slowly) for _ in range(4))) as servers, client(*servers, workers_per_url=3) as sandbox:
        await asyncio.gather(*(sandbox.execute("1") for _ in range(120)))
        assert all(server.most_at_once == 3 for server in servers)
        assert min(server.num_calls for server in servers) >= 20


async def test_a_server_that_fails_calls_but_answers_pings_gets_a_rest():
    async with told(Told(pong, broken), Told(pong, ran)) as (bad, good), client(bad, good) as sandbox:
        for _ in range(100):
            assert (await sandbox.execute("1")).stdout == "ran\n"
        assert 3 <= bad.num_calls <= 8
        assert good.num_calls == 100
        bad.run = ran
        async with asyncio.timeout(10):
            while bad.num_calls <= 8:
                await sandbox.execute("1")
                await asyncio.sleep(0.02)


async def test_a_busy_server_is_spared_and_the_call_goes_on():
    async def busy() -> str:
        return "503 try again later"

    async with told(Told(pong, busy), Told(pong, ran)) as (full, free):
        async with client(full, free) as sandbox:
            await asyncio.gather(*(sandbox.execute("1") for _ in range(50)))
            assert full.num_calls <= 25
            before = full.num_calls
            await asyncio.gather(*(sandbox.execute("1") for _ in range(50)))
            assert full.num_calls == before
        async with client(full, attempts=1) as sandbox:  # a refusal is no failed try
            call = asyncio.ensure_future(sandbox.execute("1"))
            await asyncio.sleep(0.2)
            full.run = ran
            assert (await call).ok


async def test_a_call_that_every_server_fails_ends_after_its_attempts():
    async with told(Told(pong, broken), Told(pong, broken)) as servers, client(*servers, attempts=4) as sandbox:
        with pytest.raises(SandboxUnavailable, match="answered 500: out of order"):
            await sandbox.execute("1")
        assert sum(server.num_calls for server in servers) == 4


async def test_a_request_that_is_refused_is_not_tried_again():
    async def refused() -> str:
        return "422 no such file"

    async with told(Told(pong, refused), Told(pong, refused)) as servers, client(*servers) as sandbox:
        with pytest.raises(ConfigError, match="no such file"):
            await sandbox.execute("1")
        assert sum(server.num_calls for server in servers) == 1


@pytest.mark.parametrize("level", ["", "x-sandbox-level: strong\r\n"], ids=["none", "unknown"])
async def test_a_server_that_tells_no_level_is_good_only_where_none_is_asked_for(level: str):
    async with told(Told(pong, ran, headers=level)) as servers:
        for least in (Level.LANDLOCK, Level.NAMESPACES):
            with pytest.raises(ConfigError, match=f"runs at level 'none', below min_level = '{least}'"):
                async with client(*servers, min_level=least) as sandbox:
                    await sandbox.execute("1")
        assert servers[0].num_calls == 0
        async with client(*servers, min_level=Level.RLIMITS) as sandbox:
            assert (await sandbox.execute("1")).stdout == "ran\n"


SESSIONS = "x-sandbox-level: namespaces\r\nx-sandbox-sessions: 2\r\n"


async def test_a_sessions_call_that_fails_is_not_tried_again():
    """Its code may have run, and what it changed is still there."""
    servers = [Told(pong, broken, headers=SESSIONS) for _ in range(2)]
    async with told(*servers), client(*servers, sessions=True, attempts=5) as sandbox:
        with pytest.raises(SandboxUnavailable):
            await sandbox.execute("x += 1", session="a")
        assert sum(server.num_calls for server in servers) == 1


async def test_a_call_that_is_given_up_frees_its_place():
    async with told(Told(pong, never)) as (server,), client(server, workers_per_url=1) as sandbox:
        calls = [asyncio.ensure_future(sandbox.execute("1")) for _ in range(5)]
        await asyncio.sleep(0.2)
        for call in calls:
            call.cancel()
        assert all(
            isinstance(got, asyncio.CancelledError) for got in await asyncio.gather(*calls, return_exceptions=True)
        )
        server.run = ran
        async with asyncio.timeout(30):  # a place that is not freed stays taken
            assert (await sandbox.execute("1")).ok


async def test_a_standstill_of_this_process_is_not_the_servers_fault(caplog: pytest.LogCaptureFixture):
    async with told(*(Told(pong, slowly) for _ in range(3))) as servers, client(*servers) as sandbox:
        calls = [asyncio.ensure_future(sandbox.execute("1")) for _ in range(9)]
        await asyncio.sleep(0.02)
        time.sleep(1.5)
        assert all(result.ok for result in await asyncio.gather(*calls))
        assert sum(server.num_calls for server in servers) == 9
        assert "gets no calls" not in caplog.text


# --------------------------------------------------------------- servers of our own


def start(port: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "retool_mcore.sandbox", "serve", "--min-level", "rlimits", "--workers", "1"]
    return subprocess.Popen(
        [*command, "--port", str(port)], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        start_new_session=True,
    )  # fmt: skip


def url_of(server: subprocess.Popen[str]) -> str:
    assert server.stdout is not None
    url = server.stdout.readline().strip()
    assert url, "the server did not start"
    return url


async def num_given_up(urls: Sequence[str]) -> int:
    """Calls that the live servers saw their client give up."""
    total = 0
    async with httpx.AsyncClient(timeout=30) as http:
        for url in urls:
            text = (await http.get(f"{url}/metrics")).text
            found = [line for line in text.splitlines() if line.startswith('retool_sandbox_refused_total{code="499"}')]
            total += int(float(found[0].split()[-1])) if found else 0
    return total


@pytest.mark.parametrize(
    "num_servers, num_killed, num_hung", [(4, 1, 1), pytest.param(16, 4, 4, marks=pytest.mark.long)]
)
async def test_no_call_is_lost_when_servers_die_and_hang(num_servers: int, num_killed: int, num_hung: int):
    seed = int.from_bytes(os.urandom(4), "big")
    print(f"seed {seed}")
    chance = random.Random(seed)
    servers = [start(0) for _ in range(num_servers)]
    try:
        urls = [await asyncio.to_thread(url_of, server) for server in servers]
        async with RemoteSandbox(urls, workers_per_url=4) as sandbox:

            async def trajectory(number: int) -> list[str]:
                outputs: list[str] = []
                for turn in range(4):
                    result = await sandbox.execute(f"import time; time.sleep(0.05); {number} * 100 + {turn}")
                    outputs.append(result.stdout)
                return outputs

            count = 15 * num_servers
            tasks = [asyncio.ensure_future(trajectory(number)) for number in range(count)]
            await asyncio.sleep(1)
            victims = chance.sample(range(num_servers), num_killed + num_hung)
            for victim in victims[:num_killed]:
                servers[victim].kill()
                await asyncio.sleep(chance.uniform(0, 0.3))
            for victim in victims[num_killed:]:
                servers[victim].send_signal(signal.SIGSTOP)
                await asyncio.sleep(chance.uniform(0, 0.3))
            assert not all(task.done() for task in tasks)
            outputs = await asyncio.gather(*tasks)
            assert outputs == [[f"{number * 100 + turn}\n" for turn in range(4)] for number in range(count)]
            for victim in victims[num_killed:]:  # they wake up, and are given calls again
                servers[victim].send_signal(signal.SIGCONT)
            live = [url for index, url in enumerate(urls) if index not in victims[:num_killed]]
            # A call was given up only where it was started twice: never more than once for each
            # place of a server that died or hung, and of those that were slow to answer a ping.
            given_up = await num_given_up(live)
            print(f"{4 * count} calls, {given_up} given up")
            assert given_up <= 4 * num_servers
    finally:
        for server in servers:
            os.killpg(server.pid, signal.SIGKILL)
            server.communicate()
