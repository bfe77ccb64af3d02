"""Lets ``multiprocessing`` work where no program may be run and no socket be opened.

Only the start method fork remains there, so whatever two processes share exists before the fork:
semaphores in shared memory, and for managers a pair of sockets over which each client passes one
end of a new pair. Applied to the warm image, before any of the model's code: modules are changed
when they are first imported, and cost nothing until then. This is a convenience and protects
nothing: the kernel refuses what it refused before.
"""

import ctypes
import errno
import itertools
import mmap
import os
import socket
import sys
import threading
import time
import types
import weakref
from collections.abc import Callable
from typing import Any, Self

from retool_mcore.sandbox import habits
from retool_mcore.sandbox.imports import Change, change_on_import

_RECURSIVE = 0  # `kind` of a lock that its owner may take again; semaphores are 1
_SEM_VALUE_MAX = 2**31 - 1
_SEM_BYTES = 64  # sem_t is 32 bytes on 64-bit machines
_NANOSECONDS = 1_000_000_000


def without_programs_and_sockets() -> None:
    """Above rlimits: forks only, no resource tracker, managers over pairs, heaps in TMPDIR.

    What would run a program says that none is run.
    """
    os.system = _tell_not_run
    change_on_import(_CHANGES)


def without_shared_directory() -> None:
    """For landlock: semaphores and shared memory that need no /dev/shm.

    A block of shared memory is a file in the working directory, as it is where /dev/shm leads there
    (namespaces): it counts against the size of a file, and is deleted with the rest.
    """
    semaphores = types.ModuleType("_multiprocessing")
    semaphores.__dict__.update(SemLock=SemLock, sem_unlink=_unlink_semaphore, flags={})
    shared = types.ModuleType("_posixshmem")
    shared.__dict__.update(shm_open=_open_shared, shm_unlink=_unlink_shared)
    sys.modules |= {"_multiprocessing": semaphores, "_posixshmem": shared}


def _tell_not_run(command: Any) -> int:
    """``os.system``: the status of a shell that could not run it, and a line that says why."""
    text = os.fsdecode(command)
    sys.stderr.write(f"[os.system({text[:100]!r}) was not run: {habits.why_not_run(text)}]\n")
    return 127 << 8


def _refuse_programs(module: Any) -> None:
    """``subprocess``: the same error as from the kernel, in words that say what it means."""

    def refuse(_: Any, args: Any, *others: Any, **options: Any) -> None:
        words: list[Any] = [args] if isinstance(args, (str, bytes, os.PathLike)) else list(args)
        command = " ".join(map(os.fsdecode, words))
        raise PermissionError(errno.EPERM, habits.why_not_run(command), command[:100])

    module.Popen._execute_child = refuse


def _track_nothing(module: Any) -> None:
    """The tracker is a program that deletes leftovers; here everything is deleted with the call."""

    def nothing(*_: object) -> None: ...

    tracker = module._resource_tracker
    for name in ("ensure_running", "register", "unregister"):
        setattr(module, name, nothing)
        setattr(tracker, name, nothing)


def _fork_by_default(module: Any) -> None:
    """From Python 3.14 on the default is forkserver, which is a program."""
    module._default_context._default_context = module._concrete_contexts["fork"]


def _heap_in_tmpdir(module: Any) -> None:
    module.Arena._dir_candidates = []  # looking at /dev/shm takes statvfs, which is refused


# ------------------------------------------------------------------- managers

_meetings: dict[str, tuple[socket.socket, socket.socket]] = {}  # address -> the server's end, the clients' end
_numbers = itertools.count(1)


def _managers_over_pairs(module: Any) -> None:
    """Managers without an address get a meeting place that server and clients inherit."""
    listen, call = module.listener_client["pickle"]
    module.listener_client["pickle"] = (_listener(module, listen), _client(module, call))
    start = module.BaseManager.start

    def start_with_meeting(self: Any, *args: Any, **kwargs: Any) -> None:
        if self._address is not None or self._serializer != "pickle":
            start(self, *args, **kwargs)
            return
        servers, clients = socket.socketpair()
        self._address = f"manager-{os.getpid()}-{next(_numbers)}"
        _meetings[self._address] = servers, clients
        weakref.finalize(self, clients.close).atexit = False
        try:
            start(self, *args, **kwargs)
        finally:
            servers.close()  # the server has its own: when it ends, a client must not wait for ever

    module.BaseManager.start = start_with_meeting


def _listener(module: Any, otherwise: Callable[..., Any]) -> Callable[..., Any]:
    class Listener:
        last_accepted = None

        def __init__(self, address: str, servers: socket.socket) -> None:
            self.address = address
            self._servers = servers

        def accept(self) -> Any:
            _, fds, _, _ = socket.recv_fds(self._servers, 1, 1)
            if not fds:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            return module.connection.Connection(fds[0])

        def close(self) -> None:
            self._servers.close()

    def listen(address: Any = None, *args: Any, **kwargs: Any) -> Any:
        if address in _meetings:
            return Listener(address, _meetings[address][0])
        return otherwise(address, *args, **kwargs)

    return listen


