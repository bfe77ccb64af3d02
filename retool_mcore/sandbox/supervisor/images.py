"""Supervisor side of the zygote protocol: start a zygote, request forks, receive exits."""

import asyncio
import contextlib
import json
import logging
import marshal
import os
import signal
import socket
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from retool_mcore.errors import ConfigError, SandboxUnavailable
from retool_mcore.sandbox.base import Level
from retool_mcore.sandbox.supervisor import confine, kernel, zygote
from retool_mcore.sandbox.supervisor.interpreter import Interpreter
from retool_mcore.sandbox.supervisor.seccomp import compile_filter, without_sockets

logger = logging.getLogger(__name__)

# One third of the CPU weight of a process at nice 0. Not lower, because rollouts wait for
# executions.
_NICE = 5
_OOM_SCORE_ADJ = 1000  # the OOM killer picks these processes first
_START_TIMEOUT_S = 120.0
_FORK_TIMEOUT_S = 30.0
_PACKAGE = str(Path(__file__).resolve().parents[2])
# Finds our modules without their folder on sys.path: it may be the trainer's site-packages, whose
# packages another interpreter must not import.
_BOOT = """
import sys, types
package = sys.modules["retool_mcore"] = types.ModuleType("retool_mcore")
package.__path__ = [{package!r}]
from retool_mcore.sandbox.supervisor.zygote import main
main({fd})
"""
_ENVIRONMENT = confine.ENVIRONMENT | {
    "MKL_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "2",  # each thread's arena reserves 64 MiB or more of the limited address space
    "JE_ARROW_MALLOC_CONF": "background_thread:false",  # pyarrow, which pandas imports: a fork would lose the thread
    "MPLBACKEND": "Agg",
    "PYTHONHASHSEED": "0",  # a printed set has the same order in every zygote
}


@dataclass(frozen=True)
class Exit:
    """Exit of a child: ``os.wait`` status, and CPU seconds including its reaped children."""

    status: int
    cpu_s: float


@dataclass(frozen=True)
class Child:
    """A started child. The caller must close ``pidfd``.

    Awaiting ``exit`` raises SandboxUnavailable if the zygote died.
    """

    pidfd: int
    exit: asyncio.Future[Exit]


class _Job(NamedTuple):
    """A requested child: its pidfd once it has started, and its exit."""

    started: asyncio.Future[int]
    exit: asyncio.Future[Exit]


