"""Runs model code as a cell or script inside a confined process and reports to the supervisor.

Runs in a child of the zygote, after confinement. Once model code has started, nothing in this
process can be trusted: the supervisor treats everything on the control socket as untrusted data.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import gc
import io
import linecache
import marshal
import os
import resource
import signal
import socket
import stat
import struct
import sys
import threading
import types
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from retool_mcore.sandbox.child import notebook, tracebacks

if TYPE_CHECKING:
    import asyncio  # imported at run time only for code that awaits

# Headroom above the code's memory limit for reporting a MemoryError.
_REPORT_BYTES = 64 << 20

READY, SETUP_ERROR, FILE, DONE = b"R", b"E", b"N", b"D"
_MAX_FETCHED_BYTES = 64 << 20
_MAX_CORES = 8  # pools start one worker per core, and processes are limited
_CO_COROUTINE = 0x80  # as in inspect, which is slow to import
_leave = os._exit  # a copy, because model code may replace os._exit
CELL_END = struct.Struct("=ii")  # payload of DONE: return code, number of the cell
FRAME = struct.Struct("=cI")  # kind, length in bytes of the payload that follows


def send_frame(control: socket.socket, kind: bytes, payload: bytes = b"") -> None:
    """Write one frame to the supervisor."""
    control.sendall(FRAME.pack(kind, len(payload)) + payload)


class CellRunner:
    """Runs cells in one ``__main__`` namespace: one cell, or all cells of a session."""

    def __init__(self, control: socket.socket, mapped_bytes: int) -> None:
        """``mapped_bytes``: the warm image's address space, which the memory limit adds to."""
        self._control = control
        self._requests = control.makefile("rb")
        self._mapped_bytes = mapped_bytes
        self._loop: asyncio.AbstractEventLoop | None = None
        self._module = types.ModuleType("__main__")
        self._module.__dict__["__builtins__"] = builtins

    def serve(self) -> NoReturn:
        """Run one request from the control socket; in a session, run requests until it ends."""
        self._become_main()
        number = 0
        while True:
            number += 1
            try:
                request = marshal.load(self._requests)  # unsafe for untrusted input; the supervisor is trusted
            except EOFError:
                _leave(0)  # the supervisor is gone or the call was cancelled
            session: bool = request["session"]
            if number == 1:
                self._limit_memory(request["memory_limit_mb"])
            self._open_stdin(request["stdin"])
            filename = f"cell_{number}.py" if session else "main.py"
            return_code = self._write_files(request["files"])
            if not return_code and not request["notebook"]:
                self._become_script(request["code"], filename)
            return_code = return_code or self.run_cell(request["code"], filename, echo=request["notebook"])
            if not session:
                return_code = self._shut_down(return_code)
            self._send_files(request["fetch_files"])
            if not session:
                _leave(return_code)
            send_frame(self._control, DONE, CELL_END.pack(return_code, number))

    def _become_main(self) -> None:
        sys.modules["__main__"] = self._module
        sys.argv = ["main.py"]
        sys.path.insert(0, os.getcwd())
        sys.stdout = sys.__stdout__ = _text_writer(1)
        sys.stderr = sys.__stderr__ = _text_writer(2)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        num_cores = min(_MAX_CORES, os.cpu_count() or 1)
        os.cpu_count = lambda: num_cores
        gc.enable()
        reseed()

    def _limit_memory(self, memory_limit_mb: int) -> None:
        """Set RLIMIT_AS to the bytes mapped by the warm image plus the limit."""
        soft = self._mapped_bytes + (memory_limit_mb << 20)
        hard = soft + _REPORT_BYTES
        _, ceiling = resource.getrlimit(resource.RLIMIT_AS)
        if ceiling != resource.RLIM_INFINITY:
            soft, hard = min(soft, ceiling), min(hard, ceiling)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))

    def _open_stdin(self, stdin: bytes | None) -> None:
        with open(".stdin" if stdin else "/dev/null", "x+b" if stdin else "rb") as file:
            if stdin:
                os.unlink(".stdin")
                file.write(stdin)
                file.seek(0)
            os.dup2(file.fileno(), 0)
        raw = io.FileIO(0, "r", closefd=False)
        sys.stdin = sys.__stdin__ = io.TextIOWrapper(io.BufferedReader(raw), encoding="utf-8", errors="replace")

    @staticmethod
    def _write_files(files: dict[str, bytes]) -> int:
        """Write the request's files. Returns an exit code.

        0, or 1 with a line on stderr when a file cannot be written (``a`` next to ``a/b``, or no
        space left).
        """
        for name, content in files.items():
            try:
                os.makedirs(os.path.dirname(name) or ".", exist_ok=True)
                with open(name, "wb") as file:
                    file.write(content)
            except OSError as error:
                sys.stderr.write(f"the file {name!r} could not be written: {error.strerror}\n")
                return 1
        return 0

    def _send_files(self, names: Sequence[str]) -> None:
        """Send the named files that are regular and readable. The supervisor bounds the total."""
        for index, name in enumerate(names):
            with contextlib.suppress(OSError, ValueError, MemoryError):
                fd = os.open(name, os.O_RDONLY | os.O_NONBLOCK)
                with os.fdopen(fd, "rb") as file:
                    if stat.S_ISREG(os.fstat(fd).st_mode):
                        content = file.read(_MAX_FETCHED_BYTES)
                        send_frame(self._control, FILE, struct.pack("=I", index) + content)

    def _become_script(self, source: str, filename: str) -> None:
        """Write the script to a file and set ``__file__``, as for a script run from disk."""
        path = self._module.__dict__["__file__"] = os.path.join(os.getcwd(), filename)
        with contextlib.suppress(OSError, UnicodeEncodeError), open(path, "x", encoding="utf-8") as file:
            file.write(source)

    def run_cell(self, source: str, filename: str, *, echo: bool) -> int:
        """Execute one cell and return its exit code. Prints the traceback of an exception.

        With ``echo``, prints the value of a trailing expression.
        """
        _register_source(filename, source)
        try:
            cell = notebook.parse_cell(source, filename, notebook=echo)
            _register_source(filename, cell.text)
            codes = notebook.compile_cell(cell.tree, filename, notebook=echo)
            sys.stderr.write(cell.note)
            if echo:
                builtins.__dict__["display"] = notebook.display
            if any(code.co_flags & _CO_COROUTINE for code in codes):
                self._run_in_loop(codes)
            else:
                for code in codes:
                    exec(code, self._module.__dict__)
        except SystemExit as stop:
            return _exit_code(stop.code)
        except BaseException as error:  # noqa: BLE001  any exception of the model's code is a result
            _, hard = resource.getrlimit(resource.RLIMIT_AS)
            resource.setrlimit(resource.RLIMIT_AS, (hard, hard))  # to report a MemoryError
            tracebacks.write("", error)
            return 1
        finally:
            _flush()
        return 0

    def _run_in_loop(self, codes: Sequence[types.CodeType]) -> None:
        """Run a cell with top-level await. A session keeps one loop, so its tasks stay alive."""
        import asyncio

        async def run() -> None:
            for code in codes:
                if coroutine := eval(code, self._module.__dict__):
                    await coroutine

        if self._loop is None or self._loop.is_closed():
            self._loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(run())

    @staticmethod
    def _shut_down(return_code: int) -> int:
        """Finish like a normal interpreter: join threads, run exit handlers, flush."""
        try:
            threading._shutdown()  # pyright: ignore[reportUnknownMemberType, reportAttributeAccessIssue]
            atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage]
            _flush()
        except BaseException:  # noqa: BLE001  the model's own exit handler may fail
            return return_code or 1
        return return_code


def _register_source(filename: str, text: str) -> None:
    """Register the code's lines with ``linecache``, so that tracebacks can quote them."""
    linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)


class _WholeWrites(io.FileIO):
    """A raw file whose ``write`` retries short writes: a signal can interrupt a write to a pipe."""

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        size = len(view)
        while view:
            view = view[super().write(view) :]
        return size


def _text_writer(fd: int) -> io.TextIOWrapper:
    """Open ``fd`` unbuffered, so that output printed before a time limit is not lost."""
    raw: Any = _WholeWrites(fd, "w", closefd=False)
    return io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", write_through=True)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()


def _exit_code(code: object) -> int:
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"{code}\n")
    return 1


def reseed() -> None:
    """Reseed numpy and sympy, whose generators the fork copied from the zygote.

    ``random`` reseeds itself after a fork. A 32-bit seed spares numpy a SeedSequence (0.5 ms).
    """
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(int.from_bytes(os.urandom(4), "little"))
    if sympy_random := sys.modules.get("sympy.core.random"):
        sympy_random.rng.seed()
