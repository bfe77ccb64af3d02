"""OpenAI's messages with tool calls and ShareGPT's conversations become the same SFT rows."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from retool_mcore.cli.data import app
from retool_mcore.data.conversations import openai_messages
from retool_mcore.data.files import read_jsonl, read_rows

ASKED = "What is 2 + 2?"
CODE = "print(2 + 2)"
CALL = {"name": "code_interpreter", "arguments": {"code": CODE}}
OPENAI = [
    {"role": "system", "content": "You may call tools."},
    {"role": "user", "content": ASKED},
    {"role": "assistant", "content": "Let me add.", "tool_calls": [
        {"id": "call_1", "type": "function", "function": {**CALL, "arguments": json.dumps(CALL["arguments"])}}]},
    {"role": "tool", "tool_call_id": "call_1", "content": "4"},
    {"role": "assistant", "content": "So it is \\boxed{4}."},
]  # fmt: skip
SHAREGPT = [
    {"from": "system", "value": "You may call tools."},
    {"from": "human", "value": ASKED},
    {"from": "gpt", "value": "Let me add."},
    {"from": "function_call", "value": json.dumps(CALL)},
    {"from": "observation", "value": "4"},
    {"from": "gpt", "value": "So it is \\boxed{4}."},
]
TAGGED = [
    {"from": "human", "value": ASKED},
    {"from": "gpt", "value": f"Let me add.\n<tool_call>\n{json.dumps(CALL)}\n</tool_call>"},
    {"from": "tool", "value": "<tool_response>\n4\n</tool_response>"},
    {"from": "gpt", "value": "So it is \\boxed{4}."},
]
INLINE = [
    {"from": "human", "value": ASKED},
    {"from": "gpt", "value": f"Let me add.\n<code>\n{CODE}\n</code>\n<interpreter>\n4\n</interpreter>\n"
                             "So it is <answer>\\boxed{4}</answer>"},
]  # fmt: skip


def convert(tmp_path, *rows, options=()):
    source, out = tmp_path / "in.jsonl", tmp_path / "out.parquet"
    source.write_text("\n".join(map(json.dumps, rows)))
    result = CliRunner().invoke(app, ["sft", str(source), "--out", str(out), *options])
    return result, [row for _, row in read_rows(out, ("messages", "tools"))] if result.exit_code == 0 else []


@pytest.mark.parametrize(
    "row",
    [
        {"messages": OPENAI},
        {"messages": json.dumps(OPENAI)},
        {"conversations": SHAREGPT},
        {"conversations": TAGGED, "tools": "[]"},
        {"conversations": OPENAI},
    ],
    ids=["OpenAI", "as text", "ShareGPT", "tags", "OpenAI under ShareGPT's name"],
)
def test_each_form_gives_the_same_row(tmp_path, row):
    result, (made,) = convert(tmp_path, {**row, "answer": "4"}, options=("--truth", "answer"))
    assert result.exit_code == 0
    asked, called, told, said = made["messages"]
    assert asked["content"] == f"{ASKED}\nPut your final answer within \\boxed{{}}."
    assert called["content"] == "Let me add."
    assert called["tool_calls"][0]["function"] == CALL
    assert (told["role"], told["content"]) == ("tool", "4")
    assert said["content"] == "So it is \\boxed{4}."


def test_a_raw_trace_under_sharegpts_names_is_read(tmp_path):
    _, (made,) = convert(tmp_path, {"conversations": INLINE})
    assert [turn["role"] for turn in made["messages"]] == ["user", "assistant", "tool", "assistant"]


NUMINA = (
    f"Let me add.\n```python\n{CODE}\n```\n```output\n4\n```\nOnce more.\n```python\nprint('\\n'.join('ab'))\n```\n"
    "```output\na\nb\n```\nSo it is $\\boxed{4}$."
)


def test_an_output_that_markdown_shows_is_a_result_and_no_words_of_the_model(tmp_path):
    _, (made,) = convert(tmp_path, {"messages": [OPENAI[1], {"role": "assistant", "content": NUMINA}]})
    assert [turn["role"] for turn in made["messages"]] == [
        "user",
        "assistant",
        "tool",
        "assistant",
        "tool",
        "assistant",
    ]
    assert [turn["content"] for turn in made["messages"][1:]] == [
        "Let me add.", "4", "Once more.", "a\nb", "So it is $\\boxed{4}$.",
    ]  # fmt: skip
    assert made["messages"][1]["tool_calls"][0]["function"]["arguments"]["code"] == CODE


def test_an_output_without_code_is_a_reject_with_its_reason(tmp_path):
    text = "Running it:\n```output\n4\n```\nSo \\boxed{4}."
    result, _ = convert(tmp_path, {"messages": [OPENAI[1], {"role": "assistant", "content": text}]})
    assert result.exit_code == 2 and "an ```output block is not behind its ```python block" in result.output
    _, (made,) = convert(  # code that shows no output is only shown
        tmp_path,
        {"messages": [OPENAI[1], {"role": "assistant", "content": f"```python\n{CODE}\n```\nSo \\boxed{{4}}."}]},
    )
    assert len(made["messages"]) == 2


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_thoughts_beside_a_turns_text_are_kept(tmp_path, name):
    turns = [*OPENAI[:2], {**OPENAI[2], name: "Two and two."}, OPENAI[3], {**OPENAI[4], name: "Done.\n"}]
    _, (made,) = convert(tmp_path, {"messages": turns})
    assert made["messages"][1]["content"] == "<think>\nTwo and two.\n</think>\n\nLet me add."
    assert made["messages"][-1]["content"] == "<think>\nDone.\n</think>\n\nSo it is \\boxed{4}."
    result, _ = convert(tmp_path, {"messages": [*OPENAI[:4], {**OPENAI[4], name: ["Done."]}]})
    assert result.exit_code == 2 and "the reasoning_content of a message is no text" in result.output


@given(st.permutations([0, 1, 2]))
def test_results_of_parallel_calls_go_to_their_calls(order):
    calls = [{"id": f"c{n}", "function": {"name": "x", "arguments": {"code": str(n)}}} for n in range(3)]
    results = [{"role": "tool", "tool_call_id": f"c{n}", "content": str(n)} for n in range(3)]
    turns = [OPENAI[1], {"role": "assistant", "content": "", "tool_calls": calls}, *(results[n] for n in order)]
    assert openai_messages([*turns, OPENAI[-1]])[2:5] == results


@pytest.mark.parametrize(
    ("turn", "reason"),
    [
        ({"from": "function_call", "value": "print(4)"}, "a tool call without code"),
        ({"from": "function_call", "value": '{"name": "get_weather", "arguments": {"city": "Ulm"}}'}, "without code"),
        ({"from": "gpt", "value": None}, "it does not end in one assistant turn"),
        ({"from": "narrator", "value": "Then."}, "turn 1 is a narrator turn"),
        ({"from": 5, "value": "Then."}, "turn 1 is a 5 turn"),
    ],
)
def test_other_turns_are_rejects_with_the_reason(tmp_path, turn, reason):
    bad = [SHAREGPT[1], turn, {"from": "observation", "value": "4"}, SHAREGPT[-1]]
    result, _ = convert(tmp_path, {"conversations": SHAREGPT}, {"conversations": bad})
    assert result.exit_code == 0, result.output
    ((_, reject),) = read_jsonl(tmp_path / "out.rejects.jsonl")
    assert reason in reject["reason"]


def test_another_column_is_named_and_errors_say_how(tmp_path):
    row = {"dialogue": SHAREGPT, "id": 7}
    refused, _ = convert(tmp_path, row)
    assert refused.exit_code == 2
    assert (
        "line 1: no column messages or conversations; it has dialogue, id. The row: dialogue = [{'from'"
        in refused.output
    )
    assert "--messages names the column of the conversation" in refused.output
    assert len(convert(tmp_path, row, options=("--messages", "dialogue"))[1]) == 1
    typo, _ = convert(tmp_path, row, options=("--messages", "dialog"))
    assert typo.exit_code == 2 and "line 1: no column dialog; it has dialogue, id" in typo.output


@pytest.mark.parametrize("value", [5, "Once upon a time", {"role": "user"}, None, []])
def test_messages_of_another_type_are_one_error_with_the_row(tmp_path, value):
    result, _ = convert(tmp_path, {"messages": value, "note": "n"})
    assert result.exit_code == 2
    assert "none of 1 rows survived; the first: " in result.output
    assert f"Its columns: messages, note. A row: messages = {value!r}" in result.output
    assert "--messages names the column" in result.output or value == []


def test_a_truth_that_is_no_column_is_told_with_the_option(tmp_path):
    result, _ = convert(tmp_path, {"messages": OPENAI, "answer": "4"}, options=("--truth", "nope"))
    assert result.exit_code == 2
    assert (
        "line 1: no column nope; it has messages, answer. --truth names the column of the ground truth" in result.output
    )


def test_openais_other_forms_are_read_and_two_calls_of_one_id_keep_their_results():
    turns = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "2+5"}, {"type": "text", "text": "is?"}]},
        {"role": "assistant", "content": "", "function_call": {"name": "f", "arguments": "{}"}},
        {"role": "function", "content": "7"},
    ]
    read = openai_messages(turns)
    assert [turn["role"] for turn in read] == ["system", "user", "assistant", "tool"]
    assert read[1]["content"] == "2+5\nis?"
    assert read[2]["tool_calls"] == [{"type": "function", "function": {"name": "f", "arguments": "{}"}}]
    calls = [{"id": "a", "function": {}}, {"id": "a", "function": {}}]
    results = [{"role": "tool", "tool_call_id": "a", "content": text} for text in ("1", "2")]
    kept = openai_messages([{"role": "assistant", "tool_calls": calls}, *results])
    assert [turn["content"] for turn in kept[1:]] == ["1", "2"]
