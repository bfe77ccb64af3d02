"""The sandbox behind one or several SandboxFusion-compatible URLs.

Each call goes to the server with the fewest calls in flight, and to another one when that fails.
Code may thus run twice, which no caller can see, because executions share nothing. The calls of a
session do, so they have one try, at the server that holds the session.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import logging
import random
import time
import zlib
from collections.abc import Sequence, Set
from dataclasses import replace
from urllib.parse import quote

import httpx
import tenacity

from retool_mcore.errors import ConfigError, SandboxUnavailable
from retool_mcore.sandbox.base import ExecRequest, ExecResult, Level, Sandbox
from retool_mcore.sandbox.server.wire import LEVEL_HEADER, SESSIONS_HEADER, RunCodeResponse, read_token
from retool_mcore.transport import ManyInFlight

logger = logging.getLogger(__name__)

_KEEP_ALIVE_S = 4.0  # below the 5 s after which uvicorn, SandboxFusion's server, closes an idle connection
_CONNECT_TIMEOUT_S = 5.0
# How much longer than the run timeout an answer may take: the wait in the server's queue and the
# start of the code.
_QUEUE_ALLOWANCE_S = 120.0
_OPEN_GRACE_S = 2.0  # when enough servers have answered, the others get this much more
# A server with calls in flight is pinged; one that does not answer in time has lost them.
_PING_EVERY_S, _PING_TIMEOUT_S = 2.0, 10.0
_FAILURES_IN_A_ROW = 3
_REST_S = (1.0, 30.0)  # without calls after failures: first, longest
_BUSY_S = (0.2, 1.0, 30.0)  # what a server's Retry-After may ask for: least, where it is absent, most


class RemoteServer:
    """One server: its connections, its calls in flight, and its circuit breaker."""

    def __init__(self, url: str) -> None:
        self.url = url
        uds = url.removeprefix("unix://") if url.startswith("unix://") else None
        token = read_token(None)
        self.http = httpx.AsyncClient(
            base_url="http://localhost" if uds is not None else url,
            transport=ManyInFlight(uds=uds, verify=url.startswith("https://"), keep_alive_s=_KEEP_ALIVE_S),
            trust_env=False,
            headers={} if token is None else {"authorization": f"Bearer {token}"},
        )
        self.in_flight = 0
        self.checked = False  # its level is known, and it has not gone away since
        self.rests_until = 0.0
        self.lost: asyncio.Future[str] | None = None  # set when its calls in flight will not be answered
        self._failures, self._rest_s = 0, _REST_S[0]

    def worked(self) -> None:
        """A call came back with a result, or was refused for what it asked."""
        self._failures, self._rest_s = 0, _REST_S[0]

    def failed(self, reason: str, *, gone: bool = False) -> None:
        """Open the breaker after several failures in a row, or where the server is ``gone``."""
        self._failures += 1
        self.checked = self.checked and not gone
        if (gone or self._failures >= _FAILURES_IN_A_ROW) and self.rests_until < time.monotonic():
            self.rests_until = time.monotonic() + self._rest_s * random.uniform(0.8, 1.2)
            logger.warning("sandbox %s gets no calls for %.0f s: %s", self.url, self._rest_s, reason)
            self._rest_s = min(2 * self._rest_s, _REST_S[1])

    def lose_calls(self, reason: str) -> None:
        """Fail all calls in flight: they can be started elsewhere."""
        if self.lost is not None and not self.lost.done():
            self.lost.set_result(reason)


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

        ``workers_per_url`` times the servers bounds the calls in flight.
        """
        self._servers = [RemoteServer(url.rstrip("/")) for url in urls]
        self._min_level, self._sessions, self._attempts = min_level, sessions, attempts
        self._min_nodes = min_nodes or -(-len(self._servers) // 2)
        self._places = asyncio.Semaphore(workers_per_url * len(self._servers))
        self._opening = asyncio.Lock()
        self._watch: asyncio.Task[None] | None = None
        self._closed = False
        self._answered = set[str]()  # sessions of which a result was seen, until they are ended

    # -------------------------------------------------------------- opening

    async def open(self) -> None:
        """Ask every server for its level.

        Raises ConfigError when one reports a level below min_level, SandboxUnavailable when fewer
        than min_nodes answer. Servers that are missing are asked again when calls go to them.
        """
        async with self._opening:
            if self._closed:
                raise SandboxUnavailable("the sandbox was closed.")
            if self._watch is None:
                await self._check_all()
                self._watch = asyncio.ensure_future(self._watch_servers())

    async def _check_all(self) -> None:
        checks = [asyncio.ensure_future(self._check_patiently(server)) for server in self._servers]
        pending, enough = set(checks), False
        try:
            while pending:
                done, pending = await asyncio.wait(
                    pending, timeout=_OPEN_GRACE_S if enough else None, return_when=asyncio.FIRST_COMPLETED
                )
                for check in done:
                    if isinstance(error := check.exception(), ConfigError):
                        raise error
                if enough and not done:
                    break
                enough = sum(server.checked for server in self._servers) >= self._min_nodes
        finally:
            for check in pending:
                check.cancel()
        num_well = sum(server.checked for server in self._servers)
        errors = [check.exception() for check in checks if check.done() and not check.cancelled()]
        error = next((error for error in errors if error), None)
        if num_well < self._min_nodes:
            if len(self._servers) == 1:
                raise SandboxUnavailable(str(error)) from error
            raise SandboxUnavailable(
                f"{num_well} of {len(self._servers)} sandboxes answer, and {self._min_nodes} are needed to start. "
                f"The first that is missing: {error}"
            )
        if num_well < len(self._servers):
            logger.warning("opened with %d of %d sandboxes. Missing: %s", num_well, len(self._servers), error)

    async def _check_patiently(self, server: RemoteServer) -> None:
        async for attempt in self._retries(first_wait_s=0.5, longest_wait_s=4.0):
            with attempt:
                await self._check(server)

    def _retries(self, *, first_wait_s: float, longest_wait_s: float) -> tenacity.AsyncRetrying:
        """Attempts until a server answers; the waits between them are random and grow."""
        return tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception_type(SandboxUnavailable),
            stop=tenacity.stop_after_attempt(self._attempts),
            wait=tenacity.wait_random_exponential(multiplier=first_wait_s, max=longest_wait_s),
            reraise=True,
        )

    async def _check(self, server: RemoteServer) -> None:
        """Ask a server for its level. Raises SandboxUnavailable, ConfigError."""
        try:
            answer = await server.http.get("/v1/ping", timeout=_CONNECT_TIMEOUT_S)
            answer.raise_for_status()
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise unavailable(server.url, "GET /v1/ping", error) from error
        reported = answer.headers.get(LEVEL_HEADER, "")
        level = Level(reported) if reported in list(Level) else Level.NONE
        if level == Level.NONE and self._min_level.rank <= Level.RLIMITS.rank:
            logger.warning("the sandbox at %s does not report its isolation level; taken as none", server.url)
        elif level.rank < self._min_level.rank:
            raise ConfigError(
                f"the sandbox at {server.url} runs at level {str(level)!r}, below min_level = "
                f"{str(self._min_level)!r}. Start it with `retool sandbox serve --min-level {self._min_level}`, "
                "or lower min_level."
            )
        if self._sessions and answer.headers.get(SESSIONS_HEADER, "0") == "0":
            raise ConfigError(
                f"sessions were asked for, but the sandbox at {server.url} has none. "
                "Start it with `retool sandbox serve --sessions N`."
            )
        server.checked = True

    # -------------------------------------------------------------- calling

    async def run(self, request: ExecRequest) -> ExecResult:
        """See ``base.Sandbox.run``."""
        session = request.session
        if session is not None and not self._sessions:
            raise ConfigError(f"session = {session!r}, but this sandbox was opened without sessions (sessions=0).")
        body = _pack(request)
        await self.open()
        async with self._places:
            if session is None:
                return await self._call(body, request.run_timeout_s)
            result = await self._try(self._holder(session), body, request.run_timeout_s, only=True)
        # A server that was restarted does not know what it has lost.
        lost = result.session_started and session in self._answered
        self._answered.add(session)
        return replace(result, session_restarted=True) if lost else result

    async def _call(self, body: bytes, run_timeout_s: float) -> ExecResult:
        tried: set[RemoteServer] = set()
        async for attempt in self._retries(first_wait_s=0.2, longest_wait_s=5.0):
            with attempt:
                server = await self._choose(tried)
                tried.add(server)
                return await self._try(server, body, run_timeout_s)
        raise AssertionError("tenacity neither returned nor raised")

    async def _choose(self, avoid: Set[RemoteServer]) -> RemoteServer:
        """The least busy server whose breaker is closed; waits for one if there is none."""
        while not self._closed:
            now = time.monotonic()
            well = [server for server in self._servers if server.rests_until <= now]
            if well:
                wanted = [server for server in well if server not in avoid] or well
                # Ties by lot: the processes of a run must not all begin with the first URL.
                return min(wanted, key=lambda server: (server.in_flight, random.random()))
            await asyncio.sleep(min(server.rests_until for server in self._servers) - now)
        raise SandboxUnavailable("the sandbox was closed.")

    async def _try(self, server: RemoteServer, body: bytes, run_timeout_s: float, *, only: bool = False) -> ExecResult:
        """One try at ``server``, which waits while the server is busy and no other can be had."""
        server.in_flight += 1
        if server.lost is None or server.lost.done():
            server.lost = asyncio.get_running_loop().create_future()
        lost = server.lost
        post = asyncio.ensure_future(self._post(server, body, run_timeout_s, only=only))
        try:
            await asyncio.wait((post, lost), return_when=asyncio.FIRST_COMPLETED)
            if not post.done():
                raise SandboxUnavailable(lost.result())
            return post.result()
        finally:
            server.in_flight -= 1
            post.cancel()
            await asyncio.wait((post,))

    async def _post(self, server: RemoteServer, body: bytes, run_timeout_s: float, *, only: bool) -> ExecResult:
        """One request, and what its outcome says of the server."""
        asked = time.monotonic()
        timeout = httpx.Timeout(run_timeout_s + _QUEUE_ALLOWANCE_S, connect=_CONNECT_TIMEOUT_S)
        headers = {"content-type": "application/json"}
        gone = True
        try:
            if not server.checked:
                await self._check(server)
            while True:
                answer = await server.http.post("/run_code", content=body, headers=headers, timeout=timeout)
                if answer.status_code != 503 or time.monotonic() - asked > _QUEUE_ALLOWANCE_S:
                    break
                wait_s = _wait_asked_for(answer)
                server.rests_until = max(server.rests_until, time.monotonic() + wait_s)
                if not only and any(other.rests_until <= time.monotonic() for other in self._servers):
                    gone = False
                    raise SandboxUnavailable(f"the sandbox at {server.url} is too busy: {answer.text[:500]}")
                await asyncio.sleep(wait_s)
            gone = False
            if answer.status_code in (400, 413, 422):
                server.worked()
                raise _RefusedRequest(f"the sandbox at {server.url} refused the request: {answer.text[:2000]}")
            result = _read(server, answer, time.monotonic() - asked)
        except _RefusedRequest as refusal:
            raise ConfigError(str(refusal)) from None
        except (ConfigError, SandboxUnavailable, httpx.HTTPError, ValueError) as error:
            failure = error if isinstance(error, SandboxUnavailable) else unavailable(server.url, "a call", error)
            server.failed(str(failure), gone=gone)
            raise failure from error
        server.worked()
        return result

    def _holder(self, session: str) -> RemoteServer:
        """The server that a session's definitions live on."""
        return self._servers[zlib.crc32(session.encode("utf-8", "replace")) % len(self._servers)]

    async def end_session(self, session: str) -> None:
        """See ``base.Sandbox.end_session``."""
        server = self._holder(session)
        self._answered.discard(session)
        try:
            answer = await server.http.delete(f"/v1/sessions/{quote(session, safe='')}", timeout=_CONNECT_TIMEOUT_S)
            answer.raise_for_status()
        except httpx.HTTPError as error:
            logger.info("session %s was not ended at %s (its idle time will): %s", session, server.url, error)

    # ------------------------------------------------------- health, closing

    async def _watch_servers(self) -> None:
        """Ping the servers that have calls in flight: a machine that hangs closes no connection."""
        while True:
            await asyncio.sleep(_PING_EVERY_S)
            await asyncio.gather(*(self._ping(server) for server in self._servers if server.in_flight))

    async def _ping(self, server: RemoteServer) -> None:
        try:
            await server.http.get("/v1/ping", timeout=_PING_TIMEOUT_S)
        except httpx.HTTPError as error:
            reason = str(unavailable(server.url, "GET /v1/ping", error))
            server.failed(reason, gone=True)
            server.lose_calls(reason)

    async def close(self) -> None:
        """See ``base.Sandbox.close``."""
        self._closed = True
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.wait((self._watch,))
        for server in self._servers:
            server.lose_calls("the sandbox was closed.")
        await asyncio.sleep(0)  # the calls end first
        for server in self._servers:
            with contextlib.suppress(httpx.HTTPError):
                await server.http.aclose()


class _RefusedRequest(Exception):
    """The server does not run what was asked: no other one would."""


def unavailable(url: str, what: str, error: Exception) -> SandboxUnavailable:
    """The error for a server that did not answer."""
    reason = str(error) or type(error).__name__
    return SandboxUnavailable(
        f"the sandbox at {url} did not answer {what}: {reason[:500]}. "
        "Is it running there (`retool sandbox serve`), and reachable from this machine?"
    )


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


def _read(server: RemoteServer, answer: httpx.Response, round_trip_s: float) -> ExecResult:
    """Read the server's answer.

    Raises SandboxUnavailable or ValueError when the server itself failed.
    """
    if answer.status_code != 200:
        raise SandboxUnavailable(f"the sandbox at {server.url} answered {answer.status_code}: {answer.text[:500]}")
    response = RunCodeResponse.model_validate_json(answer.content)
    if response.status == "SandboxError":
        raise SandboxUnavailable(f"the sandbox at {server.url} failed: {response.message[:2000]}")
    return response.result(round_trip_s=round_trip_s)
