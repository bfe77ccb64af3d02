"""The local sandbox: warm images, a bounded number of executions, one confined fork per execution.

Rollout workers and ``retool sandbox serve`` open it. All state belongs to one asyncio event loop.
"""

import asyncio
import logging
import os
import re
import time
from collections import deque
from dataclasses import replace

import tenacity

from retool_mcore.errors import ConfigError, SandboxUnavailable
from retool_mcore.sandbox.base import ExecRequest, ExecResult, Level, Sandbox
from retool_mcore.sandbox.supervisor import levels
from retool_mcore.sandbox.supervisor.images import WarmImage
from retool_mcore.sandbox.supervisor.interpreter import Interpreter
from retool_mcore.sandbox.supervisor.process import ChildProcess
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
        attempts: int = 3,
        interpreter: Interpreter | None = None,
    ) -> None:
        """Check the arguments; ``open`` starts processes.

        ``max_level`` caps the level (for tests). ``attempts`` is the number of tries per execution.
        ``session_wait_s`` is the longest wait in seconds of a new session while all interpreters
        are in use. ``interpreter`` is the Python that runs the code (default: this one). Raises
        ConfigError when ``sessions`` is positive but below ``workers``.
        """
        self._interpreter = interpreter or Interpreter()
        # A heuristic for the faster image: both images can run any code. Untrusted code is searched
        # but never parsed in this process.
        self._find_heavy = re.compile(rf"\b(?:{'|'.join(sorted(self._interpreter.heavy))})\b").search
        self._min_level, self._max_level = min_level, max_level
        self.workers = workers or len(os.sched_getaffinity(0))
        if 0 < sessions < self.workers:
            raise ConfigError(f"sessions = {sessions} is below workers = {self.workers}: each worker may need one.")
        self.num_sessions, self._session_wait_s = sessions, session_wait_s
        self._attempts = attempts
        self._running = asyncio.Semaphore(self.workers)
        self._opening = asyncio.Lock()
        self._level: Level | None = None
        self._light: list[WarmImage] = []
        self._full: list[WarmImage] = []
        self._slots: deque[WorkerSlot] = deque()
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
    def num_zygote_deaths(self) -> int:
        """How many zygotes have died unexpectedly."""
        return sum(image.num_deaths for image in (*self._light, *self._full))

    @property
    def memory_is_bounded_per_execution(self) -> bool:
        """Whether a cgroup limits the memory of an execution as a whole, not of each process."""
        return self._state is not None and self._state.cgroups is not None

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
            self._slots.append(WorkerSlot.make(level, number, self._state))
        if self.num_sessions:
            self._sessions = Sessions(self.num_sessions, self._slots.append, wait_s=self._session_wait_s)
        self._level = level
        self._log_opening(level)

    async def _strongest_image(self) -> tuple[WarmImage, Level]:
        assert self._state is not None, "slots live in the state directory"
        reasons: dict[Level, str] = {}
        for level in levels.LOCAL_LEVELS:
            if level.rank > self._max_level.rank or level.rank < self._min_level.rank:
                continue
            slot = WorkerSlot.make(level, -1, self._state)
            try:
                image = self._image(level, light=True, number=0)
                await levels.start_and_probe(image, level, slot)
            except (SandboxUnavailable, OSError) as error:
                reasons[level] = str(error)
                logger.warning("sandbox level %s is refused here: %s", level, error)
            else:
                return image, level
            finally:
                slot.remove()
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
        for warning in levels.warnings(level, self._full[0].facts["path_under_tmp"], self._full[0].facts["reachable"]):
            logger.warning("%s", warning)

    # ------------------------------------------------------------ executing

    async def run(self, request: ExecRequest) -> ExecResult:
        """See ``base.Sandbox.run``."""
        session = request.session
        if session is not None and not self.num_sessions:
            raise ConfigError(f"session = {session!r}, but this sandbox was opened without sessions (sessions=0).")
        if request.code.startswith("\ufeff"):  # byte order mark; Python skips it in files too
            request = replace(request, code=request.code[1:])
        requested_at = time.monotonic()
        await self.open()
        async for attempt in tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception_type(SandboxUnavailable),
            stop=tenacity.stop_after_attempt(1 if session else self._attempts),
            wait=tenacity.wait_random_exponential(multiplier=0.2, max=2.0),
            reraise=True,
        ):
            with attempt:
                try:
                    return await self._execute_once(request, requested_at)
                except OSError as error:  # temporarily out of descriptors, processes or disk space
                    raise SandboxUnavailable(f"this machine lacks a resource for an execution: {error}") from error
        raise AssertionError("tenacity neither returned nor raised")

    async def _execute_once(self, request: ExecRequest, requested_at: float) -> ExecResult:
        if request.session is not None:
            return await self._run_in_session(request, request.session, requested_at)
        async with self._running:
            if self._closed:
                raise SandboxUnavailable("the sandbox was closed.")
            queue_s = time.monotonic() - requested_at
            slot = self._slots.popleft()
            try:
                heavy = len(request.code) > _MAX_SEARCHED_CHARS or self._find_heavy(request.code)
                result = await self._run_stateless(request, self._full if heavy else self._light, slot)
            finally:
                self._slots.append(slot)
        return replace(result, queue_s=queue_s)

    async def _run_stateless(self, request: ExecRequest, images: list[WarmImage], slot: WorkerSlot) -> ExecResult:
        """Run in a fresh child, then clean the slot."""
        image = min(images, key=lambda image: image.num_running)
        kills_before = slot.oom_kills()
        try:
            slot.prepare(request.memory_limit_mb)
            process = await ChildProcess.spawn(image, slot)
            try:
                result = await process.run(request, session=False)
            finally:
                await process.close()
        finally:
            await slot.clean()
        if slot.oom_kills() > kills_before and result.return_code is not None and result.return_code < 0:
            return replace(result, status="memory_limit", return_code=None)
        return result

    async def _run_in_session(self, request: ExecRequest, name: str, requested_at: float) -> ExecResult:
        """Run in the session's interpreter; start it for the first cell.

        Acquire the session before a worker: a new session that waits for a free interpreter must
        not block the sessions it waits for.
        """
        assert self._sessions is not None, "run() checked that sessions are on"
        async with self._sessions.turn(name) as entry, self._running:
            if self._closed:
                raise SandboxUnavailable("the sandbox was closed.")
            queue_s = time.monotonic() - requested_at
            restarted, started = entry.lost, entry.process is None
            if entry.process is None:
                entry.slot = slot = self._slots.popleft()
                image = min(self._full, key=lambda image: image.num_running)
                slot.prepare(request.memory_limit_mb)
                entry.process = await ChildProcess.spawn(image, slot)
            result = await entry.process.run(request, session=True)
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
            slot.remove()
        self._slots.clear()
        if self._state is not None:
            self._state.remove()
            self._state = None
        self._level = None
