"""Responses of planned lengths with planned calls, for RL benchmarks.

The benchmarks' models have random weights and make no calls. Everything except the text is real:
verl, the engine and its cache across turns, the sandbox, and the judge. A case of perf/cases.toml
selects this module through perf/scripted_loop.yaml and verl's own keys for agent loops.
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
from retool_mcore.verl.keys.tree import run_config_of

CALLS = 2  # per response; its last turn has no call
SAMPLED = (0.4, 0.8)  # range of sampled tokens / rollout.max_response_tokens; the rest is for results
# A long tail as in the paper: log-normal lengths with a mean of a quarter of the limit. 1 of 20
# responses reaches the limit.
SIGMA = 1.158
MEDIAN = 0.149  # times rollout.max_response_tokens
MAX_CALLS = 8
SNIPPET = """\
from sympy import solve, symbols
x = symbols("x")
print(solve(x**2 - 5 * x + 6, x), sum(k**3 for k in range(5000)))
"""


class Scripted(Hermes):
    """Ends each turn as planned, and treats its text as a call, whatever it is."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer)
        self.stop_token_ids = ()

    def ended(self, turn_ids: Sequence[int]) -> bool:
        return True  # FixedTurns stops a turn at its planned length

    def read(self, turn_ids: Sequence[int], text: str) -> Parsed:
        return Parsed(kind="tool_call", calls=code_calls(SNIPPET))


@dataclass
class FixedTurns:
    """An engine whose turns have planned numbers of tokens."""

    inner: Engine
    lengths: list[int]

    async def generate(self, request: TurnRequest) -> EngineTurn:
        wanted = min(self.lengths[0], request.max_new_tokens)
        sampled = await self.inner.generate(replace(request, max_new_tokens=wanted))
        self.lengths[0] -= len(sampled.token_ids)
        if self.lengths[0] > 0:  # interrupted by a weight sync, or by the end of the response
            return sampled
        self.lengths.pop(0)
        return replace(sampled, stop="stop")


def turn_lengths(draw: random.Random, max_response_tokens: int) -> list[int]:
    """Tokens of each model turn of one response: equal shares, plus or minus a third."""
    return _split(draw, draw.uniform(*SAMPLED) * max_response_tokens, CALLS + 1)


def long_tail(draw: random.Random, max_response_tokens: int) -> list[int]:
    """Like turn_lengths, but log-normal and with up to MAX_CALLS calls; 1 of 20 is truncated."""
    total = MEDIAN * max_response_tokens * draw.lognormvariate(0.0, SIGMA)
    return _split(draw, min(total, 2.0 * max_response_tokens), draw.randint(0, MAX_CALLS) + 1)


def _split(draw: random.Random, total: float, turns: int) -> list[int]:
    shares = [draw.uniform(2 / 3, 4 / 3) for _ in range(turns)]
    return [max(1, round(round(total) * share / sum(shares))) for share in shares]


def seed_of_row(run_seed: int, row: Mapping[str, Any]) -> str:
    """The seed of one response's plan: two runs plan the same responses to a prompt."""
    return f"{run_seed}/{row['row']}/{row['session_id']}"


class ScriptedAgentLoop(ReToolAgentLoop):
    """Our agent loop with planned turns.

    A random half of the responses gets the right answer. ``tail``: plan with ``long_tail``.
    """

    def __init__(self, trainer_config: Any, *args: Any, tail: bool = False, **kwargs: Any) -> None:
        super().__init__(trainer_config, *args, run_config=run_config_of(trainer_config.config), **kwargs)
        self.plan = long_tail if tail else turn_lengths
        self.shared = replace(self.shared, protocol=Scripted(self.tokenizer))
        self.draw = random.Random()  # each trajectory has its own loop, which its row seeds
        self.lengths: list[int] = []

    def engine(self) -> Engine:
        return FixedTurns(VerlEngine(self.server_manager, {"ignore_eos": True}), self.lengths)

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput | list[AgentLoopOutput]:
        self.draw.seed(seed_of_row(self.shared.config.run.seed, kwargs))
        limits = self.shared.limits
        self.lengths = self.plan(self.draw, limits.max_response_tokens)
        limits = replace(limits, max_turns=len(self.lengths))  # the last turn has no call
        self.shared = replace(self.shared, limits=limits)
        output = await super().run(sampling_params, **kwargs)
        if isinstance(output, AgentLoopOutput) and self.draw.random() < 0.5:
            output.extra_fields["answer"] = kwargs["reward_model"]["ground_truth"]
        return output
