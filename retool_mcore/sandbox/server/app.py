"""The sandbox over HTTP, in SandboxFusion's protocol.

It serves POST /run_code, GET /v1/ping, GET /health, and GET /metrics for Prometheus. A refusal has
the protocol's own form, too: 422 for a request that cannot be run, 413 for one too large, 408 for
one that comes too slowly. Code that fails is answered with 200. uvicorn answers 503 when it has too
many connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import os
import signal
from collections.abc import AsyncGenerator, Callable
from urllib.parse import urlsplit

from fastapi import Depends, FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram, generate_latest, multiprocess
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
    WORKERS_HEADER,
    RunCodeRequest,
    RunCodeResponse,
    is_loopback,
)
from retool_mcore.sandbox.supervisor.local import LocalSandbox

MAX_BODY_BYTES = 48 << 20
BODY_TIMEOUT_S = 30.0
METRICS_ENV = "PROMETHEUS_MULTIPROC_DIR"  # set where several processes share an address
_FAILURES_IN_A_ROW = 3  # after which the server is not healthy
_PROBE_TIMEOUT_S = 5.0
_HANG_UP_LOOK_S = 0.5
_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Metrics:
    """What GET /metrics reports. One registry per server, so that tests can open several."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.executions = self._counter("executions", "Executions by outcome.", "status")
        self.refused = self._counter("refused", "Requests not run, by HTTP status.", "code")
        self.cpu_s = self._counter("cpu_seconds", "CPU time of executions.")
        self.run_s = self._histogram("run_seconds", "Wall time of executions.")
        self.queue_s = self._histogram("queue_seconds", "Wait before execution.")

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"retool_sandbox_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(f"retool_sandbox_{name}", text, buckets=_SECONDS, registry=self.registry)

    def text(self) -> bytes:
        """The page: of this process, or of all that share an address."""
        if METRICS_ENV not in os.environ:
            return generate_latest(self.registry)
        together = CollectorRegistry()
        multiprocess.MultiProcessCollector(together)
        return generate_latest(together)

    def observe(self, result: ExecResult) -> None:
        """Count one execution."""
        self.executions.labels(status=result.status).inc()
        self.run_s.observe(result.run_s)
        self.queue_s.observe(result.queue_s)
        self.cpu_s.inc(result.cpu_s)


def create_app(
    sandbox: LocalSandbox, *, token: str | None = None, only_local: bool = False, opens: bool = False
) -> FastAPI:
    """The ASGI application around ``sandbox``.

    With ``token`` every request must bear it. ``only_local``: only this machine reaches the server,
    under an address of loopback or as localhost. ``opens``: the application opens and closes the
    sandbox; else the caller does.
    """
    metrics = Metrics()
    failures: list[str] = []  # reasons why executions could not be had, since one could

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncGenerator[None]:
        async with sandbox if opens else contextlib.nullcontext():
            yield

    async def admit(request: Request) -> None:
        if refusal := _refusal(request, token, only_local=only_local):
            raise refusal

    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan, dependencies=[Depends(admit)])

    async def refuse(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, AnyHTTPException), "registered for this type only"
        metrics.refused.labels(code=str(error.status_code)).inc()
        answer = RunCodeResponse(status="SandboxError", message=error.detail).model_dump() | {"detail": error.detail}
        return JSONResponse(answer, status_code=error.status_code, headers=error.headers)

    async def run_code(request: Request) -> JSONResponse:
        try:
            result = await _execute_while_connected(sandbox, _parse(await _read_body(request)), request)
        except ConfigError as error:
            raise HTTPException(422, str(error)) from error
        except SandboxUnavailable as error:
            metrics.executions.labels(status="sandbox_error").inc()
            failures.append(str(error))
            return JSONResponse(RunCodeResponse(status="SandboxError", message=str(error)).model_dump())
        metrics.observe(result)
        failures.clear()
        return JSONResponse(RunCodeResponse.of(result).model_dump(mode="json"))

    async def end_session(name: str) -> JSONResponse:
        await sandbox.end_session(name)
        return JSONResponse("ended")

    async def ping() -> JSONResponse:
        facts = {LEVEL_HEADER: sandbox.level, WORKERS_HEADER: sandbox.workers, SESSIONS_HEADER: sandbox.num_sessions}
        return JSONResponse("pong", headers={name: str(value) for name, value in facts.items()})

    async def health() -> JSONResponse:
        """Once calls fail, nobody may send any more: so it is tried here whether they still do."""
        if len(failures) >= _FAILURES_IN_A_ROW:
            try:
                async with asyncio.timeout(_PROBE_TIMEOUT_S):
                    await sandbox.run(ExecRequest(code=""))
                failures.clear()
            except (SandboxUnavailable, TimeoutError) as error:
                failures[:] = [*failures[-2:], str(error) or "an empty execution did not end"]
        healthy = len(failures) < _FAILURES_IN_A_ROW
        body = {"status": "ok" if healthy else "failing", "level": sandbox.level, "workers": sandbox.workers}
        body |= {"zygote_deaths": sandbox.num_zygote_deaths} | ({} if healthy else {"reason": failures[-1][:500]})
        return JSONResponse(body, status_code=200 if healthy else 503)

    async def prometheus() -> Response:
        return Response(metrics.text(), media_type=CONTENT_TYPE_LATEST)

    app.exception_handler(AnyHTTPException)(refuse)
    app.post("/run_code")(run_code)
    app.delete("/v1/sessions/{name:path}")(end_session)
    app.get("/v1/ping")(ping)
    app.get("/health")(health)
    app.get("/metrics")(prometheus)
    return app


