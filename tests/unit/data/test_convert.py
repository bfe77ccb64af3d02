"""`retool data sft`: each form of a conversation becomes the same row, and no key is dropped."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from retool_mcore.cli.data import app
from retool_mcore.data.chat import normalised_messages, render
from retool_mcore.data.convert import Conversion, convert_sft, expanded, read_turns
from retool_mcore.data.files import read_jsonl, read_rows
from retool_mcore.data.prompt_format import QUESTION_HEADER, RETOOL_INSTRUCTION
from retool_mcore.data.sft import load_sft
from retool_mcore.data.tool import CODE_INTERPRETER, blocks, tool_call
from retool_mcore.data.verify import answer_problem, format_problem
from retool_mcore.errors import DataError
from tests.unit.data.commands import refused, succeed
from tests.unit.rollout.scripted_engine import Prints

FORMS = {row["name"]: row["value"] for _, row in read_jsonl(Path(__file__).with_name("conversations.jsonl"))}
PROBLEM = "What is 2 + 2?"
CODE = "print(2 + 2)"
FENCED = f"<code>\n```python\n{CODE}\n```\n</code>"
OUTPUT = "<interpreter>\n4\n</interpreter>"
ANSWER = "<answer>\n\\boxed{4}\n</answer>"
INLINE = FORMS["RAW"]["messages"][1]["content"]
RAW, OPENAI, SHAREGPT, TAGGED = (FORMS[name] for name in ("RAW", "OPENAI", "SHAREGPT", "TAGGED"))
SHOP, LOOKUP = FORMS["SHOP"], FORMS["LOOKUP"]
CALL = {"name": "code_interpreter", "arguments": {"code": CODE}}
CONVERTED = {**FORMS["CONVERTED"], "tools": [CODE_INTERPRETER]}
USER = {"role": "user", "content": PROBLEM}
FINAL = {"role": "assistant", "content": "So it is \\boxed{4}."}


async def convert(rows, protocol: Any = "hermes", truth="answer", sandbox=None):
    numbered = [(f"file, row {index}", row) for index, row in enumerate(rows)]
    return await convert_sft(numbered, Conversion(protocol, truth, sandbox))


def convert_file(tmp_path, *rows, options=()):
    """The command's result for a file with these rows, and the rows that it wrote."""
    source, out = tmp_path / "in.jsonl", tmp_path / "out.parquet"
    source.write_text("\n".join(map(json.dumps, rows)))
    result = CliRunner().invoke(app, ["sft", str(source), "--out", str(out), *options])
    return result, [row for _, row in read_rows(out, ("messages", "tools"))] if result.exit_code == 0 else []


def trained_text(tmp_path, tokenizer) -> str:
    """The text with loss in the file that ``convert_file`` wrote."""
    example = load_sft([str(tmp_path / "out.parquet")], tokenizer, 10_000).examples[0]
    return tokenizer.decode([i for i, m in zip(example.token_ids, example.loss_mask, strict=True) if m])


# ------------------------------------------------------- forms of a conversation


@pytest.mark.parametrize(
    "row",
    [
        {"messages": OPENAI},
        {"messages": json.dumps(OPENAI)},
        {"conversations": SHAREGPT},
        {"conversations": TAGGED, "tools": "[]"},
    ],
    ids=["OpenAI", "JSON text", "ShareGPT", "tags"],
)
def test_each_form_gives_the_same_row(tmp_path, row):
    result, (made,) = convert_file(tmp_path, {**row, "answer": "4"}, options=("--truth", "answer"))
    assert result.exit_code == 0
    system = [turn["content"] for turn in made["messages"] if turn["role"] == "system"]
    assert system == ([] if row.get("conversations") is TAGGED else ["You may call tools."])
    user, call, tool, final = (turn for turn in made["messages"] if turn["role"] != "system")
    assert user["content"] == CONVERTED["messages"][0]["content"]
    assert (call["content"], call["tool_calls"][0]["function"]) == ("Let me add.", CALL)
    assert (tool["role"], tool["content"], final["content"]) == ("tool", "4", FINAL["content"])


