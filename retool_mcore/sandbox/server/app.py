"""FastAPI application that serves a local sandbox in SandboxFusion's HTTP protocol.

Routes: POST /run_code, DELETE /v1/sessions/NAME, GET /v1/ping and GET /health. Failing code gets
status 200. Rejected requests get a SandboxFusion response body and one of: 401 (token missing or
wrong), 403 (request from a web page), 408 (body too slow), 413 (body too large), 415 (not JSON),
422 (invalid request). uvicorn answers 503 when it has too many connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import signal
from collections.abc import AsyncGenerator, Callable
from urllib.parse import urlsplit

from fastapi import Depends, FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from starlette.exceptions import HTTPException as AnyHTTPException
from starlette.requests import ClientDisconnect

from retool_mcore.errors import ConfigError, SandboxUnavailable
from retool_mcore.process import die_with_parent
from retool_mcore.sandbox.base import ExecRequest, ExecResult
from retool_mcore.sandbox.server.wire import (
    LEVEL_HEADER,
    SESSIONS_HEADER,
    TOKEN_VARIABLE,
    RunCodeRequest,
    RunCodeResponse,
    is_loopback,
)
from retool_mcore.sandbox.supervisor.local import LocalSandbox

MAX_BODY_BYTES = 48 << 20
BODY_TIMEOUT_S = 30.0
_FAILURES_IN_A_ROW = 3  # from this number on, /health reports failure
_PROBE_TIMEOUT_S = 5.0
_DISCONNECT_POLL_S = 0.5


def create_app(
    sandbox: LocalSandbox, *, token: str | None = None, only_local: bool = False, opens: bool = False
) -> FastAPI:
    """Create the ASGI application that serves ``sandbox``.

    ``token``: bearer token that every request except /health must send.
    ``only_local``: the server listens on loopback, so reject a Host header other than loopback or
    localhost (protection against DNS rebinding).
    ``opens``: the application opens and closes the sandbox; otherwise the caller does.
    """
    failures: list[str] = []  # errors of the sandbox since the last successful execution

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncGenerator[None]:
        async with sandbox if opens else contextlib.nullcontext():
            yield

    async def admit(request: Request) -> None:
        _check_headers(request, token, only_local=only_local)

    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan, dependencies=[Depends(admit)])

    @app.exception_handler(AnyHTTPException)
    async def refuse(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, AnyHTTPException), "registered for this type only"
        answer = RunCodeResponse(status="SandboxError", message=error.detail).model_dump() | {"detail": error.detail}
        return JSONResponse(answer, status_code=error.status_code, headers=error.headers)

    @app.post("/run_code")
    async def run_code(request: Request) -> JSONResponse:
        try:
            result = await _execute_while_connected(sandbox, _parse(await _read_body(request)), request)
        except ConfigError as error:
            raise HTTPException(422, str(error)) from error
        except SandboxUnavailable as error:
            failures.append(str(error))
            return JSONResponse(RunCodeResponse(status="SandboxError", message=str(error)).model_dump())
        failures.clear()
        return JSONResponse(RunCodeResponse.from_result(result).model_dump(mode="json"))

    @app.delete("/v1/sessions/{name:path}")
    async def end_session(name: str) -> JSONResponse:
        await sandbox.end_session(name)
        return JSONResponse("ended")

    @app.get("/v1/ping")
    async def ping() -> JSONResponse:
        headers = {LEVEL_HEADER: str(sandbox.level), SESSIONS_HEADER: str(sandbox.num_sessions)}
        return JSONResponse("pong", headers=headers)

    @app.get("/health")
    async def health() -> JSONResponse:
        """Report health. When unhealthy, probe: clients may have stopped sending requests."""
        if len(failures) >= _FAILURES_IN_A_ROW:
            try:
                async with asyncio.timeout(_PROBE_TIMEOUT_S):
                    await sandbox.run(ExecRequest(code=""))
                failures.clear()
            except (SandboxUnavailable, TimeoutError) as error:
                failures[:] = [*failures[-2:], str(error) or "an empty execution did not end"]
        healthy = len(failures) < _FAILURES_IN_A_ROW
        body = {"status": "ok" if healthy else "failing", "level": sandbox.level, "workers": sandbox.workers}
        body |= {} if healthy else {"reason": failures[-1][:500]}
        return JSONResponse(body, status_code=200 if healthy else 503)

    return app


def worker_app(new_sandbox: Callable[[], LocalSandbox], token: str | None, only_local: bool) -> FastAPI:
    """Create the application of one uvicorn worker process, which dies with its parent."""
    die_with_parent(signal.SIGTERM)
    return create_app(new_sandbox(), token=token, only_local=only_local, opens=True)


def _check_headers(request: Request, token: str | None, *, only_local: bool) -> None:
    """Check a request's headers before its body is read. Raises HTTPException to reject it.

    Rejects DNS rebinding (Host), requests from web pages (Origin), a missing or wrong token, and
    content types that a browser sends without a CORS preflight.
    """
    host = request.headers.get("host", "localhost")
    if only_local and not is_loopback(urlsplit(f"//{host}").hostname or ""):
        raise HTTPException(
            403, f"Host {host!r} is not localhost. A web page may have pointed its name at this machine."
        )
    if (origin := request.headers.get("origin")) is not None:
        raise HTTPException(403, f"Requests from web pages are refused (Origin {origin!r}).")
    if token is not None and request.url.path != "/health":
        scheme, _, sent = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(sent.encode(), token.encode()):
            reason = f"The bearer token is missing or wrong. Clients of retool read it from {TOKEN_VARIABLE}."
            raise HTTPException(401, reason, headers={"www-authenticate": "Bearer"})
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if request.method == "POST" and kind != "application/json":  # browsers may send others without a preflight
        raise HTTPException(415, f"content-type {kind!r}: send application/json.")


async def _read_body(request: Request) -> bytes:
    """Read the whole body, bounded in size (48 MiB) and time (30 s). Raises HTTPException."""
    body, too_large = bytearray(), False
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for chunk in request.stream():  # read to the end: a client still sending would miss the answer
                body += chunk
                if too_large := too_large or len(body) > MAX_BODY_BYTES:
                    body.clear()
    except TimeoutError:
        raise HTTPException(408, f"the body did not arrive within {BODY_TIMEOUT_S:.0f} s.") from None
    except ClientDisconnect:
        raise HTTPException(499, "the client closed the connection before its body had arrived.") from None
    if too_large:
        raise HTTPException(413, f"the body is larger than {MAX_BODY_BYTES} bytes.")
    return bytes(body)


def _parse(body: bytes) -> ExecRequest:
    """Parse a request body. Raises ConfigError that names every invalid field and the reason."""
    try:
        # Use json.loads instead of pydantic's parser, which rejects lone surrogates: those are the
        # model's mistake, not a malformed request.
        return RunCodeRequest.model_validate(json.loads(body)).to_request()
    except ValidationError as error:
        fields = (f"{'.'.join(map(str, e['loc'])) or 'body'}: {e['msg']}" for e in error.errors(include_url=False))
        raise ConfigError("; ".join(fields)) from error
    except ConfigError:
        raise
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"not JSON: {error}") from error


async def _execute_while_connected(sandbox: LocalSandbox, to_execute: ExecRequest, request: Request) -> ExecResult:
    """Execute a request, and cancel the execution when the client disconnects."""
    execution = asyncio.ensure_future(sandbox.run(to_execute))
    try:
        while not (await asyncio.wait((execution,), timeout=_DISCONNECT_POLL_S))[0]:
            if await request.is_disconnected():
                raise HTTPException(499, "the client closed the connection.")
        return execution.result()
    finally:
        execution.cancel()
        await asyncio.wait((execution,))
