"""`retool data sft`: each form of a conversation becomes the same row, and no key is dropped."""

import json
from pathlib import Path
from typing import Any

import pytest

from retool_mcore.data.chat import render
from retool_mcore.data.convert import Conversion, convert_sft
from retool_mcore.data.files import read_jsonl, read_rows
from retool_mcore.data.prompt_format import QUESTION_HEADER, RETOOL_INSTRUCTION
from retool_mcore.data.sft import load_sft
from retool_mcore.data.tool import CODE_INTERPRETER, tool_call
from retool_mcore.data.verify import Rejected
from retool_mcore.errors import DataError
from tests.unit.data.commands import refused, succeed
from tests.unit.rollout.scripted_engine import Prints


def table(name: str, having: str) -> list[dict[str, Any]]:
    """The rows of a table beside this file that have this key."""
    return [row for _, row in read_jsonl(Path(__file__).with_name(name)) if having in row]


FORMS = {row["name"]: row["value"] for row in table("conversations.jsonl", "value")}
RAW, OPENAI, SHAREGPT, SHOP, LOOKUP = (FORMS[name] for name in ("RAW", "OPENAI", "SHAREGPT", "SHOP", "LOOKUP"))
INLINE = RAW["messages"][1]["content"]
CONVERTED = {**FORMS["CONVERTED"], "tools": [CODE_INTERPRETER]}
USER = {"role": "user", "content": "What is 2 + 2?"}
FINAL = {"role": "assistant", "content": "So it is \\boxed{4}."}


async def convert(rows, protocol: Any = "hermes", truth="answer", sandbox=None):
    numbered = [(f"file, row {index}", row) for index, row in enumerate(rows)]
    return await convert_sft(numbered, Conversion(protocol, truth, sandbox))


def convert_file(tmp_path, *rows, options=()):
    """The command's output for a file with these rows, and the rows that it wrote."""
    source, out = tmp_path / "in.jsonl", tmp_path / "out.parquet"
    source.write_text("\n".join(map(json.dumps, rows)))
    output = succeed("sft", source, "--out", out, *options).replace("\n", " ")
    return output, [row for _, row in read_rows(out, ("messages", "tools"))]


def trained_text(tmp_path, tokenizer) -> str:
    """The text with loss in the file that ``convert_file`` wrote."""
    example = load_sft([str(tmp_path / "out.parquet")], tokenizer, 10_000).examples[0]
    return tokenizer.decode([i for i, m in zip(example.token_ids, example.loss_mask, strict=True) if m])


@pytest.mark.parametrize("case", table("conversions.jsonl", "made"), ids=lambda case: case["name"])
async def test_a_conversation_becomes_these_turns(case):
    conversion = Conversion(**case.get("options", {}))
    row = {name: case[name] for name in ("messages", "tools") if name in case}
    made = await conversion.row("here", row)
    assert made["messages"] == case["made"]
    functions = [tool["function"] for tool in made["tools"] or ()]
    assert {function["name"]: function["description"] for function in functions} == (case["offers"] or {})
    assert (made["tools"] is None, conversion.notes) == (case["offers"] is None, case["notes"])


async def test_the_raw_and_the_converted_form_become_each_other():
    report = await convert([RAW])
    assert report.rows == [{"messages": CONVERTED["messages"], "tools": [CODE_INTERPRETER], "ground_truth": "4"}]
    (row,) = (await convert([CONVERTED], protocol="retool")).rows
    assert row["tools"] is None
    assert row["messages"] == [
        {"role": "user", "content": f"{RETOOL_INSTRUCTION}\n\n{QUESTION_HEADER}\n{USER['content']}"},
        {"role": "assistant", "content": INLINE},
    ]
    assert (await convert([{**row, "answer": "4"}])).rows[0]["messages"] == CONVERTED["messages"]


def test_calls_of_own_tools_are_kept_and_trained_on(tmp_path, tokenizer):
    row = {"messages": SHOP, "tools": [LOOKUP, CODE_INTERPRETER], "answer": "17"}
    interpreter_only = {"conversations": SHAREGPT, "answer": "4"}
    output, (made, other) = convert_file(tmp_path, row, interpreter_only, options=("--truth", "answer"))
    assert json.loads(made["tools"]) == [LOOKUP, CODE_INTERPRETER]
    assert json.loads(other["tools"]) == [CODE_INTERPRETER], "a column has one type"
    assert "user turns that get a line asking for a boxed answer (--as-is omits it): 2" in output
    trained = trained_text(tmp_path, tokenizer)
    assert trained.count('"name": "lookup"') == 2 and "print(3 + 2 * 7)" in trained
    assert trained.index('"thing": "pen"') < trained.index('"thing": "box"')


