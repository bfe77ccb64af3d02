"""What the HTTP server spends on connections: a bounded number, none of them idle for long.

uvicorn alone waits for ever for the headers of a request, and takes connections until the process
has no descriptor left, which then fails the executions too.
"""

from __future__ import annotations

import asyncio
import resource
import socket
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from retool_mcore.sandbox.guard import RETRY_AFTER_S

HEADER_TIMEOUT_S = 10.0
MAX_CONNECTIONS = 5120
_MAX_DESCRIPTORS = 1 << 20
_MAX_LINGERING = 64
_ACCEPTED_AT_ONCE = 32
BACKLOG = 4096
_LINGER_S = 1.0
_GRACE_S = 1.0  # a connection just made has its request on the way
_SMALL_BYTES = 32 << 10
_BUSY = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nconnection: close\r\n"
    b"retry-after: %d\r\ncontent-length: %d\r\n\r\n%s"
)
_BUSY_BODY = b'{"status": "SandboxError", "message": "all connections of this server are taken. Try again later."}'


def raise_descriptor_limit() -> int:
    """Raise the soft limit on open files to the hard one. Returns the limit now in force."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        return wanted
    return _MAX_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft


def connection_limit(descriptors: int, *, executions: int) -> int:
    """How many connections ``descriptors`` open files allow beside ``executions`` at a time."""
    reserved = (
        32 + 2 * _ACCEPTED_AT_ONCE + _MAX_LINGERING + 16 * executions
    )  # an execution has two pipes, a socket pair, a pidfd, a directory
    return max(16, min(MAX_CONNECTIONS, descriptors - reserved))


class GuardedServer(uvicorn.Server):
    """uvicorn's server, which takes few new connections at a time.

    asyncio accepts as many at once as the listening socket may hold, and only then has the protocol
    look at them: a flood would take every descriptor before one connection can be refused.
    """

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start serving at ``sockets``: more connections may wait there than are taken at once."""
        self.config.backlog = _ACCEPTED_AT_ONCE
        await super().startup(sockets)
        for listener in sockets or []:
            listener.listen(BACKLOG)


class Connections:
    """The connections of one server: how many there may be, and which wait for a request."""

    def __init__(self, limit: int, *, header_timeout_s: float = HEADER_TIMEOUT_S) -> None:
        self.limit = limit
        self.header_timeout_s = header_timeout_s
        self.idle: dict[GuardedProtocol, float] = {}  # those who wait for a request, since when, in that order
        self.num_lingering = 0

    def protocol(self, **arguments: Any) -> GuardedProtocol:
        """Make the protocol of a new connection: what uvicorn's ``http`` setting calls."""
        made = GuardedProtocol(**arguments)
        made.guard = self
        return made


class GuardedProtocol(H11Protocol):
    """uvicorn's protocol, whose connections are counted and may not wait for ever.

    At the limit the connection that has waited longest for a request, or for the rest of its body,
    makes room; where none has, the newcomer is told 503 before a byte of it is read. So is one that
    makes room before its first answer, or amid a body: on a busy machine its request may lie unread
    here.
    """

    guard: Connections
    _deadline: asyncio.TimerHandle | None = None
    _refused = False
    _has_answered = False
    _in_body = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if len(self.connections) >= self.guard.limit:
            longest = next(iter(self.guard.idle), None)
            if longest is None or self.loop.time() - self.guard.idle[longest] < _GRACE_S:
                self._refuse(transport)
                return
            longest.make_room()
        super().connection_made(transport)
        self._wait()

    def _refuse(self, transport: asyncio.Transport) -> None:
        self._refused, self.transport = True, transport
        transport.write(_BUSY % (RETRY_AFTER_S, len(_BUSY_BODY), _BUSY_BODY))
        if self.guard.num_lingering >= _MAX_LINGERING:
            transport.close()
            return
        # Closing at once, with bytes of the request unread, would reset the connection, and the
        # client would not see the answer.
        transport.write_eof()
        self.guard.num_lingering += 1
        self._deadline = self.loop.call_later(_LINGER_S, self._end_lingering)

    def _end_lingering(self) -> None:
        self.guard.num_lingering -= 1
        self._deadline = None
        self.transport.close()

    def data_received(self, data: bytes) -> None:
        if self._refused:
            if len(data) < _SMALL_BYTES and self._deadline is not None:  # all has come, most likely
                self._deadline.cancel()
                self._end_lingering()
            return
        super().data_received(data)
        if self.conn.their_state is h11.SEND_BODY:
            self._wait_for_body()
        elif self.conn.their_state is not h11.IDLE:
            self._stop_waiting()
        elif self._deadline is None:
            self._wait()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._has_answered = True
        if not self.transport.is_closing() and self.conn.their_state is h11.IDLE:
            self.guard.idle[self] = self.loop.time()  # uvicorn's own timer ends it, until more data comes

    def connection_lost(self, exc: Exception | None) -> None:
        if self._refused:
            if self._deadline is not None:
                self._deadline.cancel()
                self.guard.num_lingering -= 1
            return
        self._stop_waiting()
        super().connection_lost(exc)

    def make_room(self) -> None:
        """Close this idle connection for a newcomer."""
        if self._has_answered and not self._in_body:
            self.give_up()
            return
        if self._in_body:  # the application waits for the rest
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self._stop_waiting()
        self.connections.discard(self)
        self._refuse(self.transport)

    def give_up(self) -> None:
        """Close this connection, which waits for a request or for the rest of its headers."""
        self._stop_waiting()
        self.connections.discard(self)
        self.transport.close()

    def _wait(self) -> None:
        self.guard.idle[self] = self.loop.time()
        self._deadline = self.loop.call_later(self.guard.header_timeout_s, self.give_up)

    def _wait_for_body(self) -> None:
        """From the body's first byte on, however it trickles; the application bounds it in time."""
        if not self._in_body:
            self._stop_waiting()
            self._in_body = True
            self.guard.idle[self] = self.loop.time()

    def _stop_waiting(self) -> None:
        self._in_body = False
        self.guard.idle.pop(self, None)
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