def test_several_calls_in_a_text_of_sharegpt_are_one_turn():
    other = {"name": "code_interpreter", "arguments": {"code": "print(5)"}}
    text = "\n".join(["Two.", *(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in (CALL, other)), "Wait."])
    results = [{"from": "observation", "value": value} for value in ("4", "5")]
    read = read_turns([SHAREGPT[1], {"from": "gpt", "value": text}, *results, SHAREGPT[-1]])
    calls = [{"type": "function", "function": call} for call in (CALL, other)]
    assert read[1] == {"role": "assistant", "content": "Two.\nWait.", "tool_calls": calls}
    assert [(turn["role"], turn["content"]) for turn in read[2:4]] == [("tool", "4"), ("tool", "5")]


async def test_the_raw_and_the_converted_form_become_each_other():
    report = await convert([RAW])
    assert report.rows == [{"messages": CONVERTED["messages"], "tools": [CODE_INTERPRETER], "ground_truth": "4"}]
    replaced = "user turns whose instructions from other data sets are replaced by ours (--as-is keeps them)"
    assert report.notes == {replaced: 1}
    (row,) = (await convert([CONVERTED], protocol="retool")).rows
    assert row["tools"] is None
    assert row["messages"] == [
        {"role": "user", "content": f"{RETOOL_INSTRUCTION}\n\n{QUESTION_HEADER}\n{PROBLEM}"},
        {"role": "assistant", "content": INLINE},
    ]
    assert (await convert([{**row, "answer": "4"}])).rows[0]["messages"] == CONVERTED["messages"]
    calls = [tool_call(code) for code in ("print(1)", "print(2)")]
    results = [{"role": "tool", "content": text} for text in ("1", "2")]
    both = [USER, {"role": "assistant", "content": "Two.", "tool_calls": calls}, *results, {**FINAL, "weight": 1}]
    runs = [f"<code>\n```python\nprint({n})\n```\n</code>\n<interpreter>\n{n}\n</interpreter>\n" for n in (1, 2)]
    (row,) = (await convert([{"messages": both, "answer": "4"}], protocol="retool")).rows
    text = f"Two.\n{runs[0]}\n{runs[1]}So it is\n{ANSWER}"
    assert row["messages"][1] == {"role": "assistant", "content": text, "weight": 1}
    raw = [RAW["messages"][0], {**RAW["messages"][1], "weight": 1}]
    assert [turn.get("weight") for turn in expanded(raw)] == [None, 1] * 3, "each turn of a weighted trace has it"
    made = await Conversion("retool", as_is=True).row("here", {"messages": OPENAI})
    assert made["messages"][1] == {"role": "user", "content": PROBLEM}


def test_an_output_in_markdown_is_a_result_and_needs_code_before_it(tmp_path):
    text = f"Let me add.\n```python\n{CODE}\n```\n```output\n4\n```\nSo it is $\\boxed{{4}}$."
    _, (made,) = convert_file(tmp_path, {"messages": [USER, {"role": "assistant", "content": text}]})
    assert [(turn["role"], turn["content"]) for turn in made["messages"][1:]] == [
        ("assistant", "Let me add."),
        ("tool", "4"),
        ("assistant", "So it is $\\boxed{4}$."),
    ]
    assert made["messages"][1]["tool_calls"][0]["function"]["arguments"]["code"] == CODE
    text = "Running it:\n```output\n4\n```\nSo \\boxed{4}."
    result, _ = convert_file(tmp_path, {"messages": [USER, {"role": "assistant", "content": text}]})
    assert result.exit_code == 2 and "```output is out of place: each call must be code followed by" in result.output


def test_openais_older_forms_are_read_and_two_calls_with_one_id_keep_their_results():
    turns = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "2+5"}, {"type": "input_text", "text": "is?"}]},
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


def test_the_option_names_another_column_and_the_error_suggests_it(tmp_path):
    row = {"dialogue": SHAREGPT, "id": 7}
    result, _ = convert_file(tmp_path, row)
    assert result.exit_code == 2
    assert "line 1: no column messages or conversations; it has dialogue, id. The row: dialogue" in result.output
    assert "--messages names the column of the conversation" in result.output
    assert len(convert_file(tmp_path, row, options=("--messages", "dialogue"))[1]) == 1


# ------------------------------------------------------- what is kept, changed and counted


