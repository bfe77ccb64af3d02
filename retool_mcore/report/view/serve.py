"""`retool view --serve`: serves the page on this machine, and rewrites it when its files change.

The server listens on loopback. The URL contains a secret, because other users of the machine can
reach the port. The server also checks the Host header, as a protection against DNS rebinding by web
pages.
"""

import hashlib
import os
import secrets
import socket
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import FileResponse, PlainTextResponse

from retool_mcore.errors import ConfigError, DataError

HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
WRITTEN = ("metrics.jsonl", "samples.jsonl", "trajectories/*.jsonl")  # in a run's or an evaluation's folder
OWN_PORTS = range(20_000, 30_000)  # below Linux's ephemeral ports

Write = Callable[[str], object]


class LivePage:
    """A page at ``out``; ``write(version)`` rewrites it when ``sources`` have changed."""

    def __init__(self, sources: Sequence[Path], out: Path, write: Write) -> None:
        self._sources, self.out, self._write = sources, out, write
        self._writing, self._written = threading.Lock(), ""

    def version(self) -> str:
        """Return a hash of the source files' names, sizes and mtimes."""
        files = [file for source in self._sources for file in _files(source)]
        stamps = [f"{file}:{stat.st_size}:{stat.st_mtime_ns}" for file in files if (stat := _stat(file)) is not None]
        return hashlib.sha256("\n".join(stamps).encode()).hexdigest()[:16]

    def newest(self) -> Path:
        """Return the up-to-date page, or the previous one while a source file is incomplete."""
        with self._writing:
            version = self.version()  # before reading, so that changes during reading get a new version
            if version != self._written:
                try:
                    self._write(version)
                except DataError:
                    if not self._written:
                        raise
                else:
                    self._written = version
        return self.out


def live_app(page: LivePage, secret: str, hosts: Sequence[str]) -> FastAPI:
    """Create the app: GET /SECRET/ and /SECRET/version. ``hosts``: accepted Host headers."""
    app = FastAPI(openapi_url=None)

    def is_refused(request: Request, key: str) -> bool:
        host = request.headers.get("host", "")
        return host not in hosts or not secrets.compare_digest(key.encode(), secret.encode())

    @app.get("/{key}/")
    def show(key: str, request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        if is_refused(request, key):
            return PlainTextResponse("Not found", 404)
        return FileResponse(page.newest(), media_type="text/html", headers=HEADERS)

    @app.get("/{key}/version")
    def version(key: str, request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        if is_refused(request, key):
            return PlainTextResponse("Not found", 404)
        return PlainTextResponse(page.version(), headers=HEADERS)

    return app


def serve(page: LivePage, port: int, print_line: Callable[[str], object]) -> None:
    """Serve until Ctrl-C. ``port`` 0: the page's own port, or any free one if that is taken.

    Raises ConfigError if another ``port`` is taken.
    """
    page.newest()  # report errors in the files before listening
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            _bind(listener, page.out, port)
        except OSError as error:
            raise ConfigError(f"--port {port}: {error.strerror}. Choose another port, or 0 for a free one.") from error
        listener.listen()  # before printing the URL, so that clients can connect before uvicorn is up
        port, secret = listener.getsockname()[1], secrets.token_urlsafe(16)
        print_line(f"serving http://127.0.0.1:{port}/{secret}/ until Ctrl-C; {page.out} is the same page")
        app = live_app(page, secret, (f"127.0.0.1:{port}", f"localhost:{port}"))
        uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off", timeout_graceful_shutdown=1)).run(
            sockets=[listener]
        )


def _bind(listener: socket.socket, out: Path, port: int) -> None:
    """Bind ``port``; for 0, bind the port derived from the page's path, or else any free one.

    Browsers store the page's notes per origin, which includes the port. A stable port keeps them.
    """
    own = OWN_PORTS.start + int(hashlib.sha256(str(out.absolute()).encode()).hexdigest(), 16) % len(OWN_PORTS)
    try:
        listener.bind(("127.0.0.1", port or own))
    except OSError:
        if port:
            raise
        listener.bind(("127.0.0.1", 0))


def _files(source: Path) -> list[Path]:
    return [source] if source.is_file() else sorted(file for name in WRITTEN for file in source.glob(name))


def _stat(file: Path) -> os.stat_result | None:
    try:
        return file.stat()
    except FileNotFoundError:  # the run has rotated its files
        return None
