"""Client of one or several SandboxFusion-compatible servers.

Each call goes to the server with the fewest calls in flight; if that server fails, the client
retries on another. The code may then run twice, but executions share no state, so callers cannot
notice. Calls of a session do share state: the client sends each of them once, to the server that
hosts the session.
"""

from __future__ import annotations

import asyncio
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
from retool_mcore.sandbox.server.wire import (
    LEVEL_HEADER,
    SESSIONS_HEADER,
    RunCodeRequest,
    RunCodeResponse,
    read_token,
)
from retool_mcore.transport import ConcurrentTransport

logger = logging.getLogger(__name__)

_KEEP_ALIVE_S = 4.0  # uvicorn, which SandboxFusion runs on, closes idle connections after 5 s
_CONNECT_TIMEOUT_S = 5.0
# Added to the run timeout when waiting for an answer: covers the server's queue and the start of
# the code.
_QUEUE_ALLOWANCE_S = 120.0
_BUSY_PAUSE_S = (0.75, 1.25)
_MAX_PAUSE_S = 30.0


class RemoteServer:
    """One server: connection pool, count of calls in flight, and circuit breaker."""

    def __init__(self, url: str) -> None:
        self.url = url
        uds = url.removeprefix("unix://") if url.startswith("unix://") else None
        token = read_token(None)
        self.http = httpx.AsyncClient(
            base_url="http://localhost" if uds is not None else url,
            transport=ConcurrentTransport(uds=uds, verify=url.startswith("https://"), keep_alive_s=_KEEP_ALIVE_S),
            trust_env=False,
            headers={} if token is None else {"authorization": f"Bearer {token}"},
        )
        self.in_flight = 0
        self.checked = False  # True: the level is verified, and no call has failed since
        self.paused_until = 0.0
        self._failures = 0

    def record_success(self) -> None:
        """Reset the circuit breaker: the server returned a result or rejected a bad request."""
        self._failures, self.paused_until = 0, 0.0

    def record_failure(self, error: SandboxUnavailable) -> None:
        """Back off from the server, longer after each consecutive failure; then check it again."""
        self.checked = False
        if self.paused_until < time.monotonic():  # otherwise the call began before the last failure
            pause_s = min(2.0**self._failures, _MAX_PAUSE_S)
            self._failures, self.paused_until = self._failures + 1, time.monotonic() + pause_s
            logger.warning("sandbox %s gets no calls for %.0f s: %s", self.url, pause_s, error)