def test_calls_of_own_tools_are_kept_and_trained_on(tmp_path, tokenizer):
    row = {"messages": SHOP, "tools": [LOOKUP, CODE_INTERPRETER], "answer": "17"}
    interpreter_only = {"messages": OPENAI, "answer": "4"}
    result, (made, other) = convert_file(tmp_path, row, interpreter_only, options=("--truth", "answer"))
    assert json.loads(made["tools"]) == [LOOKUP, CODE_INTERPRETER]
    assert [turn["role"] for turn in made["messages"]] == [turn["role"] for turn in SHOP]
    assert made["messages"][0]["content"] == "You are a shop clerk."
    assert [turn["content"] for turn in made["messages"] if turn["role"] == "tool"] == ["3", "7", "17"]
    assert "user turns that get a line asking for a boxed answer (--as-is omits it): 2" in result.output
    assert json.loads(other["tools"]) == [CODE_INTERPRETER], "a column has one type"
    trained = trained_text(tmp_path, tokenizer)
    assert trained.count('"name": "lookup"') == 2 and "print(3 + 2 * 7)" in trained
    assert trained.index('"thing": "pen"') < trained.index('"thing": "box"')


def test_the_question_stays_as_it_is_with_as_is_no_box_a_box_in_the_prompt_or_a_second_question(tmp_path):
    own = {**CODE_INTERPRETER, "function": {**CODE_INTERPRETER["function"], "description": "Runs code."}}
    tools = [LOOKUP, own]
    unboxed = [*SHOP[:-1], {"role": "assistant", "content": "That is 17."}]
    several = [*SHOP, {"role": "user", "content": "Sure?"}, SHOP[-1]]
    told = [{"role": "system", "content": "Use \\boxed{}."}, *SHOP[1:]]
    result, _ = convert_file(tmp_path, {"messages": unboxed, "tools": tools})
    assert result.exit_code == 2 and "--no-box" in result.output
    for talk, option in ((unboxed, "--no-box"), (several, "--box"), (told, "--box"), (SHOP, "--as-is")):
        result, (made,) = convert_file(tmp_path, {"messages": talk, "tools": tools}, options=(option,))
        asked = [[turn["content"] for turn in turns if turn["role"] == "user"] for turns in (talk, made["messages"])]
        assert asked[0] == asked[1] and "get a line" not in result.output
        assert json.loads(made["tools"])[1] == (own if option == "--as-is" else CODE_INTERPRETER)


def test_the_option_names_another_interpreter_and_the_error_suggests_it(tmp_path):
    turns = copy.deepcopy(OPENAI)
    turns[2]["tool_calls"][0]["function"]["name"] = "python"
    result, _ = convert_file(tmp_path, {"messages": turns})
    assert result.exit_code == 2
    assert "the tools are code_interpreter. If it is the interpreter, add --interpreter python." in result.output
    schema = {**CODE_INTERPRETER, "function": {**CODE_INTERPRETER["function"], "name": "python"}}
    result, (made,) = convert_file(
        tmp_path, {"messages": turns, "tools": [schema]}, options=("--interpreter", "python")
    )
    assert made["tools"] == [CODE_INTERPRETER]
    assert made["messages"][2]["tool_calls"][0]["function"] == CALL
    assert "calls of python renamed to code_interpreter: 1" in result.output
    assert "rows whose interpreter schema is replaced by the rollout's (--as-is keeps it): 1" in result.output


def test_reasoning_becomes_thoughts_before_the_text(tmp_path):
    turns = [*OPENAI[:4], {**FINAL, "reasoning": "Done.\n"}]
    _, (made,) = convert_file(tmp_path, {"messages": turns})
    assert made["messages"][-1]["content"] == f"<think>\nDone.\n</think>\n\n{FINAL['content']}"
    result, _ = convert_file(tmp_path, {"messages": [*OPENAI[:4], {**FINAL, "reasoning": ["Done."]}]})
    assert result.exit_code == 2 and "reasoning is ['Done.'], not text" in result.output


@pytest.mark.parametrize("key", ["weight", "loss", "train", "trainable"])
def test_a_marked_turn_has_no_loss(tmp_path, tokenizer, key):
    talk = [USER, {"role": "assistant", "content": "It is WRONG.", key: False}, {"role": "user", "content": "Again."},
            {**FINAL, key: 1}]  # fmt: skip
    _, (made,) = convert_file(tmp_path, {"messages": talk})
    assert [turn.get("weight") for turn in made["messages"]] == [None, 0, None, 1]
    assert trained_text(tmp_path, tokenizer) == f"{FINAL['content']}<|im_end|>"


