"""Responses of planned lengths with planned calls, for RL benchmarks.

The benchmarks' models have random weights and call nothing. Everything but the text is real: verl,
the engine and its cache across turns, the sandbox, the reward's check. A case of perf/cases.toml
selects this module by verl's own keys for agent loops, through perf/scripted_loop.yaml.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopOutput

from retool_mcore.rollout.engine import Engine, EngineTurn, TurnRequest
from retool_mcore.rollout.protocol import Hermes
from retool_mcore.rollout.tool_call import Parsed, code_calls
from retool_mcore.verl.agent_loop import ReToolAgentLoop, VerlEngine
from retool_mcore.verl.keys.ppo import run_config_of

CALLS = 2  # per response; its last turn is not a call
SAMPLED = (0.4, 0.8)  # share of rollout.max_response_tokens, drawn uniformly; the rest is room for results
SNIPPET = """\
from sympy import solve, symbols
x = symbols("x")
print(solve(x**2 - 5 * x + 6, x), sum(k**3 for k in range(5000)))
"""


class Scripted(Hermes):
    """Ends each turn where it was planned to end, and reads a call in it whatever it says."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer)
        self.stop_token_ids = ()

    def ended(self, turn_ids: Sequence[int]) -> bool:
        return True  # FixedTurns says "stop" where the plan does

    def read(self, turn_ids: Sequence[int], text: str) -> Parsed:
        return Parsed(kind="tool_call", calls=code_calls(SNIPPET))


@dataclass
class FixedTurns:
    """An engine whose turns have planned numbers of tokens, one after another."""

    inner: Engine
    lengths: list[int]

    async def generate(self, request: TurnRequest) -> EngineTurn:
        wanted = min(self.lengths[0], request.max_new_tokens)
        sampled = await self.inner.generate(replace(request, max_new_tokens=wanted))
        self.lengths[0] -= len(sampled.token_ids)
        if self.lengths[0] > 0:  # interrupted by a weight update, or the end of the response
            return sampled
        self.lengths.pop(0)
        return replace(sampled, stop="stop")


def turn_lengths(draw: random.Random, max_response_tokens: int) -> list[int]:
    """Tokens of each model turn of one response: equal shares, give or take a third."""
    total = round(draw.uniform(*SAMPLED) * max_response_tokens)
    shares = [draw.uniform(2 / 3, 4 / 3) for _ in range(CALLS + 1)]
    return [max(1, round(total * share / sum(shares))) for share in shares]


def seed_of_row(run_seed: int, row: Mapping[str, Any]) -> str:
    """The seed of one planned response, so that two runs plan the same for a prompt."""
    return f"{run_seed}/{row['row']}/{row['session_id']}"


class ScriptedAgentLoop(ReToolAgentLoop):
    """Our agent loop with planned turns.

    Half of the responses, drawn at random, get the right answer.
    """

    def __init__(self, trainer_config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(trainer_config, *args, run_config=run_config_of(trainer_config.config), **kwargs)
        limits = replace(self.shared.limits, max_turns=CALLS + 1)
        self.shared = replace(self.shared, protocol=Scripted(self.tokenizer), limits=limits)
        self.draw = random.Random()  # each trajectory has a loop, and its row seeds it

    def engine(self) -> Engine:
        lengths = turn_lengths(self.draw, self.shared.limits.max_response_tokens)
        return FixedTurns(VerlEngine(self.server_manager, {"ignore_eos": True}), lengths)

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput | list[AgentLoopOutput]:
        self.draw.seed(seed_of_row(self.shared.config.run.seed, kwargs))
        output = await super().run(sampling_params, **kwargs)
        if isinstance(output, AgentLoopOutput) and self.draw.random() < 0.5:
            output.extra_fields["answer"] = kwargs["reward_model"]["ground_truth"]
        return output
