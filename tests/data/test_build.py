"""From GSM8K's marked calculations to code-integrated traces, with the real sandbox."""

import os
from decimal import Decimal
from pathlib import Path

import pytest

from retool_mcore.data.build import build_gsm8k, matches, parse_gsm8k
from retool_mcore.data.files import read_jsonl, read_rows
from retool_mcore.data.sft import load_sft
from retool_mcore.data.sources import read_source
from retool_mcore.data.verify import Rejected, answer_problem, format_problem
from retool_mcore.errors import DataError
from retool_mcore.sandbox import open_sandbox
from tests.data.commands import refused, succeed

SAMPLE = Path(__file__).parent / "samples" / "gsm8k_60.jsonl"
ROOT = Path(__file__).parents[2]
ANSWER = (
    "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\n"
    "Natalia sold 48+24 = <<48+24=72>>72 clips altogether in April and May.\n#### 72"
)
QUESTION = "How many clips did Natalia sell?"


async def built(*answers: str):
    rows = [
        (f"line {number}", {"question": QUESTION, "answer": answer}) for number, answer in enumerate(answers, start=1)
    ]
    async with open_sandbox("local", min_level="rlimits") as sandbox:
        return await build_gsm8k(rows, sandbox)


async def test_each_calculation_becomes_a_snippet_with_its_real_output():
    report = await built(ANSWER)
    (row,) = report.rows
    assert row["messages"] == [
        {"role": "user", "content": f"{QUESTION}\nPut your final answer within \\boxed{{}}."},
        {"role": "assistant", "content": "Natalia sold 48/2 =", "tool_calls": [call("print(48/2)")]},
        {"role": "tool", "content": "24.0"},
        {
            "role": "assistant",
            "content": "24 clips in May.\nNatalia sold 48+24 =",
            "tool_calls": [call("print(48+24)")],
        },
        {"role": "tool", "content": "72"},
        {"role": "assistant", "content": "72 clips altogether in April and May.\nThe answer is \\boxed{72}."},
    ]
    assert (row["data_source"], row["index"], row["ground_truth"]) == ("openai/gsm8k", 0, "72")


def call(code: str) -> dict:
    return {"type": "function", "function": {"name": "code_interpreter", "arguments": {"code": code}}}


@pytest.mark.parametrize(
    "answer, stage, reason",
    [
        ("It is 72.\n#### 72", "source", "no calculation is marked"),
        ("48+24=<<48+24=72>>72", "source", "no answer line"),
        ("<<48+24=72>>72 and <<4 8=3\n#### 72", "source", "not whole"),
        ("<<48+24=many>>72\n#### 72", "source", "'many' is no number"),
        ("<<exit()=72>>72\n#### 72", "source", "more than arithmetic"),
        ("<<48+=72>>72\n#### 72", "source", "is no expression"),
        ("<<48+24=73>>73\n#### 73", "calculation", "print(48+24) gives 72, and the solution states 73"),
        ("<<48/0=73>>73\n#### 73", "calculation", "ZeroDivisionError"),
        ("<<48+24=72>>72\n#### 73", "answer", "'72' is not equivalent to '73'"),
        ("The \\boxed{7} is <<48+24=72>>72\n#### 72", "format", "gives an answer and makes a call"),
        ("<<48+24=72>>72 </tool_call>\n#### 72", "format", "holds markup as text"),
    ],
)
async def test_what_does_not_survive_is_listed_with_stage_and_reason(answer, stage, reason):
    report = await built(ANSWER, answer, ANSWER)
    assert len(report.rows) == 2
    (reject,) = report.rejects
    assert (reject["where"], reject["stage"], reject["answer"]) == ("line 2", stage, answer)
    assert reason in reject["reason"]
    assert report.lines()[-1] == "66.67% survived"


def test_values_are_compared_to_their_last_stated_digit():
    assert matches("24.0", Decimal("24"))
    assert matches("0.3333333333333333", Decimal("0.33"))
    assert matches("16.666666666666668", Decimal("17"))
    assert matches("16.666666666666668", Decimal("16"))
    assert not matches("16.666666666666668", Decimal("18"))
    assert not matches("0.3333333333333333", Decimal("0.35"))
    assert not matches("Traceback", Decimal("1"))


def test_leading_zeros_of_numbers_are_no_syntax_error():
    assert parse_gsm8k("<<05+1.05=6.05>>6.05\n#### 6.05").steps[0].code == "print(5+1.05)"


