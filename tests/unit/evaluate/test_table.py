"""What people read of an evaluation: every score with its interval, and the matrix."""

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
COUNTS = {each.name: 0 for each in fields(Behavior) if each.default is each.default_factory}  # those without default
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
    values = {"mean@4": "0.4167", "pass@2": "0.5000", "pass@4": "0.6667", "maj@2": "0.4240", "maj@4": "0.4150"}
    assert text.splitlines()[6:11] == [f"| {name} | {value} | 0.000 to 1.000 |" for name, value in values.items()]
    assert "Few problems give wide intervals, here 1.0" in interval_note(report)
    api = {**report, "tool": False, "behavior": {**report["behavior"], "behavior/calls": 0.25}}
    del api["behavior"]["behavior/response_tokens"]
    shown = io.StringIO()
    Console(width=80, file=shown).print(summary_table({"ours": report, "api": api}))
    scores = "0.417 0.667 0.415 0.000 to 1.000 2.00"
    rows = [" ".join(line.split()) for line in shown.getvalue().splitlines()[1:]]
    assert rows == [f"ours on {scores} 1.00 30", f"api off {scores} 0.25 -"]
