"""Runs the tool calls of one trajectory in the sandbox or in user-defined tools."""

import asyncio
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_delay, wait_exponential_jitter

from retool_mcore.data.tool import TOOL_NAME
from retool_mcore.errors import SandboxUnavailable
from retool_mcore.rollout import hooks
from retool_mcore.rollout.limits import Limits
from retool_mcore.rollout.tool_call import Call
from retool_mcore.rollout.tool_output import without_middle
from retool_mcore.rollout.tools import Given, Tool, ToolError, ToolResult
from retool_mcore.sandbox.base import ExecResult, Status


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
    status: str  # finished, time_limit, memory_limit
    shown: str
    cut_tokens: int
    run_s: float
    queue_s: float
    wall_s: float = 0.0
    tool: str = TOOL_NAME


@dataclass(frozen=True, kw_only=True)
class _Outcome:
    text: str
    ok: bool
    status: Status = "finished"
    run_s: float = 0.0
    queue_s: float = 0.0
    wall_s: float = 0.0


class Shows(Protocol):
    """The part of a ``ToolProtocol`` that ``Calls`` uses."""

    @property
    def name(self) -> str: ...

    @property
    def tools(self) -> Sequence[Tool]: ...

    def shown(self, output: str, max_tokens: int) -> tuple[str, int]: ...


