"""GSM8K's solutions become programs that run in the sandbox."""

import pytest

from retool_mcore.data.chat import render, render_prompt
from retool_mcore.data.convert import Conversion
from retool_mcore.data.files import read_jsonl, read_rows
from retool_mcore.data.leaks import overlap
from retool_mcore.data.lint import lint_file
from retool_mcore.data.prompt_format import QUESTION_MARK, hermes_prompt
from retool_mcore.data.sft import load_sft
from retool_mcore.data.task_model import build_tokenizer
from retool_mcore.data.tasks import tokenizer_rows
from retool_mcore.data.verify import answer_problem, format_problem
from retool_mcore.errors import DataError
from retool_mcore.rollout.protocol import open_protocol
from retool_mcore.sandbox import open_sandbox
from tests.unit.data.commands import succeed
from tests.unit.launch.gsm8k import ANSWER, QUESTION, SAMPLE, script

# isort: split
from traces import build


async def built(*answers: str, question: str = QUESTION):
    rows = [(f"line {n}", {"question": question, "answer": answer}) for n, answer in enumerate(answers, start=1)]
    async with open_sandbox("local", min_level="rlimits") as sandbox:
        return await build(rows, sandbox)


async def test_a_solution_becomes_one_program_and_a_text_of_the_same_problem():
    tool, text = (await built(ANSWER)).rows
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
        ("<<48+24=72>>72 and <<4 8=3\n#### 72", "source", "is incomplete"),
        ("<<48+24=many>>72\n#### 72", "source", "'many' is not a number"),
        ("<<exit()=72>>72\n#### 72", "source", "not only arithmetic"),
        ("<<48+=72>>72\n#### 72", "source", "is not an expression"),
        ("<<48+24=73>>73\n#### 73", "calculation", "48+24 is not the 73 that the solution states"),
        ("<<48/0=73>>73\n#### 73", "calculation", "48/0 has no value"),
        ("<<48+24=72>>72\n#### 73", "answer", "'72' is not equivalent to '73'"),
        ("The \\boxed{7} is <<48+24=72>>72\n#### 72", "format", "boxes different answers: 7, 72"),
        ("<<48+24=72>>72 </tool_call>\n#### 72", "format", "the program contains </tool_call>"),
        ("clips </code> <<48+24=72>>72\n#### 72", "format", "the program contains </code>"),
    ],
)
async def test_what_does_not_survive_is_listed_with_stage_and_reason(answer, stage, reason):
    report = await built(ANSWER, answer, ANSWER)
    assert report.problems == 2 and len(report.rows) == 4
    (reject,) = report.rejects
    assert (reject["where"], reject["stage"], reject["answer"]) == ("line 2", stage, answer)
    assert reason in reject["reason"]
    assert report.lines()[-1] == "66.67% survived", "of the problems, not of the rows"


async def test_a_program_that_prints_something_else_is_rejected(monkeypatch):
    monkeypatch.setattr("traces.program_of", lambda *_: "print(71)")
    with pytest.raises(DataError, match="prints 71, but the solution states 72"):
        await built(ANSWER)


async def test_a_problem_whose_program_or_text_fails_has_no_row_of_either_form():
    rest = "She spent 75-55 = $<<75-55=20>>20\nSo it was 20/4 = $5\n#### 5"  # the program ends at 20
    report = await built(ANSWER, rest)
    assert [row["index"] for row in report.rows] == [0, 0]
    assert [reject["stage"] for reject in report.rejects] == ["answer"]


async def test_rows_ask_as_rollout_and_evaluation_ask():
    """The prompt's tokens of each form are those of the run that learns from it."""
    tokenizer = build_tokenizer(tokenizer_rows())
    tool, text = (await built(ANSWER)).rows
    asked = [{"role": "user", "content": hermes_prompt(QUESTION)}]
    for protocol, row in (("hermes", tool), ("text", text)):
        wanted = render_prompt(asked, row["tools"], tokenizer)
        rendered = render(row["messages"], row["tools"], tokenizer)
        assert rendered.token_ids[: len(wanted)] == wanted, protocol
    assert open_protocol("hermes", tokenizer, tool=False).prompt_ids(asked) == render_prompt(asked, None, tokenizer)
    assert open_protocol("hermes", tokenizer, tool=True).prompt_ids(asked) == render_prompt(
        asked, tool["tools"], tokenizer
    )


@pytest.mark.parametrize("protocol", ["hermes", "retool"])
async def test_a_text_row_stays_one_in_either_protocol(protocol):
    tool, text = (await built(ANSWER)).rows
    conversion = Conversion(protocol, "ground_truth")
    assert (await conversion.row("row 1", text))["messages"] == text["messages"]
    assert (await conversion.row("row 1", text))["tools"] is None
    made = await conversion.row("row 0", tool)
    assert (QUESTION_MARK in made["messages"][0]["content"]) == (protocol == "retool")
    assert bool(made["tools"]) == (protocol == "hermes")


async def test_rows_of_another_schema_are_an_error():
    async with open_sandbox("local", min_level="rlimits") as sandbox:
        with pytest.raises(
            DataError, match="line 3: a GSM8K row has the texts question and answer; this one has problem"
        ):
            await build([("line 3", {"problem": "x"})], sandbox)
        with pytest.raises(DataError, match="No solution of 1 passes"):
            await build([("line 1", {"question": "x", "answer": "y"})], sandbox)


def test_the_script_writes_rows_that_training_reads(tmp_path):
    out, rejects, rl = tmp_path / "sft.parquet", tmp_path / "rejects.jsonl", tmp_path / "rl.parquet"
    output = script("traces.py", SAMPLE, "--part", "sft", "--out", out, "--rejects", rejects)
    rows = [row for _, row in read_rows(out, ("messages", "tools", "ground_truth"))]
    assert f"{len(rows)} rows in" in output and f"{len(list(read_jsonl(rejects)))} in" in output
    data = load_sft(str(out), build_tokenizer(tokenizer_rows()), max_length_tokens=100_000)
    assert len(data.examples) == len(rows) >= 40
    assert {row["tools"] is None for row in rows} == {True, False}
    for row in rows:
        assert format_problem(row["messages"]) is None
        assert answer_problem(row["messages"], row["ground_truth"]) is None
    succeed("rl", SAMPLE, "--out", rl, "--part", "rl")
    found = [lint_file(str(path), None, None).problems for path in (out, rl)]
    assert overlap(found[0], found[1], ("sft", "rl")).leaked == 0


def test_the_script_says_what_is_wrong_in_one_line(tmp_path):
    assert "no problem is in part sft" in script("traces.py", SAMPLE, "--part", "sft", "--sft-share", "0", "--out",
                                                 tmp_path / "o.parquet", fails=True)  # fmt: skip
    assert ".parquet is written here" in script("traces.py", SAMPLE, "--out", tmp_path / "o.json", fails=True)
    assert "is what is read" in script("large.py", SAMPLE, "--out", SAMPLE, fails=True)
    assert not list(tmp_path.iterdir())
