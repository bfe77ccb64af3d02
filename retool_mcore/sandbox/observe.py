"""What may be asked on the port for monitoring, beside a service on a Unix socket: nothing runs."""

from fastapi import FastAPI
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

_PATHS = ("/health", "/metrics", "/v1/ping")


class MonitoringOnly:
    """``app``, of which ``port`` shows no more than health and metrics."""

    def __init__(self, app: FastAPI, port: int) -> None:
        self._app, self._port = app, port

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        server = scope.get("server") or (None, None)
        if scope["type"] == "http" and server[1] == self._port and scope["path"] not in _PATHS:
            refused = PlainTextResponse(f"This port has only GET {', '.join(_PATHS)}.\n", status_code=404)
            await refused(scope, receive, send)
        else:
            await self._app(scope, receive, send)
