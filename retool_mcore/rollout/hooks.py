"""Runs the hooks of user-defined tools with a time limit.

An exception in a hook fails at most one call or one trajectory. It is logged and counted.
"""

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Coroutine, Generator, Iterable
from contextvars import ContextVar
from typing import Any, TypeVar

GRACE_S = 1.0  # how long to wait for a cancelled hook to finish
FoundT = TypeVar("FoundT")

logger = logging.getLogger(__name__)

_counts: ContextVar[Counter[str] | None] = ContextVar("faults of one trajectory", default=None)


@contextlib.contextmanager
def counting() -> Generator[Counter[str]]:
    """Counts the hook faults of one trajectory by "TOOL.HOOK/EXCEPTION": "lookup.end/KeyError"."""
    token = _counts.set(counts := Counter[str]())
    try:
        yield counts
    finally:
        _counts.reset(token)


def count(what: str, error: BaseException) -> None:
    """Log and count an exception in user code. ``what``: "TOOL.HOOK"."""
    counts = _counts.get()
    if counts is not None:
        counts[f"{what}/{type(error).__name__}"] += 1
    logger.error("%s of rollout.tools failed: %s: %s", what, type(error).__name__, error, exc_info=error)


async def bounded(what: str, work: Coroutine[Any, Any, FoundT], limit_s: float | None) -> FoundT:
    """Await ``work``; raise TimeoutError after ``limit_s`` seconds (None: no limit).

    It returns in time even if ``work`` suppresses its cancellation. The task is then abandoned.
    """
    task = asyncio.ensure_future(work)
    try:
        done, _ = await asyncio.wait([task], timeout=limit_s)
    finally:
        await cancel([task])
    if not done:
        raise TimeoutError(f"{what} did not end within {limit_s:g} s")
    if task.cancelled():  # the hook did this itself: a cancelled trajectory would not get here
        raise RuntimeError(f"{what} cancelled itself")
    return task.result()


async def cancel(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel ``tasks`` and wait up to GRACE_S for them to finish."""
    running = [task for task in tasks if not task.done()]
    for task in running:
        task.cancel()
    if running:
        await asyncio.wait(running, timeout=GRACE_S)
