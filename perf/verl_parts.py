"""The agent loop, tool and reward of verl's own run in perf/verl_bench.py.

verl's processes load this module through verl's own keys. verl's own agent loop, tool calls and
scorer run. Only the lengths and calls of turns are planned, as in perf/scripted.py.
"""

from __future__ import annotations

import asyncio
import json
import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from scripted import CALLS, SNIPPET, turn_lengths
from verl.experimental.agent_loop.tool_agent_loop import AgentData, AgentState, ToolAgentLoop
from verl.experimental.agent_loop.tool_parser import FunctionCall, ToolParser
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import ToolResponse
from verl.utils.reward_score import math_dapo
from verl.utils.reward_score.sandbox_fusion.utils import call_sandbox_api

TOOL = "code_interpreter"  # the name in perf/verl_bench.py's schema
RIGHT = 0.5  # share of responses that get the right answer, as in perf/scripted.py
_calls = ThreadPoolExecutor(64)  # threads, because verl's client blocks; enough for a worker's trajectories


class CodeTool(BaseTool):
    """Runs code on a SandboxFusion server, through verl's own client."""

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        run_s, limit_mb = self.config["run_timeout_s"], self.config["memory_limit_mb"]
        arguments = (self.config["url"], parameters["code"], None, run_s, run_s, limit_mb, "python")
        loop = asyncio.get_running_loop()
        answer, error = await loop.run_in_executor(_calls, call_sandbox_api, *arguments)
        if answer is None:
            return ToolResponse(text=f"Error: {error}"), 0.0, {}
        result = answer["run_result"]
        return ToolResponse(text=(result["stdout"] or "") + (result["stderr"] or "")), 0.0, {}


class PlannedCalls:
    """Runs verl's parser on a turn and replaces its result with the planned call."""

    def __init__(self, parser: ToolParser) -> None:
        self._parser = parser
        self.stop_token_ids = parser.stop_token_ids

    async def extract_tool_calls(self, responses_ids: list[int], tools: Any) -> tuple[str, list[FunctionCall]]:
        content, _ = await self._parser.extract_tool_calls(responses_ids, tools)
        return content, [FunctionCall(name=TOOL, arguments=json.dumps({"code": SNIPPET}))]


class ScriptedToolAgentLoop(ToolAgentLoop):
    """verl's tool agent loop with planned turns. verl creates one per trajectory."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.tool_parser: Any = PlannedCalls(self.tool_parser)
        self.max_assistant_turns = CALLS + 1
        self.lengths = turn_lengths(random.Random(), self.response_length)

    async def _handle_generating_state(
        self, agent_data: AgentData, sampling_params: dict[str, Any], ignore_termination: bool = False
    ) -> AgentState:
        planned = {"max_new_tokens": self.lengths[agent_data.assistant_turns], "ignore_eos": True}
        return await super()._handle_generating_state(agent_data, {**sampling_params, **planned}, ignore_termination)


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **_: Any) -> float:
    """verl's score. A random half of the responses gets the right answer first."""
    if random.random() < RIGHT:
        solution_str += f"\nAnswer: {ground_truth}"
    judged: Any = math_dapo.compute_score(solution_str, ground_truth)
    return float(judged["score"])
