"""The process that Ray's workers of a run on one node are forked from, and an engine's own ones.

Each of them would import torch, transformers and half a hundred libraries more for itself: 6 s of a
core, in ten processes or more. This process imports them once. It takes requests of
``worker_command`` at the socket that its first argument names; the others are the modules. It keeps
off what does not survive a fork: Ray itself, which reads its settings as it is imported, and
devices. Where it fails, workers start as Ray starts them.

A worker whose children are to be forked as well calls ``fork_children``. Those with libraries
loaded before all others (LD_PRELOAD) are forks of another such process, which has them, too.
"""

import fcntl
import importlib
import json
import multiprocessing
import os
import runpy
import select
import selectors
import shlex
import signal
import socket
import sys
import warnings
from contextlib import suppress
from multiprocessing import resource_tracker
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from retool_mcore.process import collect_new_garbage, die_with_parent, leave_garbage
from retool_mcore.verl import worker_command
from retool_mcore.verl.worker_command import PRELOADED

PYTHON_ENV = "RETOOL_FORKED_PYTHON"  # in a worker: what starts a Python that is forked here
_HARMLESS = ("/dev/null", "/dev/pts/", "/dev/tty", "/dev/shm/", "/dev/random", "/dev/urandom")
_AT_ONCE = 64  # requests that wait while the modules are imported
_FILES = 250  # that a client may hold; Linux sends 253
_LOOK_S = 0.5  # for a SIGQUIT
_QUIT = frozenset({signal.SIGQUIT})


def environment(path: str) -> dict[str, str]:
    """What this process starts with, to listen at ``path``.

    Ray gives an actor without num_cpus one thread of OpenMP, which reads the variable as it is
    loaded. The first variable is the one that every worker keeps: whoever sets a process's title
    looks for its place in front of the first.
    """
    first = {PYTHON_ENV: str(Path(path).with_name("python"))}
    return first | {"OMP_NUM_THREADS": "1"} | os.environ | first


def preload(modules: list[str]) -> None:
    """Import the modules. Raises RuntimeError when they have opened a device or imported Ray."""
    leave_garbage()
    for module in modules:
        with suppress(ImportError):  # of another release, or not installed: then each worker does without it, too
            importlib.import_module(module)
    links = {os.readlink(f"/proc/self/fd/{number}") for number in worker_command.open_files()}
    opened = {link for link in links if link.startswith("/dev/") and not link.startswith(_HARMLESS)}
    if opened or "ray" in sys.modules:
        raise RuntimeError(f"no worker can be forked from here: opened {opened}, Ray imported: {'ray' in sys.modules}")
    collect_new_garbage()  # else a collection in a worker writes to, and so copies, all of it


def serve(listener: socket.socket, held: set[int]) -> list[str]:
    """Fork a worker for each request, until SIGTERM ends this process and all of them.

    Returns in each worker, with the command's words. The client's end of a connection stands for
    the worker: closed, it ends the worker; it hears of the fork, of each SIGQUIT with which the
    worker tells its parent that it has failed, and of the worker's exit code. ``held``: numbers of
    files that a worker cannot be given.
    """
    waiting = selectors.DefaultSelector()
    waiting.register(listener, selectors.EVENT_READ)
    signal.signal(signal.SIGTERM, lambda *_: _end(waiting))
    while True:
        events = waiting.select(_LOOK_S)
        while (sent := signal.sigtimedwait(_QUIT, 0)) is not None:  # before the end of the worker that has sent it
            _tell_quit(waiting, sent.si_pid)
        for key, _ in events:
            if waiting.get_map().get(key.fd) is not key:
                continue  # client and worker ended at once, and this is the second to be seen
            if key.fileobj is listener:
                if words := _begin(waiting, listener, held):
                    return words
            elif isinstance(connection := key.fileobj, socket.socket):  # closed: the client never says more
                os.kill(key.data[0], signal.SIGKILL)
                waiting.unregister(connection)
            else:
                _tell_end(waiting, key)


def _begin(waiting: selectors.DefaultSelector, listener: socket.socket, held: set[int]) -> list[str] | None:
    """Fork a worker for the next client; returns its command's words there, and None here."""
    connection, _ = listener.accept()
    files = list[int]()
    try:
        request = _received(connection, files)
        _require_forkable(request, held)
        if _closed(connection):
            raise OSError("the client has become the worker")
        pid = _fork()
    except (OSError, ValueError):  # the client has gone, or no such process can be made: then it becomes the worker
        pid = None
    if pid == 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _QUIT)
        _close(waiting, connection)
        return _become(request, files)
    for file in files:
        os.close(file)
    if pid is None:
        connection.close()
        return None
    ended = os.pidfd_open(pid)
    waiting.register(ended, selectors.EVENT_READ, (pid, connection))
    waiting.register(connection, selectors.EVENT_READ, (pid, ended))
    with suppress(OSError):  # the client has gone: its end is seen next
        connection.sendall(worker_command.FORKED)
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
    """What the server holds, in a worker: each other worker's client would wait for this one.

    A socket is closed as such, or it closes whatever has its number by the time that it is freed.
    """
    for key in list(waiting.get_map().values()):
        key.fileobj.close() if isinstance(key.fileobj, socket.socket) else os.close(key.fd)
    connection.close()
    waiting.close()


