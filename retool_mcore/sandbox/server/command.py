"""``retool sandbox serve``: the sandbox as a service of this node."""

import asyncio
import atexit
import logging
import os
import resource
import signal
import socket
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from retool_mcore.errors import ConfigError, ReToolError, SandboxUnavailable
from retool_mcore.sandbox import open_sandbox
from retool_mcore.sandbox.base import Level
from retool_mcore.sandbox.server.wire import is_loopback, read_token
from retool_mcore.sandbox.supervisor.interpreter import Interpreter
from retool_mcore.sandbox.supervisor.local import LocalSandbox
from retool_mcore.sandbox.supervisor.sessions import SERVER_WAIT_S

logger = logging.getLogger(__name__)

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode=None, help=__doc__)

# Longer than the clients' keep-alive, so that clients close idle connections first: they can retry,
# the server cannot.
_KEEP_ALIVE_S = 75
_MAX_CONNECTIONS = 4096
_DRAIN_S = 10  # wait for calls in flight at shutdown


@app.command()
def serve(
    *,
    host: Annotated[str, typer.Option(help="address to listen on; use a token unless it is loopback")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="0: any free port; the first line of output shows it")
    ] = 8080,
    socket_path: Annotated[Path | None, typer.Option("--socket", help="Unix socket, instead of host and port")] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="executions at the same time [default: the CPUs]")] = None,
    min_level: Annotated[Level, typer.Option(help="refuse to start below this isolation")] = Level.NAMESPACES,
    token_file: Annotated[Path | None, typer.Option(help="bearer token that clients must send")] = None,
    sessions: Annotated[
        int, typer.Option(min=0, help="interpreters kept alive between calls; 0 turns sessions off")
    ] = 0,
    python: Annotated[str, typer.Option(help="interpreter that runs the code: absolute path [default: this one]")] = "",
    preload: Annotated[list[str] | None, typer.Option(help="module to import in advance; may be repeated")] = None,
    processes: Annotated[
        int, typer.Option(min=1, help="server processes that share the workers; a dead one is replaced")
    ] = 1,
) -> None:
    """Answer SandboxFusion's POST /run_code and GET /v1/ping, and GET /health, until stopped."""
    # Imported here because every `retool` command imports this file, and these import FastAPI.
    import uvicorn
    from uvicorn.supervisors import Multiprocess

    from retool_mcore.sandbox.server.app import create_app, worker_app

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        token = read_token(token_file)
        if socket_path is None and token is None and not is_loopback(host):
            logger.warning(
                "Listening on %s without a token: everyone who can reach this port can run code here. "
                "Add --token-file, or listen on 127.0.0.1 or a --socket.", host,
            )  # fmt: skip
        workers = workers or len(os.sched_getaffinity(0))
        if processes > 1 and (sessions or processes > workers):
            raise ConfigError(
                f"processes = {processes} is too high for workers = {workers} and sessions = {sessions}: each process "
                "needs a worker, and sessions need --processes 1. Lower --processes."
            )
        new_sandbox = partial(
            LocalSandbox, min_level=min_level, workers=-(-workers // processes), sessions=sessions,
            session_wait_s=SERVER_WAIT_S, interpreter=Interpreter(python, tuple(preload or ())),
        )  # fmt: skip
        sandbox = new_sandbox()
        listener, url = _listen(host, port, socket_path)
        only_local = listener.family == socket.AF_INET and is_loopback(listener.getsockname()[0])
        server_config = partial(
            uvicorn.Config,
            http="h11",
            access_log=False,
            log_level="warning",
            limit_concurrency=_connection_limit(sandbox.workers + sessions),
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=_DRAIN_S,
        )
        if processes == 1:
            server = uvicorn.Server(server_config(create_app(sandbox, token=token, only_local=only_local)))
            asyncio.run(_run(sandbox, url, lambda: server.serve(sockets=[listener])))
        else:
            asyncio.run(_run(sandbox, url))  # open once here, so that an error is reported once
            config = server_config(partial(worker_app, new_sandbox, token, only_local), factory=True, workers=processes)
            Multiprocess(config, [listener]).run()
    except ReToolError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error


@app.command()
def ping(
    urls: Annotated[list[str], typer.Argument(help="http://, https:// or unix:// URLs")],
    min_level: Annotated[Level, typer.Option(help="fail below this isolation")] = Level.RLIMITS,
) -> None:
    """Wait until every sandbox answers, run one line in each, and print its isolation level."""
    try:
        for url in urls:
            typer.echo(f"{url} runs at level {asyncio.run(_ping(url, min_level))}", err=True)
    except ReToolError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error


async def _ping(url: str, min_level: Level) -> str:
    async with open_sandbox(url, min_level=min_level) as sandbox:
        result = await sandbox.execute("print(6 * 7)")
    if result.stdout != "42\n":
        raise SandboxUnavailable(f"the sandbox at {url} printed {result.text[:200]!r} for print(6 * 7).")
    return result.level


async def _run(sandbox: LocalSandbox, url: str, serve: Callable[[], Awaitable[None]] | None = None) -> None:
    """Open the sandbox, print the URL, and serve."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _stop)  # uvicorn raises the signal again after it has shut down
    async with sandbox:
        typer.echo(url)
        if serve is not None:
            await serve()


def _connection_limit(executions: int) -> int:
    """Raise RLIMIT_NOFILE to its hard limit; return the maximum number of connections.

    An execution uses up to 16 descriptors: two pipes, a socket pair, a pidfd and a directory, plus
    the same number again while it starts.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    descriptors = _MAX_CONNECTIONS * 2 if hard == resource.RLIM_INFINITY else hard
    return max(16, min(_MAX_CONNECTIONS, descriptors - 128 - 16 * executions))


def _stop(number: int, _: object) -> None:
    raise SystemExit(128 + number)


def _listen(host: str, port: int, path: Path | None) -> tuple[socket.socket, str]:
    """Bind and listen; return the socket and its URL. Raises ConfigError if that fails."""
    if path is None:
        try:
            # asyncio sets TCP_NODELAY only on sockets created with an explicit protocol. Without
            # TCP_NODELAY, every answer waits 40 ms for an ACK.
            listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
            listener.listen(4096)
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {host}:{port}: {error.strerror}. Choose another --host or --port."
            ) from error
        return listener, f"http://{host}:{listener.getsockname()[1]}"
    listener = socket.socket(socket.AF_UNIX)
    try:
        if path.is_socket() and listener.connect_ex(str(path)) != 0:
            path.unlink()  # left behind by a server that was killed
        listener.bind(str(path))
        atexit.register(path.unlink, missing_ok=True)
        os.chmod(path, 0o600)
        listener.listen(4096)
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on the Unix socket {path}: {error.strerror or error}.") from error
    return listener, f"unix://{path}"
