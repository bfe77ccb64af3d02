"""One sandbox server as a client sees it: its connections, its load, and whether it is trusted.

A node is admitted by a ping that it answers. It loses that by a refused or broken connection, by
silence while calls wait for it, and by calls that fail one after another though it answers pings.
"""

import asyncio
import logging
import random
import time
from collections.abc import Callable
from typing import Protocol

import httpx

from retool_mcore.errors import ConfigError, SandboxUnavailable
from retool_mcore.sandbox.base import Level
from retool_mcore.sandbox.server.guard import read_token
from retool_mcore.sandbox.server.wire import LEVEL_HEADER, SESSIONS_HEADER
from retool_mcore.transport import ManyInFlight

logger = logging.getLogger(__name__)

# Stays below the 5 s after which uvicorn, SandboxFusion's server, closes an idle connection.
_KEEP_ALIVE_S = 4.0
# A node that calls wait for and that has said nothing for _SILENT_S is asked for a sign of life. It
# gets no more calls unless it answers within _PING_TIMEOUT_S.
_SILENT_S = 0.4
_PING_TIMEOUT_S = 0.5
# A server that starts listens before it can answer.
_FIRST_PING_TIMEOUT_S = 5.0
_IDLE_PING_S = 5.0
_RETRY_PING_S = (0.5, 4.0)  # how long a node that is out rests between pings: first, longest
# Calls that fail in a row put a node out for a time that doubles, whatever its pings say.
_FAILURES_IN_A_ROW = 3
_REST_S = (1.0, 30.0)
# Beyond the longest run timeout among its calls: a working server answers one of them in this time.
_NO_ANSWER_ALLOWANCE_S = 15.0


class InFlightCall(Protocol):
    """A call in flight at a node, or one that waits for a node."""

    run_timeout_s: float

    def abandon(self, reason: str) -> None:
        """The node will not answer: be started elsewhere."""
        ...


