"""Two reports: the paired difference, its interval, what flipped, and what cannot be compared."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from retool_mcore.cli.evaluate import app
from retool_mcore.errors import DataError
from retool_mcore.evaluate.compare import Flip, compare, comparison_lines, read_report


def report(*rows: str, truth: str = "7") -> dict[str, Any]:
    """A report whose problem i has samples as its string says: "1101" is three right of four."""
    marks = [[mark == "1" for mark in row] for row in rows]
    return {"per_problem": [{"id": index, "truth": truth, "correct": row} for index, row in enumerate(marks)]}


def test_the_difference_is_paired_and_flips_are_named():
    comparison = compare(report("1111", "1100", "0000", "1110"), report("1111", "1110", "1111", "1000"))
    assert (comparison.first, comparison.second, comparison.problems) == (9 / 16, 12 / 16, 4)
    assert comparison.difference == pytest.approx(3 / 16)
    assert comparison.gained == (
        Flip(id=1, truth="7", first="2/4", second="3/4"),
        Flip(id=2, truth="7", first="0/4", second="4/4"),
    )
    assert comparison.lost == (Flip(id=3, truth="7", first="3/4", second="1/4"),)
    assert comparison.low < 0 < comparison.high


def test_the_interval_is_paired_and_resamples_problems():
    # One of two problems gained: half of the draws contain it once, a quarter never.
    comparison = compare(report("0000", "0000"), report("1111", "0000"))
    assert (comparison.low, comparison.difference, comparison.high) == (0.0, 0.5, 1.0)
    assert list(comparison_lines(comparison)) == [
        "0.000 to 0.500: +0.500, 95 % interval +0.000 to +1.000, paired over 2 problems",
        "The interval contains 0: the difference may be chance.",
        "Only the second solves 1 problems; only the first solves 0.",
        "  + problem 0 (truth 7): 0/4 right, then 4/4",
    ]
    # The difference of each problem is a quarter, whatever its difficulty.
    comparison = compare(report("1000", "1100", "1110"), report("1100", "1110", "1111"))
    assert (comparison.low, comparison.difference, comparison.high) == pytest.approx((0.25, 0.25, 0.25))
    assert "may be chance" not in " ".join(comparison_lines(comparison))


def test_other_problems_are_not_compared():
    with pytest.raises(DataError, match=r"1 are only in the first \(\[1\]\), 0 only in the second"):
        compare(report("1", "1"), report("1"))
    with pytest.raises(DataError, match="the truth of problem 0 is '7' in the first, '8' in the second"):
        compare(report("1"), report("1", truth="8"))


def write(folder: Path, content: Any) -> Path:
    folder.mkdir(parents=True)
    (folder / "report.json").write_text(json.dumps(content))
    return folder


def test_a_user_compares_two_folders_and_an_unreadable_report_is_an_error(tmp_path: Path):
    first = write(tmp_path / "out" / "base", report("1111", "0000", "1000"))
    second = write(tmp_path / "out" / "tuned", report("1111", "1110", "1000"))
    out = tmp_path / "difference.json"
    done = CliRunner().invoke(app, ["compare", str(first), str(second / "report.json"), "--out", str(out)])
    assert done.exit_code == 0 and "+0.250" in done.output, done.output
    written = json.loads(out.read_text())
    assert (written["difference"], written["gained"][0]["id"], written["lost"]) == (0.25, 1, [])
    with pytest.raises(DataError, match="has no per_problem"):
        read_report(write(tmp_path / "number", {"per_problem": [{"id": 1, "truth": "1", "correct": [0.5]}]}))
    with pytest.raises(DataError, match="Name one of its folders with a report: base"):
        read_report(tmp_path / "out")
    only = write(tmp_path / "mine" / "model", report("1111"))
    assert read_report(only.parent) == read_report(only)
