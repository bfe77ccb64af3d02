"""The budgets of one trajectory."""

from __future__ import annotations

from dataclasses import dataclass

from retool_mcore.config import SandboxSettings, ToolLoop

MAX_MALFORMED_CALLS = 3  # a model that has been told twice what is wrong rarely gets it right
# Of running in all turns. Calls that each take their whole time may do so in every turn.
MAX_TOOL_S = 300.0


@dataclass(frozen=True, kw_only=True)
class Limits:
    """See ``ledger.StopReason`` for what happens at each. Most are settings of [rollout]."""

    max_response_tokens: int  # sampled and written tokens together
    max_turns: int  # model turns
    max_tool_output_tokens: int  # of one result; the middle of a longer one is cut, with a note to the model
    max_malformed_calls: int  # in a row
    max_tool_s: float  # interpreter run time over the whole trajectory
    run_timeout_s: float
    memory_limit_mb: int
    max_outage_s: float  # how long a call is retried while the sandbox is away (restarting)
    sessions: bool  # one interpreter for all calls of a trajectory, which then run one after another

    @classmethod
    def of(cls, rollout: ToolLoop, sandbox: SandboxSettings) -> Limits:
        return cls(
            max_response_tokens=rollout.max_response_tokens,
            max_turns=rollout.max_turns if rollout.tool else 1,
            max_tool_output_tokens=rollout.max_tool_output_tokens,
            max_malformed_calls=MAX_MALFORMED_CALLS,
            max_tool_s=max(MAX_TOOL_S, rollout.max_turns * sandbox.run_timeout_s),
            run_timeout_s=sandbox.run_timeout_s,
            memory_limit_mb=sandbox.memory_limit_mb,
            max_outage_s=rollout.max_outage_s,
            sessions=sandbox.sessions > 0,
        )
