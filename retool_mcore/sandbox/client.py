"""The sandbox behind one or several SandboxFusion-compatible URLs.

Each call goes to the least busy server, and is retried with backoff.
"""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import time
import zlib
from collections.abc import Sequence
from urllib.parse import quote

import httpx
import tenacity
from pydantic import ValidationError

from retool_mcore.errors import ConfigError, SandboxUnavailable
from retool_mcore.sandbox.base import ExecRequest, ExecResult, Level, Sandbox
from retool_mcore.sandbox.guard import read_token
from retool_mcore.sandbox.wire import LEVEL_HEADER, SESSIONS_HEADER, RunCodeResponse

logger = logging.getLogger(__name__)

# Stays below the 5 s after which uvicorn, SandboxFusion's server, closes an idle connection.
_KEEP_ALIVE_S = 4.0
_CONNECT_TIMEOUT_S = 5.0
# How much longer than the run timeout an answer may take: the wait in the server's queue and the
# start of the code.
_QUEUE_ALLOWANCE_S = 120.0
# For this long after a failure, an endpoint is chosen last.
_COOL_DOWN_S = 5.0


class _Endpoint:
    """One server, its connections and its load."""

    def __init__(self, url: str, connections: int) -> None:
        self.url = url
        transport = httpx.AsyncHTTPTransport(
            uds=url.removeprefix("unix://") if url.startswith("unix://") else None,
            limits=httpx.Limits(max_connections=connections, keepalive_expiry=_KEEP_ALIVE_S),
        )
        base_url = "http://sandbox" if url.startswith("unix://") else url
        token = read_token(None)
        headers = {} if token is None else {"authorization": f"Bearer {token}"}
        self.http = httpx.AsyncClient(base_url=base_url, transport=transport, trust_env=False, headers=headers)
        self.num_in_flight = 0
        self.failed_at = -_COOL_DOWN_S

    @property
    def load(self) -> tuple[bool, int]:
        """Smaller is better: healthy before failed, idle before busy."""
        return time.monotonic() - self.failed_at < _COOL_DOWN_S, self.num_in_flight


