"""The process that Ray's workers of a run on one node are forked from.

Each of them would import torch, transformers and half a hundred libraries more for itself: 6 s of a
core, in eight processes or more. This process imports them once. It takes requests of
``worker_command`` at the socket that its first argument names; the others are the modules. It keeps
off what does not survive a fork: Ray itself, which reads its settings as it is imported, and
devices. Where it fails, workers start as Ray starts them.
"""

import gc
import importlib
import json
import os
import runpy
import select
import selectors
import signal
import socket
import sys
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from retool_mcore.process import die_with_parent

_HARMLESS = ("/dev/null", "/dev/pts/", "/dev/tty", "/dev/shm/", "/dev/random", "/dev/urandom")
_AT_ONCE = 64  # requests that wait while the modules are imported
_STREAMS = 3


def preload(modules: list[str]) -> None:
    """Import the modules. Raises RuntimeError when they have opened a device or imported Ray."""
    for module in modules:
        with suppress(ImportError):  # of another release, or not installed: then each worker does without it, too
            importlib.import_module(module)
    opened = {link for link in _links() if link.startswith("/dev/") and not link.startswith(_HARMLESS)}
    if opened or "ray" in sys.modules:
        raise RuntimeError(f"no worker can be forked from here: opened {opened}, Ray imported: {'ray' in sys.modules}")
    gc.collect()
    gc.freeze()  # else a collection in a worker writes to, and so copies, all of it


def _links() -> list[str]:
    links: list[str] = []
    for entry in os.scandir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the directory's own
            links.append(os.readlink(entry.path))
    return links


def serve(listener: socket.socket) -> list[str]:
    """Fork a worker for each request, until SIGTERM ends this process and all of them.

    Returns in each worker, with the command's words. The client's end of a connection stands for
    the worker: closed, it ends the worker; it hears of the fork, and then the worker's exit code.
    """
    waiting = selectors.DefaultSelector()
    waiting.register(listener, selectors.EVENT_READ)
    signal.signal(signal.SIGTERM, lambda *_: _end(waiting))
    while True:
        for key, _ in waiting.select():
            if waiting.get_map().get(key.fd) is not key:
                continue  # client and worker ended at once, and this is the second to be seen
            if key.fileobj is listener:
                if words := _begin(waiting, listener):
                    return words
            elif isinstance(connection := key.fileobj, socket.socket):  # closed: the client never says more
                os.kill(key.data[0], signal.SIGKILL)
                waiting.unregister(connection)
            else:
                _tell_end(waiting, key)


def _begin(waiting: selectors.DefaultSelector, listener: socket.socket) -> list[str] | None:
    """Fork a worker for the next client; returns its command's words there, and None here."""
    connection, _ = listener.accept()
    streams = list[int]()
    try:
        request = _received(connection, streams)
        if _closed(connection):
            raise OSError("the client has become the worker")
        pid = _fork()
    except (OSError, ValueError):  # the client has gone, or no process can be made: then it becomes the worker
        pid = None
    if pid == 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        _close(waiting, connection)
        return _become(request, streams)
    for stream in streams:
        os.close(stream)
    if pid is None:
        connection.close()
        return None
    ended = os.pidfd_open(pid)
    waiting.register(ended, selectors.EVENT_READ, (pid, connection))
    waiting.register(connection, selectors.EVENT_READ, (pid, ended))
    with suppress(OSError):  # the client has gone: its end is seen next
        connection.sendall(b"forked\n")
    return None


def _closed(connection: socket.socket) -> bool:
    """Whether the client has closed its end: after the request it never says more."""
    return bool(select.select([connection], [], [], 0)[0])


def _fork() -> int:
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        return os.fork()  # Python 3.12 warns of threads; the one here is of pyarrow's jemalloc, which knows forks


def _end(waiting: selectors.DefaultSelector) -> NoReturn:
    """End the workers, and collect them: in a container the first process may not do so."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    workers = {key.data[0] for key in waiting.get_map().values() if key.data}
    for pid in workers:
        os.kill(pid, signal.SIGKILL)
    for pid in workers:
        os.waitpid(pid, 0)
    os._exit(0)


def _close(waiting: selectors.DefaultSelector, connection: socket.socket) -> None:
    """What the server holds, in a worker: each other worker's client would wait for this one."""
    for descriptor in [key.fd for key in waiting.get_map().values()]:
        os.close(descriptor)
    connection.close()
    waiting.close()


def _received(connection: socket.socket, streams: list[int]) -> dict[str, Any]:
    """A client's request; its streams are added to ``streams``. Raises ValueError without one."""
    text, received, _, _ = socket.recv_fds(connection, 1 << 16, _STREAMS)
    streams += received
    while not text.endswith(b"\n"):
        more = connection.recv(1 << 16)
        if not more:
            raise ValueError("half a request")
        text += more
    return json.loads(text)


def _tell_end(waiting: selectors.DefaultSelector, key: selectors.SelectorKey) -> None:
    pid, connection = key.data
    _, status = os.waitpid(pid, 0)
    with suppress(OSError):
        connection.sendall(b"%d\n" % os.waitstatus_to_exitcode(status))
    with suppress(KeyError):  # the client closed it first
        waiting.unregister(connection)
    connection.close()
    waiting.unregister(key.fileobj)
    os.close(key.fd)


def _become(request: dict[str, Any], streams: list[int]) -> list[str]:
    """Make this process what a new one with the client's command would be."""
    die_with_parent()
    os.setpgid(0, 0)  # when a worker dies raylet kills its group, for what it may have started
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()  # or all workers draw the same; Python's own generator does this by itself
    return request["words"]


def main(path: str, *modules: str) -> None:
    die_with_parent(signal.SIGTERM)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(_AT_ONCE)
    preload(list(modules))
    sys.argv = serve(listener)
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
