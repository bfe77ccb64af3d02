"""Supervisor side of one confined child: sends requests, reads streams and control frames.

Everything that the child sends after its code has started is untrusted: sizes are bounded, and
unknown frames are ignored.
"""

from __future__ import annotations

import asyncio
import contextlib
import marshal
import os
import signal
import socket
import struct
import time
from dataclasses import dataclass, field, replace

from retool_mcore.errors import SandboxUnavailable
from retool_mcore.sandbox.base import MAX_FILE_BYTES, ExecRequest, ExecResult
from retool_mcore.sandbox.child import runner
from retool_mcore.sandbox.supervisor import freeze
from retool_mcore.sandbox.supervisor.images import Child, Exit, WarmImage
from retool_mcore.sandbox.supervisor.output import (
    MAX_SCRIPT_STREAM_BYTES,
    MAX_STREAM_BYTES,
    BoundedOutput,
    as_on_a_terminal,
)
from retool_mcore.sandbox.supervisor.slots import WorkerSlot

_SETUP_TIMEOUT_S = 30.0
_END_TIMEOUT_S = 10.0
_CHECK_FROZEN_S = 2.0  # interval between checks that an idle session is still stopped
_READ_BYTES = 64 << 10
# Control frames other than files fit into this many bytes. More is an attack, so the supervisor
# shuts the control socket down.
_CONTROL_BYTES = 4 << 10
_MAX_FRAMES = 64  # not counting one per requested file; more is an attack too
_MAX_READS = 16  # from one child, before the event loop serves others
_MAX_LAST_READS = 64  # from a stream after the code has ended; a pipe has at most 1 MiB
# After each read from a stream that exceeds its cap, pause for this time. The writer then blocks on
# a full pipe instead of keeping this process busy.
_OVERFLOW_PAUSE_S = 0.002


@dataclass
class _Frames:
    """Parser state of one request: control frames received from the child's byte stream."""

    buffer: bytearray = field(default_factory=bytearray)
    files: dict[int, bytes] = field(default_factory=dict[int, bytes])  # by index in the request
    num_files: int = 0  # requested
    num_left: int = _MAX_FRAMES
    bytes_left: int = _CONTROL_BYTES


