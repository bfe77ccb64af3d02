"""A trajectory at work keeps its session, newcomers wait, and what is lost is told."""

import asyncio
import time

import httpx
import pytest

from retool_mcore.errors import SandboxUnavailable
from retool_mcore.sandbox import open_sandbox
from retool_mcore.sandbox.base import ExecResult, Level
from retool_mcore.sandbox.supervisor import sessions
from retool_mcore.sandbox.supervisor.local import LocalSandbox
from tests.sandbox.sandbox_helpers import LEVELS, open_at, start


async def _trajectory(sandbox: LocalSandbox, name: str, cells: int = 3) -> list[ExecResult]:
    results = [await sandbox.execute("n = 0", session=name)]
    for _ in range(cells - 1):
        results.append(await sandbox.execute("n += 1\nprint(n)", session=name))
    await sandbox.end_session(name)
    return results


@pytest.mark.parametrize("level", LEVELS)
async def test_more_trajectories_than_sessions_wait_and_lose_nothing(level: Level):
    opened = await open_at(level, workers=2, sessions=2)
    async with opened as sandbox:
        at_once = asyncio.Semaphore(8)

        async def one(number: int) -> list[ExecResult]:
            async with at_once:
                return await _trajectory(sandbox, f"t{number}")

        beside = [sandbox.execute("print(7)") for _ in range(20)]
        found = await asyncio.gather(*(one(number) for number in range(24)), *beside)
    for results in found[:24]:
        assert isinstance(results, list)
        assert [result.stdout for result in results] == ["", "1\n", "2\n"]
        assert not any(result.session_restarted for result in results)
    assert all(isinstance(result, ExecResult) and result.stdout == "7\n" for result in found[24:])


async def test_a_newcomer_waits_for_a_bounded_time_while_those_at_work_go_on():
    async with LocalSandbox(min_level=Level.RLIMITS, workers=1, sessions=1, session_wait_s=0.6) as sandbox:
        await sandbox.execute("x = 1", session="a")
        started = time.monotonic()
        newcomer = asyncio.ensure_future(sandbox.execute("1", session="b"))
        await asyncio.sleep(0.1)
        assert (await sandbox.execute("x", session="a")).stdout == "1\n", "a waiting newcomer takes no worker"
        assert (await sandbox.execute("print(3)")).stdout == "3\n"
        with pytest.raises(SandboxUnavailable, match="all 1 are kept by trajectories at work"):
            await newcomer
        assert 0.5 < time.monotonic() - started < 5
        await sandbox.end_session("a")
        assert (await sandbox.execute("2", session="b")).stdout == "2\n"


async def test_an_idle_session_gives_its_place_to_a_newcomer_and_is_told(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sessions, "IDLE_S", 0.3)
    async with LocalSandbox(min_level=Level.RLIMITS, workers=1, sessions=1, session_wait_s=20) as sandbox:
        await sandbox.execute("x = 1", session="a")
        assert (await sandbox.execute("2", session="b")).stdout == "2\n", "nobody has ended the first"
        again = await sandbox.execute("x", session="a")
        assert again.session_restarted and "NameError" in again.stderr


async def test_a_session_that_is_ended_while_it_opens_gives_everything_back():
    async with LocalSandbox(min_level=Level.RLIMITS, workers=2, sessions=2) as sandbox:
        for number in range(12):
            opening = [asyncio.ensure_future(sandbox.execute("1", session=f"s{number}")) for _ in range(2)]
            await asyncio.sleep(0.002 * (number % 4))
            await asyncio.gather(sandbox.end_session(f"s{number}"), sandbox.end_session("never"))
            opening[0].cancel()
            await asyncio.wait(opening)
            await sandbox.end_session(f"s{number}")
        assert len(sandbox._slots) == 4
        assert (await sandbox.execute("x = 1", session="a")).ok and (await sandbox.execute("x = 1", session="b")).ok


async def test_stateless_calls_over_http_work_beside_idle_sessions_and_opening_ones():
    server, url = start("--port", "0", "--workers", "2", "--sessions", "2")
    try:
        async with httpx.AsyncClient(base_url=url, timeout=300) as http:

            async def post(code: str, session: str | None) -> int:
                body = {"code": code, "language": "python", "session": session}
                return (await http.post("/run_code", json=body)).status_code

            assert [await post("x = 1", "a"), await post("x = 1", "b")] == [200, 200]
            waiting = [asyncio.ensure_future(post("1", name)) for name in "cd"]
            await asyncio.sleep(0.2)
            assert await asyncio.gather(*(post("print(1)", None) for _ in range(8))) == [200] * 8
            deleted = await asyncio.gather(*(http.delete(f"/v1/sessions/{name}") for name in "ab"))
            assert [answer.status_code for answer in deleted] == [200, 200]
            assert await asyncio.gather(*waiting) == [200, 200]
    finally:
        server.kill()
        server.communicate()


async def test_a_session_that_a_restarted_server_lost_is_told():
    server, url = start("--port", "0", "--workers", "1", "--sessions", "2")
    port = url.rpartition(":")[2]
    try:
        async with open_sandbox(url, min_level="rlimits", sessions=2) as remote:
            assert not (await remote.execute("x = 1", session="t")).session_restarted
            assert (await remote.execute("x", session="t")).text == "1"
            server.kill()
            server.communicate()
            server, _ = start("--port", port, "--workers", "1", "--sessions", "2")
            for _ in range(40):
                try:
                    found = await remote.execute("'x' in globals()", session="t")
                    break
                except SandboxUnavailable:
                    await asyncio.sleep(0.25)
            else:
                raise AssertionError("the restarted server was not found")
            assert found.stdout == "False\n" and found.session_restarted
            assert "earlier definitions are gone" in found.text
            assert not (await remote.execute("1", session="t")).session_restarted
            await remote.end_session("t")
            assert not (await remote.execute("1", session="t")).session_restarted, "ended by its own trajectory"
    finally:
        server.kill()
        server.communicate()