class Node:
    """One server. ``admitted``: calls may be given to it."""

    def __init__(self, url: str, connections: int, *, min_level: Level, sessions: bool) -> None:
        self.url = url
        self.limit = connections
        self._min_level, self._sessions = min_level, sessions
        uds = url.removeprefix("unix://") if url.startswith("unix://") else None
        transport = ManyInFlight(uds=uds, verify=url.startswith("https://"), keep_alive_s=_KEEP_ALIVE_S)
        token = read_token(None)
        self.http = httpx.AsyncClient(
            base_url="http://sandbox" if uds is not None else url,
            transport=transport,
            trust_env=False,
            headers={} if token is None else {"authorization": f"Bearer {token}"},
        )
        self.legs: set[InFlightCall] = set()
        self.admitted = False
        self.reason = "it was not asked yet"
        self.refusal: ConfigError | None = None
        self.failed_pings = 0
        self.heard_at = self._answered_at = time.monotonic()
        self.rests_until = 0.0
        self.stalled_at = 0.0  # when this process itself last stood still: silence since then proves nothing
        # Whether the others could do its work: if not, silence is overload, and it stays in use.
        self.expendable: Callable[[], bool] = lambda: True
        self._known = False
        self._failures = 0
        self._rest_s = _REST_S[0]
        self._ping: asyncio.Task[None] | None = None
        self._ping_at = 0.0

    # --------------------------------------------------------------- choice

    def free(self, now: float) -> bool:
        """Whether another call may be given to it."""
        return self.admitted and now >= self.rests_until and len(self.legs) < self.limit

    def silent_s(self, now: float) -> float:
        """Seconds since it last said anything."""
        return now - self.heard_at

    def begin(self, leg: InFlightCall) -> None:
        """Count a call in."""
        if not self.legs:
            self._answered_at = time.monotonic()
        self.legs.add(leg)

    # --------------------------------------------------------------- health

    def call_answered(self) -> None:
        """A call came back with a result, or was refused for what it asked."""
        self.heard_at = self._answered_at = time.monotonic()
        self._failures, self._rest_s = 0, _REST_S[0]

    def call_failed(self, reason: str) -> None:
        """The server answered a call, but could not run it."""
        self.heard_at = self._answered_at = time.monotonic()
        self._failures += 1
        if self._failures >= _FAILURES_IN_A_ROW:
            self.rest(f"{self._failures} calls failed in a row: {reason}")

    def rest(self, reason: str) -> None:
        """Give it no more calls for a time that doubles until one succeeds."""
        now = time.monotonic()
        self._answered_at = now  # judged anew from here
        if now < self.rests_until:
            return
        self.rests_until = now + self._rest_s * random.uniform(0.8, 1.2)
        logger.warning("sandbox %s rests for %.0f s: %s", self.url, self._rest_s, reason)
        self._rest_s = min(2 * self._rest_s, _REST_S[1])

    def busy_for(self, seconds: float) -> None:
        """The server asked to be spared for a while."""
        self.heard_at = self._answered_at = time.monotonic()
        self.rests_until = max(self.rests_until, time.monotonic() + seconds)

    def put_out(self, reason: str) -> None:
        """Give it no more calls until it answers a ping."""
        if self.admitted:
            logger.warning("sandbox %s is out: %s", self.url, reason)
        self.admitted, self.reason = False, reason
        self._ping_at = min(self._ping_at, time.monotonic() + _RETRY_PING_S[0])

    def stuck(self, now: float) -> bool:
        """Whether it answers no calls, although one must have ended by now."""
        if not self.legs:
            return False
        longest_s = max(leg.run_timeout_s for leg in self.legs)
        return now - self._answered_at > longest_s + _NO_ANSWER_ALLOWANCE_S

    def due(self, now: float) -> bool:
        """Whether it is time for a ping: often while calls wait in silence, seldom otherwise."""
        if self._ping is not None and not self._ping.done():
            return False
        if not self.admitted:
            return now >= self._ping_at
        return self.silent_s(now) >= (_SILENT_S if self.legs else _IDLE_PING_S)

    def ask_anew(self) -> None:
        """Forget earlier refusals: somebody opens the sandbox again."""
        self.failed_pings, self.refusal, self._ping_at = 0, None, 0.0

    def start_ping(self) -> asyncio.Task[None]:
        """Ask for a sign of life; the result is the node's state."""
        self._ping = asyncio.ensure_future(self._ask())
        return self._ping

    async def _ask(self) -> None:
        asked_at = time.monotonic()
        try:
            timeout_s = _PING_TIMEOUT_S if self._known else _FIRST_PING_TIMEOUT_S
            async with asyncio.timeout(timeout_s):
                answer = await self.http.get("/v1/ping", timeout=timeout_s)
            answer.raise_for_status()
            self._check_level(answer.headers)
        except (TimeoutError, httpx.TimeoutException) as error:
            if not self.admitted or (self.heard_at < asked_at > self.stalled_at and self.expendable()):
                self._ping_failed(unavailable(self.url, "GET /v1/ping", error))
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            # An answer to a call meanwhile says more.
            if max(self.heard_at, self.stalled_at) < asked_at or not self.admitted:
                self._ping_failed(unavailable(self.url, "GET /v1/ping", error))
        except ConfigError as error:
            self.refusal = error
            self._ping_failed(error)
        else:
            self._admit()

    def _ping_failed(self, error: Exception) -> None:
        rest_s = min(_RETRY_PING_S[0] * 2 ** min(self.failed_pings, 8), _RETRY_PING_S[1])
        self.failed_pings += 1
        self.put_out(str(error))
        self._ping_at = time.monotonic() + rest_s * random.uniform(0.8, 1.2)

    def _admit(self) -> None:
        self.heard_at = time.monotonic()
        self.failed_pings = 0
        if not self.admitted:
            if self._known:
                logger.warning("sandbox %s is back", self.url)
            self.admitted, self._known, self.refusal = True, True, None

    def _check_level(self, headers: httpx.Headers) -> None:
        told = headers.get(LEVEL_HEADER, "")
        level = Level(told) if told in list(Level) else Level.NONE
        if level == Level.NONE and self._min_level.rank <= Level.RLIMITS.rank:
            if not self._known:
                logger.warning("the sandbox at %s does not tell its isolation level; taken as none", self.url)
        elif level.rank < self._min_level.rank:
            raise ConfigError(
                f"the sandbox at {self.url} runs at level {str(level)!r}, below min_level = "
                f"{str(self._min_level)!r}. Start it with `retool sandbox serve --min-level {self._min_level}`, "
                "or lower min_level."
            )
        if self._sessions and headers.get(SESSIONS_HEADER, "0") == "0":
            raise ConfigError(
                f"sessions were asked for, but the sandbox at {self.url} has none. "
                "Start it with `retool sandbox serve --sessions N`."
            )
        if not self._known:
            logger.info("sandbox at %s: level %s", self.url, level)

    async def close(self) -> None:
        """End a ping in flight, and the connections."""
        if self._ping is not None:
            self._ping.cancel()
            await asyncio.wait((self._ping,))
        await self.http.aclose()


def unavailable(url: str, what: str, error: Exception) -> SandboxUnavailable:
    """The error for a server that did not answer."""
    reason = str(error) or type(error).__name__
    return SandboxUnavailable(
        f"the sandbox at {url} did not answer {what}: {reason[:500]}. "
        "Is it running there (`retool sandbox serve`), and reachable from this machine?"
    )