def test_the_answer_may_be_named_after_the_last_calculation():
    with pytest.raises(Rejected, match="no calculation"):
        parse_gsm8k("So 20/4 = $5\n#### 5")


async def test_a_last_step_in_words_counts():
    report = await built("She spent 75-55 = $<<75-55=20>>20\nSo it was 20/4 = $1,005\n#### 1,005")
    assert report.rows[0]["messages"][-1]["content"].endswith("\\boxed{1005}.")


async def test_rows_of_another_schema_are_an_error():
    async with open_sandbox("local", min_level="rlimits") as sandbox:
        with pytest.raises(DataError, match="line 3: GSM8K rows have the texts question and answer; here: problem"):
            await build_gsm8k([("line 3", {"problem": "x"})], sandbox)
        with pytest.raises(DataError, match="none of 1 solutions survived"):
            await build_gsm8k([("line 1", {"question": "x", "answer": "y"})], sandbox)


def test_the_command_writes_rows_that_training_reads(tmp_path, tokenizer):
    out, rejects = tmp_path / "sft.parquet", tmp_path / "rejects.jsonl"
    output = succeed("build", "gsm8k", SAMPLE, "--out", out, "--rejects", rejects)
    assert "96.67% survived" in output
    assert [row["stage"] for _, row in read_jsonl(rejects)] == ["source", "answer"]
    data = load_sft(str(out), tokenizer, max_length_tokens=100_000)
    assert len(data.examples) == 58
    for _, row in read_rows(out, ("messages", "ground_truth")):
        assert format_problem(row["messages"]) is None
        assert answer_problem(row["messages"], row["ground_truth"]) is None


def test_a_file_that_is_not_json_lines_is_an_error(tmp_path):
    bad = tmp_path / "bad.jsonl"
    for content, rule in (
        (b"", "no rows"),
        (b"[1]\n", "line 1: list, not an object"),
        (b"\xff\n", "line 1: not JSON: no text"),
    ):
        bad.write_bytes(content)
        options = ["--out", str(tmp_path / "o.parquet"), "--rejects", str(tmp_path / "r")]
        output = refused("build", "gsm8k", bad, *options)
        assert rule in output.replace("\n", " ")


def gsm8k_train() -> Path | None:
    """The whole training set: RETOOL_DATA, or the folder shared/data beside the repository."""
    folder = Path(os.environ.get("RETOOL_DATA", ROOT.parent / "shared" / "data"))
    path = folder / "gsm8k" / "train.jsonl"
    return path if path.is_file() else None


@pytest.mark.slow
@pytest.mark.skipif(gsm8k_train() is None, reason="needs GSM8K: set RETOOL_DATA to a folder with gsm8k/train.jsonl")
async def test_at_least_95_percent_of_gsm8k_survive():
    rows = list(read_source(str(gsm8k_train())))
    async with open_sandbox("local", min_level="rlimits") as sandbox:
        report = await build_gsm8k(rows, sandbox)
    assert len(rows) == 7473
    assert len(report.rows) + len(report.rejects) == 7473
    assert report.survived >= 0.95


def test_format_problems_are_told():
    user, answer = {"role": "user", "content": "q"}, {"role": "assistant", "content": "\\boxed{1}"}
    calling = {"role": "assistant", "content": "", "tool_calls": [call("1"), call("2")]}
    tool = {"role": "tool", "content": "1"}
    assert format_problem([user, calling, tool, tool, answer]) is None
    assert format_problem([{"role": "system", "content": "s"}, user, answer]) is None
    for messages, problem in [
        ([answer], "begins with a turn of role 'assistant'"),
        ([user, user], "message 1 is a user turn, where the assistant's is due"),
        ([user, calling, tool, answer], "2 calls before it have 1 results"),
        ([user, calling, tool, tool], "does not end in an assistant turn without calls"),
        ([user, answer, answer], "message 2 is a second assistant turn in a row"),
        ([user, tool, answer], "a result without a call before it"),
        ([user, {"role": "critic", "content": ""}, answer], "message 1 has role 'critic'"),
        ([user, {"role": "assistant", "content": "1"}], "gives no answer"),
        ([user, {"role": "assistant", "content": "\\boxed{1} \\boxed{2}"}], "boxes different answers: 1, 2"),
    ]:
        assert problem in (format_problem(messages) or "none"), messages
    assert "no answer" in (answer_problem([user, {"role": "assistant", "content": "x"}], "1") or "")
