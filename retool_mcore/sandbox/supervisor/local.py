"""The sandbox in this process: warm images, bounded executions, one confined fork for each.

A rollout worker opens it, or ``retool sandbox serve`` does. All state belongs to one asyncio loop.
"""

import asyncio
import logging
import os
import re
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import tenacity

from retool_mcore.errors import ConfigError, SandboxUnavailable
from retool_mcore.sandbox.base import ExecRequest, ExecResult, Level, Sandbox
from retool_mcore.sandbox.supervisor import levels
from retool_mcore.sandbox.supervisor.images import WarmImage
from retool_mcore.sandbox.supervisor.interpreter import Interpreter
from retool_mcore.sandbox.supervisor.process import CellEnd, ChildProcess
from retool_mcore.sandbox.supervisor.sessions import WAIT_S, Sessions
from retool_mcore.sandbox.supervisor.slots import StateDirectory, WorkerSlot

logger = logging.getLogger(__name__)

# One zygote forks serially, a few milliseconds per fork; more workers than this get another zygote.
_WORKERS_PER_ZYGOTE = 16
_LEAST_SECOND_RUN_S = 0.001  # a limit must be positive
_IMPORT_BEFORE = re.compile(r"(?:^|[\n;:])[ \t]*(?:import|from)[ \t][^\n;]*\Z")
_GUESSED_CHARS, _GUESSED_NAMES = 32_000, 100


