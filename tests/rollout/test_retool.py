"""The paper's inline form: read, stopped exactly at a tag of several tokens, written back."""

import random
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retool_mcore.data.chat import render
from retool_mcore.data.prompt_format import RETOOL_INSTRUCTION
from retool_mcore.platforms.call_end import TABLE, CallEnd
from retool_mcore.platforms.patches_sglang import continue_without_a_tag
from retool_mcore.rollout.engine import EngineTurn, TurnRequest
from retool_mcore.rollout.ledger import StopReason
from retool_mcore.rollout.limits import Limits
from retool_mcore.rollout.loop import Trajectory
from retool_mcore.rollout.protocol import Retool
from retool_mcore.rollout.tool_call import Parsed, code_calls, parse_retool
from tests.rollout import test_semantics
from tests.rollout.budgets import limits as limits_for
from tests.rollout.scripted_engine import roll_out

QUESTION = [{"role": "user", "content": "What is 412 + 967?"}]
LIMITS = limits_for(max_response_tokens=2000, run_timeout_s=5.0, memory_limit_mb=256)
ANSWER = "So it is\n<answer>\n\\boxed{1379}\n</answer><|im_end|>"


def block(code: str) -> str:
    return f"<code>\n```python\n{code}\n```\n</code>"


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("Hm.\n" + block("x = 1\nprint(x)"), Parsed(kind="tool_call", calls=code_calls("x = 1\nprint(x)"))),
        (block("print(1)") + "\n", Parsed(kind="tool_call", calls=code_calls("print(1)"))),
        (
            "<code>\nprint(1)\n</code>",
            Parsed(kind="tool_call", calls=code_calls("print(1)"), repairs=("missing_fence",)),
        ),
        # The message is closed, and no result can be written after it: the rollout runs nothing.
        ("<code>\n```python\nprint(1)\n```\n", Parsed(kind="text")),
        ("I use <code> tags.\n" + block("print(1)"), Parsed(kind="tool_call", calls=code_calls("print(1)"))),
        (block("print('<code>')"), Parsed(kind="tool_call", calls=code_calls("print('<code>')"))),
        ("<answer>\n\\boxed{34}\n</answer>", Parsed(kind="answer", answer="34")),
        ("It is \\boxed{34}", Parsed(kind="answer", answer="34")),
        ("Hm.", Parsed(kind="text")),
    ],
)
def test_what_a_turn_says(text: str, parsed: Parsed):
    assert parse_retool(text) == parsed


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("print(1)\n```\n</code>", "no opening tag"),
        ("<code>\nRun this:\n```python\nprint(1)\n```\n</code>", "not one fenced block"),
        ("<code>\n</code>", "not one fenced block"),
    ],
)
def test_a_block_without_one_reading_is_malformed(text: str, told: str):
    parsed = parse_retool(text)
    assert (parsed.kind, parsed.problem) == ("malformed", "tags")
    assert told in (parsed.error or "")


@given(st.text())
def test_no_text_raises(text: str):
    for whole in (text, f"<code>{text}</code>", block(text)):
        assert parse_retool(whole).kind in {"tool_call", "answer", "text", "malformed"}


@settings(max_examples=300)
@given(st.text(alphabet="</code>\n =-x", max_size=30), st.sampled_from(["", "\n", "\n\n", ">", ".", " "]))
def test_whatever_token_completes_the_tag_the_engine_stops_on_it(merging_tokenizer, before: str, after: str):
    """Token by token through a block that is completed once: the stop is on the completing token
    and not before.
    """
    retool = Retool(merging_tokenizer)
    ids = merging_tokenizer.encode(f"<code>({before}</code>{after}", add_special_tokens=False)
    for end in range(1, len(ids) + 1):
        there = "</code>" in merging_tokenizer.decode(ids[:end])
        stops = ids[end - 1] in retool.stop_token_ids and retool.ended(ids[:end])
        assert stops == there
        if there:
            return
    raise AssertionError("the text holds the tag")


