"""What verl's own run of perf/verl_bench.py is given: planned turns, a tool, a reward.

verl's processes load it by verl's own keys. Its agent loop, its tokens, its tools and its scorer do
the work; only the length of a turn and the call in it are planned, as perf/scripted.py plans ours.
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

TOOL = "code_interpreter"  # as perf/verl_bench.py describes it to the model
RIGHT = 0.5  # share of the responses that get the right answer, as in perf/scripted.py
_calls = ThreadPoolExecutor(64)  # verl's client blocks; an agent worker has fewer trajectories than this


class CodeTool(BaseTool):
    """Runs code in a SandboxFusion server, through verl's own client of one."""

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        run_s, limit_mb = self.config["run_timeout_s"], self.config["memory_limit_mb"]
        asked = (self.config["url"], parameters["code"], None, run_s, run_s, limit_mb, "python")
        loop = asyncio.get_running_loop()
        answer, error = await loop.run_in_executor(_calls, call_sandbox_api, *asked)
        if answer is None:
            return ToolResponse(text=f"Error: {error}"), 0.0, {}
        result = answer["run_result"]
        return ToolResponse(text=(result["stdout"] or "") + (result["stderr"] or "")), 0.0, {}


class PlannedCalls:
    """Reads a turn as verl's parser does, and puts the planned call in place of what it found."""

    def __init__(self, parser: ToolParser) -> None:
        self._parser = parser
        self.stop_token_ids = parser.stop_token_ids

    async def extract_tool_calls(self, responses_ids: list[int], tools: Any) -> tuple[str, list[FunctionCall]]:
        content, _ = await self._parser.extract_tool_calls(responses_ids, tools)
        return content, [FunctionCall(name=TOOL, arguments=json.dumps({"code": SNIPPET}))]


class ScriptedToolAgentLoop(ToolAgentLoop):
    """verl's tool agent with planned turns. verl makes one for each trajectory."""

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
    """verl's score of a mathematical answer; a random half of the responses get the right one."""
    if random.random() < RIGHT:
        solution_str += f"\nAnswer: {ground_truth}"
    judged: Any = math_dapo.compute_score(solution_str, ground_truth)
    return float(judged["score"])