class ImportGuess:
    """Guesses from its text whether code imports a package of the full image.

    Only to start in the right image: this process never parses hostile code. The child reads the
    AST, and asks for the full image where the guess was wrong.
    """

    def __init__(self, heavy: Iterable[str]) -> None:
        self._name = re.compile(r"\b(?:" + "|".join(sorted(heavy)) + r")\b")

    def __call__(self, code: str) -> bool:
        """Takes time that code cannot stretch.

        Of longer code, and code that names the packages more often, the guess is yes: the full
        image runs any code.
        """
        if len(code) > _GUESSED_CHARS:
            return True
        for number, name in enumerate(self._name.finditer(code)):
            before = code[max(0, name.start() - 200) : name.start()]
            if number >= _GUESSED_NAMES or _IMPORT_BEFORE.search(before, max(0, before.rfind("\n"))):
                return True
        return False


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
        """``max_level`` caps the level (for tests); ``attempts`` counts tries per execution;
        ``session_wait_s`` bounds how long a new session waits while all are kept.

        ``interpreter``: the Python that runs the code, and what its full image holds; None: ours.
        """
        self._interpreter = interpreter or Interpreter()
        self._may_import_heavy = ImportGuess(self._interpreter.heavy)
        self._min_level, self._max_level = min_level, max_level
        self._workers = workers or len(os.sched_getaffinity(0))
        if 0 < sessions < self._workers:
            raise ConfigError(f"sessions = {sessions} is below workers = {self._workers}: each worker may need one.")
        self._num_sessions, self._session_wait_s = sessions, session_wait_s
        self._attempts = attempts
        self._running = asyncio.Semaphore(self._workers)
        self._opening = asyncio.Lock()
        self._level: Level | None = None
        self._light: list[WarmImage] = []
        self._full: list[WarmImage] = []
        self._slots: deque[WorkerSlot] = deque()
        self._state: StateDirectory | None = None
        self._sessions: Sessions | None = None
        self._returning = set[asyncio.Task[None]]()
        self._closed = False
        self.num_zygote_deaths = 0
        self.num_session_waits = self.num_sessions_refused = 0  # new sessions that found no place at once, or none
        self.on_zygote_death: Callable[[], None] = lambda: None  # what a server counts both with
        self.count_session_wait: Callable[[bool], None] = lambda _: None

    @property
    def level(self) -> Level:
        """The level in force. Raises SandboxUnavailable before the sandbox is open."""
        if self._level is None:
            raise SandboxUnavailable("the sandbox is not open yet: enter it with `async with`, or execute something.")
        return self._level

    @property
    def workers(self) -> int:
        """Executions that may run at once."""
        return self._workers

    @property
    def num_sessions(self) -> int:
        """Interpreters that may be kept alive between calls; 0 when sessions are off."""
        return self._num_sessions

    @property
    def num_cleaning(self) -> int:
        """Workers that are not free yet because what an execution left is still being deleted."""
        return len(self._returning)

    @property
    def state_dir(self) -> Path:
        """Where slots and images have their files. Raises SandboxUnavailable before it is open."""
        if self._state is None:
            raise SandboxUnavailable("the sandbox is not open, so it has no files.")
        return self._state.path

    @property
    def memory_is_bounded_per_execution(self) -> bool:
        """Whether a cgroup bounds an execution's processes together, rather than each by itself."""
        return self._state is not None and self._state.cgroups is not None

    # -------------------------------------------------------------- opening

    async def open(self) -> None:
        """Start images at the strongest level.

        Raises SandboxUnavailable below ``min_level``, ConfigError for the interpreter.
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
        await self._interpreter.check()
        self._state = StateDirectory.create()
        first_light, level = await self._strongest_image()
        num_zygotes = -(-self._workers // _WORKERS_PER_ZYGOTE)
        more_light = [self._image(level, light=True, number=number) for number in range(1, num_zygotes)]
        self._light = [first_light, *more_light]
        self._full = [self._image(level, light=False, number=number) for number in range(num_zygotes)]
        await asyncio.gather(*(image.start() for image in (*more_light, *self._full)))
        for number in range(self._workers + self._num_sessions):
            self._slots.append(self._make_slot(level, number))
        if self._num_sessions:
            self._sessions = Sessions(self._num_sessions, wait_s=self._session_wait_s)
            self._sessions.on_wait = self._session_waited
        self._level = level
        self._log_opening(level)

    async def _strongest_image(self) -> tuple[WarmImage, Level]:
        reasons: dict[Level, str] = {}
        for level in levels.LOCAL_LEVELS:
            if level.rank > self._max_level.rank or level.rank < self._min_level.rank:
                continue
            slot = self._make_slot(level, -1)
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
            on_death=self._zygote_died,
        )

    def _zygote_died(self) -> None:
        self.num_zygote_deaths += 1
        self.on_zygote_death()

    def _session_waited(self, in_vain: bool) -> None:
        """Count a new session that had to wait for a place, or waited in vain."""
        self.num_session_waits += 1
        self.num_sessions_refused += in_vain
        self.count_session_wait(in_vain)

    def _log_opening(self, level: Level) -> None:
        memory = "execution" if self.memory_is_bounded_per_execution else "process (no writable memory cgroup)"
        logger.info(
            "sandbox open: level %s, %d workers, memory limited per %s, %s",
            level, self._workers, memory, self._interpreter.executable,
        )  # fmt: skip
        if missing := self._full[0].missing:
            logger.warning(
                "%s has not %s: code that imports them fails. Install them there.",
                self._interpreter.executable, ", ".join(missing),
            )  # fmt: skip
        for warning in levels.warnings(level, self._full[0].path_under_tmp, self._full[0].led_out):
            logger.warning("%s", warning)

    def _make_slot(self, level: Level, number: int) -> WorkerSlot:
        assert self._state is not None, "slots live in the state directory"
        return WorkerSlot.make(level, number, self._state)

    # ------------------------------------------------------------ executing

    async def run(self, request: ExecRequest) -> ExecResult:
        """See ``base.Sandbox.run``."""
        session = request.session
        if session is not None and not self._num_sessions:
            raise ConfigError(f"session = {session!r}, but this sandbox was opened without sessions (sessions=0).")
        if request.code.startswith("\ufeff"):  # a byte order mark, which Python skips in files too
            request = replace(request, code=request.code[1:])
        asked = time.monotonic()
        await self.open()
        async for attempt in tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception_type(SandboxUnavailable),
            stop=tenacity.stop_after_attempt(1 if session else self._attempts),
            wait=tenacity.wait_random_exponential(multiplier=0.2, max=2.0),
            reraise=True,
        ):
            with attempt:
                try:
                    return await self._execute_once(request, asked)
                except OSError as error:  # no descriptor, process or disk space left just now
                    raise SandboxUnavailable(f"this machine refused what an execution takes: {error}") from error
        raise AssertionError("tenacity neither returned nor raised")

    async def _execute_once(self, request: ExecRequest, asked: float) -> ExecResult:
        if request.session is not None:
            return await self._run_in_session(request, request.session, asked)
        await self._running.acquire()
        if self._closed:
            self._running.release()
            raise SandboxUnavailable("the sandbox was closed.")
        queue_s = time.monotonic() - asked
        slot = self._slots.popleft()
        try:
            heavy = self._may_import_heavy(request.code)
            result = await self._run_in_budget(request, self._full if heavy else self._light, slot)
        finally:
            if slot.removals:  # the caller has its result; the worker is free when all is deleted
                self._returning.add(task := asyncio.ensure_future(slot.cleaned()))
                task.add_done_callback(lambda task: (self._returning.discard(task), self._give_back(slot)))
            else:
                self._give_back(slot)
        return replace(result, queue_s=queue_s)

    def _give_back(self, slot: WorkerSlot) -> None:
        self._slots.append(slot)
        self._running.release()

    async def _run_in_budget(self, request: ExecRequest, images: list[WarmImage], slot: WorkerSlot) -> ExecResult:
        """Run; once more in the full image where the light one will not do, for the time left.

        The code itself can ask for the full image at any time: it gets no second limit by that.
        """
        first, again = await self._run_stateless(request, images, slot)
        if not again:
            return first
        left_s = max(request.run_timeout_s - first.run_s, _LEAST_SECOND_RUN_S)
        result, _ = await self._run_stateless(replace(request, run_timeout_s=left_s), self._full, slot)
        return replace(result, run_s=first.run_s + result.run_s, cpu_s=first.cpu_s + result.cpu_s)

    async def _run_stateless(
        self, request: ExecRequest, images: list[WarmImage], slot: WorkerSlot
    ) -> tuple[ExecResult, bool]:
        """Run in a fresh child. True where the light image will not do for the code."""
        image = min(images, key=lambda image: image.num_running)
        kills_before = slot.oom_kills()
        try:
            slot.prepare(request.memory_limit_mb)
            process = await ChildProcess.spawn(image, slot)
            try:
                turn = await process.run(request, session=False)
            finally:
                await process.close()
        finally:
            slot.clean()
        result = self._result(turn, out_of_memory=slot.oom_kills() > kills_before)
        return result, turn.needs_full and image.light

    async def _run_in_session(self, request: ExecRequest, name: str, asked: float) -> ExecResult:
        """Run in the session's own child.

        The place is taken before the slot: a newcomer that waits must not keep those at work from
        running, whose end it waits for.
        """
        assert self._sessions is not None, "run() checked that sessions are on"
        async with self._sessions.turn(name) as entry, self._running:
            if self._closed:
                raise SandboxUnavailable("the sandbox was closed.")
            queue_s = time.monotonic() - asked
            restarted, started = entry.lost, entry.process is None
            if entry.process is None:
                slot = self._slots.popleft()
                entry.own(slot, give_back=self._slots.append)
                image = min(self._full, key=lambda image: image.num_running)
                slot.prepare(request.memory_limit_mb)
                entry.process = await ChildProcess.spawn(image, slot)
            turn = await entry.process.run(request, session=True)
            result = self._result(turn, out_of_memory=False)
            return replace(result, queue_s=queue_s, session_restarted=restarted, session_started=started)

    def _result(self, turn: CellEnd, *, out_of_memory: bool) -> ExecResult:
        killed = out_of_memory and turn.return_code is not None and turn.return_code < 0
        return ExecResult(
            status="time_limit" if turn.timed_out else "memory_limit" if killed else "finished",
            return_code=None if killed else turn.return_code,
            stdout=turn.stdout[0],
            stderr=turn.stderr[0],
            stdout_dropped_bytes=turn.stdout[1],
            stderr_dropped_bytes=turn.stderr[1],
            run_s=turn.run_s,
            cpu_s=turn.cpu_s,
            level=self.level,
            files=turn.files,
        )

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
        if self._returning:
            await asyncio.wait(self._returning)
        for slot in self._slots:
            slot.remove()
        self._slots.clear()
        if self._state is not None:
            self._state.remove()
            self._state = None
        self._level = None
