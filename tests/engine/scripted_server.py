"""The real SGLang server with a scripted model: a logit processor leaves one token to sample."""

import subprocess
import sys
import textwrap
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from retool_mcore.rollout.engine import EngineTurn, TurnRequest
from retool_mcore.rollout.protocol import ToolProtocol
from retool_mcore.rollout.sglang_http import SglangEngine


class PlannedEngine(SglangEngine):
    """Samples ``plan`` by position after the prompt: the response, with the results in between."""

    def __init__(self, url: str, prompt_tokens: int, plan: Sequence[int], *, retry_s: float = 5.0) -> None:
        super().__init__(url, retry_s=retry_s)
        self.prompt_tokens, self.plan = prompt_tokens, list(plan)
        self.turns = 0

    def body(self, request: TurnRequest) -> dict[str, Any]:
        body = super().body(request)
        rest = self.plan[len(request.token_ids) - self.prompt_tokens :]
        body["sampling_params"]["custom_params"] = {**request.custom_params, "script": rest}
        return body | {"custom_logit_processor": script_processor()}

    async def generate(self, request: TurnRequest) -> EngineTurn:
        turn = await super().generate(request)
        self.turns += 1
        return turn


def make_plan(protocol: ToolProtocol, turns: Sequence[str], results: Sequence[str]) -> list[int]:
    """The response tokens of a trajectory: turns of the model, a result after each but the last."""
    plan: list[int] = []
    for turn, result in zip(turns, [*results, None], strict=True):
        sampled = protocol.tokenizer.encode(turn, add_special_tokens=False)
        plan += sampled
        if result is not None:
            plan += protocol.result_ids(sampled, [result])
    return plan


@lru_cache
def script_processor() -> str:
    """The processor as SGLang takes it; made in a process of its own, because it imports SGLang."""
    code = """
        from retool_mcore.platforms.base import get_platform
        get_platform("cpu").activate()
        from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor

        class Script(CustomLogitProcessor):
            def __call__(self, logits, custom_param_list):
                for row, params in enumerate(custom_param_list):
                    if params and "script" in params:
                        script, done = params["script"], len(params["__req__"].output_ids)
                        logits[row, :] = -1e9
                        logits[row, script[min(done, len(script) - 1)]] = 0.0
                return logits

        print(Script.to_str())
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True)
    return done.stdout.strip().splitlines()[-1]