class ChildProcess:
    """A live child. ``run`` executes a request in it. Callers must always ``close`` it."""

    def __init__(
        self, image: WarmImage, child: Child, control: socket.socket, stdout: int, stderr: int, *, session: bool
    ) -> None:
        self.image = image
        self.child = child
        self._session = session
        self._control = control
        self._loop = asyncio.get_running_loop()
        self._outputs = {stdout: BoundedOutput(), stderr: BoundedOutput()}
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._cell_end: asyncio.Future[int | None] = self._loop.create_future()  # a cell's return code; None: it exited
        self._cell = 0
        self._tree = freeze.Tree(child.pidfd, with_root=image.child_is_init)
        self._used_s = 0.0  # CPU seconds of a session's earlier cells
        self._frozen_check: asyncio.TimerHandle | None = None  # while a session is stopped
        self._frames = _Frames()
        self._open = {stdout, stderr, control.fileno()}
        for fd in self._outputs:
            os.set_blocking(fd, False)
            self._loop.add_reader(fd, self._read_stream, fd)
        self._loop.add_reader(control, self._read_control)
        child.exit.add_done_callback(self._on_exit)

    @classmethod
    async def spawn(cls, image: WarmImage, slot: WorkerSlot, *, session: bool = False) -> ChildProcess:
        """Fork a child of ``image`` for a request or a session. Raises SandboxUnavailable."""
        cgroup = [] if slot.cgroup_fd is None else [slot.cgroup_fd]
        directory = [] if slot.directory is None else [os.open(slot.directory, os.O_PATH | os.O_DIRECTORY)]
        ours, theirs = socket.socketpair()
        out_read, out_write = os.pipe()
        err_read, err_write = os.pipe()
        fds = [theirs.fileno(), out_write, err_write, *cgroup, *directory]
        try:
            child = await image.spawn(fds, uid=slot.uid, has_cgroup=bool(cgroup))
        except BaseException:
            ours.close()
            os.close(out_read)
            os.close(err_read)
            raise
        finally:
            theirs.close()
            for fd in (out_write, err_write, *directory):
                os.close(fd)
        ours.setblocking(False)
        return cls(image, child, ours, out_read, err_read, session=session)

    @property
    def alive(self) -> bool:
        """Whether the child still runs."""
        return not self.child.exit.done()

    # ---------------------------------------------------------- one request

    async def run(self, request: ExecRequest) -> ExecResult:
        """Run one request.

        On return, the child is dead, unless it belongs to a session. Then it is stopped (SIGSTOP)
        until the next ``run``, if it neither hit the time limit nor ended itself.

        Raises SandboxUnavailable when the kernel refused the confinement or the zygote died. When
        the call is cancelled, the child is killed before the cancellation propagates.
        """
        self._begin_request(request)
        sending = asyncio.ensure_future(self._send(request))
        try:
            if not (await asyncio.wait((self._ready,), timeout=_SETUP_TIMEOUT_S))[0]:
                raise SandboxUnavailable(f"a child was not ready after {_SETUP_TIMEOUT_S:.0f} s")
            self._ready.result()
            started = time.monotonic()
            timed_out = not (await asyncio.wait((self._cell_end,), timeout=request.run_timeout_s))[0]
            run_s = time.monotonic() - started
            return_code = None if timed_out else self._cell_end.result()
            if return_code is not None:
                cpu_s = await self._freeze()
            else:
                exit_ = await self._end(kill=timed_out)
                cpu_s = max(0.0, exit_.cpu_s - self._used_s)
                return_code = None if timed_out else os.waitstatus_to_exitcode(exit_.status)
        except BaseException:
            await asyncio.shield(self._kill_and_wait())
            raise
        finally:
            sending.cancel()
            await asyncio.wait((sending,))
        self._drain()
        return self._result(request, run_s, cpu_s=cpu_s, return_code=return_code, timed_out=timed_out)

    async def _freeze(self) -> float:
        """Stop a session's processes until its next cell. Returns the CPU seconds of this cell.

        They include the time between the frame that ended the cell and the stop. If the processes
        do not stop, they are killed, and the session is lost.
        """
        stopped = await self._tree.stop()
        used_s = self._tree.used_s()
        cpu_s, self._used_s = max(0.0, used_s - self._used_s), used_s
        if stopped:
            self._frozen_check = self._loop.call_later(_CHECK_FROZEN_S, self._check_frozen)
        else:
            await self._kill_and_wait()
        return cpu_s

    def _check_frozen(self) -> None:
        """Kill the session if a process woke up: a timer can send SIGCONT to stopped processes."""
        if self._tree.running():
            self.image.kill(self.child.pidfd)
        elif self.alive:
            self._frozen_check = self._loop.call_later(_CHECK_FROZEN_S, self._check_frozen)

    def _begin_request(self, request: ExecRequest) -> None:
        """Reset what belongs to one request, and resume a stopped session."""
        self._cell_end = self._loop.create_future()
        self._cell += 1
        self._frames = _Frames(
            num_files=len(request.fetch_files),
            num_left=_MAX_FRAMES + len(request.fetch_files),
            bytes_left=_CONTROL_BYTES + (2 * MAX_FILE_BYTES if request.fetch_files else 0),
        )
        for fd in self._outputs:
            self._outputs[fd] = BoundedOutput(MAX_STREAM_BYTES if request.notebook else MAX_SCRIPT_STREAM_BYTES)
        if self.child.exit.done():
            self._on_exit(self.child.exit)
        if self._frozen_check is not None:
            self._frozen_check.cancel()
            self._frozen_check = None
            if self._tree.running():
                self.image.kill(self.child.pidfd)
            elif self.alive:
                self._tree.resume()

    async def _send(self, request: ExecRequest) -> None:
        packed = marshal.dumps(
            {
                "code": request.code.removeprefix("\ufeff"),  # byte order mark; Python skips it in files too
                "stdin": None if request.stdin is None else request.stdin.encode("utf-8", "surrogatepass"),
                "files": dict(request.files),
                "fetch_files": list(request.fetch_files),
                "memory_limit_mb": request.memory_limit_mb,
                "session": self._session,
                "notebook": request.notebook,
            }
        )
        with contextlib.suppress(OSError):  # the child has exited; its exit status shows why
            await self._loop.sock_sendall(self._control, packed)

    def _result(
        self,
        request: ExecRequest,
        run_s: float,
        *,
        cpu_s: float,
        return_code: int | None,
        timed_out: bool,
    ) -> ExecResult:
        stdout, stderr = (output.text() for output in self._outputs.values())
        if request.notebook:
            stdout, stderr = ((as_on_a_terminal(text), dropped) for text, dropped in (stdout, stderr))
        return ExecResult(
            status="time_limit" if timed_out else "finished",
            return_code=return_code,
            stdout=stdout[0],
            stderr=stderr[0],
            stdout_dropped_bytes=stdout[1],
            stderr_dropped_bytes=stderr[1],
            run_s=run_s,
            cpu_s=cpu_s,
            level=self.image.level,
            files={request.fetch_files[index]: content for index, content in self._frames.files.items()},
        )

    # --------------------------------------------------------------- events

    def _on_exit(self, exit_: asyncio.Future[Exit]) -> None:
        self._drain()  # frames may arrive just before the exit
        if not self._ready.done():
            output = "".join(output.text()[0] for output in self._outputs.values()).strip()[-2000:]
            reason = f"a child ended before it was confined{': ' + output if output else ''}"
            self._ready.set_exception(exit_.exception() or SandboxUnavailable(reason))
            self._ready.add_done_callback(lambda ready: ready.exception())
        if not self._cell_end.done():
            self._cell_end.set_result(None)

    def _read_stream(self, fd: int) -> bool:
        """Read once from a stream. Returns whether more may follow at once."""
        try:
            data = os.read(fd, _READ_BYTES)
        except BlockingIOError:
            return False
        output = self._outputs[fd]
        output.write(data)
        if not data:
            self._stop_reading(fd)
        elif output.overflowed:
            self._loop.remove_reader(fd)
            self._loop.call_later(_OVERFLOW_PAUSE_S, self._resume, fd)
        return bool(data)

    def _resume(self, fd: int) -> None:
        if fd in self._open:
            self._loop.add_reader(fd, self._read_stream, fd)

    def _drain(self) -> None:
        """Read what is left in the pipes and the control socket.

        The amount is bounded by the number of reads per descriptor.
        """
        for fd in self._outputs:
            num_reads = 0
            while fd in self._open and num_reads < _MAX_LAST_READS and self._read_stream(fd):
                num_reads += 1
        if self._control.fileno() in self._open:
            self._read_control(max_reads=2 * MAX_FILE_BYTES // _READ_BYTES)

    def _read_control(self, max_reads: int = _MAX_READS) -> None:
        for _ in range(max_reads):
            try:
                data = self._control.recv(_READ_BYTES)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            frames = self._frames
            frames.bytes_left -= len(data)
            frames.buffer += data
            self._take_frames()
            if not data or frames.bytes_left < 0 or frames.num_left < 0:
                self._stop_reading(self._control.fileno())
                if data:
                    self._control.shutdown(socket.SHUT_RDWR)
                return

    def _take_frames(self) -> None:
        buffer = self._frames.buffer
        while len(buffer) >= runner.FRAME.size and self._frames.num_left >= 0:
            kind, length = runner.FRAME.unpack_from(buffer)
            end = runner.FRAME.size + length
            if len(buffer) < end:
                return
            with memoryview(buffer) as view:
                payload = bytes(view[runner.FRAME.size : end])
            del buffer[:end]
            self._on_frame(kind, payload)

    def _on_frame(self, kind: bytes, payload: bytes) -> None:
        self._frames.num_left -= 1
        if not self._ready.done():
            if kind == runner.READY:
                self._ready.set_result(None)
            elif kind == runner.SETUP_ERROR:
                reason = payload.decode(errors="replace")
                self._ready.set_exception(SandboxUnavailable(f"the kernel refused the confinement: {reason}"))
        elif kind == runner.FILE and len(payload) >= 4:
            (index,) = struct.unpack_from("=I", payload)
            if index < self._frames.num_files:
                self._frames.files.setdefault(index, payload[4:])
        elif kind == runner.DONE and self._session and not self._cell_end.done():
            return_code, cell = runner.CELL_END.unpack(payload) if len(payload) == runner.CELL_END.size else (0, 0)
            if cell == self._cell:  # else: an earlier cell forged its end, and this is its real one
                self._cell_end.set_result(return_code)

    def _stop_reading(self, fd: int) -> None:
        if fd in self._open:
            self._open.discard(fd)
            self._loop.remove_reader(fd)

    # ------------------------------------------------------------------ end

    async def _end(self, *, kill: bool) -> Exit:
        """Wait until the child and its descendants are gone; with ``kill``, kill them first.

        Raises SandboxUnavailable when a killed child does not exit within 10 s.
        """
        if kill and self.alive:
            self.image.kill(self.child.pidfd)
        try:
            async with asyncio.timeout(_END_TIMEOUT_S if kill else None):
                return await asyncio.shield(self.child.exit)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.child.pidfd, signal.SIGKILL)
            raise SandboxUnavailable(f"a killed child did not end within {_END_TIMEOUT_S:.0f} s") from None

    async def _kill_and_wait(self) -> None:
        with contextlib.suppress(SandboxUnavailable):
            await self._end(kill=True)

    async def close(self) -> None:
        """Kill the child if it is alive, wait for its exit, and close every fd."""
        try:
            if self.alive:
                await asyncio.shield(self._kill_and_wait())
        finally:
            if self._frozen_check is not None:
                self._frozen_check.cancel()
            for fd in list(self._open):
                self._stop_reading(fd)
            self._control.close()
            for fd in (*self._outputs, self.child.pidfd):
                os.close(fd)


async def run_once(image: WarmImage, slot: WorkerSlot, request: ExecRequest) -> ExecResult:
    """Run a request in a fresh child, then clean the slot. Raises as its steps do."""
    kills_before = slot.oom_kills()
    try:
        slot.prepare(request.memory_limit_mb)
        process = await ChildProcess.spawn(image, slot)
        try:
            result = await process.run(request)
        finally:
            await process.close()
    finally:
        await slot.clean()
    if slot.oom_kills() > kills_before and result.return_code is not None and result.return_code < 0:
        return replace(result, status="memory_limit", return_code=None)
    return result