class Calls:
    """The tools of one trajectory and their state. Call ``close`` when the trajectory is over."""

    def __init__(self, protocol: Shows, limits: Limits, given: Given) -> None:
        self._sandbox, self._protocol, self._limits = given.sandbox, protocol, limits
        self._given, self._trajectory_id = given, given.trajectory_id
        self.found: dict[str, dict[str, float]] = {}  # results of Tool.end by tool name, for the reward function
        self._tools = {tool.name: tool for tool in protocol.tools}
        self._states: dict[str, asyncio.Task[Any]] = {}
        self._made: Counter[str] = Counter()

    async def run(self, calls: Sequence[Call]) -> list[CallResult]:
        """Run one turn's calls: concurrently, or in order if they share an interpreter session.

        Raises SandboxUnavailable if an outage outlasts ``max_outage_s``. Any other exception of a
        user-defined tool except ToolError propagates. The turn's other calls are cancelled first.
        """
        if self._limits.sessions:
            outcomes = [await self._run(call) for call in calls]
        else:
            running = [asyncio.ensure_future(self._run(call)) for call in calls]
            try:
                outcomes = await asyncio.gather(*running)
            finally:
                await hooks.cancel(running)
        return [self._result(call, outcome) for call, outcome in zip(calls, outcomes, strict=True)]

    def shown(self, error: str) -> str:
        """An error message of the loop, cleaned and cut like a tool's output."""
        return self._protocol.shown(error, self._limits.max_tool_output_tokens)[0]

    async def close(self) -> None:
        """End the interpreter session and call ``end`` of every tool that was started.

        Exceptions in ``end`` are logged and counted. They affect neither the trajectory nor the
        other tools.
        """
        if self._limits.sessions and self._sandbox is not None:
            await self._sandbox.end_session(self._trajectory_id)
        await asyncio.gather(*(self._end(name, state) for name, state in self._states.items()))

    async def _end(self, name: str, started: asyncio.Task[Any]) -> None:
        tool, what = self._tools[name], f"{name}.end"
        if not started.done():
            await hooks.cancel([started])
        if not started.done() or started.cancelled() or started.exception() is not None:
            return
        try:
            found = await hooks.bounded(what, tool.end(started.result()), tool.hook_timeout_s)
            if found is not None:
                self.found[name] = _numbers(found)
        except Exception as error:  # noqa: BLE001  user code may raise anything
            hooks.count(what, error)

    async def _run(self, call: Call) -> _Outcome:
        tool = self._tools.get(call.tool)
        return await (self._execute(call.code) if tool is None else self._ask(tool, call))

    async def _execute(self, code: str) -> _Outcome:
        assert self._sandbox is not None, f"protocol {self._protocol.name} calls a tool, but no sandbox was given"
        started = time.perf_counter()
        found: ExecResult = await self._retrying()(
            self._sandbox.execute,
            code,
            run_timeout_s=self._limits.run_timeout_s,
            memory_limit_mb=self._limits.memory_limit_mb,
            session=self._trajectory_id if self._limits.sessions else None,
        )
        return _Outcome(
            text=found.text,
            ok=found.ok,
            status=found.status,
            run_s=found.run_s,
            queue_s=found.queue_s,
            wall_s=time.perf_counter() - started,
        )

    async def _ask(self, tool: Tool, call: Call) -> _Outcome:
        self._made[tool.name] += 1
        if tool.max_calls is not None and self._made[tool.name] > tool.max_calls:
            return _Outcome(text=f"Error: {tool.name} may be called {tool.max_calls} times, and was.", ok=False)
        started = time.perf_counter()
        try:
            answer: ToolResult = await self._retrying()(self._call, tool, call)
        except ToolError as error:
            answer = ToolResult(text=f"Error: {error}", ok=False)
        except TimeoutError:
            took_s = time.perf_counter() - started
            text = f"[stopped at the time limit, after {took_s:.1f} s]"
            return _Outcome(text=text, ok=False, status="time_limit", run_s=took_s, wall_s=took_s)
        took_s = time.perf_counter() - started
        return _Outcome(text=answer.text, ok=answer.ok, run_s=took_s, wall_s=took_s)

    async def _call(self, tool: Tool, call: Call) -> ToolResult:
        """One attempt. Counts exceptions as faults, except ToolError, outages and timeouts."""
        try:
            answer = await hooks.bounded(f"{tool.name}.call", self._started_call(tool, call), tool.timeout_s)
        except (ToolError, SandboxUnavailable, TimeoutError):
            raise
        except Exception as error:
            hooks.count(f"{tool.name}.call", error)
            raise
        return _checked(tool, answer)

    async def _started_call(self, tool: Tool, call: Call) -> str | ToolResult:
        if tool.name not in self._states:  # concurrent calls share one start
            work = hooks.bounded(f"{tool.name}.start", tool.start(self._given), tool.hook_timeout_s)
            self._states[tool.name] = asyncio.ensure_future(work)
        state = await asyncio.shield(self._states[tool.name])
        return await tool.call(call.arguments, state)

    def _retrying(self) -> AsyncRetrying:
        return AsyncRetrying(
            retry=retry_if_exception_type(SandboxUnavailable),
            stop=stop_after_delay(self._limits.max_outage_s),
            wait=wait_exponential_jitter(multiplier=0.5, max=5.0),
            reraise=True,
        )

    def _result(self, call: Call, outcome: _Outcome) -> CallResult:
        # Drop the middle of a huge output before cleaning, which would read all of it.
        text = without_middle(outcome.text, self._limits.max_tool_output_tokens)
        shown, cut_tokens = self._protocol.shown(text, self._limits.max_tool_output_tokens)
        return CallResult(
            tool=call.tool,
            code=call.code,
            ok=outcome.ok,
            status=outcome.status,
            shown=shown,
            cut_tokens=cut_tokens,
            run_s=outcome.run_s,
            queue_s=outcome.queue_s,
            wall_s=outcome.wall_s,
        )


def _numbers(found: Mapping[str, float]) -> dict[str, float]:
    numbers = {str(name): float(value) for name, value in found.items()}
    if not all(map(math.isfinite, numbers.values())):
        raise ValueError(f"its end returned {numbers}, which are not all finite numbers")
    return numbers


def _checked(tool: Tool, answer: object) -> ToolResult:
    """Convert a tool's return value. Anything but a str or a ToolResult of str is a failed call."""
    if isinstance(answer, str):
        return ToolResult(text=answer)
    text = cast("object", answer.text) if isinstance(answer, ToolResult) else None
    if isinstance(answer, ToolResult) and isinstance(text, str):
        return answer
    held = (
        f"a ToolResult with a text of type {type(text).__name__}"
        if isinstance(answer, ToolResult)
        else repr(type(answer))
    )
    hooks.count(f"{tool.name}.call", TypeError(f"it returned {held}; return a str or a ToolResult of a str"))
    return ToolResult(text=f"Error: {tool.name} gave no text.", ok=False)