class WarmImage:
    """One zygote process. If it dies, the next ``spawn`` starts a new one."""

    def __init__(
        self,
        *,
        level: Level,
        light: bool,
        state_dir: Path,
        interpreter: Interpreter,
    ) -> None:
        """``state_dir`` is the directory for the zygote's log and mount point."""
        self.level = level
        self._light = light
        self._state_dir = state_dir
        self._interpreter = interpreter
        self.facts: dict[str, Any] = {}  # reported by the zygote after its start
        self._channel: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._starting = asyncio.Lock()
        self._closed = False
        self._next_job = 1
        self._jobs: dict[int, _Job] = {}  # those that have not exited

    @property
    def child_is_init(self) -> bool:
        """Whether the child is the execution itself (pid 1 of its namespace), not a guardian."""
        return self.level == Level.NAMESPACES

    @property
    def num_running(self) -> int:
        """Number of children that have not exited."""
        return len(self._jobs)

    async def start(self) -> None:
        """Start the zygote unless it is running.

        Raises SandboxUnavailable with the kernel's refusal, ConfigError if a ``sandbox.preload``
        module cannot be in the image.
        """
        async with self._starting:
            if self._closed:  # a call still in progress must not restart the zygote
                raise SandboxUnavailable("the sandbox was closed.")
            if self._channel is None:
                await self._start()

    async def _start(self) -> None:
        root = self._state_dir / "root"
        root.mkdir(parents=True, exist_ok=True)
        log_path = self._state_dir / "zygote.log"
        environment = dict(_ENVIRONMENT, HOME=str(self._state_dir))
        if not self._interpreter.python and "LD_LIBRARY_PATH" in os.environ:  # our libraries may not fit another Python
            environment["LD_LIBRARY_PATH"] = os.environ["LD_LIBRARY_PATH"]
        try:
            config = marshal.dumps(self._config(root))
        except (ImportError, OSError, RuntimeError) as error:
            raise SandboxUnavailable(f"no seccomp filter or no Landlock: {error}") from error
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        boot = _BOOT.format(package=_PACKAGE, fd=theirs.fileno())
        with log_path.open("wb") as log, theirs:
            try:
                process = subprocess.Popen(
                    [self._interpreter.executable, "-s", "-P", "-B", "-c", boot],
                    env=environment, pass_fds=[theirs.fileno()], cwd="/", start_new_session=True,
                    stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                )  # fmt: skip
            except OSError as error:
                ours.close()
                raise self._interpreter.error(f"cannot be started: {error.strerror}") from error
        _lower_priority(process.pid)
        ours.setblocking(False)
        try:
            ours.send(config)
            async with asyncio.timeout(_START_TIMEOUT_S):
                answer = await asyncio.get_running_loop().sock_recv(ours, 1 << 16)
        except TimeoutError:
            answer = zygote.FAILED + f"no answer within {_START_TIMEOUT_S:.0f} s".encode()
        except OSError:  # the process ended without reading its configuration
            answer = b""
        if answer[:1] != zygote.READY:
            ours.close()
            process.kill()
            await asyncio.to_thread(process.wait)
            reason = answer[1:].decode(errors="replace") or log_path.read_text(errors="replace")[-2000:].strip()
            if answer[:1] == zygote.MISCONFIGURED:
                raise ConfigError(reason)
            if not answer and self._interpreter.python:
                raise self._interpreter.error(f"cannot run the sandbox: {reason!r}")
            raise SandboxUnavailable(reason or f"the zygote ended with {process.returncode}")
        self.facts = json.loads(answer[1:])
        self._channel, self._process = ours, process
        asyncio.get_running_loop().add_reader(ours, self._on_message)

    def _config(self, root: Path) -> dict[str, object]:
        return {
            "level": str(self.level),
            "light": self._light,
            "preload": list(self._interpreter.preload),
            "root": str(root),
            "seccomp": self._filter(),
            "landlock_abi": kernel.landlock_abi() if self.level == Level.LANDLOCK else 0,
        }

    def _filter(self) -> bytes:
        """Return the seccomp program.

        At level namespaces, the namespaces already confine signals and hide host files. Landlock
        confines signals from ABI 6 on and protects file lengths from ABI 3 on; below those versions
        the filter does. No Landlock version protects modes and times. When the sandbox runs as
        root, executions have other uids than the files' owners, so file permissions protect them;
        otherwise the filter must. At level rlimits without libseccomp, fall back to
        ``without_sockets``.
        """
        if self.level == Level.LANDLOCK:
            abi = kernel.landlock_abi()
            return compile_filter(
                only_own_signals=abi < kernel.LANDLOCK_ABI_WITH_SIGNAL_SCOPE,
                keep_modes=os.geteuid() != 0,
                keep_lengths=abi < kernel.LANDLOCK_ABI_WITH_TRUNCATE,
            )
        try:
            return compile_filter(only_own_signals=False)
        except (ImportError, OSError, RuntimeError):
            if self.level != Level.RLIMITS:
                raise
            return without_sockets()

    async def spawn(self, fds: list[int], *, uid: int | None, has_cgroup: bool) -> Child:
        """Fork a child that receives ``fds`` (see ``zygote.SPAWN``). Raises SandboxUnavailable."""
        await self.start()
        assert self._channel is not None, "start() returned without a channel"
        loop = asyncio.get_running_loop()
        number, self._next_job = self._next_job, self._next_job + 1
        self._jobs[number] = job = _Job(loop.create_future(), loop.create_future())
        for future in job:
            future.add_done_callback(lambda done: done.exception())  # its waiter may have been cancelled
        message = zygote.SPAWN.pack(number, -1 if uid is None else uid, has_cgroup)
        try:
            socket.send_fds(self._channel, [message], fds)
        except OSError as error:
            self._jobs.pop(number, None)
            raise SandboxUnavailable(f"the zygote accepts no more jobs: {error}") from error
        try:
            async with asyncio.timeout(_FORK_TIMEOUT_S):
                return Child(pidfd=await asyncio.shield(job.started), exit=job.exit)
        except TimeoutError:
            reason = f"the zygote did not fork within {_FORK_TIMEOUT_S:.0f} s"
            self._died(reason)
            raise SandboxUnavailable(reason) from None
        except asyncio.CancelledError:
            job.started.add_done_callback(self._kill_unwanted)  # runs at once if the child has started
            raise

    def _on_message(self) -> None:
        assert self._channel is not None, "a reader outlived its channel"
        try:
            message, pidfds, _, _ = socket.recv_fds(self._channel, 4096, 1)
        except BlockingIOError:
            return
        except OSError:
            message, pidfds = b"", []
        kind, body = message[:1], message[1:]
        if kind == zygote.STARTED:
            self._jobs[zygote.STARTED_BODY.unpack(body)[0]].started.set_result(pidfds[0])
        elif kind == zygote.EXITED:
            number, status, cpu_s = zygote.EXITED_BODY.unpack(body)
            self._jobs.pop(number).exit.set_result(Exit(status, cpu_s))
        elif kind == zygote.FAILED:
            reason = body[zygote.STARTED_BODY.size :].decode(errors="replace")
            for future in self._jobs.pop(zygote.STARTED_BODY.unpack_from(body)[0]):
                future.set_exception(SandboxUnavailable(f"the zygote could not fork: {reason}"))
        else:
            self._died("the zygote died")

    def _died(self, reason: str) -> None:
        log = ""
        with contextlib.suppress(OSError):
            log = (self._state_dir / "zygote.log").read_text(errors="replace")[-500:].strip()
        logger.error("%s, in %s; %d executions were lost. Its log: %s", reason, self._state_dir, len(self._jobs), log)
        self._lost(reason)

    def _lost(self, reason: str) -> None:
        """Fail all waiting calls: the zygote is gone, and with it every child.

        The next spawn starts a new zygote.
        """
        if self._channel is not None:
            asyncio.get_running_loop().remove_reader(self._channel)
            self._channel.close()
            self._channel = None
        lost, self._jobs = self._jobs, {}
        for job in lost.values():
            for future in job:
                if not future.done():
                    future.set_exception(SandboxUnavailable(reason))
        if self._process is not None:
            self._process.kill()  # the outer of the two processes; the inner one dies with it
            self._process.wait()
            self._process = None

    def kill(self, pidfd: int) -> None:
        """Kill a child and all its descendants.

        At level namespaces, the child is pid 1, and SIGKILL takes its whole pid namespace down. At
        the other levels, SIGTERM makes the guardian kill the tree before it exits.
        """
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL if self.child_is_init else signal.SIGTERM)

    def _kill_unwanted(self, started: asyncio.Future[int]) -> None:
        if started.exception() is None:
            self.kill(started.result())
            os.close(started.result())

    async def close(self) -> None:
        """Stop the zygote with all its children, and wait until it has exited."""
        async with self._starting:
            self._closed = True
            process, self._process = self._process, None
            self._lost("the sandbox was closed")
            if process is not None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    await asyncio.to_thread(process.wait, 10)
                process.kill()
                await asyncio.to_thread(process.wait)


def _lower_priority(pid: int) -> None:
    """Lower the CPU priority of ``pid`` and raise its OOM score; its children inherit both.

    This needs no privileges. It is set from outside, so it takes effect before ``pid`` runs. If
    this process has CAP_SYS_RESOURCE, the unprivileged child cannot lower the score again.
    """
    with contextlib.suppress(OSError):  # it may have exited already
        os.setpriority(os.PRIO_PROCESS, pid, _NICE)
    # With sched_autogroup, the kernel schedules by session, and the group's nice value counts.
    for name, value in (("oom_score_adj", _OOM_SCORE_ADJ), ("autogroup", _NICE)):
        with contextlib.suppress(OSError):
            Path(f"/proc/{pid}/{name}").write_text(str(value))
