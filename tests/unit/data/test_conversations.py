"""OpenAI's messages with tool calls and ShareGPT's conversations become the same SFT rows."""

import json

import pytest
from typer.testing import CliRunner

from retool_mcore.cli.data import app
from retool_mcore.data.chat import normalised_messages, render
from retool_mcore.data.files import read_jsonl, read_rows, write_parquet
from retool_mcore.data.sft import load_sft
from retool_mcore.data.tool import CODE_INTERPRETER
from retool_mcore.errors import DataError

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
    asked, called, told, said = (turn for turn in made["messages"] if turn["role"] != "system")
    kept = [turn["content"] for turn in made["messages"] if turn["role"] == "system"]
    assert kept == ([] if row.get("conversations") is TAGGED else ["You may call tools."])
    assert asked["content"] == f"{ASKED}\nPut your final answer within \\boxed{{}}."
    assert called["content"] == "Let me add."
    assert called["tool_calls"][0]["function"] == CALL
    assert (told["role"], told["content"]) == ("tool", "4")
    assert said["content"] == "So it is \\boxed{4}."


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
    assert result.exit_code == 2 and "```output is out of place: each call must be code followed by" in result.output
    _, (made,) = convert(  # code that shows no output is only shown
        tmp_path,
        {"messages": [OPENAI[1], {"role": "assistant", "content": f"```python\n{CODE}\n```\nSo \\boxed{{4}}."}]},
    )
    assert len(made["messages"]) == 2


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_thoughts_beside_a_turns_text_are_kept(tmp_path, name):
    turns = [*OPENAI[:2], {**OPENAI[2], name: "Two and two."}, OPENAI[3], {**OPENAI[4], name: "Done.\n"}]
    _, (made,) = convert(tmp_path, {"messages": turns})
    assert made["messages"][2]["content"] == "<think>\nTwo and two.\n</think>\n\nLet me add."
    assert made["messages"][-1]["content"] == "<think>\nDone.\n</think>\n\nSo it is \\boxed{4}."
    result, _ = convert(tmp_path, {"messages": [*OPENAI[:4], {**OPENAI[4], name: ["Done."]}]})
    assert result.exit_code == 2 and f"{name} is ['Done.'], not text" in result.output


@pytest.mark.parametrize(
    ("turn", "reason"),
    [
        ({"from": "function_call", "value": "print(4)"}, "a call without a name"),
        (
            {"from": "function_call", "value": '{"name": "get_weather", "arguments": {"city": "Ulm"}}'},
            "a call of get_weather, but the row declares code_interpreter",
        ),
        (
            {"from": "function_call", "value": '{"name": "code_interpreter", "arguments": {"city": "Ulm"}}'},
            "without code",
        ),
        ({"from": "gpt", "value": None}, "a result without a call before it"),
        ({"from": 5, "value": "Then."}, "message 1 has role 5"),
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


def test_openais_other_forms_are_read_and_two_calls_of_one_id_keep_their_results():
    turns = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "2+5"}, {"type": "text", "text": "is?"}]},
        {"role": "assistant", "content": "", "function_call": {"name": "f", "arguments": "{}"}},
        {"role": "function", "content": "7"},
    ]
    read = normalised_messages(turns)
    assert [turn["role"] for turn in read] == ["system", "user", "assistant", "tool"]
    assert read[1]["content"] == "2+5\nis?"
    assert read[2]["tool_calls"] == [{"type": "function", "function": {"name": "f", "arguments": "{}"}}]
    calls = [{"id": "a", "function": {}}, {"id": "a", "function": {}}]
    results = [{"role": "tool", "tool_call_id": "a", "content": text} for text in ("1", "2")]
    kept = normalised_messages([{"role": "assistant", "tool_calls": calls}, *results])
    assert [turn["content"] for turn in kept[1:]] == ["1", "2"]


LOOKUP = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": "The price of a thing.",
        "parameters": {"type": "object", "properties": {"thing": {"type": "string"}}, "required": ["thing"]},
    },
}


def call_of(call_id: str, name: str, **arguments: object) -> dict:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}


