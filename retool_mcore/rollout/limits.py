"""The budgets of one trajectory."""

from __future__ import annotations

import math
from dataclasses import dataclass

from retool_mcore.config import SandboxSettings, ToolLoop


@dataclass(frozen=True, kw_only=True)
class Limits:
    """See ``ledger.StopReason`` for what happens at each."""

    max_response_tokens: int  # sampled and written tokens together
    max_turns: int = 8  # model turns
    max_tool_output_tokens: int = 512  # of one result; the middle of a longer one is cut, with a note to the model
    max_malformed_calls: int = 3  # in a row
    max_tool_s: float = math.inf  # interpreter run time over the whole trajectory
    run_timeout_s: float = 10.0
    memory_limit_mb: int = 1024
    max_outage_s: float = 60.0  # how long a call is retried while the sandbox is away (restarting)
    sessions: bool = False  # one interpreter for all calls of a trajectory, which then run one after another

    @classmethod
    def of(cls, rollout: ToolLoop, sandbox: SandboxSettings) -> Limits:
        return cls(
            max_response_tokens=rollout.max_response_tokens,
            max_turns=rollout.max_turns if rollout.tool else 1,
            max_tool_output_tokens=rollout.max_tool_output_tokens,
            max_malformed_calls=rollout.max_malformed_calls,
            max_tool_s=rollout.max_tool_s,
            run_timeout_s=sandbox.run_timeout_s,
            memory_limit_mb=sandbox.memory_limit_mb,
            max_outage_s=rollout.max_outage_s,
            sessions=sandbox.sessions > 0,
        )
