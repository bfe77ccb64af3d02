"""The paper's inline form: read, stopped exactly at a tag of several tokens, written back."""

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retool_mcore.data.prompt_format import RETOOL_INSTRUCTION
from retool_mcore.platforms.call_end import TABLE, CallEnd
from retool_mcore.platforms.patches_sglang import continue_without_a_tag
from retool_mcore.rollout.protocol import Retool
from retool_mcore.rollout.tool_call import Parsed, code_calls, parse_retool

QUESTION = [{"role": "user", "content": "What is 412 + 967?"}]


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


@pytest.mark.parametrize(("processor", "kept"), [(None, False), ("a processor", True)])
def test_a_request_names_itself_only_to_processors_of_logits(processor: str | None, kept: bool):
    custom = {TABLE: CallEnd.of({"</code>": 1}, "</code>").text, "__req__": "itself"}
    request = SimpleNamespace(sampling_params=SimpleNamespace(custom_params=custom), custom_logit_processor=processor)
    assert continue_without_a_tag(lambda request, accepted: False)(request, [2]) is False
    assert ("__req__" in custom) == kept


def test_the_prompt_explains_the_form_unless_the_row_does(tokenizer):
    retool = Retool(tokenizer)
    assert RETOOL_INSTRUCTION in tokenizer.decode(retool.prompt_ids(QUESTION))
    own = [{"role": "user", "content": "Use code.\n*user question:*\nWhat is 1 + 1?"}]
    assert RETOOL_INSTRUCTION not in tokenizer.decode(retool.prompt_ids(own))
