"""The sandbox behind one or several SandboxFusion-compatible URLs.

Each call goes to the least busy server that is well (``fleet.py``), and to another one when that
fails. Code may thus run twice, which no caller can see, because executions share nothing. The calls
of a session do, so they have one try, at the server that holds the session.
"""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import random
import time
import zlib
from collections.abc import Sequence
from dataclasses import replace
from urllib.parse import quote

import httpx
from pydantic import ValidationError

from retool_mcore.errors import ConfigError, SandboxUnavailable
from retool_mcore.sandbox.base import ExecRequest, ExecResult, Level, Sandbox
from retool_mcore.sandbox.fleet import Fleet
from retool_mcore.sandbox.node import Node, unavailable
from retool_mcore.sandbox.server.wire import RunCodeResponse

logger = logging.getLogger(__name__)

_CONNECT_TIMEOUT_S = 5.0
# How much longer than the run timeout an answer may take: the wait in the server's queue and the
# start of the code. Silence of the server is noticed long before (``node.py``).
_QUEUE_ALLOWANCE_S = 120.0
_PAUSE_S = (0.3, 5.0)  # before another try where there is no other server: first, longest
_BUSY_S = (0.2, 1.0, 30.0)  # what a server's Retry-After may ask for: least, where it is absent, most


class RemoteSandbox(Sandbox):
    """Runs model code on other machines (or in another process).

    See ``base.Sandbox`` and ``open_sandbox``.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        min_level: Level = Level.RLIMITS,
        workers_per_url: int = 64,
        sessions: bool = False,
        attempts: int = 5,
        min_nodes: int | None = None,
    ) -> None:
        """``min_nodes``: servers that must answer at the start, half of them if None.

        ``attempts`` counts tries that a server's failure ended.
        """
        self._sessions = sessions
        self._attempts = attempts
        nodes = [Node(url.rstrip("/"), workers_per_url, min_level=min_level, sessions=sessions) for url in urls]
        self._fleet = Fleet(nodes, min_nodes=min_nodes or -(-len(nodes) // 2), attempts=attempts)
        self._opening = asyncio.Lock()
        self._opened = False
        self._answered = set[str]()  # sessions of which a result was seen, until they are ended

    async def open(self) -> None:
        """Ask every server for its level.

        Raises ConfigError when one tells a level below min_level, SandboxUnavailable when fewer
        than min_nodes answer. Servers that are missing are used as soon as they answer.
        """
        async with self._opening:
            if not self._opened:
                await self._fleet.open()
                self._opened = True

    async def run(self, request: ExecRequest) -> ExecResult:
        """See ``base.Sandbox.run``."""
        session = request.session
        if session is not None and not self._sessions:
            raise ConfigError(f"session = {session!r}, but this sandbox was opened without sessions (sessions=0).")
        body = _pack(request)
        await self.open()
        if session is None:
            return await self._call(body, request.run_timeout_s, attempts=self._attempts)
        result = await self._call(body, request.run_timeout_s, attempts=1, only=self._holder(session))
        # A server that was restarted does not know what it has lost.
        lost = result.session_started and session in self._answered
        self._answered.add(session)
        return replace(result, session_restarted=True) if lost else result

    async def _call(self, body: bytes, run_timeout_s: float, *, attempts: int, only: Node | None = None) -> ExecResult:
        """Try until there is a result. Raises ConfigError, SandboxUnavailable."""
        tried: set[Node] = set()
        failures, busy_since = 0, 0.0
        while True:
            leg = _Leg(run_timeout_s)
            node = await self._fleet.acquire(leg, only=only, avoid=tried, urgent=bool(tried))
            tried.add(node)
            try:
                return await self._try(node, leg, body)
            except _Busy as error:
                busy_since = busy_since or time.monotonic()
                failure: Exception = error
            except SandboxUnavailable as error:
                failure = error
            # A server that asks to be spared, or was not reached, is out for now: that is no try.
            is_no_try = isinstance(failure, (_Busy, _NotReached))
            failures += not is_no_try or only is not None
            too_long = isinstance(failure, _Busy) and time.monotonic() - busy_since > _QUEUE_ALLOWANCE_S
            if failures >= attempts or too_long:
                raise SandboxUnavailable(str(failure)) from failure
            if not is_no_try and not self._fleet.alternative(tried):
                await asyncio.sleep(random.uniform(0, min(_PAUSE_S[0] * 2**failures, _PAUSE_S[1])))

    async def _try(self, node: Node, leg: _Leg, body: bytes) -> ExecResult:
        """One try at ``node``, until that is given up."""
        post = asyncio.ensure_future(_post(node, body, leg.run_timeout_s))
        try:
            await asyncio.wait((post, leg.abandoned), return_when=asyncio.FIRST_COMPLETED)
            if not post.done():
                raise SandboxUnavailable(leg.abandoned.result())
            return post.result()
        finally:
            post.cancel()
            await asyncio.wait((post,))
            self._fleet.release(leg, node)

    def _holder(self, session: str) -> Node:
        """The server that a session's definitions live on."""
        return self._fleet.nodes[zlib.crc32(session.encode("utf-8", "replace")) % len(self._fleet.nodes)]

    async def end_session(self, session: str) -> None:
        """See ``base.Sandbox.end_session``."""
        node = self._holder(session)
        self._answered.discard(session)
        try:
            answer = await node.http.delete(f"/v1/sessions/{quote(session, safe='')}", timeout=_CONNECT_TIMEOUT_S)
            answer.raise_for_status()
        except httpx.HTTPError as error:
            logger.info("session %s was not ended at %s (its idle time will): %s", session, node.url, error)

    async def close(self) -> None:
        """See ``base.Sandbox.close``."""
        await self._fleet.close()


