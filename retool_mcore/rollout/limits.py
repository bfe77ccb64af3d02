"""The budgets of one trajectory."""

from __future__ import annotations

from dataclasses import dataclass

from retool_mcore.config import SandboxSettings, ToolLoop

MAX_MALFORMED_CALLS = 3  # a model that repeats the error after two explanations rarely gets it right
MIN_TOTAL_TOOL_S = 300.0  # minimum of max_tool_s, which otherwise is max_turns * run_timeout_s


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of one trajectory, mostly from [rollout] and [sandbox].

    ``ledger.StopReason`` describes the effect of each.
    """

    max_response_tokens: int  # model and tool tokens
    max_turns: int  # model turns
    max_tool_output_tokens: int  # per result; cuts the middle of a longer one and notes the cut
    max_malformed_calls: int  # in a row
    max_tool_s: float  # total run time of the trajectory's calls
    run_timeout_s: float
    memory_limit_mb: int
    max_outage_s: float  # how long to retry a call while the sandbox is unavailable (restarting)
    sessions: bool  # all calls of a trajectory share one interpreter and run sequentially

    @classmethod
    def of(cls, rollout: ToolLoop, sandbox: SandboxSettings) -> Limits:
        return cls(
            max_response_tokens=rollout.max_response_tokens,
            max_turns=rollout.max_turns if rollout.tool else 1,
            max_tool_output_tokens=rollout.max_tool_output_tokens,
            max_malformed_calls=MAX_MALFORMED_CALLS,
            max_tool_s=max(MIN_TOTAL_TOOL_S, rollout.max_turns * sandbox.run_timeout_s),
            run_timeout_s=sandbox.run_timeout_s,
            memory_limit_mb=sandbox.memory_limit_mb,
            max_outage_s=rollout.max_outage_s,
            sessions=sandbox.sessions > 0,
        )