async def test_a_row_with_an_empty_column_of_tools_and_no_calls_offers_none():
    talk = {"messages": [USER, FINAL], "answer": "4"}
    report = await convert(
        [talk, *({**talk, "tools": none} for none in ([], "[]")), {"messages": OPENAI, "tools": [], "answer": "4"}]
    )
    assert [row["tools"] for row in report.rows] == [[CODE_INTERPRETER], None, None, [CODE_INTERPRETER]]


async def test_every_snippet_is_executed_and_its_output_compared():
    report = await convert([CONVERTED, CONVERTED], truth="", sandbox=Prints(["4\n", "4.0", "4\n", "4.1"]))
    (reject,) = report.rejects
    assert (reject["where"], reject["stage"], len(report.rows)) == ("file, row 1", "execution", 1)
    assert reject["reason"] == "call 2 prints '4.1', but the trace shows '4.0'"


# ------------------------------------------------------- what is refused or rejected


def refused_turns(kind: str) -> list[tuple[Any, str]]:
    """What refused_turns.jsonl has of a kind, each with the problem that the error states."""
    rows = [row for _, row in read_jsonl(Path(__file__).with_name("refused_turns.jsonl"))]
    return [(row[kind], row["problem"]) for row in rows if kind in row]


@pytest.mark.parametrize(("message", "problem"), refused_turns("message"))
def test_a_key_with_a_meaning_is_used_or_refused(message, problem):
    with pytest.raises(DataError) as error:
        normalised_messages([{"role": "user", "content": "x"}, message])
    assert problem in str(error.value)


@pytest.mark.parametrize(("results", "problem"), refused_turns("results"))
def test_conversion_and_training_refuse_results_without_their_call(tmp_path, tokenizer, results, problem):
    calls = [{**tool_call("print()"), "id": call_id} for call_id in ("a", "b")]
    turns = [USER, {"role": "assistant", "content": "", "tool_calls": calls},
             *({"role": "tool", "content": "1", **result} for result in results), FINAL]  # fmt: skip
    result, _ = convert_file(tmp_path, {"messages": turns})
    assert result.exit_code == 2 and problem in result.output.replace("\n", " ")
    with pytest.raises(DataError, match=problem):
        render(turns, [CODE_INTERPRETER], tokenizer)


@pytest.mark.parametrize(("turn", "reason"), refused_turns("turn"))
def test_a_row_with_an_unknown_turn_is_rejected_with_the_reason(tmp_path, turn, reason):
    bad = [SHAREGPT[1], turn, {"from": "observation", "value": "4"}, SHAREGPT[-1]]
    result, rows = convert_file(tmp_path, {"conversations": SHAREGPT}, {"conversations": bad})
    assert len(rows) == 1, result.output
    ((_, reject),) = read_jsonl(tmp_path / "out.rejects.jsonl")
    assert reason in reject["reason"] and reject["messages"] == bad


def test_protocol_retool_does_not_support_own_tools(tmp_path):
    row = {"messages": SHOP, "tools": [LOOKUP, CODE_INTERPRETER]}
    result, _ = convert_file(tmp_path, row, options=("--protocol", "retool"))
    assert result.exit_code == 2 and "protocol retool does not support the tools lookup" in result.output
    result, _ = convert_file(tmp_path, {"messages": [*OPENAI, USER, FINAL]}, options=("--protocol", "retool"))
    assert result.exit_code == 2 and "protocol retool does not support several user turns" in result.output


@pytest.mark.parametrize(("protocol", "tag"), [("hermes", "</tool_call>"), ("retool", "</code>")])
async def test_code_with_the_protocols_end_tag_is_rejected(protocol, tag):
    cut, other = (copy.deepcopy(CONVERTED) for _ in range(2))
    cut["messages"][1]["tool_calls"][0]["function"]["arguments"]["code"] = f"print(4, '{tag}')"
    other_tag = "</code>" if protocol == "hermes" else "</tool_call>"
    other["messages"][1]["tool_calls"][0]["function"]["arguments"]["code"] = f"print(4, '{other_tag}')"
    report = await convert([cut, other], protocol=protocol)
    assert [(reject["stage"], reject["reason"]) for reject in report.rejects] == [
        ("format", f"the arguments of call 1 contain {tag}, which would end the call in a rollout")
    ]
    assert len(report.rows) == 1  # the other protocol's tag does not end a call here


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (f"{FENCED}\nHm.\n{OUTPUT}\n{ANSWER}", "<code> is out of place: each call must be code followed by its output"),
        (f"{ANSWER}\n{FENCED}\n{OUTPUT}", "<answer> is out of place"),
        ("four", "its last turn has no answer"),
        ("\\boxed{4} or <answer>\\boxed{5}</answer>", "boxes different answers: 4, 5"),
    ],
)
async def test_a_raw_trace_with_a_wrong_format_is_rejected_and_counted(text, reason):
    report = await convert([{**RAW, "messages": [RAW["messages"][0], {"role": "assistant", "content": text}]}, RAW])
    (reject,) = report.rejects
    assert (reject["where"], reject["stage"]) == ("file, row 0", "format") and reason in reject["reason"]
    assert report.lines()[:5] == [
        "2 rows", "2 after source (0 rejected)", "1 after format (1 rejected)", "1 after answer (0 rejected)",
        "50.00% survived, ignoring exact repeats",
    ]  # fmt: skip


