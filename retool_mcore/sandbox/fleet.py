"""The sandbox servers of a run together: which of them takes the next call, and who is well.

A bounded number of calls is at each server; the others wait here, in order of arrival, for
whichever server is free first. All state belongs to one asyncio loop.
"""

import asyncio
import logging
import random
import time
from collections import deque
from collections.abc import Sequence, Set
from dataclasses import dataclass, field

from retool_mcore.errors import SandboxUnavailable
from retool_mcore.sandbox.node import InFlightCall, Node

logger = logging.getLogger(__name__)

_TICK_S = 0.1
_STALL_S = 0.25  # a tick later than this by so much: this process was busy, so no server is to blame
# Calls at a server that is silent for this long are started again, at another one if there is one.
_LOST_S = 10.0
# While no server is admitted, calls wait this long before they are an outage to their caller.
_OUTAGE_S = 10.0
_OPEN_GRACE_S = 2.0  # when enough servers have answered, the others get this much more


@dataclass(eq=False)
class _Waiter:
    """A call without a server."""

    leg: InFlightCall
    future: asyncio.Future[Node]
    only: Node | None
    avoid: Set[Node]
    since: float = field(default_factory=time.monotonic)


class Fleet:
    """``min_nodes`` of ``nodes`` must answer for the fleet to open; one, for it to go on."""

    def __init__(self, nodes: Sequence[Node], *, min_nodes: int, attempts: int) -> None:
        self.nodes = list(nodes)
        self._min_nodes, self._attempts = min_nodes, attempts
        self._waiters: deque[_Waiter] = deque()
        self._watch: asyncio.Task[None] | None = None
        self._closed = False
        for node in self.nodes:
            node.expendable = lambda: self._half_without_one

    # -------------------------------------------------------------- opening

    async def open(self) -> None:
        """Ask every server for its level.

        Raises ConfigError when one tells a level below the minimum, SandboxUnavailable when fewer
        than min_nodes answer.
        """
        if self._closed:
            raise SandboxUnavailable("the sandbox was closed.")
        if self._watch is None:
            for node in self.nodes:
                node.ask_anew()
            self._watch = asyncio.ensure_future(self._watch_nodes())
        try:
            await self._until_enough()
        except BaseException:
            await self._stop_watching()
            raise

    async def _until_enough(self) -> None:
        enough_at: float | None = None
        while True:
            for node in self.nodes:
                if node.refusal is not None:
                    raise node.refusal
            missing = [node for node in self.nodes if not node.admitted]
            if not missing:
                return
            if len(self.nodes) - len(missing) >= self._min_nodes:
                now = time.monotonic()
                enough_at = enough_at or now
                if now - enough_at > _OPEN_GRACE_S or all(node.failed_pings for node in missing):
                    self._tell_missing(missing)
                    return
            elif all(node.failed_pings >= self._attempts for node in missing):
                raise self._too_few(missing)
            await asyncio.sleep(_TICK_S / 5)

    def _tell_missing(self, missing: Sequence[Node]) -> None:
        for node in missing:
            logger.warning("opened with %d of %d sandboxes; they go on being asked. Missing: %s",
                           len(self.nodes) - len(missing), len(self.nodes), node.reason)  # fmt: skip

    def _too_few(self, missing: Sequence[Node]) -> SandboxUnavailable:
        if len(self.nodes) == 1:
            return SandboxUnavailable(missing[0].reason)
        return SandboxUnavailable(
            f"{len(self.nodes) - len(missing)} of {len(self.nodes)} sandboxes answer, and {self._min_nodes} are needed "
            f"to start. The first that is missing: {missing[0].reason}"
        )

    # --------------------------------------------------------------- choice

    async def acquire(
        self,
        leg: InFlightCall,
        *,
        only: Node | None = None,
        avoid: Set[Node] = frozenset(),
        urgent: bool,
    ) -> Node:
        """A server that has taken ``leg``; the caller must ``release`` it.

        ``avoid`` is a preference where servers besides these are admitted. ``urgent`` calls, which
        a server had already, go before others.

        Raises SandboxUnavailable when no server is admitted for some time.
        """
        if self._closed:
            raise SandboxUnavailable("the sandbox was closed.")
        waiter = _Waiter(leg, asyncio.get_running_loop().create_future(), only, avoid)
        if urgent:
            self._waiters.appendleft(waiter)
        else:
            self._waiters.append(waiter)
        self._hand_out()
        try:
            return await waiter.future
        except asyncio.CancelledError:
            if waiter.future.done() and not waiter.future.cancelled() and waiter.future.exception() is None:
                self.release(leg, waiter.future.result())
            elif waiter in self._waiters:
                self._waiters.remove(waiter)
            raise

    def release(self, leg: InFlightCall, node: Node) -> None:
        """Take ``leg`` from its server, and give the place to the next."""
        node.legs.discard(leg)
        self._hand_out()

    def alternative(self, avoid: Set[Node]) -> bool:
        """Whether a server outside of ``avoid`` is admitted."""
        return any(node.admitted for node in self.nodes if node not in avoid)

    def _hand_out(self) -> None:
        now = time.monotonic()
        free = [node for node in self.nodes if node.free(now)]
        passed: list[_Waiter] = []
        while free and self._waiters:
            waiter = self._waiters.popleft()
            if waiter.future.done():
                continue
            node = self._choose(waiter, free)
            if node is None:
                passed.append(waiter)
                continue
            node.begin(waiter.leg)
            waiter.future.set_result(node)
            if not node.free(now):
                free.remove(node)
        self._waiters.extendleft(reversed(passed))

    def _choose(self, waiter: _Waiter, free: Sequence[Node]) -> Node | None:
        if waiter.only is not None:
            return waiter.only if waiter.only in free else None
        wanted = [node for node in free if node not in waiter.avoid]
        if not wanted and not self.alternative(waiter.avoid):
            wanted = list(free)
        # Ties by lot: the runs' processes must not all begin with the first URL.
        return min(wanted, key=lambda node: (len(node.legs), random.random())) if wanted else None

    # --------------------------------------------------------------- health

    async def _watch_nodes(self) -> None:
        before = time.monotonic()
        while True:
            now = time.monotonic()
            if now - before > _TICK_S + _STALL_S:
                for node in self.nodes:
                    node.stalled_at = now
            before = now
            for node in self.nodes:
                if node.due(now):
                    node.start_ping().add_done_callback(lambda _: self._hand_out())
                self._look_after(node, now)
            self._fail_waiters(now)
            self._hand_out()  # a rest may have ended
            await asyncio.sleep(_TICK_S)

    def _look_after(self, node: Node, now: float) -> None:
        if node.stuck(now):
            node.rest("it answers pings, but no calls")
            if self.alternative({node}):
                self._abandon_calls(node, f"the sandbox at {node.url} answers pings, but no calls.")
        if node.legs and node.silent_s(now) > _LOST_S and now - node.stalled_at > _LOST_S:
            node.put_out(f"the sandbox at {node.url} has been silent for {_LOST_S:.0f} s.")
            self._abandon_calls(node, node.reason)

    def _abandon_calls(self, node: Node, reason: str) -> None:
        for leg in list(node.legs):
            leg.abandon(reason)

    @property
    def _half_without_one(self) -> bool:
        return 2 * (sum(node.admitted for node in self.nodes) - 1) >= len(self.nodes)

    def _fail_waiters(self, now: float) -> None:
        for waiter in list(self._waiters):
            for_it = [waiter.only] if waiter.only else self.nodes
            if any(node.admitted for node in for_it):
                waiter.since = now
            elif now - waiter.since > _OUTAGE_S and not waiter.future.done():
                count = f"none of {len(for_it)} sandboxes answers: " if len(for_it) > 1 else ""
                waiter.future.set_exception(SandboxUnavailable(count + for_it[0].reason))
        self._waiters = deque(waiter for waiter in self._waiters if not waiter.future.done())

    # -------------------------------------------------------------- closing

    async def close(self) -> None:
        """Fail who waits, close the connections."""
        self._closed = True
        await self._stop_watching()
        for waiter in self._waiters:
            if not waiter.future.done():
                waiter.future.set_exception(SandboxUnavailable("the sandbox was closed."))
        self._waiters.clear()
        for node in self.nodes:
            for leg in list(node.legs):
                leg.abandon("the sandbox was closed.")
        await asyncio.gather(*(node.close() for node in self.nodes))

    async def _stop_watching(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.wait((self._watch,))
            self._watch = None
