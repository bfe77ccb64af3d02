"""The sandbox over HTTP, in SandboxFusion's protocol.

It serves POST /run_code, GET /v1/ping, GET /health, and GET /metrics for Prometheus. Whatever a
client sends, the answer has the protocol's own form: 422 for a request that cannot be run, 413 for
one too large, 408 for one that comes too slowly, 503 when too many wait, and what ``guard.py``
refuses. Code that fails is answered with 200.
"""

import asyncio
import base64
import json
import os
import resource
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
    multiprocess,
)
from pydantic import ValidationError
from starlette.requests import ClientDisconnect

from retool_mcore.errors import ConfigError, SandboxUnavailable
from retool_mcore.sandbox.base import ExecRequest, ExecResult
from retool_mcore.sandbox.server.guard import FULL, Guard, retry_after
from retool_mcore.sandbox.server.health import Health
from retool_mcore.sandbox.server.processes import METRICS_ENV
from retool_mcore.sandbox.server.wire import (
    LEVEL_HEADER,
    SESSIONS_HEADER,
    WORKERS_HEADER,
    RunCodeRequest,
    RunCodeResponse,
)
from retool_mcore.sandbox.supervisor.local import LocalSandbox

MAX_BODY_BYTES = 48 << 20
BODY_TIMEOUT_S = 30.0
MAX_PENDING = 4096
MAX_CONNECTIONS = 5120
_MAX_DESCRIPTORS = 1 << 20
_PIECE_BYTES = 3 << 18  # of a file in an answer; a multiple of 3, so that the pieces join as base64
_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class _Refused(Exception):
    """A request that is not run, with the HTTP status that says so."""

    def __init__(self, status_code: int, reason: str) -> None:
        super().__init__(reason)
        self.status_code = status_code


