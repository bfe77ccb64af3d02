"""Runs the calls of one trajectory: in the sandbox, or by the run's own tools."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_delay, wait_exponential_jitter

from retool_mcore.data.tool import TOOL_NAME
from retool_mcore.errors import SandboxUnavailable
from retool_mcore.rollout.limits import Limits
from retool_mcore.rollout.protocol import ToolProtocol
from retool_mcore.rollout.tool_call import Call
from retool_mcore.rollout.tools import Tool, ToolError, ToolResult
from retool_mcore.sandbox.base import ExecResult, Sandbox, Status


@dataclass(frozen=True, kw_only=True)
class CallResult:
    """One executed call: what the tool returned, and the part of it that the model saw.

    ``code`` is the interpreter's, or another tool's arguments as JSON. ``wall_s`` is the time from
    request to answer. It includes queue_s (waiting for a free place), run_s (running), transport
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


class Calls:
    """The tools as one trajectory has them. ``close`` it when the trajectory is over."""

    def __init__(self, sandbox: Sandbox | None, protocol: ToolProtocol, limits: Limits, trajectory_id: str) -> None:
        self._sandbox, self._protocol, self._limits = sandbox, protocol, limits
        self._trajectory_id = trajectory_id
        self._tools = {tool.name: tool for tool in protocol.tools}
        self._states: dict[str, asyncio.Task[Any]] = {}
        self._made: Counter[str] = Counter()

    async def run(self, calls: Sequence[Call]) -> list[CallResult]:
        """Side by side, but those of one interpreter in their order.

        Raises SandboxUnavailable for an outage that lasts, and what a tool of the user's own raises
        beside ToolError.
        """
        if self._limits.sessions:
            outcomes = [await self._run(call) for call in calls]
        else:
            outcomes = await asyncio.gather(*(self._run(call) for call in calls))
        return [self._result(call, outcome) for call, outcome in zip(calls, outcomes, strict=True)]

    async def close(self) -> None:
        """End what the trajectory's calls have started."""
        if self._limits.sessions and self._sandbox is not None:
            await self._sandbox.end_session(self._trajectory_id)
        for name, state in self._states.items():
            if not state.done():
                state.cancel()
            elif not state.cancelled() and state.exception() is None:
                await self._tools[name].end(state.result())

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
        async with asyncio.timeout(tool.timeout_s):  # of one attempt: an outage is no fault of the call
            if tool.name not in self._states:  # one start, also for calls side by side
                self._states[tool.name] = asyncio.ensure_future(tool.start(self._trajectory_id))
            state = await asyncio.shield(self._states[tool.name])
            answer = await tool.call(call.arguments, state)
        return answer if isinstance(answer, ToolResult) else ToolResult(text=str(answer))

    def _retrying(self) -> AsyncRetrying:
        return AsyncRetrying(
            retry=retry_if_exception_type(SandboxUnavailable),
            stop=stop_after_delay(self._limits.max_outage_s),
            wait=wait_exponential_jitter(initial=0.5, max=5.0),
            reraise=True,
        )

    def _result(self, call: Call, outcome: _Outcome) -> CallResult:
        shown, cut_tokens = self._protocol.shown(outcome.text, self._limits.max_tool_output_tokens)
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
