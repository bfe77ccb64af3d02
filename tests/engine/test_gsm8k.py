"""launch/gsm8k: solutions become programs that run in the sandbox; variants with large numbers."""

import re
from concurrent.futures import ThreadPoolExecutor

import pytest

from retool_mcore.data.files import read_jsonl, read_rows, read_source
from retool_mcore.data.sft import load_sft
from retool_mcore.data.split import rows_of_part
from retool_mcore.data.task_model import build_tokenizer
from retool_mcore.data.tasks import tokenizer_rows
from retool_mcore.data.verify import answer_problem, format_problem
from retool_mcore.errors import DataError
from retool_mcore.sandbox.base import Sandbox
from tests.unit.launch.gsm8k import ANSWER, QUESTION, SAMPLE, script

# isort: split
import traces
from large import build, variant


async def built(sandbox: Sandbox, *answers: str):
    rows = [(f"line {n}", {"question": QUESTION, "answer": answer}) for n, answer in enumerate(answers, start=1)]
    return await traces.build(rows, sandbox)


async def test_a_solution_becomes_one_program_and_a_text_of_the_same_problem(sandbox):
    tool, text = (await built(sandbox, ANSWER)).rows
    code = tool["messages"][1]["tool_calls"][0]["function"]["arguments"]["code"]
    assert code == (
        "# Natalia sold clips in May.\nstep1 = 48/2\n"
        "# Natalia sold clips altogether in April and May.\nstep2 = 48+step1\nprint(round(step2, 2))"
    )
    assert tool["messages"][2]["content"] == "72.0"
    assert tool["messages"][3]["content"] == "The answer is \\boxed{72}."
    assert (tool["data_source"], tool["index"], tool["ground_truth"]) == ("openai/gsm8k", 0, "72")
    assert tool["tools"] and text["tools"] is None
    assert text["messages"][1] == {
        "role": "assistant",
        "content": (
            "Natalia sold 48/2 = 24 clips in May.\nNatalia sold 48+24 = 72 clips altogether in April and May.\n"
            "The answer is \\boxed{72}."
        ),
    }
    assert tool["messages"][0] == text["messages"][0]


@pytest.mark.parametrize(
    "answer, stage, reason",
    [
        ("It is 72.\n#### 72", "source", "no calculation is marked"),
        ("48+24=<<48+24=72>>72", "source", "no answer line"),
        ("<<exit()=72>>72\n#### 72", "source", "not only arithmetic"),
        ("<<48+24=73>>73\n#### 73", "calculation", "48+24 is not the stated 73"),
        ("<<48/0=73>>73\n#### 73", "calculation", "48/0 has no value"),
        ("<<48+24=72>>72\n#### 73", "answer", "'72' is not equivalent to '73'"),
        ("<<48+24=72>>72 </tool_call>\n#### 72", "format", "the program contains </tool_call>"),
        ("clips </code> <<48+24=72>>72\n#### 72", "format", "the program contains </code>"),
    ],
)
async def test_what_does_not_survive_is_listed_with_stage_and_reason(sandbox, answer, stage, reason):
    report = await built(sandbox, ANSWER, answer, ANSWER)
    assert report.problems == 2 and len(report.rows) == 4
    (reject,) = report.rejects
    assert (reject["where"], reject["stage"], reject["answer"]) == ("line 2", stage, answer)
    assert reason in reject["reason"]
    assert report.lines()[-1] == "66.67% survived, ignoring exact repeats", "of the problems, not of the rows"


def test_traces_py_writes_rows_that_training_reads(tmp_path):
    out, rejects = tmp_path / "sft.parquet", tmp_path / "rejects.jsonl"
    script("traces.py", SAMPLE, "--part", "sft", "--out", out, "--rejects", rejects)
    rows = [row for _, row in read_rows(out, ("messages", "tools", "ground_truth"))]
    of_part = list(rows_of_part(read_source(str(SAMPLE)), "sft"))
    assert len(rows) >= 40 and len(rows) / 2 + len(list(read_jsonl(rejects))) == len(of_part) < 60
    assert {row["tools"] is None for row in rows} == {True, False}
    for row in rows:
        assert format_problem(row["messages"]) is None
        assert answer_problem(row["messages"], row["ground_truth"]) is None
    data = load_sft([str(out)], build_tokenizer(tokenizer_rows()), max_length_tokens=100_000)
    assert len(data.examples) == len(rows)


async def test_each_variant_runs_in_the_sandbox_and_one_that_fails_is_rejected(sandbox, monkeypatch):
    rows = [("line 1", {"question": QUESTION, "answer": ANSWER}), ("line 2", {"question": "x", "answer": "y"})]
    report = await build(rows, sandbox)
    assert len(report.rows) == 1 and [reject["where"] for reject in report.rejects] == ["line 2"]
    (built, _) = (await traces.build([("r", report.rows[0])], sandbox)).rows
    assert built["ground_truth"] == report.rows[0]["answer"].rpartition("#### ")[2]
    wrong = variant(QUESTION, ANSWER, 0)
    wrong["answer"] = re.sub(r"#### \d+", "#### 5", wrong["answer"])
    monkeypatch.setattr("large.variant", lambda *_: wrong)
    # In place of processes, which the test's ``variant`` does not reach.
    monkeypatch.setattr("large.ProcessPoolExecutor", lambda *_, **__: ThreadPoolExecutor(1))
    with pytest.raises(DataError, match=r"None of 1 variants passes.*program: answer"):
        await build(rows[:1], sandbox)
