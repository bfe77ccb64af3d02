"""Runs what a user wrote: each hook of a tool has a time limit.

What goes wrong in a hook costs one call or one trajectory, is logged, and is counted.
"""

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Coroutine, Generator, Iterable
from contextvars import ContextVar
from typing import Any, TypeVar

GRACE_S = 1.0  # for a hook that was cancelled to end
FoundT = TypeVar("FoundT")

logger = logging.getLogger(__name__)

_counts: ContextVar[Counter[str] | None] = ContextVar("faults of one trajectory", default=None)


@contextlib.contextmanager
def counting() -> Generator[Counter[str]]:
    """Counts the faults of one trajectory: "lookup.end/TimeoutError" -> how often."""
    token = _counts.set(counts := Counter[str]())
    try:
        yield counts
    finally:
        _counts.reset(token)


def count(what: str, error: BaseException) -> None:
    """Log and count a fault of a user's code."""
    counts = _counts.get()
    if counts is not None:
        counts[f"{what}/{type(error).__name__}"] += 1
    logger.error("%s of rollout.tools failed: %s: %s", what, type(error).__name__, error, exc_info=error)


async def bounded(what: str, work: Coroutine[Any, Any, FoundT], limit_s: float | None) -> FoundT:
    """The result of ``work``, or TimeoutError after ``limit_s`` (None: no limit).

    It returns in time also where ``work`` swallows its cancellation: that task is then left alone.
    """
    task = asyncio.ensure_future(work)
    try:
        done, _ = await asyncio.wait([task], timeout=limit_s)
    finally:
        await cancel([task])
    if not done:
        raise TimeoutError(f"{what} did not end within {limit_s:g} s")
    if task.cancelled():  # by itself: nobody cancelled this trajectory
        raise RuntimeError(f"{what} cancelled itself")
    return task.result()


async def cancel(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel ``tasks`` and wait a little for their end."""
    running = [task for task in tasks if not task.done()]
    for task in running:
        task.cancel()
    if running:
        await asyncio.wait(running, timeout=GRACE_S)