SHOP = [
    {"role": "system", "content": "You are a shop clerk."},
    {"role": "user", "content": "A pen and two boxes?"},
    {"role": "assistant", "content": "Prices first.", "tool_calls": [
        call_of("a", "lookup", thing="pen"), call_of("b", "lookup", thing="box")]},
    {"role": "tool", "tool_call_id": "b", "name": "lookup", "content": "7"},
    {"role": "tool", "tool_call_id": "a", "content": "3"},
    {"role": "assistant", "content": "", "tool_calls": [call_of("c", "code_interpreter", code="print(3 + 2 * 7)")]},
    {"role": "tool", "tool_call_id": "c", "content": "17"},
    {"role": "assistant", "content": "\\boxed{17}"},
]  # fmt: skip


def test_calls_of_own_tools_are_kept_as_they_are_and_trained_on(tmp_path, tokenizer):
    row = {"messages": SHOP, "tools": [LOOKUP, CODE_INTERPRETER], "answer": "17"}
    interpreter_alone = {"messages": OPENAI, "answer": "4"}
    result, (made, other) = convert(tmp_path, row, interpreter_alone, options=("--truth", "answer"))
    assert json.loads(made["tools"]) == [LOOKUP, CODE_INTERPRETER]
    assert [turn["role"] for turn in made["messages"]] == [turn["role"] for turn in SHOP]
    assert made["messages"][0]["content"] == "You are a shop clerk."
    assert [turn["content"] for turn in made["messages"] if turn["role"] == "tool"] == ["3", "7", "17"]
    assert "user turns that get a line asking for a boxed answer (--as-is omits it): 2" in result.output
    assert json.loads(other["tools"]) == [CODE_INTERPRETER], "one column has one type"
    example = load_sft(str(tmp_path / "out.parquet"), tokenizer, 10_000).examples[0]
    whole = tokenizer.decode(list(example.token_ids))
    trained = tokenizer.decode([i for i, m in zip(example.token_ids, example.loss_mask, strict=True) if m])
    assert "The price of a thing." in whole and "shop clerk" in whole
    assert trained.count('"name": "lookup"') == 2 and "print(3 + 2 * 7)" in trained
    assert whole.index('"thing": "pen"') < whole.index('"thing": "box"') < whole.index("3\n") < whole.index("7\n")


def test_as_is_leaves_user_turns_and_no_box_takes_any_answer(tmp_path):
    talk = [*SHOP[:-1], {"role": "assistant", "content": "That is 17."}, {"role": "user", "content": "Thanks."},
            {"role": "assistant", "content": "Welcome."}]  # fmt: skip
    row = {"messages": talk, "tools": [LOOKUP, CODE_INTERPRETER]}
    refused, _ = convert(tmp_path, row)
    assert refused.exit_code == 2 and "--no-box" in refused.output
    result, (made,) = convert(tmp_path, row, options=("--no-box", "--as-is"))
    assert made["messages"][1]["content"] == "A pen and two boxes?"
    assert [turn["content"] for turn in made["messages"][-2:]] == ["Thanks.", "Welcome."]
    assert "get a line" not in result.output
    _, (one,) = convert(tmp_path, {"messages": OPENAI}, options=("--as-is",))
    assert one["messages"][1]["content"] == ASKED


def test_an_interpreter_of_another_name_is_named_or_its_rows_are_rejects(tmp_path):
    python = [{**turn, "tool_calls": [call_of("c", "python", code=CODE)]} if "tool_calls" in turn else turn
              for turn in OPENAI]  # fmt: skip
    python[3] = {**OPENAI[3], "tool_call_id": "c"}
    refused, _ = convert(tmp_path, {"messages": python})
    assert refused.exit_code == 2
    assert "the row declares code_interpreter. If it is the interpreter, add --interpreter python." in refused.output
    other = {**CODE_INTERPRETER, "function": {**CODE_INTERPRETER["function"], "name": "python"}}
    result, (made,) = convert(tmp_path, {"messages": python, "tools": [other]}, options=("--interpreter", "python"))
    assert made["tools"] == [CODE_INTERPRETER]
    assert made["messages"][2]["tool_calls"][0]["function"] == CALL
    assert "calls of python renamed to code_interpreter: 1" in result.output
    assert "rows whose interpreter schema is replaced by the rollout's (--as-is keeps it): 1" in result.output