class RemoteSandbox(Sandbox):
    """Runs model code on other machines (or in another process).

    See ``base.Sandbox`` and ``open.open_sandbox``.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        min_level: Level = Level.RLIMITS,
        workers_per_url: int = 64,
        sessions: bool = False,
        attempts: int = 5,
    ) -> None:
        self._min_level = min_level
        self._sessions = sessions
        self._attempts = attempts
        self._endpoints = [_Endpoint(url.rstrip("/"), workers_per_url) for url in urls]
        self._slots = asyncio.Semaphore(workers_per_url * len(self._endpoints))
        self._opening = asyncio.Lock()
        self._opened = False

    # -------------------------------------------------------------- opening

    async def open(self) -> None:
        """Ask every server for its level.

        Raises ConfigError when a level is below min_level, SandboxUnavailable when a server does
        not answer.
        """
        async with self._opening:
            if not self._opened:
                await asyncio.gather(*(self._check(endpoint) for endpoint in self._endpoints))
                self._opened = True

    async def _check(self, endpoint: _Endpoint) -> None:
        async for attempt in self._retrying(self._attempts):
            with attempt:
                try:
                    answer = await endpoint.http.get("/v1/ping", timeout=_CONNECT_TIMEOUT_S)
                    answer.raise_for_status()
                except httpx.HTTPError as error:
                    raise _unavailable(endpoint, "GET /v1/ping", error) from error
                self._check_level(endpoint, answer.headers)

    def _check_level(self, endpoint: _Endpoint, headers: httpx.Headers) -> None:
        told = headers.get(LEVEL_HEADER, "")
        level = Level(told) if told in list(Level) else Level.NONE
        if level == Level.NONE and self._min_level.rank <= Level.RLIMITS.rank:
            logger.warning("the sandbox at %s does not tell its isolation level; taken as none", endpoint.url)
        elif level.rank < self._min_level.rank:
            raise ConfigError(
                f"the sandbox at {endpoint.url} runs at level {str(level)!r}, below min_level = "
                f"{str(self._min_level)!r}. Start it with `retool sandbox serve --min-level {self._min_level}`, "
                "or lower min_level."
            )
        if self._sessions and headers.get(SESSIONS_HEADER, "0") == "0":
            raise ConfigError(
                f"sessions were asked for, but the sandbox at {endpoint.url} has none. "
                "Start it with `retool sandbox serve --sessions N`."
            )
        logger.info("sandbox at %s: level %s", endpoint.url, level)

    # ------------------------------------------------------------ executing

    async def run(self, request: ExecRequest) -> ExecResult:
        """See ``base.Sandbox.run``."""
        session = request.session
        if session is not None and not self._sessions:
            raise ConfigError(f"session = {session!r}, but this sandbox was opened without sessions (sessions=0).")
        body = _pack(request)
        await self.open()
        async for attempt in self._retrying(1 if session else self._attempts):
            with attempt:
                async with self._slots:
                    return await self._post(self._choose(session), body, request.run_timeout_s)
        raise AssertionError("tenacity neither returned nor raised")

    @staticmethod
    def _retrying(attempts: int) -> tenacity.AsyncRetrying:
        return tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception_type(SandboxUnavailable),
            stop=tenacity.stop_after_attempt(attempts),
            wait=tenacity.wait_random_exponential(multiplier=0.3, max=5.0),
            before_sleep=tenacity.before_sleep_log(logger, logging.WARNING),
            reraise=True,
        )

    def _choose(self, session: str | None) -> _Endpoint:
        if session is not None:  # a session's definitions live on one server
            return self._endpoints[zlib.crc32(session.encode("utf-8", "replace")) % len(self._endpoints)]
        return min(self._endpoints, key=lambda endpoint: endpoint.load)

    async def _post(self, endpoint: _Endpoint, body: bytes, run_timeout_s: float) -> ExecResult:
        endpoint.num_in_flight += 1
        asked = time.monotonic()
        try:
            answer = await endpoint.http.post(
                "/run_code",
                content=body,
                headers={"content-type": "application/json"},
                timeout=httpx.Timeout(run_timeout_s + _QUEUE_ALLOWANCE_S, connect=_CONNECT_TIMEOUT_S),
            )
            return _read(endpoint, answer, time.monotonic() - asked)
        except (httpx.HTTPError, ValidationError, ValueError) as error:
            if isinstance(error, ConfigError):
                raise
            endpoint.failed_at = time.monotonic()
            raise _unavailable(endpoint, "POST /run_code", error) from error
        except SandboxUnavailable:
            endpoint.failed_at = time.monotonic()
            raise
        finally:
            endpoint.num_in_flight -= 1

    async def end_session(self, session: str) -> None:
        """See ``base.Sandbox.end_session``."""
        endpoint = self._choose(session)
        try:
            answer = await endpoint.http.delete(f"/v1/sessions/{quote(session, safe='')}", timeout=_CONNECT_TIMEOUT_S)
            answer.raise_for_status()
        except httpx.HTTPError as error:
            logger.info("session %s was not ended at %s (its idle time will): %s", session, endpoint.url, error)

    # -------------------------------------------------------------- closing

    async def close(self) -> None:
        """See ``base.Sandbox.close``."""
        await asyncio.gather(*(endpoint.http.aclose() for endpoint in self._endpoints))


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
    }
    return json.dumps(fields).encode()  # ASCII: a lone surrogate in the code travels as an escape


def _read(endpoint: _Endpoint, answer: httpx.Response, round_trip_s: float) -> ExecResult:
    """Read the server's answer.

    Raises ConfigError when the server refused the request, SandboxUnavailable or ValueError when
    the server itself failed.
    """
    if answer.status_code in (400, 413, 422):
        raise ConfigError(f"the sandbox at {endpoint.url} refused the request: {answer.text[:2000]}")
    if answer.status_code != 200:
        raise SandboxUnavailable(f"the sandbox at {endpoint.url} answered {answer.status_code}: {answer.text[:500]}")
    response = RunCodeResponse.model_validate_json(answer.content)
    if response.status == "SandboxError":
        raise SandboxUnavailable(f"the sandbox at {endpoint.url} failed: {response.message[:2000]}")
    return response.result(round_trip_s=round_trip_s)


def _unavailable(endpoint: _Endpoint, what: str, error: Exception) -> SandboxUnavailable:
    reason = str(error) or type(error).__name__
    return SandboxUnavailable(
        f"the sandbox at {endpoint.url} did not answer {what}: {reason[:500]}. "
        "Is it running there (`retool sandbox serve`), and reachable from this machine?"
    )