def _client(module: Any, otherwise: Callable[..., Any]) -> Callable[..., Any]:
    def call(address: Any, family: str | None = None, authkey: bytes | None = None) -> Any:
        if address not in _meetings:
            return otherwise(address, family, authkey)
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(_meetings[address][1], [b"c"], [theirs.fileno()])
        connection = module.connection.Connection(ours.detach())
        if authkey is not None:
            module.connection.answer_challenge(connection, authkey)
            module.connection.deliver_challenge(connection, authkey)
        return connection

    return call


_CHANGES: dict[str, Change] = {
    "subprocess": _refuse_programs,
    "multiprocessing.context": _fork_by_default,
    "multiprocessing.resource_tracker": _track_nothing,
    "multiprocessing.heap": _heap_in_tmpdir,
    "multiprocessing.managers": _managers_over_pairs,
}

# -------------------------------------------------- semaphores, shared memory


class SemLock:
    """``_multiprocessing.SemLock`` without a name: in memory that later forks share."""

    SEM_VALUE_MAX = _SEM_VALUE_MAX

    def __init__(self, kind: int, value: int, maxvalue: int, name: str, unlink: bool) -> None:
        """Raises OSError for a value that no semaphore can have, and for one that needs a name."""
        if not unlink:
            raise OSError(errno.ENOSYS, "only processes that are forked can share a semaphore here", name)
        if not 0 <= value <= _SEM_VALUE_MAX:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        self._memory = mmap.mmap(-1, _SEM_BYTES)
        self._sem = ctypes.byref((ctypes.c_char * _SEM_BYTES).from_buffer(self._memory))
        _semaphore("init", self._sem, 1, ctypes.c_uint(value))
        self.kind, self.maxvalue, self.name = kind, maxvalue, None
        self.handle = id(self._memory)
        self._held, self._owner = 0, 0

    def acquire(self, block: bool = True, timeout: float | None = None) -> bool:
        """Take one; False when there is none (without ``block``) or none comes in ``timeout`` s."""
        if self.kind == _RECURSIVE and self._is_mine():
            self._held += 1
            return True
        if not self._take(block, timeout):
            return False
        self._held += 1
        self._owner = threading.get_ident()
        return True

    def _take(self, block: bool, timeout: float | None) -> bool:
        if _semaphore("trywait", self._sem) == 0:
            return True
        if not block:
            return False
        if timeout is None:
            return _until_known("wait", self._sem)
        nanoseconds = time.time_ns() + int(max(timeout, 0.0) * _NANOSECONDS)
        until = (ctypes.c_long * 2)(*divmod(nanoseconds, _NANOSECONDS))
        return _until_known("timedwait", self._sem, until)

    def release(self) -> None:
        """Give one back. Raises as the original: AssertionError, ValueError."""
        if self.kind == _RECURSIVE:
            if not self._is_mine():
                raise AssertionError("attempt to release recursive lock not owned by thread")
            if self._held > 1:
                self._held -= 1
                return
        elif self._get_value() >= self.maxvalue:
            raise ValueError("semaphore or lock released too many times")
        _semaphore("post", self._sem)
        self._held -= 1

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    def _count(self) -> int:
        return self._held

    def _is_mine(self) -> bool:
        return self._held > 0 and self._owner == threading.get_ident()

    def _get_value(self) -> int:
        value = ctypes.c_int()
        _semaphore("getvalue", self._sem, ctypes.byref(value))
        return value.value

    def _is_zero(self) -> bool:
        return self._get_value() == 0

    def _after_fork(self) -> None:
        self._held = 0

    @classmethod
    def _rebuild(cls, *_: object) -> Self:
        raise OSError(errno.ENOSYS, "only processes that are forked can share a semaphore here")


_libc = ctypes.CDLL(None, use_errno=True)


def _semaphore(function: str, *arguments: Any) -> int:
    """One of libc's functions for semaphores: 0 or an errno that is no fault of the caller's."""
    if getattr(_libc, f"sem_{function}")(*arguments) == 0:
        return 0
    code = ctypes.get_errno()
    if code not in (errno.EAGAIN, errno.ETIMEDOUT, errno.EINTR):
        raise OSError(code, os.strerror(code))
    return code


def _until_known(function: str, *arguments: Any) -> bool:
    """Wait on, whatever signal comes between: their handlers run after each return."""
    code = errno.EINTR
    while code == errno.EINTR:
        code = _semaphore(function, *arguments)
    return code == 0


def _unlink_semaphore(name: str) -> None:
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)


def _open_shared(path: str, flags: int, mode: int = 0o777) -> int:
    return os.open(_in_box(path), flags | os.O_CLOEXEC | os.O_NOFOLLOW, mode)


def _unlink_shared(path: str) -> None:
    os.unlink(_in_box(path))


def _in_box(path: str) -> str:
    name = path.lstrip("/")
    if not name or "/" in name or name in (".", ".."):
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), path)
    return os.path.join(box, name)


box = "."  # the execution's working directory; the zygote's child sets it
