"""The tokens of a rollout, put together turn by turn, are those of rendering the conversation at once (verl 6501)."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scripted_engine import ScriptedEngine

from retool_mcore.data.chat import CODE_INTERPRETER, neutralise, render
from retool_mcore.rollout.engine import Sampling
from retool_mcore.rollout.ledger import StopReason
from retool_mcore.rollout.loop import Limits, run_trajectory
from retool_mcore.rollout.protocol import Hermes
from retool_mcore.sandbox.base import ExecResult

plain = st.text(alphabet="ab 1\n\\\"'{}<>/é=.()", max_size=30)
LIMITS = Limits(max_response_tokens=5000, max_turns=10)


class Prints:
    """A sandbox whose programs print what they are told to."""

    def __init__(self, outputs: list[str]) -> None:
        self.outputs = outputs

    async def execute(self, code: str, **limits: Any) -> ExecResult:
        return ExecResult(status="finished", return_code=0, stdout=self.outputs.pop(0), stderr="")


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    question=plain,
    calls=st.lists(st.tuples(plain, plain, plain), max_size=4),
    answer=plain,
)
@pytest.mark.parametrize("style", ["tokenizer", "merging_tokenizer"])
async def test_a_rollout_has_the_tokens_of_the_one_shot_rendering(request, style, question, calls, answer):
    tokenizer = request.getfixturevalue(style)
    protocol = Hermes(tokenizer)
    messages: list[dict[str, Any]] = [{"role": "user", "content": question}]
    script: list[str] = []
    for text, code, output in calls:
        # As the template writes it: text first, then the call on a line of its own.
        arguments = json.dumps({"code": code}, ensure_ascii=False)
        body = f'<tool_call>\n{{"name": "code_interpreter", "arguments": {arguments}}}\n</tool_call>'
        script.append(f"{text}\n{body}" if text else body)
        function = {"name": "code_interpreter", "arguments": {"code": code}}
        messages.append({"role": "assistant", "content": text, "tool_calls": [{"function": function}]})
        shown = ExecResult(status="finished", return_code=0, stdout=output, stderr="").text
        messages.append({"role": "tool", "content": neutralise(shown, protocol.format)})
    script.append(f"{answer}<|im_end|>")
    messages.append({"role": "assistant", "content": answer})
    trajectory = await run_trajectory(
        protocol.prompt_ids(messages[:1]),
        engine=ScriptedEngine(tokenizer, script),
        sandbox=Prints([output for _, _, output in calls]),
        protocol=protocol,
        limits=LIMITS,
        sampling=Sampling(),
        request_id="t",
    )
    assert trajectory.stop_reason == StopReason.FINISHED
    rendered = render(messages, [CODE_INTERPRETER], tokenizer)
    context = trajectory.ledger.context
    assert context == rendered.token_ids[: len(context)]
    assert tokenizer.decode(rendered.token_ids[len(context) :]) == "\n", "the template ends with a line break"