def worker_app(sandbox_of: Callable[[], LocalSandbox], token: str | None, only_local: bool) -> FastAPI:
    """The application of one of several processes, which ends with the process that started it."""
    die_with_parent(signal.SIGTERM)
    return create_app(sandbox_of(), token=token, only_local=only_local, opens=True)


def _refusal(request: Request, token: str | None, *, only_local: bool) -> HTTPException | None:
    """Why a request is refused before its body is read: no token, or a web page sends it."""
    host = request.headers.get("host", "localhost")
    if only_local and not is_loopback(urlsplit(f"//{host}").hostname or ""):
        return HTTPException(403, f"the Host {host!r} is not localhost: a web page may have made its name lead here.")
    if (origin := request.headers.get("origin")) is not None:
        return HTTPException(403, f"the Origin is {origin!r}, and no web page may ask this server.")
    if token is not None and request.url.path != "/health":
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(given.encode(), token.encode()):
            reason = f"a bearer token is wanted; clients of retool take it from {TOKEN_VARIABLE}."
            return HTTPException(401, reason, headers={"www-authenticate": "Bearer"})
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if request.method == "POST" and kind != "application/json":  # others a web page may send without asking
        return HTTPException(415, f"content-type {kind!r}: send application/json.")
    return None


async def _read_body(request: Request) -> bytes:
    """The whole body, bounded in size and in time."""
    body, too_large = bytearray(), False
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for chunk in request.stream():  # to its end: a client that still sends would miss the answer
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
    """Parse a body, or name every field that is wrong, and why. Raises ConfigError."""
    try:
        # json.loads, not pydantic's parser: a lone surrogate in the code is the model's mistake,
        # not a bad request.
        return RunCodeRequest.model_validate(json.loads(body)).checked()
    except ValidationError as error:
        fields = (f"{'.'.join(map(str, e['loc'])) or 'body'}: {e['msg']}" for e in error.errors(include_url=False))
        raise ConfigError("; ".join(fields)) from error
    except ConfigError:
        raise
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"not JSON: {error}") from error


async def _execute_while_connected(sandbox: LocalSandbox, asked: ExecRequest, request: Request) -> ExecResult:
    """Execute, and stop executing when the client hangs up."""
    execution = asyncio.ensure_future(sandbox.run(asked))
    try:
        while not (await asyncio.wait((execution,), timeout=_HANG_UP_LOOK_S))[0]:
            if await request.is_disconnected():
                raise HTTPException(499, "the client closed the connection.")
        return execution.result()
    finally:
        execution.cancel()
        await asyncio.wait((execution,))