async def test_a_wrong_answer_is_rejected_and_a_missing_column_is_an_error():
    report = await convert([RAW, {**RAW, "answer": "5"}, {**RAW, "answer": "4.0"}])
    assert [(reject["where"], reject["reason"]) for reject in report.rejects] == [
        ("file, row 1", "its answer '4' is not equivalent to '5'")
    ]
    with pytest.raises(DataError, match="file, row 0: no column solution; it has messages, answer"):
        await convert([RAW], truth="solution")
    with pytest.raises(DataError, match="none of 1 rows survived; the first: file, row 0: messages is None, not a"):
        await convert([{"messages": None, "answer": "4"}])


def test_unreadable_lines_stop_the_command_or_are_rejected(tmp_path):
    source, out = tmp_path / "in.jsonl", tmp_path / "out.parquet"
    source.write_bytes(b"\n".join([json.dumps(RAW).encode(), b'{"dialogue": []}', b'{"messages": "\xff"}']))
    assert "line 2: no column messages or conversations" in refused("sft", source, "--out", out).replace("\n", " ")
    assert "3 rows\n1 after source (2 rejected)" in succeed("sft", source, "--out", out, "--reject-bad")
    rejects = [row["where"] for _, row in read_jsonl(tmp_path / "out.rejects.jsonl")]
    assert rejects == [f"{source}, line 2", f"{source}, line 3"]


def test_a_file_with_rows_of_several_splits_needs_a_choice(tmp_path):
    rows = [{**RAW, "split": split} for split in ("train", "test", "train")]
    result, _ = convert_file(tmp_path, *rows)
    assert result.exit_code == 2
    assert "line 2: a row of split 'test' after rows of 'train'. Choose one with --split" in result.output
    assert len(convert_file(tmp_path, *rows, options=("--split", "train"))[1]) == 2


def test_a_format_problem_states_the_message_and_the_rule():
    calling = {"role": "assistant", "content": "", "tool_calls": [CALL, CALL]}
    tool, marked = {"role": "tool", "content": "1"}, {"role": "assistant", "content": "a </tool_response>"}
    assert format_problem([USER, calling, tool, tool, FINAL]) is None
    assert format_problem([USER, {"role": "assistant", "content": "\\boxed{4}, so \\boxed{4}."}]) is None
    for messages, problem in [
        ([USER, USER], "message 1 is a user turn instead of an assistant turn"),
        ([USER, calling, tool, tool, USER, FINAL], "message 4 is a user turn instead of an assistant turn"),
        ([USER, calling, tool], "the last 2 calls have 1 results"),
        ([USER, calling, tool, tool], "it does not end with an assistant turn without calls"),
        ([USER, calling], "it does not end with an assistant turn without calls"),
        ([USER, {**calling, **FINAL}, tool, tool, FINAL], "message 1 has both an answer and a call"),
        ([USER, FINAL, FINAL], "message 2 is a second assistant turn in a row"),
        ([USER, marked, USER, FINAL], "message 1 contains markup as text"),
    ]:
        assert format_problem(messages) == problem
    assert "no answer" in (answer_problem([USER, {"role": "assistant", "content": "x"}], "1") or "")


def test_a_few_words_between_tags_or_in_backticks_are_a_mention():
    def calls(text: str) -> int:
        return len(list(blocks(text, "<c>", "</c>")))

    assert [calls(f"<c>{'a' * chars}</c>") for chars in (40, 41)] == [0, 1]
    assert [calls(f"`{'a' * chars}<c>print(1)</c>`") for chars in (380, 401)] == [0, 1]