@pytest.mark.parametrize("key", ["weight", "loss", "train", "trainable"])
def test_a_marked_turn_has_no_loss(tmp_path, tokenizer, key):
    wrong = {"role": "assistant", "content": "It is WRONG.", key: False}
    talk = [USER, wrong, {"role": "user", "content": "Again."}, {**FINAL, key: 1}]
    _, (made,) = convert_file(tmp_path, {"messages": talk})
    assert [turn.get("weight") for turn in made["messages"]] == [None, 0, None, 1]
    assert trained_text(tmp_path, tokenizer) == f"{FINAL['content']}<|im_end|>"


def test_the_options_reach_the_conversion(tmp_path):
    python = {**CODE_INTERPRETER, "function": {**CODE_INTERPRETER["function"], "name": "python"}}
    call = {"function": {"name": "python", "arguments": '{"code": "print(4)"}'}}
    talk = [USER, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "4"}]
    row = {"talk": [*talk, {"role": "assistant", "content": "Four."}], "tools": [python], "split": "train"}
    other = {"talk": [USER, FINAL], "tools": [], "split": "test"}
    options = ("--messages", "talk", "--split", "train", "--interpreter", "python", "--no-box")
    output, _ = convert_file(tmp_path, row, other, options=options)
    assert "1 after format (0 rejected)" in output
    assert "calls of python renamed to code_interpreter: 1" in output
    _, (made,) = convert_file(tmp_path, CONVERTED, options=("--protocol", "retool"))
    assert made["messages"][-1]["content"] == INLINE
    _, (made,) = convert_file(tmp_path, {"messages": [USER, FINAL]}, options=("--as-is",))
    assert made["messages"][0]["content"] == USER["content"]


async def test_every_snippet_is_executed_and_its_output_compared():
    report = await convert([CONVERTED, CONVERTED], truth="", sandbox=Prints(["4\n", "4.0", "4\n", "4.1"]))
    (reject,) = report.rejects
    assert (reject["where"], reject["stage"], len(report.rows)) == ("file, row 1", "execution", 1)
    assert reject["reason"] == "call 2 prints '4.1', but the trace shows '4.0'"


@pytest.mark.parametrize("case", table("refused_turns.jsonl", "message"), ids=lambda case: case["problem"])
def test_a_message_that_cannot_be_used_whole_is_refused(tokenizer, case):
    with pytest.raises(DataError, match=r"^message 1") as error:
        render([USER, case["message"]], None, tokenizer)
    assert case["problem"] in str(error.value)


@pytest.mark.parametrize("case", table("refused_turns.jsonl", "results"), ids=lambda case: case["problem"])
async def test_conversion_and_training_refuse_results_without_their_call(tokenizer, case):
    calls = [{**tool_call("print()"), "id": call_id} for call_id in ("a", "b")]
    calling = {"role": "assistant", "content": "", "tool_calls": calls}
    turns = [USER, calling, *({"role": "tool", "content": "1", **result} for result in case["results"]), FINAL]
    with pytest.raises(DataError, match=case["problem"]):
        await convert([{"messages": turns}], truth="")
    with pytest.raises(DataError, match=case["problem"]):
        render(turns, [CODE_INTERPRETER], tokenizer)


@pytest.mark.parametrize("case", table("refused_turns.jsonl", "row"), ids=lambda case: case["problem"])
async def test_a_row_of_another_format_is_not_converted(case):
    with pytest.raises((DataError, Rejected)) as error:
        await Conversion(**case.get("options", {})).row("here", case["row"])
    assert case["problem"] in str(error.value)


async def test_rejects_are_named_and_counted_by_stage():
    rows = [RAW, {**RAW, "answer": "5"}, {**RAW, "answer": "4.0"}, {"messages": [USER, USER], "answer": "4"}]
    report = await convert(rows)
    assert [(reject["where"], reject["stage"], reject["reason"]) for reject in report.rejects] == [
        ("file, row 1", "answer", "its answer '4' is not equivalent to '5'"),
        ("file, row 3", "format", "message 1 is a user turn instead of an assistant turn"),
    ]
    assert report.rejects[1]["messages"] == [USER, USER]
    lines = ["4 rows", "4 after source (0 rejected)", "3 after format (1 rejected)", "2 after answer (1 rejected)"]
    assert report.lines()[:5] == [*lines, "50.00% survived, ignoring exact repeats"]
    with pytest.raises(DataError, match="file, row 0: no column solution; it has messages, answer"):
        await convert([RAW], truth="solution")


def test_a_row_without_a_conversation_stops_the_command_or_is_rejected(tmp_path):
    source, out = tmp_path / "in.jsonl", tmp_path / "out.parquet"
    source.write_bytes(b"\n".join([json.dumps(RAW).encode(), b'{"dialogue": []}', b'{"messages": "\xff"}']))
    output = refused("sft", source, "--out", out).replace("\n", " ")
    assert "line 2: no column messages or conversations; it has dialogue" in output
    assert "3 rows\n1 after source (2 rejected)" in succeed("sft", source, "--out", out, "--reject-bad")
    rejects = [row["where"] for _, row in read_jsonl(tmp_path / "out.rejects.jsonl")]
    assert rejects == [f"{source}, line 2", f"{source}, line 3"]
