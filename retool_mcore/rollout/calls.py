"""Runs the tool calls of one trajectory in the sandbox or in user-defined tools.

The hooks of user-defined tools run with time limits. An exception in a hook fails at most one call
or one trajectory. It is logged and counted.
"""

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_delay, wait_exponential_jitter

from retool_mcore.data.tool import TOOL_NAME
from retool_mcore.errors import SandboxUnavailable
from retool_mcore.rollout.limits import Limits
from retool_mcore.rollout.tool_call import Call
from retool_mcore.rollout.tools import Tool, ToolContext, ToolError, ToolFailed, ToolResult
from retool_mcore.sandbox.base import ExecResult

GRACE_S = 1.0  # how long to wait for a cancelled hook to finish

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class CallResult:
    """The result of one executed call.

    ``code``: the interpreter's code, or another tool's arguments as JSON. ``shown``: the output as
    the model sees it. ``cut_tokens``: tokens cut from its middle. ``wall_s``: seconds from request
    to result, including ``queue_s`` (waiting for a sandbox slot), ``run_s`` (running), transport
    and retries.
    """

    code: str
    ok: bool
    status: str = "finished"  # or time_limit, memory_limit
    shown: str
    cut_tokens: int
    run_s: float = 0.0
    queue_s: float = 0.0
    wall_s: float = 0.0
    tool: str = TOOL_NAME


