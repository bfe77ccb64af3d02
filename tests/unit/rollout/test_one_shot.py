"""A rollout's tokens, turn by turn, equal those of rendering the conversation at once (verl 6501).

For templates of the Qwen2.5 and the Qwen3 style, with one call a turn and with several (consecutive
tool results), with thinking blocks, and for a tokenizer that merges line breaks with what stands
before them.
"""

from copy import deepcopy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retool_mcore.data.chat import neutralise, render
from retool_mcore.data.tool import CODE_INTERPRETER, tool_call
from retool_mcore.rollout.ledger import StopReason
from retool_mcore.rollout.protocol import open_protocol
from retool_mcore.sandbox.base import ExecResult
from tests.unit.rollout.budgets import limits as limits_for
from tests.unit.rollout.scripted_engine import Prints, ScriptedEngine, roll_out
from tests.unit.rollout.test_templates import require_same, turns_of

plain = st.text(alphabet="ab 1\n\\\"'{}<>/é=.()", max_size=30)
LIMITS = limits_for(max_response_tokens=5000, max_turns=10)

# Qwen3's: thinking is written back after the last user message; a last turn without any gets an
# empty block.
TURN = "{{- '<|im_start|>assistant\\n' + message.content -}}"
THINKING_TURN = """{{- '<|im_start|>assistant\\n' -}}
        {%- if message.reasoning_content or loop.last -%}
            {{- '<think>\\n' + (message.reasoning_content or '').strip('\\n') + '\\n</think>\\n\\n' -}}
        {%- endif -%}
        {{- message.content.lstrip('\\n') -}}"""


@pytest.fixture(scope="module")
def thinking_tokenizer(merging_tokenizer):
    made = deepcopy(merging_tokenizer)
    assert made.chat_template.count(TURN) == 1
    made.chat_template = made.chat_template.replace(TURN, THINKING_TURN)
    return made


@settings(max_examples=100)
@given(
    question=plain,
    turns=st.lists(st.tuples(plain, plain, st.lists(st.tuples(plain, plain), min_size=1, max_size=3)), max_size=3),
    end=st.tuples(plain, plain),
)
@pytest.mark.parametrize("calls", ["first", "all"])
@pytest.mark.parametrize("style", ["merging_tokenizer", "thinking_tokenizer"])
async def test_a_rollout_has_the_tokens_of_the_one_shot_rendering(request, style, calls, *, question, turns, end):
    tokenizer, thinks = request.getfixturevalue(style), style == "thinking_tokenizer"
    protocol = open_protocol("hermes", tokenizer, calls=calls)
    messages: list[dict[str, Any]] = [{"role": "user", "content": question}]
    outputs: list[str] = []
    for thought, text, all_runs in turns:
        runs = all_runs if calls == "all" else all_runs[:1]
        wanted = [tool_call(code) for code, _ in runs]
        turn = {"content": text, "reasoning_content": thought * thinks, "tool_calls": wanted}
        messages.append({"role": "assistant", **turn})
        for _, output in runs:
            outputs.append(output)
            shown = ExecResult(status="finished", return_code=0, stdout=output, stderr="").text
            messages.append({"role": "tool", "content": neutralise(shown, protocol.format)})
    messages.append({"role": "assistant", "content": end[1], "reasoning_content": end[0] * thinks})
    engine = ScriptedEngine(tokenizer, turns_of(tokenizer, messages, [CODE_INTERPRETER]))
    trajectory = await roll_out(protocol.prompt_ids(messages[:1]), engine, Prints(outputs), protocol, LIMITS)
    assert trajectory.stop_reason == StopReason.FINISHED
    require_same(tokenizer, trajectory, messages, [CODE_INTERPRETER])
    rendered, context = render(messages, [CODE_INTERPRETER], tokenizer), trajectory.ledger.context
    assert tokenizer.decode(rendered.token_ids[len(context) :]) == "\n", "the template ends with a line break"
    one_shot = tokenizer.apply_chat_template(messages, tools=[CODE_INTERPRETER], tokenize=False)
    assert tokenizer.decode(context) + "\n" == one_shot
