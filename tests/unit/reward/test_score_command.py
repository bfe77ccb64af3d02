"""`retool score`."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from retool_mcore.cli.main import all_commands
from retool_mcore.data.files import read_jsonl
from tests.unit.reward.slow import SLOW

CASES = [case for _, case in read_jsonl(Path(__file__).with_name("score_rows.jsonl"))]


def run(tmp_path, *rows, options=()):
    """The command's output, and the rows that it wrote; none after an error."""
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(map(json.dumps, rows)))
    result = CliRunner().invoke(all_commands(), ["score", str(source), "--out", str(out), *options])
    assert (result.exit_code, out.exists()) in ((0, True), (2, False)), result.output
    return " ".join(result.output.split()), [row for _, row in read_jsonl(out)] if out.exists() else []


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.get("name") or case["refused"])
def test_a_row_gets_its_columns_or_is_one_error_and_nothing_is_written(tmp_path, case):
    output, scored = run(tmp_path, case["row"], options=case.get("options", ()))
    assert scored == ([case["row"] | case["added"]] if "added" in case else [])
    assert case.get("refused", "") in output


def test_rows_come_back_in_order(tmp_path):
    rows = [
        {"id": n, "response": f"\\boxed{{{n:03d}}}" if n % 3 else "none", "answer": str(n % 5)} for n in range(2000)
    ]
    output, scored = run(tmp_path, *rows)
    assert [row["id"] for row in scored] == list(range(2000))
    assert [row["id"] for row in scored if row["correct"]] == [1, 2, 4]
    assert "2000 rows, 3 correct, 667 without answer, 0 failed checks" in output


def test_a_check_that_timed_out_and_an_empty_truth_are_marked_in_their_rows(tmp_path):
    slow = {"response": rf"\boxed{{{SLOW[0]}}}", "answer": SLOW[1]}
    rows = [slow, {"response": r"\boxed{5}", "answer": " "}, {"response": r"\boxed{\sqrt8}", "answer": r"2\sqrt2"}]
    output, scored = run(tmp_path, *rows, options=("--timeout-s", "0.1"))
    made = [(row["correct"], row["reward"], row["check_failed"]) for row in scored]
    assert made == [(False, -1.0, True), (None, None, False), (True, 1.0, False)]
    assert "line 2: the ground truth is empty" in output
    assert "3 rows, 1 correct, 0 without answer, 1 failed checks, 1 without truth" in output
