"""Interpreters that live on between a trajectory's calls, bounded in number and in idle time.

A trajectory at work keeps its interpreter. A newcomer waits for a place, for a bounded time.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field

from retool_mcore.errors import SandboxUnavailable
from retool_mcore.sandbox.supervisor.process import ChildProcess
from retool_mcore.sandbox.supervisor.slots import WorkerSlot

IDLE_S = 600.0
WAIT_S = 600.0  # for a place; a server has less (command.py), since its clients wait for an answer
SERVER_WAIT_S = 90.0
# Names without an interpreter that are remembered, to tell their trajectory that it was restarted.
_MAX_REMEMBERED = 16_384

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Session:
    """One trajectory's interpreter. ``lost``: an earlier one is gone, with its definitions."""

    process: ChildProcess | None = None
    slot: WorkerSlot | None = None
    lost: bool = False
    has_place: bool = False  # whether it counts among the live ones
    busy: asyncio.Lock = field(default_factory=asyncio.Lock)
    expiry: asyncio.TimerHandle | None = None


class Sessions:
    """At most ``limit`` live interpreters. A name is remembered until its session is ended."""

    def __init__(self, limit: int, give_back: Callable[[WorkerSlot], None], *, wait_s: float = WAIT_S) -> None:
        """``wait_s`` bounds how long a new session waits for a place."""
        self._limit, self._wait_s, self._give_back = limit, wait_s, give_back
        self._places = asyncio.Semaphore(limit)
        self._sessions: dict[str, Session] = {}  # in order of last use
        self._ending = set[asyncio.Task[None]]()

    @contextlib.asynccontextmanager
    async def turn(self, name: str) -> AsyncGenerator[Session]:
        """Hold the session, with a place for its interpreter, for one call at a time.

        A child that is dead afterwards is cleaned up, and the session is marked lost. Raises
        SandboxUnavailable when no place was free for ``wait_s``.
        """
        session = self._sessions.setdefault(name, Session())
        async with session.busy:
            if session.expiry is not None:
                session.expiry.cancel()
            self._sessions.pop(name, None)
            self._sessions[name] = session
            try:
                if not session.has_place:
                    await self._take_place(name)
                    session.has_place = True
                yield session
                session.lost = False
            finally:
                if session.process is None or not session.process.alive:
                    await self._release(session)
                    self._forget_oldest()
                loop = asyncio.get_running_loop()
                session.expiry = loop.call_later(IDLE_S, self._expire, session)

    async def _take_place(self, name: str) -> None:
        if self._places.locked():
            logger.warning(
                "session %s waits for a place: %d sessions are at work, and a trajectory at work keeps its own. "
                "Raise sessions to the number of trajectories in flight.", name, self._limit,
            )  # fmt: skip
        try:
            async with asyncio.timeout(self._wait_s):
                await self._places.acquire()
        except TimeoutError:
            raise SandboxUnavailable(
                f"no session was free for {self._wait_s:g} s: all {self._limit} are kept by trajectories at work. "
                "Raise sessions to the number of trajectories in flight."
            ) from None

    def _forget_oldest(self) -> None:
        """Bound what is remembered of sessions whose client never ended them."""
        if len(self._sessions) <= _MAX_REMEMBERED + self._limit:
            return
        oldest = next((name for name, each in self._sessions.items() if not each.has_place), None)
        if oldest is not None:
            session = self._sessions.pop(oldest)
            if session.expiry is not None:
                session.expiry.cancel()

    def _expire(self, session: Session) -> None:
        self._ending.add(task := asyncio.ensure_future(self._end_idle(session)))
        task.add_done_callback(self._ending.discard)

    async def _end_idle(self, session: Session) -> None:
        async with session.busy:
            await self._release(session)

    async def _release(self, session: Session) -> None:
        """Kill the interpreter, give back the slot and then the place, cancelled or not."""
        process, session.process = session.process, None
        slot, session.slot = session.slot, None
        had_place, session.has_place = session.has_place, False
        session.lost = session.lost or process is not None
        await asyncio.shield(asyncio.ensure_future(self._kill(process, slot, had_place=had_place)))

    async def _kill(self, process: ChildProcess | None, slot: WorkerSlot | None, *, had_place: bool) -> None:
        try:
            if process is not None:
                await process.close()
        finally:
            if slot is not None:
                await slot.clean()
                self._give_back(slot)
            if had_place:  # after the slot: whoever gets the place finds one
                self._places.release()

    async def end(self, name: str) -> None:
        """Forget a session; unknown names are ignored."""
        session = self._sessions.pop(name, None)
        if session is not None:
            if session.expiry is not None:
                session.expiry.cancel()
            await self._end_idle(session)

    async def close(self) -> None:
        """End every session."""
        for name in list(self._sessions):
            await self.end(name)
        while self._ending:
            await asyncio.wait(self._ending)
