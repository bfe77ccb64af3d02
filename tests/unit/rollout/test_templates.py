"""With a stable template, a rollout has the tokens and the mask that training renders.

For calls in the model's own format, in the inline format, and for text without calls.
"""

import json
from typing import Any

import pytest

from retool_mcore.data.chat import chat_format, encode_piece, render
from retool_mcore.data.prompt_format import retool_prompt
from retool_mcore.data.tool import CODE_INTERPRETER, tool_call
from retool_mcore.errors import CheckpointError, DataError
from retool_mcore.rollout.ledger import StopReason
from retool_mcore.rollout.loop import Trajectory
from retool_mcore.rollout.protocol import PROTOCOLS, TOOL_TURNS, TextOnly, ToolProtocol
from retool_mcore.rollout.tool_call import mistral_ids
from tests.template_styles import STYLES, TAKEN, Style, tokenizer_in
from tests.unit.rollout.budgets import limits as limits_for
from tests.unit.rollout.scripted_engine import Prints, ScriptedEngine, roll_out

QUESTION = {"role": "user", "content": "How much is 2 + 2?"}
CODE = 'x = 2\nprint("x", x + x)'
RESULT = "x 4"


class Pieces:
    """Encodes sampled text, which follows other tokens."""

    def __init__(self, tokenizer) -> None:
        self.tokenizer = tokenizer

    def encode(self, text: str, **_: bool) -> list[int]:
        return encode_piece(self.tokenizer, text)


def named(styles: list[Style]) -> Any:
    return pytest.mark.parametrize("style", styles, ids=lambda style: style.name)


def codes_of(trajectory: Trajectory) -> list[str]:
    return [result.code for turn in trajectory.turns for result in turn.results]


async def play(tokenizer, protocol: ToolProtocol, *script: str) -> Trajectory:
    engine, sandbox = ScriptedEngine(Pieces(tokenizer), script), Prints(["x 4\n"] * len(script))
    limits = limits_for(max_response_tokens=3000)
    return await roll_out(protocol.prompt_ids([QUESTION]), engine, sandbox, protocol, limits)


async def answer_as_rendered(
    protocol: ToolProtocol, messages: list[dict[str, Any]], tools: Any, codes: list[str]
) -> Trajectory:
    """Sample the turns of the rendering, which run ``codes``, and compare the tokens."""
    tokenizer = protocol.tokenizer
    trajectory = await play(tokenizer, protocol, *turns_of(tokenizer, messages, tools))
    assert (trajectory.stop_reason, trajectory.answer) == (StopReason.FINISHED, "4")
    assert codes_of(trajectory) == codes
    require_same(tokenizer, trajectory, messages, tools)
    return trajectory


def require_same(tokenizer, trajectory: Trajectory, messages: list[dict[str, Any]], tools: Any) -> None:
    """Compare the rollout's tokens and mask with those of the rendering."""
    rendered = render(messages, tools, tokenizer)
    ledger = trajectory.ledger
    text, context = tokenizer.decode(rendered.token_ids), tokenizer.decode(ledger.context)
    assert text.startswith(context)
    assert list(rendered.token_ids)[: len(ledger.context)] == ledger.context
    mask = [0] * len(ledger.prompt_ids) + ledger.loss_mask
    trained = list(rendered.loss_mask)[: len(mask)]
    end = chat_format(tokenizer).end_of_turn_id
    for position, token_id in enumerate(ledger.context):
        if token_id != end:  # after a call the rollout may write it, and training has the model learn it
            assert trained[position] == mask[position], tokenizer.decode(ledger.context[:position][-20:])
    assert not any(list(rendered.loss_mask)[len(mask) :])


def turns_of(tokenizer, messages: list[dict[str, Any]], tools: Any) -> list[str]:
    """The model's text of each turn in the rendering, with the token that ends it."""
    rendered, turns, ids = render(messages, tools, tokenizer), [], []
    for token_id, loss in [*zip(rendered.token_ids, rendered.loss_mask, strict=True), (0, 0)]:
        if loss:
            ids.append(token_id)
        elif ids:  # after another token, since some tokenizers drop the first space of what they decode
            turns.append(tokenizer.decode([tokenizer.eos_token_id, *ids]).removeprefix(tokenizer.eos_token))
            ids = []
    return turns


@named(TAKEN)
async def test_text_and_the_inline_form_are_rendered_as_they_are_sampled(style: Style):
    tokenizer = tokenizer_in(style.name)
    messages = [QUESTION, {"role": "assistant", "content": "It is \\boxed{4}."}]
    await answer_as_rendered(TextOnly(tokenizer), messages, None, [])
    block = f"Let me see.\n<code>\n```python\n{CODE}\n```\n</code>"
    content = f"{block}\n<interpreter>\n{RESULT}\n</interpreter>\nIt is\n<answer>\n\\boxed{{4}}\n</answer>"
    question = {"role": "user", "content": retool_prompt(QUESTION["content"])}
    messages = [question, {"role": "assistant", "content": content}]
    await answer_as_rendered(PROTOCOLS["retool"](tokenizer), messages, None, [CODE])


