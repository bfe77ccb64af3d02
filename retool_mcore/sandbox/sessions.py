"""Interpreters that live on between a trajectory's calls, bounded in number and in idle time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field

from retool_mcore.sandbox.process import ChildProcess
from retool_mcore.sandbox.seats import Seat

IDLE_S = 600.0


@dataclass(eq=False)
class Session:
    """One trajectory's interpreter. ``lost``: an earlier one is gone, with its definitions."""

    process: ChildProcess | None = None
    lost: bool = False
    busy: asyncio.Lock = field(default_factory=asyncio.Lock)
    expiry: asyncio.TimerHandle | None = None
    _seat: Seat | None = None
    _give_back: Callable[[Seat], None] | None = None

    def own(self, seat: Seat, give_back: Callable[[Seat], None]) -> None:
        """Hold ``seat`` until ``end``."""
        self._seat, self._give_back = seat, give_back

    async def end(self) -> None:
        """Kill the interpreter and give the seat back."""
        if self.process is not None:
            self.lost = True
            await self.process.close()
            self.process = None
        if self._seat is not None and self._give_back is not None:
            seat, self._seat = self._seat, None
            try:
                await seat.clean()
            finally:
                self._give_back(seat)


class Sessions:
    """At most ``limit`` live interpreters; the one idle longest makes room.

    A name is remembered until its session is ended.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._sessions: dict[str, Session] = {}  # in order of last use

    @contextlib.asynccontextmanager
    async def turn(self, name: str) -> AsyncGenerator[Session]:
        """Hold the session for one call at a time.

        A child that is dead afterwards is cleaned up, and the session is marked lost.
        """
        session = self._sessions.setdefault(name, Session())
        async with session.busy:
            if session.expiry is not None:
                session.expiry.cancel()
            self._sessions.pop(name, None)
            self._sessions[name] = session
            try:
                yield session
                session.lost = False
            finally:
                if session.process is None or not session.process.alive:
                    await session.end()
                loop = asyncio.get_running_loop()
                session.expiry = loop.call_later(IDLE_S, self._expire, session)

    def _expire(self, session: Session) -> None:
        self._ending = asyncio.ensure_future(self._end_idle(session))

    async def _end_idle(self, session: Session) -> None:
        async with session.busy:
            await session.end()

    async def make_room(self) -> None:
        """End the interpreter that has been idle longest, if all places are taken."""
        live = [session for session in self._sessions.values() if session.process is not None]
        if len(live) >= self._limit:
            idle = next(session for session in live if not session.busy.locked())
            await self._end_idle(idle)

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
