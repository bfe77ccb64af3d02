"""Interpreters kept alive between a trajectory's calls, bounded in number and idle time.

An active trajectory keeps its interpreter. A new one waits a bounded time for a free slot.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field

from retool_mcore.errors import SandboxUnavailable
from retool_mcore.sandbox.supervisor.process import ChildProcess
from retool_mcore.sandbox.supervisor.slots import WorkerSlot

IDLE_S = 600.0
WAIT_S = 600.0  # longest wait for a slot
SERVER_WAIT_S = 90.0  # the same in a server (command.py): its clients wait for an HTTP response

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Session:
    """One trajectory's interpreter. ``lost``: an earlier one died, and its definitions are gone."""

    process: ChildProcess | None = None
    slot: WorkerSlot | None = None
    lost: bool = False
    busy: asyncio.Lock = field(default_factory=asyncio.Lock)
    expiry: asyncio.Task[None] | None = None  # cancelled only by the holder of ``busy``


class Sessions:
    """One live interpreter per slot. A session is remembered by name until it is ended."""

    def __init__(self, slots: Sequence[WorkerSlot], *, wait_s: float = WAIT_S) -> None:
        """``wait_s`` is the longest time in seconds that a new session waits for a slot."""
        self._limit, self._wait_s = len(slots), wait_s
        self._free = asyncio.Queue[WorkerSlot]()
        for slot in slots:
            self._free.put_nowait(slot)
        self._sessions: dict[str, Session] = {}

    @contextlib.asynccontextmanager
    async def reserve(self, name: str) -> AsyncGenerator[tuple[Session, WorkerSlot]]:
        """Reserve the session and a slot for its interpreter; one call at a time.

        If the interpreter is dead afterwards, clean up after it and mark the session lost. Raises
        SandboxUnavailable when no slot becomes free within ``wait_s``.
        """
        session = self._sessions.setdefault(name, Session())
        async with session.busy:
            if session.expiry is not None:
                session.expiry.cancel()
            self._sessions[name] = session  # an ``end`` may have forgotten it meanwhile
            try:
                session.slot = session.slot or await self._take_slot(name)
                yield session, session.slot
                session.lost = False
            finally:
                if session.process is None or not session.process.alive:
                    await self._release(session)
                session.expiry = asyncio.ensure_future(self._expire(session))

    async def _take_slot(self, name: str) -> WorkerSlot:
        if self._free.empty():
            logger.warning(
                "session %s waits: all %d interpreters are in use. "
                "Raise sessions to the number of trajectories in flight.", name, self._limit,
            )  # fmt: skip
        try:
            async with asyncio.timeout(self._wait_s):
                return await self._free.get()
        except TimeoutError:
            raise SandboxUnavailable(
                f"no interpreter became free within {self._wait_s:g} s: all {self._limit} sessions are in use. "
                "Raise sessions to the number of trajectories in flight."
            ) from None

    async def _expire(self, session: Session) -> None:
        await asyncio.sleep(IDLE_S)
        async with session.busy:
            await self._release(session)

    async def _release(self, session: Session) -> None:
        """Kill the interpreter and release its slot, even if the caller is cancelled."""
        process, session.process = session.process, None
        slot, session.slot = session.slot, None
        session.lost = session.lost or process is not None
        if slot is not None:
            await asyncio.shield(asyncio.ensure_future(self._kill(process, slot)))

    async def _kill(self, process: ChildProcess | None, slot: WorkerSlot) -> None:
        try:
            if process is not None:
                await process.close()
        finally:
            await slot.clean()
            self._free.put_nowait(slot)

    async def end(self, name: str) -> None:
        """End and forget a session. Unknown names are ignored."""
        session = self._sessions.pop(name, None)
        if session is not None:
            async with session.busy:
                if session.expiry is not None:
                    session.expiry.cancel()
                await self._release(session)

    async def close(self) -> None:
        """End every session."""
        for name in list(self._sessions):
            await self.end(name)
