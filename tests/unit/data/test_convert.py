"""ReTool-SFT rows, raw and converted, into either protocol, with the stages of verification."""

import copy
import json
from typing import Any

import pytest
from typer.testing import CliRunner

from retool_mcore.cli.data import app
from retool_mcore.data.convert import Conversion, convert_sft
from retool_mcore.data.files import read_jsonl, read_rows, write_parquet
from retool_mcore.data.prompt_format import QUESTION_MARK, RETOOL_INSTRUCTION
from retool_mcore.data.sft import load_sft
from retool_mcore.data.tool import CODE_INTERPRETER
from retool_mcore.data.verify import answer_problem, format_problem
from retool_mcore.errors import DataError
from tests.unit.data.commands import refused, succeed

CODE = "<code>\n```python\nprint(2 + 2)\n```\n</code>"
OUTPUT = "<interpreter>\n4\n</interpreter>"
ANSWER = "<answer>\n\\boxed{4}\n</answer>"
INLINE = f"Let me add.\n{CODE}\n{OUTPUT}\nSo it is four.\n{ANSWER}"
RAW = {
    "messages": [
        {"role": "user", "content": f"Solve it. You may write code.\n\n{QUESTION_MARK}\nWhat is 2 + 2?"},
        {"role": "assistant", "content": INLINE},
    ],
    "answer": "4",
}
CALL = {"type": "function", "function": {"name": "code_interpreter", "arguments": {"code": "print(2 + 2)"}}}
CONVERTED = {
    "messages": [
        {"role": "user", "content": "What is 2 + 2?\nPut your final answer within \\boxed{}."},
        {"role": "assistant", "content": "Let me add.", "tool_calls": [CALL]},
        {"role": "tool", "content": "4"},
        {"role": "assistant", "content": "So it is four.\n\\boxed{4}"},
    ],
    "tools": [CODE_INTERPRETER],
    "answer": "4",
}


async def convert(rows, protocol: Any = "hermes", truth="answer", sandbox=None):
    named = [(f"file, row {index}", row) for index, row in enumerate(rows)]
    return await convert_sft(named, Conversion(protocol, truth, sandbox))


async def test_a_raw_trace_becomes_messages_with_tool_calls():
    report = await convert([RAW])
    assert list(report.rows) == [
        {"messages": CONVERTED["messages"], "tools": [CODE_INTERPRETER], "ground_truth": "4"},
    ]


async def test_a_converted_trace_becomes_the_inline_form_and_back():
    report = await convert([CONVERTED], protocol="retool")
    (row,) = report.rows
    assert row["tools"] is None
    assert row["messages"] == [
        {"role": "user", "content": f"{RETOOL_INSTRUCTION}\n\n{QUESTION_MARK}\nWhat is 2 + 2?"},
        {"role": "assistant", "content": INLINE},
    ]
    again = await convert([{**row, "answer": "4"}])
    assert again.rows[0]["messages"] == CONVERTED["messages"]


@pytest.mark.parametrize(("protocol", "tag"), [("hermes", "</tool_call>"), ("retool", "</code>")])
async def test_code_that_a_rollout_would_cut_is_rejected_with_the_tag(protocol, tag):
    cut, other = (copy.deepcopy(CONVERTED) for _ in range(2))
    cut["messages"][1]["tool_calls"][0]["function"]["arguments"]["code"] = f"print(4, '{tag}')"
    other_tag = "</code>" if protocol == "hermes" else "</tool_call>"
    other["messages"][1]["tool_calls"][0]["function"]["arguments"]["code"] = f"print(4, '{other_tag}')"
    report = await convert([cut, other], protocol=protocol)
    assert [(each["stage"], each["reason"]) for each in report.rejects] == [
        ("format", f"the arguments of call 1 contain {tag}, which would end the call in a rollout")
    ]
    assert len(report.rows) == 1  # the other protocol's tag ends nothing here


@pytest.mark.parametrize(
    "text, reason",
    [
        (f"{CODE}\nHm.\n{OUTPUT}\n{ANSWER}", "<code> is out of place: each call must be code followed by its output"),
        (f"{OUTPUT}\n{ANSWER}", "<interpreter> is out of place"),
        (f"<code>\n{CODE}\n{OUTPUT}\n{ANSWER}", "<code> is out of place"),
        (f"{ANSWER}\n{CODE}\n{OUTPUT}", "<answer> is out of place"),
        (f"{ANSWER}\n{ANSWER}", "<answer> is out of place"),
        ("four", "its last turn has no answer"),
        ("\\boxed{4} or <answer>\\boxed{5}</answer>", "boxes different answers: 4, 5"),
    ],
)
async def test_a_trace_of_the_wrong_form_is_rejected_with_the_reason(text, reason):
    bad = {"messages": [RAW["messages"][0], {"role": "assistant", "content": text}], "answer": "4"}
    report = await convert([bad, RAW])
    (reject,) = report.rejects
    assert (reject["where"], reject["stage"]) == ("file, row 0", "format")
    assert reason in reject["reason"]
    assert report.lines() == [
        "2 rows", "2 after source (0 rejected)", "1 after format (1 rejected)", "1 after answer (0 rejected)",
        "50.00% survived",
        "user turns whose instructions from other data sets are replaced by ours (--as-is keeps them): 1",
    ]  # fmt: skip