class _Busy(Exception):
    """The server takes no more calls for now."""


class _NotReached(SandboxUnavailable):
    """No connection: the server has not seen the call."""


class _Leg:
    """One try of a call at one server: what ``node.InFlightCall`` asks for."""

    def __init__(self, run_timeout_s: float) -> None:
        self.run_timeout_s = run_timeout_s
        self.abandoned: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def abandon(self, reason: str) -> None:
        """See ``node.InFlightCall``."""
        if not self.abandoned.done():
            self.abandoned.set_result(reason)


async def _post(node: Node, body: bytes, run_timeout_s: float) -> ExecResult:
    """One request, and what its outcome says of the server."""
    asked = time.monotonic()
    try:
        answer = await node.http.post(
            "/run_code",
            content=body,
            headers={"content-type": "application/json"},
            timeout=httpx.Timeout(run_timeout_s + _QUEUE_ALLOWANCE_S, connect=_CONNECT_TIMEOUT_S),
        )
        if answer.status_code == 503:
            node.busy_for(_wait_asked_for(answer))
            raise _Busy(f"the sandbox at {node.url} is too busy: {answer.text[:500]}")
        result = _read(node, answer, time.monotonic() - asked)
    except (httpx.ConnectError, httpx.ConnectTimeout) as error:
        reached = unavailable(node.url, "POST /run_code", error)
        node.put_out(str(reached))
        raise _NotReached(str(reached)) from error
    except ConfigError:
        node.call_answered()
        raise
    except httpx.HTTPError as error:
        failure = unavailable(node.url, "POST /run_code", error)
        node.put_out(str(failure))
        raise failure from error
    except (ValidationError, ValueError) as error:
        node.call_failed(str(error))
        raise unavailable(node.url, "POST /run_code", error) from error
    except SandboxUnavailable as error:
        node.call_failed(str(error))
        raise
    node.call_answered()
    return result


def _wait_asked_for(answer: httpx.Response) -> float:
    """Seconds of a Retry-After header, bounded."""
    least_s, absent_s, most_s = _BUSY_S
    asked = answer.headers.get("retry-after", "")
    seconds = float(asked) if asked.isascii() and asked.isdigit() else absent_s
    return min(max(seconds, least_s), most_s) * random.uniform(0.75, 1.25)


def _pack(request: ExecRequest) -> bytes:
    fields = {
        "code": request.code,
        "language": "python",
        "run_timeout": request.run_timeout_s,
        "memory_limit_MB": request.memory_limit_mb,
        "stdin": request.stdin,
        "files": {name: base64.b64encode(content).decode() for name, content in request.files.items()},
        "fetch_files": list(request.fetch_files),
        "session": request.session,
        "notebook": request.notebook,
    }
    return json.dumps(fields).encode()  # ASCII: a lone surrogate in the code travels as an escape


def _read(node: Node, answer: httpx.Response, round_trip_s: float) -> ExecResult:
    """Read the server's answer.

    Raises ConfigError when the server refused the request, SandboxUnavailable or ValueError when
    the server itself failed.
    """
    if answer.status_code in (400, 413, 422):
        raise ConfigError(f"the sandbox at {node.url} refused the request: {answer.text[:2000]}")
    if answer.status_code != 200:
        raise SandboxUnavailable(f"the sandbox at {node.url} answered {answer.status_code}: {answer.text[:500]}")
    response = RunCodeResponse.model_validate_json(answer.content)
    if response.status == "SandboxError":
        raise SandboxUnavailable(f"the sandbox at {node.url} failed: {response.message[:2000]}")
    return response.result(round_trip_s=round_trip_s)