class Calls:
    """The tools of one trajectory and their state. Call ``close`` when the trajectory is over.

    ``render_output``: see ``ToolProtocol.render_output``.
    ``tool_numbers``: the numbers that each tool's ``end`` hook returned, by tool name.
    ``faults``: the exceptions in hooks, by "TOOL.HOOK/EXCEPTION", such as "lookup.end/KeyError".
    """

    def __init__(
        self,
        tools: Sequence[Tool],
        render_output: Callable[[str, int], tuple[str, int]],
        limits: Limits,
        context: ToolContext,
    ) -> None:
        self._render_output, self._limits, self._context = render_output, limits, context
        self.tool_numbers: dict[str, dict[str, float]] = {}
        self.faults: Counter[str] = Counter()
        self._tools = {tool.name: tool for tool in tools}
        self._states: dict[str, asyncio.Task[Any]] = {}
        self._num_calls: Counter[str] = Counter()

    async def run(self, calls: Sequence[Call]) -> list[CallResult]:
        """Run one turn's calls: concurrently, or in order if they share an interpreter session.

        Raises SandboxUnavailable if an outage outlasts ``max_outage_s``. Exceptions of user-defined
        tools, except ToolError and TimeoutError, propagate after the turn's other calls are
        cancelled.
        """
        if self._limits.sessions:
            return [await self._run(call) for call in calls]
        running = [asyncio.ensure_future(self._run(call)) for call in calls]
        try:
            return await asyncio.gather(*running)
        finally:
            await _cancel(running)

    def render_error(self, error: str) -> str:
        """An error message of the loop, cleaned and cut like a tool's output."""
        return self._render_output(error, self._limits.max_tool_output_tokens)[0]

    async def close(self) -> None:
        """End the interpreter session and call ``end`` of every tool that was started.

        Exceptions in ``end`` are logged and counted. They affect neither the trajectory nor the
        other tools.
        """
        if self._limits.sessions and self._context.sandbox is not None:
            await self._context.sandbox.end_session(self._context.trajectory_id)
        await asyncio.gather(*(self._end(name, state) for name, state in self._states.items()))

    async def _end(self, name: str, started: asyncio.Task[Any]) -> None:
        tool, what = self._tools[name], f"{name}.end"
        if not started.done():
            await _cancel([started])
        if not started.done() or started.cancelled() or started.exception() is not None:
            return
        try:
            numbers = await _bounded(what, tool.end(started.result()), tool.hook_timeout_s)
            if numbers is not None:
                self.tool_numbers[name] = _checked(numbers)
        except Exception as error:  # noqa: BLE001  user code may raise anything
            self._count_fault(what, error)

    async def _run(self, call: Call) -> CallResult:
        tool = self._tools.get(call.tool)
        return await (self._run_code(call) if tool is None else self._run_tool(tool, call))

    async def _run_code(self, call: Call) -> CallResult:
        sandbox = self._context.sandbox
        assert sandbox is not None, "an interpreter call without a sandbox"
        started = time.perf_counter()
        output: ExecResult = await self._retrying()(
            sandbox.execute,
            call.code,
            run_timeout_s=self._limits.run_timeout_s,
            memory_limit_mb=self._limits.memory_limit_mb,
            session=self._context.trajectory_id if self._limits.sessions else None,
        )
        return self._result(
            call,
            output.text,
            ok=output.ok,
            status=output.status,
            run_s=output.run_s,
            queue_s=output.queue_s,
            wall_s=time.perf_counter() - started,
        )

    async def _run_tool(self, tool: Tool, call: Call) -> CallResult:
        self._num_calls[tool.name] += 1
        if tool.max_calls is not None and self._num_calls[tool.name] > tool.max_calls:
            return self._result(call, f"Error: {tool.name} can be called only {tool.max_calls} times.", ok=False)
        started, status = time.perf_counter(), "finished"
        try:
            answer: ToolResult = await self._retrying()(self._call, tool, call)
        except ToolError as error:
            answer = ToolResult(text=f"Error: {error}", ok=False)
        except TimeoutError:
            status = "time_limit"
            after_s = time.perf_counter() - started
            answer = ToolResult(text=f"[stopped at the time limit, after {after_s:.1f} s]", ok=False)
        wall_s = time.perf_counter() - started
        return self._result(call, answer.text, ok=answer.ok, status=status, run_s=wall_s, wall_s=wall_s)

    async def _call(self, tool: Tool, call: Call) -> ToolResult:
        """One attempt. Raises ToolFailed for all but ToolError, outages and timeouts."""
        what = f"{tool.name}.call"
        try:
            answer: object = await _bounded(what, self._start_and_call(tool, call), tool.timeout_s)
        except (ToolError, SandboxUnavailable, TimeoutError):
            raise
        except Exception as error:
            self._count_fault(what, error)
            raise ToolFailed(f"{what} raised {type(error).__name__}: {error}") from error
        result = ToolResult(text=answer) if isinstance(answer, str) else answer
        if isinstance(result, ToolResult) and isinstance(result.text, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            return result
        self._count_fault(what, TypeError(f"it returned {answer!r:.200}; return a str or a ToolResult of a str"))
        return ToolResult(text=f"Error: {tool.name} returned no text.", ok=False)

    async def _start_and_call(self, tool: Tool, call: Call) -> str | ToolResult:
        if tool.name not in self._states:  # concurrent calls share one start
            work = _bounded(f"{tool.name}.start", tool.start(self._context), tool.hook_timeout_s)
            self._states[tool.name] = asyncio.ensure_future(work)
        state = await asyncio.shield(self._states[tool.name])
        return await tool.call(call.arguments, state)

    def _count_fault(self, what: str, error: Exception) -> None:
        """Log and count an exception in user code. ``what``: "TOOL.HOOK"."""
        self.faults[f"{what}/{type(error).__name__}"] += 1
        logger.error("%s of rollout.tools failed: %s: %s", what, type(error).__name__, error, exc_info=error)

    def _retrying(self) -> AsyncRetrying:
        return AsyncRetrying(
            retry=retry_if_exception_type(SandboxUnavailable),
            stop=stop_after_delay(self._limits.max_outage_s),
            wait=wait_exponential_jitter(multiplier=0.5, max=5.0),
            reraise=True,
        )

    def _result(self, call: Call, text: str, **fields: Any) -> CallResult:
        shown, cut_tokens = self._render_output(text, self._limits.max_tool_output_tokens)
        return CallResult(tool=call.tool, code=call.code, shown=shown, cut_tokens=cut_tokens, **fields)


def _checked(numbers: Mapping[str, float]) -> dict[str, float]:
    checked = {str(name): float(value) for name, value in numbers.items()}
    if not all(map(math.isfinite, checked.values())):
        raise ValueError(f"end returned {checked}, but all numbers must be finite")
    return checked


async def _bounded[T](what: str, work: Coroutine[Any, Any, T], limit_s: float | None) -> T:
    """Await ``work``; raise TimeoutError after ``limit_s`` seconds (None: no limit).

    It returns in time even if ``work`` suppresses its cancellation. The task is then abandoned.
    """
    task = asyncio.ensure_future(work)
    try:
        done, _ = await asyncio.wait([task], timeout=limit_s)
    finally:
        await _cancel([task])
    if not done:
        raise TimeoutError(f"{what} did not end within {limit_s:g} s")
    if task.cancelled():  # by the hook itself: a cancelled trajectory would not get here
        raise RuntimeError(f"{what} cancelled itself")
    return task.result()


async def _cancel(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel ``tasks`` and wait up to GRACE_S for them to finish."""
    running = [task for task in tasks if not task.done()]
    for task in running:
        task.cancel()
    if running:
        await asyncio.wait(running, timeout=GRACE_S)