@named([style for style in TAKEN if style.tools])
@pytest.mark.parametrize("thought", ["", "count"])
async def test_native_calls_are_rendered_as_they_are_sampled(style: Style, thought: str):
    protocol = PROTOCOLS[style.tools](tokenizer_in(style.name))
    thinks = bool(thought) and "<think>" in style.template and not style.args
    reasoning = {"reasoning_content": thought} if thinks else {}
    words = "Let me see." if style.words_before_call else ""
    turn = {"role": "assistant", "content": words, "tool_calls": [tool_call(CODE)], **reasoning}
    answer = {"role": "assistant", "content": "It is \\boxed{4}.", **reasoning}
    messages = [QUESTION, *[turn, {"role": "tool", "content": RESULT}] * 2, answer]
    trajectory = await answer_as_rendered(protocol, messages, [CODE_INTERPRETER], [CODE, CODE])
    assert not any(turn.parsed.repairs for turn in trajectory.turns if turn.parsed)
    if protocol.tags:  # type: ignore[attr-defined]
        assert trajectory.turns[0].text.endswith(protocol.tags[1])  # type: ignore[attr-defined]
    if thinks:
        assert trajectory.turns[0].text.count(thought) == 1


@named(TAKEN)
def test_only_the_protocol_of_a_templates_own_form_is_served(style: Style):
    served = []
    for protocol in TOOL_TURNS:
        try:
            protocol(tokenizer_in(style.name))
        except CheckpointError as error:
            assert "render" in str(error), error
        else:
            served.append(protocol.name)
    assert served == [style.tools] * bool(style.tools)


@named([style for style in STYLES if style.message])
def test_an_unstable_template_is_refused_with_the_reason(style: Style):
    with pytest.raises(CheckpointError) as caught:
        TextOnly(tokenizer_in(style.name))
    assert style.message in str(caught.value)


async def test_llama_may_end_a_call_with_eom():
    tokenizer = tokenizer_in("Llama 3 with python_tag")
    json_call = json.dumps({"name": "code_interpreter", "parameters": {"code": CODE}})
    calls = [f"<|python_tag|>{json_call}<|eom_id|>", f"<|python_tag|>{CODE}<|eom_id|>", f"{json_call}<|eot_id|>"]
    trajectory = await play(tokenizer, PROTOCOLS["llama3"](tokenizer), *calls, "\\boxed{4}<|eot_id|>")
    assert codes_of(trajectory) == [CODE] * 3
    text = tokenizer.decode(trajectory.ledger.response_ids)
    assert text.count("<|eot_id|>") == 5 and text.count("<|eom_id|>") == 2


async def test_mistrals_results_have_the_call_ids_that_the_model_sampled():
    tokenizer = tokenizer_in("Mistral v3: a list of calls")
    call = json.dumps({"name": "code_interpreter", "arguments": {"code": CODE}, "id": "aB3dE6gH9"})
    other = call.replace("aB3dE6gH9", "second001")
    turn = f"[TOOL_CALLS] [{call}, {other}]</s>"
    trajectory = await play(tokenizer, PROTOCOLS["mistral"](tokenizer), turn, " \\boxed{4}</s>")
    text = tokenizer.decode(trajectory.ledger.response_ids)
    assert text.index('"call_id": "aB3dE6gH9"') < text.index('"call_id": "second001"')
    assert len(trajectory.turns[0].results) == 2
    assert mistral_ids("[TOOL_CALLS]f[CALL_ID]aB3dE6gH9[ARGS]{}") == ["aB3dE6gH9"]
    assert mistral_ids("[TOOL_CALLS]f[CALL_ID]aB3dE6gH9[ARGS]{}[TOOL_CALLS]f[ARGS]{}") == [], "one has none"


R1 = "R1-Distill: the prompt opens the thinking block, earlier turns drop it"
QWEN3 = "Qwen3-Thinking: the prompt opens the thinking block"
THOUGHT = {"content": "It is 4.", "reasoning_content": "count"}


@pytest.mark.parametrize(
    ("name", "message"),
    [(R1, THOUGHT), (QWEN3, THOUGHT), (R1, {"content": "<think>\ncount\n</think>\n\nIt is 4."})],
)
def test_thinking_that_the_prompt_opens_is_learnt_from_its_first_word(name: str, message: dict[str, str]):
    tokenizer = tokenizer_in(name)
    turns = turns_of(tokenizer, [QUESTION, {"role": "assistant", **message}], None)
    assert turns == [f"count\n</think>\n\nIt is 4.{tokenizer.eos_token}"]
    question = [QUESTION, {"role": "assistant", "content": "a"}, QUESTION, {"role": "assistant", "content": "b"}]
    with pytest.raises(DataError, match=r"message 3 \(assistant\).*Split the conversation at its user turns"):
        render(question, None, tokenizer)


def test_a_turn_that_the_template_does_not_end_is_ended_by_eos_token():
    tokenizer = tokenizer_in("role names and colons: eos_token ends a turn")
    again = [QUESTION, {"role": "assistant", "content": "4\n\nyes"}, QUESTION, {"role": "assistant", "content": "5"}]
    question = f"user: {QUESTION['content']}\n"
    answers = ["assistant: 4\n\nyes<|endoftext|>", "assistant: 5<|endoftext|>"]
    assert turns_of(tokenizer, again, None) == answers
    whole = "".join(f"{question}{answer}\n" for answer in answers)
    assert tokenizer.decode(render(again, None, tokenizer).token_ids) == whole