async def test_an_answer_that_is_not_the_truth_is_rejected():
    report = await convert([RAW, {**RAW, "answer": "5"}, {**RAW, "answer": "4.0"}])
    assert [reject["where"] for reject in report.rejects] == ["file, row 1"]
    assert report.rejects[0]["reason"] == "its answer '4' is not equivalent to '5'"


async def test_missing_columns_and_nothing_left_are_errors():
    with pytest.raises(DataError, match="file, row 0: no column solution; it has messages, answer"):
        await convert([RAW], truth="solution")
    with pytest.raises(DataError, match="none of 1 rows survived; the first: file, row 0: messages is NoneType"):
        await convert([{"messages": None}])


@pytest.mark.parametrize("protocol", ["hermes", "retool"])
def test_the_command_writes_what_training_reads(tmp_path, tokenizer, protocol):
    source, out, rejects = (tmp_path / name for name in ("in.parquet", "out.parquet", "rejects.jsonl"))
    write_parquet(source, [{**RAW, "tools": None}, {**RAW, "answer": "5", "tools": None}])
    options = ["--out", str(out), "--rejects", str(rejects), "--protocol", protocol, "--truth", "answer"]
    output = succeed("sft", source, *options)
    assert "1 after answer (1 rejected)" in output
    assert len(list(read_jsonl(rejects))) == 1
    (example,) = load_sft(str(out), tokenizer, max_length_tokens=10_000).examples
    spoken = tokenizer.decode([i for i, m in zip(example.token_ids, example.loss_mask, strict=True) if m])
    assert "print(2 + 2)" in spoken
    assert "interpreter>" not in spoken
    assert "What is" not in spoken
    assert len(list(read_rows(out, ("messages", "ground_truth")))) == 1


def test_bad_lines_stop_the_command_or_are_counted_when_asked(tmp_path):
    source, out = tmp_path / "in.jsonl", tmp_path / "out.parquet"
    lines = [json.dumps(RAW).encode(), b'{"dialogue": []}', b'{"messages": "\xff"}']
    source.write_bytes(b"\n".join(lines))
    output = refused("sft", source, "--out", out)
    assert "line 2: no column messages or conversations; it has dialogue" in output.replace("\n", " ")
    output = succeed("sft", source, "--out", out, "--reject-bad")
    assert "3 rows\n1 after source (2 rejected)" in output
    rejects = [row for _, row in read_jsonl(tmp_path / "out.rejects.jsonl")]
    assert [(row["stage"], row["where"]) for row in rejects] == [
        ("source", f"{source}, line 2"),
        ("source", f"{source}, line 3"),
    ]
    source.write_bytes(lines[1])
    output = refused("sft", source, "--out", out, "--reject-bad")
    assert output.count("--messages names the column of the conversation") == 1


@pytest.mark.parametrize(
    ("options", "kept"),
    [((), None), (("--split", "train"), 2), (("--split", "test"), 1)],
    ids=["none", "train", "test"],
)
def test_rows_of_several_splits_are_refused_or_chosen(tmp_path, options: tuple[str, ...], kept: int | None):
    source, out = tmp_path / "in.jsonl", tmp_path / "out.parquet"
    rows = [{**RAW, "split": split} for split in ("train", "test", "train")]
    source.write_text("\n".join(map(json.dumps, rows)))
    result = CliRunner().invoke(app, ["sft", str(source), "--out", str(out), *options])
    if kept is None:
        assert result.exit_code == 2 and not out.exists()
        assert "line 2: a row of split 'test' after rows of 'train'. Choose one with --split" in result.output
    else:
        assert result.exit_code == 0, result.output
        assert len(list(read_rows(out, ("messages",)))) == kept


def test_format_and_answer_problems_have_their_reasons():
    user, answer = {"role": "user", "content": "q"}, {"role": "assistant", "content": "\\boxed{1}"}
    calling = {"role": "assistant", "content": "", "tool_calls": [CALL, CALL]}
    tool = {"role": "tool", "content": "1"}
    assert format_problem([user, calling, tool, tool, answer]) is None
    assert format_problem([{"role": "system", "content": "s"}, user, answer]) is None
    for messages, problem in [
        ([answer], "starts with a turn of role 'assistant'"),
        ([user, user], "message 1 is a user turn instead of an assistant turn"),
        ([user, calling, tool, answer], "2 calls before it have 1 results"),
        ([user, calling, tool, tool], "does not end with an assistant turn without calls"),
        ([user, answer, answer], "message 2 is a second assistant turn in a row"),
    ]:
        assert problem in (format_problem(messages) or "none"), messages
    assert "no answer" in (answer_problem([user, {"role": "assistant", "content": "x"}], "1") or "")
