"""Several server processes behind one address, kept up.

One process of Python forks, feeds and reads executions for about one core; more of them share the
listening socket. Each takes one waiting connection at a time, so that the one that is busy takes
fewer. A process that ends, or whose loop stands still, is replaced. Their metrics are added up in
files, by prometheus_client itself.
"""

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import uvicorn
from prometheus_client import multiprocess

from retool_mcore.errors import ConfigError, SandboxUnavailable
from retool_mcore.process import die_with_parent
from retool_mcore.sandbox.supervisor.slots import PREFIX, lock_directory

logger = logging.getLogger(__name__)

METRICS_ENV = "PROMETHEUS_MULTIPROC_DIR"
_BEAT_S = 1.0
_STILL_S = 10.0  # a loop that does not turn for so long is not coming back in time for anybody
_READY, _BEAT = b"ready\n", b".\n"
_PAUSE_S = (0.5, 30.0)  # before a process is started again: first, longest
_STOP_EXTRA_S = 6.0  # beyond the time to drain: to close what is still open
_BACKLOG = 4096


# ------------------------------------------------------------- in the parent


@dataclass(frozen=True)
class ServerPlan:
    """What is started: the command's own arguments, shared out."""

    arguments: Sequence[str]
    listener: socket.socket
    processes: int
    workers: int
    sessions: int
    drain_s: int

    def __post_init__(self) -> None:
        if not 1 <= self.processes <= self.workers:
            raise ConfigError(f"processes = {self.processes} is not one of 1 to workers = {self.workers}.")
        if self.sessions and self.processes > 1:
            raise ConfigError(
                f"sessions = {self.sessions} with processes = {self.processes}: a session lives in one process, and a "
                "connection may reach any. Use one process, or no sessions."
            )

    def command(self, number: int, *, again: bool) -> list[str]:
        """Process ``number``. Options that are given twice count as given last."""
        workers = self.workers // self.processes + (number < self.workers % self.processes)
        inherited = str(self.listener.fileno())
        options = ["--workers", str(workers), "--inherited", inherited, *(["--again"] if again else [])]
        return [sys.executable, "-m", "retool_mcore.sandbox", "serve", *self.arguments, *options]


class Processes:
    """The processes of one address. ``run`` returns when they have been stopped."""

    def __init__(self, plan: ServerPlan, told: Callable[[], None]) -> None:
        """``told`` is called when all are ready for the first time."""
        self._plan, self._told = plan, told
        self._live: dict[int, asyncio.subprocess.Process] = {}
        self._metrics_dir = ""

    async def run(self) -> int:
        """Start, keep up, and stop at SIGTERM or SIGINT; the signal's number.

        Raises SandboxUnavailable when the processes cannot be started at all.
        """
        stopped: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, _set_once, stopped, int(number))
        self._metrics_dir = tempfile.mkdtemp(prefix=PREFIX)
        lock = lock_directory(Path(self._metrics_dir))  # else the next sandbox removes it
        keeping: list[asyncio.Task[None]] = []
        try:
            starting = asyncio.ensure_future(self._start_all())
            await asyncio.wait((starting, stopped), return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                starting.result()
                self._told()
                keeping += [asyncio.ensure_future(self._keep(number)) for number in range(self._plan.processes)]
            else:
                starting.cancel()
            return await stopped
        finally:
            for task in keeping:
                task.cancel()
            await self._stop()
            shutil.rmtree(self._metrics_dir, ignore_errors=True)
            if lock is not None:
                os.close(lock)

    async def _start_all(self) -> None:
        await self._start(0, again=False)  # alone: what refuses it is told once
        await asyncio.gather(*(self._start(number, again=False) for number in range(1, self._plan.processes)))

    async def _start(self, number: int, *, again: bool) -> None:
        process = await asyncio.create_subprocess_exec(
            *self._plan.command(number, again=again),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            pass_fds=[self._plan.listener.fileno()],
            env={**os.environ, METRICS_ENV: self._metrics_dir},
        )
        self._live[number] = process
        assert process.stdout is not None, "asked for a pipe"
        if await process.stdout.readline() != _READY:
            code = await process.wait()
            raise SandboxUnavailable(f"server process {number} ended with {code} before it was ready; see above.")

    async def _keep(self, number: int) -> None:
        """Watch one process, and replace it whenever it is lost."""
        pause_s = _PAUSE_S[0]
        while True:
            started_at = time.monotonic()
            reason = await self._lost(self._live[number])
            if time.monotonic() - started_at > _PAUSE_S[1]:
                pause_s = _PAUSE_S[0]
            while True:
                logger.error("server process %d %s; started again in %.1f s", number, reason, pause_s)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _PAUSE_S[1])
                try:
                    await self._start(number, again=True)
                    break
                except (SandboxUnavailable, OSError) as error:
                    reason = f"could not be started: {error}"

    async def _lost(self, process: asyncio.subprocess.Process) -> str:
        """Wait until the process has ended, or make it end when it stands still; tell which."""
        assert process.stdout is not None, "asked for a pipe"
        still = False
        try:
            while True:
                async with asyncio.timeout(_STILL_S):
                    if not await process.stdout.readline():
                        break
        except TimeoutError:
            still = True
            process.kill()
        code = await process.wait()
        multiprocess.mark_process_dead(process.pid, self._metrics_dir)  # pyright: ignore[reportUnknownMemberType]
        return f"stood still for {_STILL_S:.0f} s" if still else f"ended with {code}"

    async def _stop(self) -> None:
        for process in self._live.values():
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
        waiting = [asyncio.ensure_future(process.wait()) for process in self._live.values()]
        if waiting:
            await asyncio.wait(waiting, timeout=self._plan.drain_s + _STOP_EXTRA_S)
        for process in self._live.values():
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        await asyncio.gather(*waiting)


def _set_once(future: asyncio.Future[int], value: int) -> None:
    if not future.done():
        future.set_result(value)


# ------------------------------------------------------------- in each of them


def inherit(fd: int) -> socket.socket:
    """The socket that the parent listens on. This process ends with the parent."""
    die_with_parent(signal.SIGTERM)
    return socket.socket(fileno=fd)


async def serve_and_tell(config: uvicorn.Config, listener: socket.socket) -> None:
    """Serve until stopped, and tell the parent: ready, then that the loop turns."""
    config.backlog = 1  # as many connections are taken at a time; the rest is for the others
    server = uvicorn.Server(config)
    telling = asyncio.ensure_future(_tell(server, listener))
    try:
        await server.serve(sockets=[listener])
    finally:
        telling.cancel()


async def _tell(server: uvicorn.Server, listener: socket.socket) -> None:
    while not server.started:
        await asyncio.sleep(0.02)
    listener.listen(_BACKLOG)  # the queue itself stays long
    os.write(1, _READY)
    while True:
        await asyncio.sleep(_BEAT_S)
        os.write(1, _BEAT)
