"""The local sandbox: warm images, a bounded number of executions, one confined fork per execution.

Rollout workers and ``retool sandbox serve`` open it. All state belongs to one asyncio event loop.
"""

import asyncio
import contextlib
import logging
import os
import re
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace

from retool_mcore.errors import ConfigError, SandboxUnavailable
from retool_mcore.sandbox.base import ExecRequest, ExecResult, Level, Sandbox
from retool_mcore.sandbox.child.packages import heavy_packages
from retool_mcore.sandbox.supervisor import levels
from retool_mcore.sandbox.supervisor.images import WarmImage
from retool_mcore.sandbox.supervisor.interpreter import Interpreter
from retool_mcore.sandbox.supervisor.process import ChildProcess, run_once
from retool_mcore.sandbox.supervisor.sessions import WAIT_S, Sessions
from retool_mcore.sandbox.supervisor.slots import StateDirectory, WorkerSlot

logger = logging.getLogger(__name__)

# A zygote forks serially and needs a few milliseconds per fork, so each group of this many workers
# gets another zygote.
_WORKERS_PER_ZYGOTE = 16
_MAX_SEARCHED_CHARS = 32_000  # longer code goes to the full image without a search


class LocalSandbox(Sandbox):
    """Runs model code on this machine. See ``base.Sandbox`` and ``open_sandbox``."""

    def __init__(
        self,
        *,
        min_level: Level = Level.NAMESPACES,
        max_level: Level = Level.NAMESPACES,
        workers: int | None = None,
        sessions: int = 0,
        session_wait_s: float = WAIT_S,
        interpreter: Interpreter | None = None,
    ) -> None:
        """Check the arguments; ``open`` starts processes.

        ``max_level`` caps the level (for tests). ``session_wait_s`` is the longest wait in seconds
        of a new session while all interpreters are in use. ``interpreter`` is the Python that runs
        the code (default: this one). Raises ConfigError when ``sessions`` is positive but below
        ``workers``.
        """
        self._interpreter = interpreter or Interpreter()
        # A heuristic for the faster image: both images can run any code. Untrusted code is searched
        # but never parsed in this process.
        self._find_heavy = re.compile(rf"\b(?:{'|'.join(heavy_packages(self._interpreter.preload))})\b").search
        self._min_level, self._max_level = min_level, max_level
        self.workers = workers or len(os.sched_getaffinity(0))
        if 0 < sessions < self.workers:
            raise ConfigError(f"sessions = {sessions} is below workers = {self.workers}: each worker may need one.")
        self.num_sessions, self._session_wait_s = sessions, session_wait_s
        self._free = asyncio.Queue[WorkerSlot]()  # one slot per worker
        self._opening = asyncio.Lock()
        self._level: Level | None = None
        self._light: list[WarmImage] = []
        self._full: list[WarmImage] = []
        self._slots: list[WorkerSlot] = []  # of workers and sessions
        self._state: StateDirectory | None = None
        self._sessions: Sessions | None = None
        self._closed = False

    @property
    def level(self) -> Level:
        """The level in force. Raises SandboxUnavailable before the sandbox is open."""
        if self._level is None:
            raise SandboxUnavailable("The sandbox is not open yet. Enter it with `async with`, or execute something.")
        return self._level

    @property
    def memory_is_bounded_per_execution(self) -> bool:
        """Whether a cgroup limits the memory of an execution as a whole, not of each process."""
        return self._state is not None and self._state.cgroup is not None

    # -------------------------------------------------------------- opening

    async def open(self) -> None:
        """Start the images at the strongest level that this machine supports.

        Raises SandboxUnavailable when that is below ``min_level``, ConfigError when the interpreter
        or a ``preload`` module is unusable.
        """
        async with self._opening:
            if self._closed:
                raise SandboxUnavailable("the sandbox was closed.")
            if self._level is None:
                try:
                    await self._open()
                except BaseException:
                    await self._release()
                    raise

    async def _open(self) -> None:
        self._state = StateDirectory.create()
        first_light, level = await self._strongest_image()
        num_zygotes = -(-self.workers // _WORKERS_PER_ZYGOTE)
        more_light = [self._image(level, light=True, number=number) for number in range(1, num_zygotes)]
        self._light = [first_light, *more_light]
        self._full = [self._image(level, light=False, number=number) for number in range(num_zygotes)]
        await asyncio.gather(*(image.start() for image in (*more_light, *self._full)))
        for number in range(self.workers + self.num_sessions):
            self._slots.append(WorkerSlot.make(level, f"slot{number}", self._state))
        for slot in self._slots[: self.workers]:
            self._free.put_nowait(slot)
        if self.num_sessions:
            self._sessions = Sessions(self._slots[self.workers :], wait_s=self._session_wait_s)
        self._level = level
        self._log_opening(level)

    async def _strongest_image(self) -> tuple[WarmImage, Level]:
        assert self._state is not None, "slots live in the state directory"
        reasons: dict[Level, str] = {}
        for level in levels.LOCAL_LEVELS:
            if level.rank > self._max_level.rank or level.rank < self._min_level.rank:
                continue
            slot = WorkerSlot.make(level, "probe", self._state)
            image = self._image(level, light=True, number=0)
            try:
                await levels.start_and_probe(image, level, slot)
            except (SandboxUnavailable, OSError) as error:
                reasons[level] = str(error)
                await image.close()
                logger.warning("this machine does not support sandbox level %s: %s", level, error)
            else:
                return image, level
            finally:
                slot.close()
        raise levels.refusal(self._min_level, reasons)

    def _image(self, level: Level, *, light: bool, number: int) -> WarmImage:
        assert self._state is not None, "images live in the state directory"
        directory = self._state.path / f"{'light' if light else 'full'}-{number}"
        return WarmImage(
            level=level,
            light=light,
            state_dir=directory,
            interpreter=self._interpreter,
        )

    def _log_opening(self, level: Level) -> None:
        memory = "execution" if self.memory_is_bounded_per_execution else "process (no writable memory cgroup)"
        logger.info(
            "sandbox open: level %s, %d workers, memory limited per %s, %s",
            level, self.workers, memory, self._interpreter.executable,
        )  # fmt: skip
        if missing := self._full[0].facts["missing"]:
            logger.warning(
                "%s lacks %s: code that imports them fails. Install them there.",
                self._interpreter.executable, ", ".join(missing),
            )  # fmt: skip
        for warning in levels.warnings(level, self._full[0].facts["python_in_tmp"], self._full[0].facts["reachable"]):
            logger.warning("%s", warning)

    # ------------------------------------------------------------ executing

    async def run(self, request: ExecRequest) -> ExecResult:
        """See ``base.Sandbox.run``."""
        session = request.session
        if session is not None and not self.num_sessions:
            raise ConfigError(
                f"session = {session!r}, but this sandbox was opened without sessions. Open it with sessions=N."
            )
        requested_at = time.monotonic()
        await self.open()
        try:
            if session is not None:
                return await self._run_in_session(request, session, requested_at)
            async with self._worker() as slot:
                queue_s = time.monotonic() - requested_at
                heavy = len(request.code) > _MAX_SEARCHED_CHARS or self._find_heavy(request.code)
                result = await run_once(_least_busy(self._full if heavy else self._light), slot, request)
                return replace(result, queue_s=queue_s)
        except OSError as error:  # temporarily out of descriptors, processes or disk space
            raise SandboxUnavailable(f"this machine lacks a resource for an execution: {error}") from error

    @contextlib.asynccontextmanager
    async def _worker(self) -> AsyncGenerator[WorkerSlot]:
        """Wait for a worker's slot. Raises SandboxUnavailable if the sandbox closes."""
        slot = await self._free.get()
        try:
            if self._closed:
                raise SandboxUnavailable("the sandbox was closed.")
            yield slot
        finally:
            self._free.put_nowait(slot)

    async def _run_in_session(self, request: ExecRequest, name: str, requested_at: float) -> ExecResult:
        """Run in the session's interpreter; start it for the first cell.

        Acquire the session before a worker: a new session that waits for a free slot must not block
        the sessions it waits for.
        """
        assert self._sessions is not None, "run() checked that sessions are on"
        async with self._sessions.reserve(name) as (session, slot), self._worker():
            queue_s = time.monotonic() - requested_at
            restarted, started = session.lost, session.process is None
            if session.process is None:
                slot.prepare(request.memory_limit_mb)
                session.process = await ChildProcess.spawn(_least_busy(self._full), slot, session=True)
            result = await session.process.run(request)
            return replace(result, queue_s=queue_s, session_restarted=restarted, session_started=started)

    # -------------------------------------------------------------- closing

    async def end_session(self, session: str) -> None:
        """See ``base.Sandbox.end_session``."""
        if self._sessions is not None:
            await self._sessions.end(session)

    async def close(self) -> None:
        """See ``base.Sandbox.close``."""
        async with self._opening:
            self._closed = True
            await self._release()

    async def _release(self) -> None:
        if self._sessions is not None:
            await self._sessions.close()
        await asyncio.gather(*(image.close() for image in (*self._light, *self._full)))
        for slot in self._slots:
            slot.close()
        self._slots.clear()
        if self._state is not None:
            self._state.remove()
            self._state = None
        self._level = None


def _least_busy(images: Sequence[WarmImage]) -> WarmImage:
    return min(images, key=lambda image: image.num_running)
