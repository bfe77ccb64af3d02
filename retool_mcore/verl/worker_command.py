"""The command of a worker: a fork of ``forked_workers``, for which this process stands.

Words: the path of the sockets, then what Python would get. It exits as the worker does, and its
death is the worker's; it dies with its parent. Where no process listens, has not imported
everything after half of the time in which raylet waits for a worker, or cannot become what is asked
for, it becomes the usual Python with the same words. It runs without site-packages, and imports the
standard library only.
"""

import json
import os
import select
import signal
import socket
import sys
import zlib
from collections.abc import Mapping

WAIT_S = 30.0
PRELOADED = "LD_PRELOAD"
FORKED, QUIT = b"forked\n", b"quit\n"  # what the server says; else it is the worker's exit code


def argv(path: str) -> list[str]:
    """The command, up to what Python would get."""
    return [sys.executable, "-I", "-S", __file__, path]


def socket_of(path: str, environment: Mapping[str, str]) -> str:
    """Where the process listens whose forks have the same libraries loaded before all others."""
    preloaded = environment.get(PRELOADED)
    return f"{path}.{zlib.crc32(preloaded.encode()):08x}" if preloaded else path


def main(path: str, *words: str) -> None:
    # multiprocessing opens a child's pipes for it; raylet leaves files of its own open.
    numbers = sorted(open_files() if words[0].startswith("-") else {0, 1, 2})
    parent = os.pidfd_open(os.getppid())
    server = socket.socket(socket.AF_UNIX)
    request = {
        "words": words,
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "numbers": numbers,
        "cores": sorted(os.sched_getaffinity(0)),
    }
    text = json.dumps(request).encode() + b"\n"
    server.settimeout(WAIT_S)
    try:
        server.connect(socket_of(path, os.environ))
        server.sendall(text[socket.send_fds(server, [text], numbers) :])
        forked = _answer(server) == FORKED
    except OSError:
        forked = False
    if not forked:
        os.execv(sys.executable, [sys.executable, *words])
    server.settimeout(None)
    while True:
        if parent in select.select([server, parent], [], [])[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        if (said := _answer(server)) == QUIT:
            signal.pidfd_send_signal(parent, signal.SIGQUIT)
            continue
        code = int(said or -signal.SIGKILL)
        if code < 0:
            os.kill(os.getpid(), -code)
        sys.exit(code)


def open_files() -> set[int]:
    """The numbers of this process's files."""
    return {int(name) for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}")}


def _answer(server: socket.socket) -> bytes:
    """The next line that the server says; empty when it has gone."""
    line = b""
    while not line.endswith(b"\n") and (byte := server.recv(1)):
        line += byte
    return line


if __name__ == "__main__":
    main(*sys.argv[1:])
