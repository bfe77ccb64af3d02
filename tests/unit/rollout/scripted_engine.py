"""A scripted engine that stops on the same tokens as a real one, for tests of the loop."""

from collections.abc import Mapping, Sequence
from typing import Any

from retool_mcore.rollout.engine import EngineTurn, Sampling, TurnRequest
from retool_mcore.rollout.limits import Limits
from retool_mcore.rollout.loop import Trajectory, run_trajectory
from retool_mcore.rollout.protocol import ToolProtocol
from retool_mcore.sandbox.base import ExecResult

ABORT = "<abort>"  # cuts a turn here: the engine is interrupted by a weight update


def call(code: str) -> str:
    escaped = code.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'<tool_call>\n{{"name": "code_interpreter", "arguments": {{"code": "{escaped}"}}}}\n</tool_call>'


class ScriptedEngine:
    """Samples the script turn by turn, and the rest of a turn for a request that continues it.

    ``contexts``: the contexts that it received.
    """

    def __init__(self, tokenizer, script: Sequence[str]) -> None:
        self.tokenizer = tokenizer
        self.script = [part for text in script for part in _parts(text)]
        self.contexts: list[list[int]] = []
        self.version = 0
        self._context: list[int] = []
        self._rest: tuple[list[int], bool] = ([], False)

    async def generate(self, request: TurnRequest) -> EngineTurn:
        token_ids = request.token_ids
        self.contexts.append(list(token_ids))
        ids, aborted = self._rest
        if not ids or list(token_ids) != self._context:
            text, aborted = self.script.pop(0)
            ids = self.tokenizer.encode(text, add_special_tokens=False)
        ends = [position + 1 for position, token_id in enumerate(ids) if token_id in request.stop_token_ids]
        end, stop = (ends[0], "stop") if ends else (len(ids), "abort" if aborted else "length")
        if end > request.max_new_tokens:
            end, stop = request.max_new_tokens, "length"
        sampled, self._rest = ids[:end], (ids[end:], aborted)
        self._context = [*token_ids, *sampled]
        version, self.version = self.version, self.version + (stop == "abort")
        return EngineTurn(
            token_ids=sampled, logprobs=[-0.5] * len(sampled), stop=stop, version=version, context_tokens=len(token_ids)
        )

    async def answer(self, request_id: str, prompt_ids: list[int], sampling_params: Mapping[str, Any]) -> EngineTurn:
        """One turn, through the interface of verl's client."""
        return await self.generate(
            TurnRequest(
                token_ids=prompt_ids,
                max_new_tokens=sampling_params["max_new_tokens"],
                stop_token_ids=sampling_params["stop_token_ids"],
                sampling=Sampling(),
                trajectory_id=request_id,
            )
        )


class Prints:
    """A sandbox whose programs print ``outputs``."""

    def __init__(self, outputs: list[str]) -> None:
        self.outputs = outputs

    async def execute(self, code: str, **limits: Any) -> ExecResult:
        return ExecResult(status="finished", return_code=0, stdout=self.outputs.pop(0), stderr="")


async def roll_out(
    prompt_ids: list[int], engine: Any, sandbox: Any, protocol: ToolProtocol, limits: Limits, **options: Any
) -> Trajectory:
    """One trajectory, sampled as a run does by default."""
    defaults = {"sampling": Sampling(), "trajectory_id": "t"}
    return await run_trajectory(
        prompt_ids, engine=engine, sandbox=sandbox, protocol=protocol, limits=limits, **defaults | options
    )


def shown(trajectory: Trajectory) -> list[str]:
    return [result.shown for turn in trajectory.turns for result in turn.results]


def _parts(text: str) -> list[tuple[str, bool]]:
    pieces = text.split(ABORT)
    return [(piece, index + 1 < len(pieces)) for index, piece in enumerate(pieces) if piece]