def test_protocol_retool_has_no_form_for_own_tools(tmp_path):
    row = {"messages": SHOP, "tools": [LOOKUP, CODE_INTERPRETER]}
    refused, _ = convert(tmp_path, row, options=("--protocol", "retool"))
    assert refused.exit_code == 2 and "protocol retool does not support the tools lookup" in refused.output
    _, (made,) = convert(tmp_path, {"messages": OPENAI}, options=("--protocol", "retool"))
    assert [turn["role"] for turn in made["messages"]] == ["system", "user", "assistant"]


@pytest.mark.parametrize("key", ["weight", "loss", "train", "trainable"])
def test_a_turn_that_is_marked_carries_no_loss(tmp_path, tokenizer, key):
    talk = [
        OPENAI[1],
        {"role": "assistant", "content": "It is WRONG.", key: False},
        {"role": "user", "content": "Again."},
        {"role": "assistant", "content": "So \\boxed{4}.", key: 1},
    ]
    _, (made,) = convert(tmp_path, {"messages": talk})
    assert [turn.get("weight") for turn in made["messages"]] == [None, 0, None, 1]
    (example,) = load_sft(str(tmp_path / "out.parquet"), tokenizer, 10_000).examples
    trained = tokenizer.decode([i for i, m in zip(example.token_ids, example.loss_mask, strict=True) if m])
    assert trained == "So \\boxed{4}.<|im_end|>"


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        ({"role": "assistant", "content": "a", "weight": 0.5}, "weight = 0.5. A turn is trained on (1) or not (0)"),
        ({"role": "assistant", "content": "a", "weight": 0, "train": True}, "weight and train contradict each other"),
        ({"role": "user", "content": "a", "trainable": True}, "only assistant turns are trained on"),
        ({"role": "user", "content": "a", "images": [{"bytes": "x"}]}, "the message has images"),
        ({"role": "assistant", "content": "<think>", "prefix": True}, "the message has prefix"),
        ({"role": "user", "content": "a", "name": "bob"}, "name = 'bob' would not reach the model"),
        ({"role": "assistant", "content": "a", "thinking": "b", "reasoning": "c"}, "reasoning and thinking differ"),
        ({"role": "user", "content": "a", "thinking": "b"}, "only an assistant has thinking"),
    ],
)
def test_a_key_that_means_something_is_used_or_refused(message, problem):
    with pytest.raises(DataError) as error:
        normalised_messages([{"role": "user", "content": "x"}, message])
    assert problem in str(error.value)


@pytest.mark.parametrize(
    ("results", "problem"),
    [
        (({"tool_call_id": "a"}, {"tool_call_id": "a"}), "two results have tool_call_id 'a'"),
        (({"tool_call_id": "a"}, {"tool_call_id": "z"}), "a result has tool_call_id 'z', but the calls have 'a', 'b'"),
        (({"tool_call_id": "a"},), "2 calls before it have 1 results"),
        (({}, {}, {}), "a result without a call before it"),
        (({"name": "other"}, {}), "a result has name 'other'"),
    ],
)
def test_results_that_do_not_belong_to_calls_are_refused_in_data_and_in_training(tmp_path, tokenizer, results, problem):
    calls = [call_of("a", "code_interpreter", code="1"), call_of("b", "code_interpreter", code="2")]
    turns = [OPENAI[1], {"role": "assistant", "content": "", "tool_calls": calls},
             *({"role": "tool", "content": "1", **result} for result in results), OPENAI[-1]]  # fmt: skip
    refused, _ = convert(tmp_path, {"messages": turns})
    assert refused.exit_code == 2 and problem in refused.output.replace("\n", " ")
    with pytest.raises(DataError, match=problem):
        render(turns, [CODE_INTERPRETER], tokenizer)


def test_a_conversation_that_the_assistant_begins_is_refused_by_its_row(tmp_path, tokenizer):
    write_parquet(tmp_path / "in.parquet", [{"messages": [OPENAI[-1], OPENAI[1], OPENAI[-1]], "tools": None}])
    with pytest.raises(DataError, match=r"in\.parquet, row 0, column messages: the conversation starts"):
        load_sft(str(tmp_path / "in.parquet"), tokenizer, 10_000)
