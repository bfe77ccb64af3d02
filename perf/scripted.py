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
# Long tails as in the paper: log-normal, in the mean a quarter of the limit, one in 20 at it.
SPREAD = 1.158
MEDIAN = 0.149  # of rollout.max_response_tokens
MOST_CALLS = 8
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
    return _shared_out(draw, draw.uniform(*SAMPLED) * max_response_tokens, CALLS + 1)


def long_tail(draw: random.Random, max_response_tokens: int) -> list[int]:
    """The same of log-normal lengths and up to MOST_CALLS calls; one response in 20 is cut."""
    total = MEDIAN * max_response_tokens * draw.lognormvariate(0.0, SPREAD)
    return _shared_out(draw, min(total, 2.0 * max_response_tokens), draw.randint(0, MOST_CALLS) + 1)


def _shared_out(draw: random.Random, total: float, turns: int) -> list[int]:
    shares = [draw.uniform(2 / 3, 4 / 3) for _ in range(turns)]
    return [max(1, round(round(total) * share / sum(shares))) for share in shares]


def seed_of_row(run_seed: int, row: Mapping[str, Any]) -> str:
    """The seed of one planned response, so that two runs plan the same for a prompt."""
    return f"{run_seed}/{row['row']}/{row['session_id']}"


class ScriptedAgentLoop(ReToolAgentLoop):
    """Our agent loop with planned turns.

    Half of the responses, drawn at random, get the right answer. ``tail``: lengths and calls as
    `long_tail` plans them.
    """

    def __init__(self, trainer_config: Any, *args: Any, tail: bool = False, **kwargs: Any) -> None:
        super().__init__(trainer_config, *args, run_config=run_config_of(trainer_config.config), **kwargs)
        self.plan = long_tail if tail else turn_lengths
        self.shared = replace(self.shared, protocol=Scripted(self.tokenizer))
        self.draw = random.Random()  # each trajectory has a loop, and its row seeds it
        self.lengths: list[int] = []

    def engine(self) -> Engine:
        return FixedTurns(VerlEngine(self.server_manager, {"ignore_eos": True}), self.lengths)

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput | list[AgentLoopOutput]:
        self.draw.seed(seed_of_row(self.shared.config.run.seed, kwargs))
        limits = self.shared.limits
        self.lengths = self.plan(self.draw, limits.max_response_tokens)
        limits = replace(limits, max_turns=len(self.lengths))  # the last calls nothing
        self.shared = replace(self.shared, limits=limits)
        output = await super().run(sampling_params, **kwargs)
        if isinstance(output, AgentLoopOutput) and self.draw.random() < 0.5:
            output.extra_fields["answer"] = kwargs["reward_model"]["ground_truth"]
        return output