class RemoteSandbox(Sandbox):
    """Runs model code on sandbox servers. See ``base.Sandbox`` and ``open_sandbox``."""

    def __init__(
        self,
        urls: Sequence[str],
        *,
        min_level: Level = Level.RLIMITS,
        workers_per_url: int = 64,
        sessions: bool = False,
        attempts: int = 5,
    ) -> None:
        """Create a client; ``open`` contacts the servers.

        ``workers_per_url`` times the number of servers is the maximum number of calls in flight.
        ``attempts`` is the number of tries to open the sandbox, and of a call without a session.
        """
        self._servers = [RemoteServer(url.rstrip("/")) for url in urls]
        self._min_level, self._sessions, self._attempts = min_level, sessions, attempts
        self._places = asyncio.Semaphore(workers_per_url * len(self._servers))
        self._opening = asyncio.Lock()
        self._opened = self._closed = False
        self._answered = set[str]()  # sessions that returned a result and have not been ended

    # -------------------------------------------------------------- opening

    async def open(self) -> None:
        """Query every server's isolation level.

        Raises ConfigError when a server reports a level below ``min_level``, and SandboxUnavailable
        when fewer than half of the servers answer. The others are queried again before their first
        call.
        """
        async with self._opening:
            if self._closed:
                raise SandboxUnavailable("the sandbox was closed.")
            if not self._opened:
                await self._retries()(self._check_all)
                self._opened = True

    def _retries(self) -> tenacity.AsyncRetrying:
        return tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception(lambda e: isinstance(e, SandboxUnavailable) and not self._closed),
            stop=tenacity.stop_after_attempt(self._attempts),
            wait=tenacity.wait_exponential(multiplier=0.5, max=5.0) + tenacity.wait_random(0, 0.25),
            reraise=True,
        )

    async def _check_all(self) -> None:
        checks = (self._check(server) for server in self._servers if not server.checked)
        errors = [error for error in await asyncio.gather(*checks, return_exceptions=True) if error is not None]
        for error in errors:
            if not isinstance(error, SandboxUnavailable):
                raise error
        if 2 * len(errors) > len(self._servers):
            answered = f"{len(self._servers) - len(errors)} of {len(self._servers)} sandboxes answer"
            raise SandboxUnavailable(f"{answered}, but half are needed to start. {errors[0]}")
        if errors:
            logger.warning("opened without %d of %d sandboxes: %s", len(errors), len(self._servers), errors[0])

    async def _check(self, server: RemoteServer) -> None:
        """Query a server's level. Raises SandboxUnavailable if it fails, ConfigError if too low."""
        try:
            answer = await server.http.get("/v1/ping", timeout=_CONNECT_TIMEOUT_S)
            answer.raise_for_status()
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise unavailable(server.url, "GET /v1/ping", error) from error
        reported = answer.headers.get(LEVEL_HEADER, "")
        level = Level(reported) if reported in list(Level) else Level.NONE
        if level == Level.NONE and self._min_level.rank <= Level.RLIMITS.rank:
            logger.warning("the sandbox at %s does not report its isolation level; treating it as none", server.url)
        elif level.rank < self._min_level.rank:
            raise ConfigError(
                f"the sandbox at {server.url} runs at level {str(level)!r}, below min_level = "
                f"{str(self._min_level)!r}. Start it with `retool sandbox serve --min-level {self._min_level}`, "
                "or lower min_level."
            )
        if self._sessions and answer.headers.get(SESSIONS_HEADER, "0") == "0":
            raise ConfigError(
                f"sessions were requested, but the sandbox at {server.url} has none. "
                "Start it with `retool sandbox serve --sessions N`."
            )
        server.checked = True

    # -------------------------------------------------------------- calling

    async def run(self, request: ExecRequest) -> ExecResult:
        """See ``base.Sandbox.run``."""
        session = request.session
        if session is not None and not self._sessions:
            raise ConfigError(
                f"session = {session!r}, but this sandbox was opened without sessions. Open it with sessions=N."
            )
        # json.dumps writes ASCII, so a lone surrogate in the code becomes an escape.
        body = json.dumps(RunCodeRequest.from_request(request).model_dump(mode="json")).encode()
        await self.open()
        async with self._places:
            if session is None:
                return await self._call(body, request.run_timeout_s)
            result = await self._try(self._session_server(session), body, request.run_timeout_s)
        # A restarted server does not know which sessions it lost.
        lost = result.session_started and session in self._answered
        self._answered.add(session)
        return replace(result, session_restarted=True) if lost else result

    async def _call(self, body: bytes, run_timeout_s: float) -> ExecResult:
        tried: set[RemoteServer] = set()

        async def attempt() -> ExecResult:
            server = self._choose(tried)
            tried.add(server)
            return await self._try(server, body, run_timeout_s)

        return await self._retries()(attempt)

    def _choose(self, tried: Set[RemoteServer]) -> RemoteServer:
        """Choose the least busy server; prefer those not backing off and not yet tried."""
        now = time.monotonic()
        # Break ties at random, so that the processes of a run do not all start with the first URL.
        return min(self._servers, key=lambda s: (s.paused_until > now, s in tried, s.in_flight, random.random()))

    async def _try(self, server: RemoteServer, body: bytes, run_timeout_s: float) -> ExecResult:
        """Send one request, and update the server's circuit breaker from the outcome."""
        server.in_flight += 1
        try:
            if not server.checked:
                await self._check(server)
            answer, round_trip_s = await self._post(server, body, run_timeout_s)
            refused = answer.status_code in (400, 413, 422)
            result = None if refused else _read(server, answer, round_trip_s)
        except (SandboxUnavailable, httpx.HTTPError, ValueError) as error:
            failure = error if isinstance(error, SandboxUnavailable) else unavailable(server.url, "a call", error)
            server.record_failure(failure)
            raise failure from error
        finally:
            server.in_flight -= 1
        server.record_success()
        if result is None:  # any other server would reject it too
            raise ConfigError(f"the sandbox at {server.url} refused the request: {answer.text[:2000]}")
        return result

    async def _post(self, server: RemoteServer, body: bytes, run_timeout_s: float) -> tuple[httpx.Response, float]:
        """Return the answer and the round trip in seconds. Retries while the server is busy."""
        sent_at = time.monotonic()
        timeout = httpx.Timeout(run_timeout_s + _QUEUE_ALLOWANCE_S, connect=_CONNECT_TIMEOUT_S)
        headers = {"content-type": "application/json"}
        while True:
            answer = await server.http.post("/run_code", content=body, headers=headers, timeout=timeout)
            took_s = time.monotonic() - sent_at
            if answer.status_code != 503 or took_s > _QUEUE_ALLOWANCE_S:
                return answer, took_s
            await asyncio.sleep(random.uniform(*_BUSY_PAUSE_S))

    def _session_server(self, session: str) -> RemoteServer:
        """Return the server that hosts a session, chosen by a hash of its name."""
        return self._servers[zlib.crc32(session.encode("utf-8", "replace")) % len(self._servers)]

    async def end_session(self, session: str) -> None:
        """See ``base.Sandbox.end_session``."""
        server = self._session_server(session)
        self._answered.discard(session)
        try:
            answer = await server.http.delete(f"/v1/sessions/{quote(session, safe='')}", timeout=_CONNECT_TIMEOUT_S)
            answer.raise_for_status()
        except httpx.HTTPError as error:
            logger.info(
                "session %s could not be ended at %s; it ends after its idle time: %s", session, server.url, error
            )

    async def close(self) -> None:
        """See ``base.Sandbox.close``."""
        self._closed = True
        for server in self._servers:
            with contextlib.suppress(httpx.HTTPError):
                await server.http.aclose()


def unavailable(url: str, what: str, error: Exception) -> SandboxUnavailable:
    """Build the error for a server that did not answer."""
    reason = str(error) or type(error).__name__
    return SandboxUnavailable(
        f"the sandbox at {url} did not answer {what}: {reason[:500]}. "
        "Is it running there (`retool sandbox serve`), and reachable from this machine?"
    )


def _read(server: RemoteServer, answer: httpx.Response, round_trip_s: float) -> ExecResult:
    """Parse the server's answer. Raises SandboxUnavailable or ValueError when the server failed."""
    if answer.status_code != 200:
        raise SandboxUnavailable(f"the sandbox at {server.url} answered {answer.status_code}: {answer.text[:500]}")
    response = RunCodeResponse.model_validate_json(answer.content)
    if response.status == "SandboxError":
        raise SandboxUnavailable(f"the sandbox at {server.url} failed: {response.message[:2000]}")
    return response.to_result(round_trip_s=round_trip_s)