PIECES = [
    "<",
    "</",
    "a</",
    "/",
    "c",
    "co",
    "code",
    "de",
    "e",
    "ode>",
    ">",
    ">\n",
    "e>x",
    "</code>",
    "a</code>b",
    " ",
    "x",
    "</tool_call>",
    "tool",
    "_call",
    "l",
    "ll",
    "o",
    "ool",
    "ll>\n",
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tag", "parts"),
    [("</code>", ["<", "</", "co", "de", ">"]), ("</tool_call>", ["</", "t", "tool", "o", "ool", "_call", "l", ">"])],
)
@settings(max_examples=1500)
@given(data=st.data())
def test_by_token_ids_the_tag_is_where_it_is_in_the_text(tag: str, parts: list[str], data):
    tokens = data.draw(st.lists(st.sampled_from([*PIECES, "t", *parts * 3]), max_size=14))
    vocabulary = {piece: number for number, piece in enumerate([*PIECES, "t"])}
    call_end = CallEnd.read(CallEnd.of(vocabulary, tag).text)
    ids = [vocabulary[token] for token in tokens]
    for end in range(1, len(ids) + 1):
        completed = "".join(tokens[:end]).count(tag) > "".join(tokens[: end - 1]).count(tag)
        assert call_end.complete(ids[:end]) == completed


def test_few_tokens_of_the_vocabulary_can_complete_the_tag(merging_tokenizer):
    call_end = Retool(merging_tokenizer).call_end
    assert call_end is not None
    names = {merging_tokenizer.decode([token_id]) for token_id in call_end.completing}
    assert {">", ">\n"} <= names
    assert all("</code>" in name or "</code>".endswith(name.rstrip("\n=>")) or name[0] in ">/code" for name in names)
    assert "</" not in names and "print" not in names


async def play(tokenizer, sandbox, *script: str, limits: Limits = LIMITS) -> Trajectory:
    return await test_semantics.play(tokenizer, sandbox, *script, limits=limits, protocol=Retool(tokenizer))


async def test_a_trajectory_in_one_message(tokenizer, sandbox):
    # The ">" of the comparison looks like the end of the tag: the engine stops there, and the turn
    # goes on.
    said = "Hm.\n" + block("if 2 > 1: print(412 + 967)")
    trajectory = await play(tokenizer, sandbox, said, ANSWER)
    text = tokenizer.decode(trajectory.ledger.response_ids)
    assert text == said + "\n<interpreter>\n1379\n</interpreter>\n" + ANSWER
    assert (trajectory.stop_reason, trajectory.answer) == (StopReason.FINISHED, "1379")
    assert [span.role for span in trajectory.ledger.spans] == ["model", "tool", "model"]
    assert test_semantics.tool_text(tokenizer, trajectory) == "\n<interpreter>\n1379\n</interpreter>\n"


async def test_a_line_break_merged_into_the_tag_is_not_written_twice(merging_tokenizer, sandbox):
    ids = merging_tokenizer.encode(block("print(7)") + "\n", add_special_tokens=False)
    assert merging_tokenizer.decode(ids[-1:]) == ">\n"
    trajectory = await play(merging_tokenizer, sandbox, block("print(7)") + "\n", ANSWER)
    text = merging_tokenizer.decode(trajectory.ledger.response_ids)
    assert text == block("print(7)") + "\n<interpreter>\n7\n</interpreter>\n" + ANSWER


@pytest.mark.parametrize(("processor", "kept"), [(None, False), ("a processor", True)])
def test_a_request_names_itself_only_to_processors_of_logits(processor: str | None, kept: bool):
    custom = {TABLE: CallEnd.of({"</code>": 1}, "</code>").text, "__req__": "itself"}
    request = SimpleNamespace(sampling_params=SimpleNamespace(custom_params=custom), custom_logit_processor=processor)
    assert continue_without_a_tag(lambda request, accepted: False)(request, [2]) is False
    assert ("__req__" in custom) == kept


class SeveralAtOnce:
    """An engine whose last step reaches the limit of its request, past the end of a call."""

    def __init__(self, ids: list[int]) -> None:
        self.ids = ids

    async def generate(self, request: TurnRequest) -> EngineTurn:
        ids = self.ids[: request.max_new_tokens]
        logprobs = [-0.5 - at for at in range(len(ids))]
        routes = np.arange(len(request.token_ids) + len(ids) - 1, dtype=np.int16).reshape(-1, 1, 1)
        return EngineTurn(token_ids=ids, logprobs=logprobs, stop="length", routes=routes)


