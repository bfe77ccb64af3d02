"""What people read of an evaluation: every score with its interval, the matrix, and how wide few
problems make it.
"""

import io
from dataclasses import fields
from pathlib import Path
from typing import Any

from rich.console import Console

from retool_mcore.config import load_evaluation
from retool_mcore.evaluate.problems import Problem
from retool_mcore.evaluate.run import Case, CaseSamples, SampleFile, make_report
from retool_mcore.evaluate.table import interval_note, markdown, summary_table
from retool_mcore.rollout.metrics import Behavior

CONFIG = Path(__file__).parents[3] / "configs/rl_tiny_cpu.toml"
COUNTS = {
    field.name: 0 for field in fields(Behavior) if field.default is field.default_factory
}  # those without default
BEHAVIOR = {**COUNTS, "stop_reason": "finished", "turns": 2, "calls": 1, "calls_ok": 1, "response_tokens": 30}


def report_of(tmp_path: Path, *rows: str) -> dict[str, Any]:
    """A finished evaluation; problem i's samples as its string says: # right, . wrong, - without an
    answer.
    """
    samples = SampleFile(tmp_path, {})
    problems = [Problem(id=index, messages=[], truth="|7|" if index == 0 else "7") for index in range(len(rows))]
    for index, row in enumerate(rows):
        for sample, mark in enumerate(row):
            answer = {"#": "7", ".": "8", "-": None}[mark]
            got = {"problem": index, "sample": sample, "correct": mark == "#", "extracted": answer}
            samples.append({**got, "behavior": BEHAVIOR})
    case, config = Case(name="m", model="m"), load_evaluation(CONFIG)
    work = CaseSamples(case=case, config=config, problems=problems, n=len(rows[0]), samples=samples)
    return {"model": "m", "data": "d.jsonl", **make_report(work)}


def test_the_report_has_scores_with_intervals_and_the_matrix(tmp_path: Path):
    report = report_of(tmp_path, "####", "#.-.", "....")
    text = markdown(report)
    assert "| 0 | \\|7\\| | 4/4 | `####` |" in text
    assert "| 1 | 7 | 1/4 | `#.-.` |" in text
    assert "| code_ratio | 1 |" in text
    lines = text.splitlines()
    assert lines[:3] == ["# m on d.jsonl", "", "3 problems, 4 samples each, protocol hermes, with the tool."]
    values = {"mean@4": "0.4167", "pass@2": "0.5000", "pass@4": "0.6667", "maj@2": "0.4240", "maj@4": "0.4150"}
    assert lines[6:11] == [f"| {name} | {value} | 0.000 to 1.000 |" for name, value in values.items()]
    for name in ("mean@4", "best@4", "maj@2", "worst@4", "pass@4"):
        scores = report["scores"]
        assert scores[f"{name}/low"] <= scores[name] <= scores[f"{name}/high"]


def test_a_note_explains_the_wide_interval_of_few_problems(tmp_path: Path):
    few = report_of(tmp_path / "few", *["##", ".."] * 15)
    assert "the 30 problems. Few problems give wide intervals, here 0.3" in interval_note(few)
    none = report_of(tmp_path / "none", *[".."] * 120)
    assert interval_note(none) == "Intervals are 95 % Wilson intervals over the 120 problems."
    many = report_of(tmp_path / "many", *["##", ".."] * 60)
    assert interval_note(many) == "Intervals are 95 % bootstrap intervals over the 120 problems."
    equal = report_of(tmp_path / "equal", "#.", ".#")
    assert interval_note(equal) == "All 2 problems have the same score, so there is no interval over problems."


def test_a_terminal_of_80_columns_shows_the_whole_table(tmp_path: Path):
    report = report_of(tmp_path, "########", "#.-.....", "........")
    text = io.StringIO()
    Console(width=80, file=text).print(summary_table({"a_run_whose_name_is_longer_than_most": report}))
    heads, *rows = text.getvalue().splitlines()
    assert " ".join(heads.split()) == "model tool mean@8 pass@8 maj@8 95 % of mean turns calls tokens"
    assert heads.index("tool") < 30, "a long name is folded, and not the numbers"
    assert rows[0].split()[-1] == "30" and "\N{HORIZONTAL ELLIPSIS}" not in text.getvalue()
    api = {**report, "tool": False, "behavior": {**report["behavior"], "behavior/calls": 0.25}}
    del api["behavior"]["behavior/response_tokens"]
    text = io.StringIO()
    Console(width=80, file=text).print(summary_table({"ours": report, "api": api}))
    scores = "0.375 0.667 0.339 0.000 to 1.000 2.00"
    rows = [" ".join(line.split()) for line in text.getvalue().splitlines()[1:]]
    assert rows == [f"ours on {scores} 1.00 30", f"api off {scores} 0.25 -"]
