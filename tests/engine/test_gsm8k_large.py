"""The large-number variant of GSM8K, with programs that run in the sandbox."""

import re
from concurrent.futures import ThreadPoolExecutor

import pytest

from retool_mcore.data.files import read_jsonl
from retool_mcore.data.sources import read_source
from retool_mcore.data.split import part_of, rows_of_part
from retool_mcore.errors import DataError
from retool_mcore.evaluate.problems import read_problems
from retool_mcore.sandbox import open_sandbox
from tests.unit.data.commands import succeed
from tests.unit.launch.gsm8k import ANSWER, QUESTION, SAMPLE, script

# isort: split
import traces
from large import build, variant


def here(*_: object, **__: object) -> ThreadPoolExecutor:
    """In place of processes, which a test's ``variant`` does not reach."""
    return ThreadPoolExecutor(1)


async def test_each_row_runs_in_the_sandbox_and_one_that_fails_is_rejected(monkeypatch):
    rows = [("line 1", {"question": QUESTION, "answer": ANSWER}), ("line 2", {"question": "x", "answer": "y"})]
    async with open_sandbox("local", min_level="rlimits") as sandbox:
        report = await build(rows, sandbox)
        assert len(report.rows) == 1 and [reject["where"] for reject in report.rejects] == ["line 2"]
        assert report.lines()[-1] == "50.00% survived"
        (built, text) = (await traces.build([("r", report.rows[0])], sandbox)).rows
        assert built["ground_truth"] == report.rows[0]["answer"].rpartition("#### ")[2] and text["tools"] is None
        wrong = variant(QUESTION, ANSWER, 0)
        wrong["answer"] = re.sub(r"#### \d+", "#### 5", wrong["answer"])
        monkeypatch.setattr("large.variant", lambda *_: wrong)
        monkeypatch.setattr("large.ProcessPoolExecutor", here)
        with pytest.raises(DataError, match=r"No variant of 1 passes.*program: answer"):
            await build(rows[:1], sandbox)
        with pytest.raises(DataError, match="No variant of 0 passes"):
            await build([], sandbox)
        with pytest.raises(
            DataError, match="line 3: a GSM8K row has the texts question and answer; this one has problem"
        ):
            await build([("line 3", {"problem": "x"})], sandbox)


async def test_each_draw_has_numbers_of_its_own_and_copies_are_rejected(monkeypatch):
    ann = QUESTION.replace("Natalia", "Ann")
    rows = [("line 1", {"question": QUESTION, "answer": ANSWER}), ("line 2", {"question": ann, "answer": ANSWER})]
    async with open_sandbox("local", min_level="rlimits") as sandbox:
        report = await build(rows, sandbox, seed=1, draws=2)
        assert list(report.rows) == [variant(question, ANSWER, seed) for seed in (1, 2) for question in (QUESTION, ann)]
        one_number = variant(QUESTION, ANSWER, 0)
        monkeypatch.setattr("large.variant", lambda *_: one_number)
        monkeypatch.setattr("large.ProcessPoolExecutor", here)
        report = await build(rows[:1], sandbox, seed=7, draws=3)
    assert list(report.rows) == [one_number]
    assert [reject["reason"].split(":")[1] for reject in report.rejects] == [
        f" seed {seed} draws the numbers of an earlier seed" for seed in (8, 9)
    ]


@pytest.mark.long
def test_the_script_writes_what_the_other_commands_read(tmp_path):
    out, again, x = tmp_path / "large.jsonl", tmp_path / "again.jsonl", tmp_path / "x.parquet"
    output = script("large.py", SAMPLE, "--out", out)
    rows = [row for _, row in read_jsonl(out)]
    rejects = [row for _, row in read_jsonl(tmp_path / "large.rejects.jsonl")]
    assert len(rows) >= 15 and len(rows) + len(rejects) == 60 and f"{len(rows)} rows in" in output
    assert sum(map(int, re.findall(r"(\d+) rejected: ", output))) == len(rejects)
    originals = {row["question"] for _, row in read_jsonl(SAMPLE)}
    assert {row["original_question"] for row in rows} <= originals
    for part in ("sft", "rl"):
        mine = [row for _, row in rows_of_part(read_source(str(out)), part)]
        assert mine and all(part_of(row["original_question"]) == part for row in mine)
    truths = [problem.truth for problem in read_problems([out])]
    assert truths == [row["answer"].rpartition("#### ")[2] for row in rows]
    assert "100.00% survived" in script("traces.py", out, "--part", "sft", "--out", x)
    assert "0 answers that nothing can be compared with" in succeed("rl", out, "--part", "rl", "--out", x)
    script("large.py", SAMPLE, "--out", again, "--draws", "2")
    both = [row for _, row in read_jsonl(again)]
    assert both[: len(rows)] == rows and len(both) >= 2 * len(rows) - 3
    script("large.py", SAMPLE, "--out", again, "--seed", "1")
    other = [row for _, row in read_jsonl(again)]
    assert [row["question"] for row in other] == [row["question"] for row in both[len(rows) :]]
