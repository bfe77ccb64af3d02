"""Who may ask the HTTP server: the bearer of its token, and no web page of another site.

It stands before the application, and refuses before a body is read.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from retool_mcore.sandbox.server.wire import TOKEN_VARIABLE

if TYPE_CHECKING:  # every command of `retool` imports this file
    from starlette.types import ASGIApp, Receive, Scope, Send

RETRY_AFTER_S = 1
FULL = "as many requests are waiting as this server takes. Try again later."
_THROW_AWAY_S = 10.0
_OPEN_PATHS = ("/health",)  # says only whether the server is up


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a server that listens on ``host``."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class Guard:
    """An ASGI application that passes on to ``app`` what may be asked.

    ``is_full`` tells whether a further execution must be refused; ``on_refusal`` is told the HTTP
    status of every refusal.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        token: str | None,
        max_body_bytes: int,
        is_full: Callable[[], bool],
        on_refusal: Callable[[int], None],
        only_local: bool = False,
    ) -> None:
        """``only_local``: only this machine reaches the server, under its address or localhost."""
        self._app = app
        self._wanted = None if token is None else f"bearer {token}".encode()
        self._max_body_bytes = max_body_bytes
        self._is_full = is_full
        self._on_refusal = on_refusal
        self._only_local = only_local

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(scope) if scope["type"] == "http" else None
        if refusal is None:
            await self._app(scope, receive, send)
            return
        status, reason = refusal
        self._on_refusal(status)
        await _answer(receive if status == 413 else None, send, status, reason)

    def _refusal(self, scope: Scope) -> tuple[int, str] | None:
        headers: dict[bytes, bytes] = dict(scope["headers"])
        path, method = scope["path"], scope["method"]
        host = headers.get(b"host", b"localhost").decode("latin-1")
        if self._only_local and not _is_own_name(urlsplit(f"//{host}").hostname or ""):
            return 403, f"the Host {host!r} is no address of this machine: a web page may have made its name lead here."
        if (origin := headers.get(b"origin")) is not None and not _own_origin(origin, headers):
            return 403, f"the Origin {origin.decode('latin-1')!r} is another site's; no web page may ask this server."
        if self._wanted is not None and path not in _OPEN_PATHS:
            kind, _, token = headers.get(b"authorization", b"").partition(b" ")
            if not hmac.compare_digest(kind.lower() + b" " + token, self._wanted):
                return 401, f"a bearer token is wanted; clients of retool take it from {TOKEN_VARIABLE}."
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length[:20]) > self._max_body_bytes:
            return 413, f"the body is larger than {self._max_body_bytes} bytes."
        if method == "POST" and path == "/run_code":
            content_type = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
            if content_type not in (b"", b"application/json"):  # without one a web page sends an Origin
                return 415, f"content-type {content_type.decode('latin-1')!r}: send application/json."
            if self._is_full():
                return 503, FULL
        return None


def retry_after(status: int) -> dict[str, str]:
    """The header that belongs to an answer of ``status``."""
    return {"retry-after": str(RETRY_AFTER_S)} if status == 503 else {}


def _own_origin(origin: bytes, headers: Mapping[bytes, bytes]) -> bool:
    """Whether a page of this server asks, under its address: a name can be made to point here."""
    parts = urlsplit(origin.decode("latin-1"))
    if parts.netloc.encode("latin-1") != headers.get(b"host"):
        return False
    return _is_own_name(parts.hostname or "")


def _is_own_name(host: str) -> bool:
    """Whether a host is an address or localhost: other names can be made to point anywhere."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    return True


async def _answer(receive: Receive | None, send: Send, status: int, reason: str) -> None:
    """The protocol's answer to a request that is not run; the connection ends with it.

    With ``receive`` not before its body has been thrown away, for a bounded time: a client that is
    still sending would meet a reset connection, and not see the answer.
    """
    body = json.dumps({"status": "SandboxError", "message": reason, "detail": reason}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    headers.append((b"connection", b"close"))
    headers += [(name.encode(), value.encode()) for name, value in retry_after(status).items()]
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": receive is not None})
    if receive is not None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_THROW_AWAY_S):
                while (await receive()).get("more_body"):
                    pass
        await send({"type": "http.response.body", "body": b""})
