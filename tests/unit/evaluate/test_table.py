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
    assert "| mean@4 | 0.4167 | " in text
    assert [name for name in ("maj@2", "maj@4", "pass@2", "pass@4") if f"| {name} | " not in text] == []
    assert "| 0 | \\|7\\| | 4/4 | `####` |" in text
    assert "| 1 | 7 | 1/4 | `#.-.` |" in text
    assert "| code_ratio | 1 |" in text
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


def test_a_terminal_of_80_columns_shows_the_whole_table(tmp_path: Path):
    report = report_of(tmp_path, "########", "#.-.....", "........")
    text = io.StringIO()
    Console(width=80, file=text).print(summary_table({"a_run_whose_name_is_longer_than_most": report}))
    heads, *rows = text.getvalue().splitlines()
    assert " ".join(heads.split()) == "model tool mean@8 pass@8 maj@8 95 % of mean turns calls tokens"
    assert heads.index("tool") < 30, "a long name is folded, and not the numbers"
    assert rows[0].split()[-1] == "30" and "\N{HORIZONTAL ELLIPSIS}" not in text.getvalue()