def _received(connection: socket.socket, files: list[int]) -> dict[str, Any]:
    """A client's request; its files are added to ``files``. Raises ValueError without one."""
    text, received, _, _ = socket.recv_fds(connection, 1 << 16, _FILES)
    files += received
    while not text.endswith(b"\n"):
        more = connection.recv(1 << 16)
        if not more:
            raise ValueError("half a request")
        text += more
    return json.loads(text)


def _require_forkable(request: dict[str, Any], held: set[int]) -> None:
    """Raise ValueError for what a fork cannot become.

    That is a process with other libraries loaded before all others, one that is bound to other
    cores, or one whose file would get the number of a file that a module here holds.
    """
    if set(request["cores"]) != os.sched_getaffinity(0):  # and its memory, perhaps: SGLang starts it through numactl
        raise ValueError("other cores")
    if request["environment"].get(PRELOADED) != os.environ.get(PRELOADED):
        raise ValueError(f"another {PRELOADED}")
    if taken := held & set(request["numbers"]):
        raise ValueError(f"{taken} are taken")


def _tell_quit(waiting: selectors.DefaultSelector, pid: int) -> None:
    """Pass a worker's SIGQUIT on to its client, whose parent is the one that it is meant for."""
    for key in waiting.get_map().values():
        if key.data and key.data[0] == pid and isinstance(key.fileobj, socket.socket):
            with suppress(OSError):
                key.fileobj.sendall(worker_command.QUIT)


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


def _become(request: dict[str, Any], files: list[int]) -> list[str]:
    """Make this process what a new one with the client's command would be."""
    die_with_parent()
    os.setpgid(0, 0)  # when a worker dies raylet kills its group, for what it may have started
    highest = max(request["numbers"], default=0)
    apart = [fcntl.fcntl(file, fcntl.F_DUPFD, highest + 1) for file in files]  # off the numbers that others are to get
    for file in files:
        os.close(file)
    for number, file in zip(request["numbers"], apart, strict=True):
        os.dup2(file, number)
        os.close(file)
    wanted = {PYTHON_ENV: os.environ[PYTHON_ENV], **request["environment"]}
    for name in os.environ.keys() - wanted.keys():
        del os.environ[name]
    os.environ.update({name: value for name, value in wanted.items() if os.environ.get(name) != value})
    os.chdir(request["folder"])
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()  # or all workers draw the same; Python's own generator does this by itself
    return request["words"]


def fork_children() -> None:
    """Let the processes that multiprocessing spawns from here on be forks as well, if this is one.

    They end with this process. The one that cleans up after it does not, so it starts before.
    """
    if (python := os.environ.get(PYTHON_ENV)) and os.access(python, os.X_OK):  # some forbid it in temporary folders
        resource_tracker.ensure_running()
        multiprocessing.set_executable(python)


def run(words: list[str]) -> None:
    """Do what Python does with these words: a script's and its own, or options and a program."""
    if not words[0].startswith("-"):
        sys.argv = words
        sys.path[0] = str(Path(words[0]).parent)
        runpy.run_path(words[0], run_name="__main__")
        return
    _, program, *own = words[words.index("-c") :]
    sys.argv, sys.path[0] = ["-c", *own], ""
    sys.modules["__main__"] = main = ModuleType("__main__")
    exec(program, main.__dict__)


def _write_python(path: str) -> None:
    """Write what starts a Python that is forked; whole, as another such process writes it, too."""
    python = Path(os.environ[PYTHON_ENV])
    draft = python.with_name(f"{python.name}.{os.getpid()}")
    draft.write_text(f'#!/bin/sh\nexec {shlex.join(worker_command.argv(path))} "$@"\n', encoding="utf-8")
    draft.chmod(0o700)
    draft.replace(python)


def main(path: str, *modules: str) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, _QUIT)  # before there are threads, each of which would take it
    die_with_parent(signal.SIGTERM)
    _write_python(path)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(worker_command.socket_of(path, os.environ))
    listener.listen(_AT_ONCE)
    preload(list(modules))
    run(serve(listener, worker_command.open_files() - {0, 1, 2, listener.fileno()}))


if __name__ == "__main__":
    main(*sys.argv[1:])