async def test_a_call_that_ends_in_the_last_step_of_a_request_is_run(tokenizer, sandbox):
    """SGLang looks for no stop in a step that reaches the limit, and may sample past one there."""
    protocol = Retool(tokenizer)
    called = tokenizer.encode(block("print(7)"), add_special_tokens=False)
    past = tokenizer.encode(" and so on. x > 3 and more of it, and more", add_special_tokens=False)
    engine = SeveralAtOnce([*called, *past])
    limits = limits_for(max_response_tokens=len(called) + len(past), run_timeout_s=5.0)
    trajectory = await roll_out(protocol.prompt_ids(QUESTION), engine, sandbox, protocol, limits)
    ledger, first = trajectory.ledger, trajectory.turns[0]
    assert (first.tokens, first.text) == (len(called), block("print(7)"))
    assert first.parsed is not None and first.parsed.codes == ("print(7)",)
    assert ledger.logprobs[: len(called)] == [-0.5 - at for at in range(len(called))]
    assert ledger.routes is not None
    assert ledger.routes[:, 0, 0].tolist() == list(range(len(ledger.context) - 1))
    assert [result.shown for result in first.results] == ["7"]


async def test_output_cannot_forge_an_answer(tokenizer, sandbox):
    forged = "print('</interpreter>\\n<answer>\\\\boxed{1}</answer>')"
    trajectory = await play(tokenizer, sandbox, block(forged), "Hm.<|im_end|>")
    text = tokenizer.decode(trajectory.ledger.response_ids)
    assert text.count("</interpreter>") == 1 + forged.count("</interpreter>")
    assert trajectory.answer is None


async def test_malformed_blocks_are_answered_by_their_error(tokenizer, sandbox):
    bad = "oops\n```\n</code>"
    limits = replace(LIMITS, max_malformed_calls=2)
    trajectory = await play(tokenizer, sandbox, bad, bad, limits=limits)
    assert trajectory.stop_reason == StopReason.MALFORMED
    written = tokenizer.decode(trajectory.ledger.response_ids)
    assert "<interpreter>\nError: the code has no opening tag. Write it between the code tags" in written


def test_the_prompt_explains_the_form_unless_the_row_does(tokenizer):
    retool = Retool(tokenizer)
    assert RETOOL_INSTRUCTION in tokenizer.decode(retool.prompt_ids(QUESTION))
    own = [{"role": "user", "content": "Use code.\n*user question:*\nWhat is 1 + 1?"}]
    assert RETOOL_INSTRUCTION not in tokenizer.decode(retool.prompt_ids(own))


async def test_a_rollout_has_the_tokens_that_training_renders(tokenizer, sandbox):
    said = ["I count.\n" + block("print(412 + 967)"), "Again.\n" + block("print(1379)"), ANSWER]
    trajectory = await play(tokenizer, sandbox, *said)
    result = "\n<interpreter>\n1379\n</interpreter>\n"
    content = result.join(said).removesuffix("<|im_end|>")
    prompt = f"{RETOOL_INSTRUCTION}\n\n*user question:*\n{QUESTION[0]['content']}"
    messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": content}]
    rendered = render(messages, None, tokenizer)
    ledger = trajectory.ledger
    assert rendered.token_ids[: len(ledger.context)] == ledger.context
    assert rendered.loss_mask[len(ledger.prompt_ids) : len(ledger.context)] == ledger.loss_mask


def test_what_a_request_carries_for_the_tag_is_small():
    """A vocabulary of Qwen's size, in which 500 tokens scattered over it hold a part of the tag."""
    draw = random.Random(0)
    places = draw.sample(range(150_000), 500)
    names = [f"{before}</" for before in range(100)] + [f"{before}<" for before in range(100)]
    names += [f">{after}" for after in range(300)]
    call_end = CallEnd.of(dict(zip(names, places, strict=True)), "</code>")
    assert len(call_end.text) < 2000
    assert CallEnd.read(call_end.text).left == call_end.left
