"""HTTP with hundreds of requests in flight.

httpx's own pool looks through all of its connections whenever a request begins or ends. With 500 in
flight that is some 20 ms of CPU a request; here it is below 3, whatever is in flight.
"""

import socket
import sys
import time
from collections import deque
from collections.abc import AsyncIterator

import httpx

_Free = deque[tuple[float, httpx.AsyncHTTPTransport]]  # with the time since when; the oldest is first

# A machine that is gone closes no connection: the kernel notices it within half a minute.
_KEEP_ALIVE = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 25_000),
] if sys.platform == "linux" else None  # fmt: skip


class ManyInFlight(httpx.AsyncBaseTransport):
    """One connection for each request in flight; it is kept for a later one.

    ``verify``: whether https servers must show a certificate; ``uds``: a Unix socket in place of
    TCP; ``keep_alive_s``: how long a connection is kept without a request. Raises as
    ``httpx.AsyncHTTPTransport``.
    """

    def __init__(self, *, verify: bool = True, uds: str | None = None, keep_alive_s: float = 5.0) -> None:
        self._verify = httpx.create_ssl_context(verify=verify)  # reads a file of certificates: once for all
        self._uds = uds
        self._limits = httpx.Limits(max_connections=1, keepalive_expiry=keep_alive_s)
        self._keep_alive_s = keep_alive_s
        self._all = set[httpx.AsyncHTTPTransport]()
        self._free = _Free()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """See ``httpx.AsyncBaseTransport``."""
        await self._close_old()
        one = self._free.pop()[1] if self._free else self._new()
        try:
            response = await one.handle_async_request(request)
        except BaseException:
            self._free.append((time.monotonic(), one))
            raise
        assert isinstance(response.stream, httpx.AsyncByteStream)
        response.stream = _Lent(response.stream, one, self._free)
        return response

    def _new(self) -> httpx.AsyncHTTPTransport:
        options = None if self._uds else _KEEP_ALIVE
        one = httpx.AsyncHTTPTransport(verify=self._verify, uds=self._uds, limits=self._limits, socket_options=options)
        self._all.add(one)
        return one

    async def _close_old(self) -> None:
        """Close what a burst has left behind."""
        while self._free and self._free[0][0] < time.monotonic() - self._keep_alive_s:
            _, one = self._free.popleft()
            self._all.discard(one)
            await one.aclose()

    async def aclose(self) -> None:
        """Close all connections."""
        for one in self._all:
            await one.aclose()


class _Lent(httpx.AsyncByteStream):
    """A response's body; when it is closed, its connection is free."""

    def __init__(self, body: httpx.AsyncByteStream, one: httpx.AsyncHTTPTransport, free: _Free) -> None:
        self._body, self._one, self._free = body, one, free

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for part in self._body:
            yield part

    async def aclose(self) -> None:
        try:
            await self._body.aclose()
        finally:
            self._free.append((time.monotonic(), self._one))
