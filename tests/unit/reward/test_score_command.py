"""`retool score`."""

import json

import pytest
from typer.testing import CliRunner

from retool_mcore.cli.main import all_commands
from retool_mcore.data.files import read_jsonl
from tests.unit.reward.slow import SLOW


def run(tmp_path, content: str, *options: str):
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(content, encoding="utf-8", errors="surrogateescape")
    return CliRunner().invoke(all_commands(), ["score", str(source), "--out", str(out), *options]), out


def test_rows_come_back_in_order_with_extracted_correct_and_reward(tmp_path):
    rows = [
        {"id": n, "response": f"\\boxed{{{n:03d}}}" if n % 3 else "none", "answer": str(n % 5)} for n in range(2000)
    ]
    result, out = run(tmp_path, "\n".join(json.dumps(row) for row in rows))
    assert result.exit_code == 0, result.output
    scored = [row for _, row in read_jsonl(out)]
    assert [row["id"] for row in scored] == list(range(2000))
    assert scored[4] == {**rows[4], "extracted": "004", "correct": True, "reward": 1.0, "check_failed": False}
    assert scored[3] == {**rows[3], "extracted": None, "correct": False, "reward": -1.0, "check_failed": False}
    assert scored[7] == {**rows[7], "extracted": "007", "correct": False, "reward": -1.0, "check_failed": False}
    assert "2000 rows, 3 correct, 667 without answer, 0 failed checks" in result.output.replace("\n", " ")


@pytest.mark.parametrize(
    "content, rule",
    [
        ("", "no rows"),
        ('{"response": "x"}', "line 1: no column answer; it has response"),
        ('{"response": 5, "answer": "5"}', "line 1, column response: 5 is not a string"),
        (
            '{"response": "x", "answer": ["5", {}]}',
            "line 1, column answer: the answer is ['5', {}], neither text nor a number",
        ),
        ('{"response": "x", "answer": NaN}', "line 1, column answer: the answer is nan, neither text nor a number"),
        (
            '{"text": "x", "answer": "5"}',
            "no column response; it has text, answer. Set --response to the column",
        ),
        ('{"response": "x", "answer": "5"}\n\udcff', "line 2: not JSON"),
    ],
)
def test_a_bad_line_is_one_error_and_nothing_is_written(tmp_path, content, rule):
    result, out = run(tmp_path, content)
    assert result.exit_code == 2
    assert rule in result.output.replace("\n", " ")
    assert not out.exists()


def test_a_rows_own_columns_are_never_overwritten(tmp_path):
    row = {"response": r"\boxed{1}", "answer": "2", "correct": "by hand", "reward": 0.5}
    result, out = run(tmp_path, json.dumps(row))
    assert result.exit_code == 2
    assert "line 1: the row already has a column correct, reward" in " ".join(result.output.split())
    assert not out.exists()
    result, out = run(tmp_path, json.dumps(row), "--prefix", "score_")
    assert result.exit_code == 0, result.output
    scores = {"score_extracted": "1", "score_correct": False, "score_reward": -1.0, "score_check_failed": False}
    assert [row for _, row in read_jsonl(out)] == [row | scores]


def test_a_check_that_timed_out_is_marked_in_its_row(tmp_path):
    rows = [
        {"response": rf"\boxed{{{SLOW[0]}}}", "answer": SLOW[1]},
        {"response": r"\boxed{\sqrt8}", "answer": r"2\sqrt2"},
    ]
    result, out = run(tmp_path, "\n".join(map(json.dumps, rows)), "--timeout-s", "0.1")
    assert result.exit_code == 0, result.output
    assert [(row["correct"], row["check_failed"]) for _, row in read_jsonl(out)] == [(False, True), (True, False)]
    assert "1 failed checks" in result.output.replace("\n", " ")


def test_a_row_with_an_empty_truth_is_listed_and_the_others_are_judged(tmp_path):
    rows = [{"response": r"\boxed{5}", "answer": answer} for answer in ("5", " ", "6")]
    result, out = run(tmp_path, "\n".join(map(json.dumps, rows)))
    assert result.exit_code == 0, result.output
    assert [(row["correct"], row["reward"]) for _, row in read_jsonl(out)] == [(True, 1.0), (None, None), (False, -1.0)]
    output = " ".join(result.output.split())
    assert "line 2: the ground truth is empty" in output
    assert "3 rows, 1 correct" in output and "1 without truth" in output


@pytest.mark.parametrize(
    ("row", "options"),
    [
        ({"question": "2 + 2?", "answer": "2 + 2 = <<2+2=4>>4\n#### 4"}, ()),
        ({"problem": "2 + 2?", "solution": "It is $\\boxed{4}$."}, ()),
        ({"prompt": [{"role": "user", "content": "2 + 2?"}], "reward_model": {"ground_truth": "4"}}, ()),
        ({"answer": ["4"]}, ()),
        ({"answer": "nothing", "gold": 4.0}, ("--answer", "gold")),
        ({"output": "\\boxed{4}", "answer": "4", "response": "\\boxed{5}"}, ("--response", "output")),
    ],
    ids=["GSM8K", "MATH", "verl", "a list of one", "a named column", "a named response"],
)
def test_the_truth_is_read_where_data_rl_finds_it(tmp_path, row, options):
    result, out = run(tmp_path, json.dumps({"response": "So \\boxed{4}.", **row}), *options)
    assert result.exit_code == 0, result.output
    assert [made["correct"] for _, made in read_jsonl(out)] == [True]


@pytest.mark.parametrize("truth", ["truth", "ground_truth"])
def test_samples_of_an_evaluation_and_trajectories_of_a_run_are_scored(tmp_path, truth):
    turns = [{"text": "Let me see.", "tokens": 3}, {"text": "So \\boxed{4}.", "tokens": 5}]
    rows = [{"turns": turns, "answer": "5", "correct_before": False, truth: "4"}, {"turns": turns, truth: "5"}]
    result, out = run(tmp_path, "\n".join(map(json.dumps, rows)))
    assert result.exit_code == 0, result.output
    assert [made["correct"] for _, made in read_jsonl(out)] == [True, False]