class Metrics:
    """What GET /metrics reports. One registry per server, so that tests can open several."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.info = Gauge(
            "retool_sandbox_info",
            "Always 1; the labels tell.",
            ["level", "memory"],
            registry=self.registry,
            multiprocess_mode="livemax",
        )
        self.executions = Counter(
            "retool_sandbox_executions", "Executions by outcome.", ["status"], registry=self.registry
        )
        self.refused = Counter(
            "retool_sandbox_refused", "Requests not run, by HTTP status.", ["code"], registry=self.registry
        )
        self.pending = Gauge(
            "retool_sandbox_pending", "Requests waiting or executing.", registry=self.registry,
            multiprocess_mode="livesum",
        )  # fmt: skip
        self.run_s = Histogram(
            "retool_sandbox_run_seconds", "Wall time of executions.", buckets=_SECONDS, registry=self.registry
        )
        self.queue_s = Histogram(
            "retool_sandbox_queue_seconds", "Wait before execution.", buckets=_SECONDS, registry=self.registry
        )
        self.cpu_s = Counter("retool_sandbox_cpu_seconds", "CPU time of executions.", registry=self.registry)
        self.dropped_bytes = Counter(
            "retool_sandbox_output_dropped_bytes", "Output beyond the cap.", registry=self.registry
        )
        self.zygote_deaths = Counter(
            "retool_sandbox_zygote_deaths", "Warm processes that died and were started anew.", registry=self.registry
        )
        self.session_waits = Counter(
            "retool_sandbox_session_waits", "New sessions that found no free place, by outcome.", ["outcome"],
            registry=self.registry,
        )  # fmt: skip
        self.process_restarts = Counter(
            "retool_sandbox_process_restarts", "Server processes that were replaced.", registry=self.registry
        )

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
        self.dropped_bytes.inc(result.stdout_dropped_bytes + result.stderr_dropped_bytes)


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
    per_execution = 16  # two pipes, a socket pair, a pidfd, a directory, and as many again while it starts
    return max(16, min(MAX_CONNECTIONS, descriptors - 128 - per_execution * executions))


def create_app(
    sandbox: LocalSandbox,
    *,
    token: str | None = None,
    max_pending: int = MAX_PENDING,
    is_replacement: bool = False,
    only_local: bool = False,
) -> FastAPI:
    """The ASGI application around ``sandbox``, which must be open; the caller closes it.

    With ``token`` every request must bear it. Beyond ``max_pending`` requests whose body is there
    further ones are answered with 503, before their own is read if it can be. ``only_local``: see
    ``Guard``.
    """
    metrics = _metrics_of(sandbox, is_replacement=is_replacement)
    health = Health(sandbox)
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    num_pending = 0
    app.add_middleware(
        Guard,
        token=token,
        max_body_bytes=MAX_BODY_BYTES,
        is_full=lambda: num_pending >= max_pending,
        on_refusal=lambda status: metrics.refused.labels(code=str(status)).inc(),
        only_local=only_local,
    )

    @app.exception_handler(_Refused)
    async def refuse(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, _Refused), "registered for this type only"
        metrics.refused.labels(code=str(error.status_code)).inc()
        answer = RunCodeResponse(status="SandboxError", message=str(error)).model_dump() | {"detail": str(error)}
        return JSONResponse(answer, status_code=error.status_code, headers=retry_after(error.status_code))

    @app.post("/run_code")
    async def run_code(request: Request) -> Response:
        nonlocal num_pending
        body = await _read_body(request)  # who sends half of one keeps nobody from being served
        if num_pending >= max_pending:
            raise _Refused(503, FULL)
        num_pending += 1
        metrics.pending.set(num_pending)
        try:
            asked = _parse(body)
            result = await _execute_while_connected(sandbox, asked, request)
        except ConfigError as error:
            raise _Refused(422, str(error)) from error
        except SandboxUnavailable as error:
            metrics.executions.labels(status="sandbox_error").inc()
            health.failed(error)
            return JSONResponse(RunCodeResponse(status="SandboxError", message=str(error)).model_dump())
        finally:
            num_pending -= 1
            metrics.pending.set(num_pending)
        metrics.observe(result)
        health.worked()
        return _answer(result)

    @app.delete("/v1/sessions/{name:path}")
    async def end_session(name: str) -> JSONResponse:
        await sandbox.end_session(name)
        return JSONResponse("ended")

    _observe(app, sandbox, metrics, health)
    handlers = (refuse, run_code, end_session)
    assert all(handlers), "registered above"
    return app


def _metrics_of(sandbox: LocalSandbox, *, is_replacement: bool) -> Metrics:
    """New metrics that count what happens in ``sandbox``."""
    metrics = Metrics()
    metrics.process_restarts.inc(is_replacement)
    memory = "execution" if sandbox.memory_is_bounded_per_execution else "process"
    metrics.info.labels(level=str(sandbox.level), memory=memory).set(1)
    sandbox.on_zygote_death = metrics.zygote_deaths.inc
    sandbox.count_session_wait = lambda in_vain: metrics.session_waits.labels(
        outcome="refused" if in_vain else "waited"
    ).inc()
    return metrics


def _observe(app: FastAPI, sandbox: LocalSandbox, metrics: Metrics, health: Health) -> None:
    @app.get("/v1/ping")
    async def ping() -> JSONResponse:
        headers = {
            LEVEL_HEADER: str(sandbox.level),
            WORKERS_HEADER: str(sandbox.workers),
            SESSIONS_HEADER: str(sandbox.num_sessions),
        }
        return JSONResponse("pong", headers=headers)

    @app.get("/health")
    async def tell_health() -> JSONResponse:
        status_code, body = await health.report()
        return JSONResponse(body, status_code=status_code)

    @app.get("/metrics")
    async def prometheus() -> Response:
        return Response(metrics.text(), media_type=CONTENT_TYPE_LATEST)

    assert ping and tell_health and prometheus, "registered above"


def _answer(result: ExecResult) -> Response:
    """The answer to an execution: large files go in pieces, between which others are served."""
    without_files = RunCodeResponse.of(replace(result, files={})).model_dump()
    if sum(map(len, result.files.values())) <= _PIECE_BYTES:
        return JSONResponse(RunCodeResponse.of(result).model_dump())
    del without_files["files"]
    return StreamingResponse(_pieces(json.dumps(without_files), result.files), media_type="application/json")


async def _pieces(start: str, files: Mapping[str, bytes]) -> AsyncIterator[bytes]:
    yield f'{start[:-1]}, "files": {{'.encode()
    for number, (name, content) in enumerate(files.items()):
        yield f'{", " if number else ""}{json.dumps(name)}: "'.encode()
        for position in range(0, len(content), _PIECE_BYTES):
            yield base64.b64encode(content[position : position + _PIECE_BYTES])
            await asyncio.sleep(0)
        yield b'"'
    yield b"}}"


async def _read_body(request: Request) -> bytes:
    """The whole body, bounded in size and in time. Raises _Refused."""
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for chunk in request.stream():
                body += chunk
                if len(body) > MAX_BODY_BYTES:
                    raise _Refused(413, f"the body is larger than {MAX_BODY_BYTES} bytes.")
    except TimeoutError:
        raise _Refused(408, f"the body did not arrive within {BODY_TIMEOUT_S:.0f} s.") from None
    except ClientDisconnect:
        raise _Refused(499, "the client closed the connection before its body had arrived.") from None
    return bytes(body)


def _parse(body: bytes) -> ExecRequest:
    """Parse a body. Raises _Refused with every field that is wrong, and why."""
    try:
        # json.loads, not pydantic's parser: a lone surrogate in the code is the model's mistake,
        # not a bad request.
        return RunCodeRequest.model_validate(json.loads(body)).checked()
    except ValidationError as error:
        fields = (f"{'.'.join(map(str, e['loc'])) or 'body'}: {e['msg']}" for e in error.errors(include_url=False))
        raise _Refused(422, "; ".join(fields)) from error
    except (ValueError, RecursionError) as error:  # ConfigError is a ValueError
        raise _Refused(422, f"{error}" if isinstance(error, ConfigError) else f"not JSON: {error}") from error


async def _execute_while_connected(sandbox: LocalSandbox, asked: ExecRequest, request: Request) -> ExecResult:
    """Execute, and stop executing when the client hangs up."""
    execution = asyncio.ensure_future(sandbox.run(asked))
    hang_up = asyncio.ensure_future(_until_disconnected(request))
    try:
        await asyncio.wait((execution, hang_up), return_when=asyncio.FIRST_COMPLETED)
        if not execution.done():
            raise _Refused(499, "the client closed the connection.")
        return execution.result()
    finally:
        for task in (execution, hang_up):
            task.cancel()
        await asyncio.wait((execution, hang_up))


async def _until_disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
