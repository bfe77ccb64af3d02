"""Which evaluation is before a run and which after it, and how they are paired."""

import os
from pathlib import Path

import pytest

from retool_mcore.errors import DataError
from retool_mcore.evaluate.compare import compare, read_report
from retool_mcore.report.evaluations import all_reports, before_and_after, between_runs
from retool_mcore.report.record import read_run
from tests.unit.report.generated import QUICKSTART, write_evaluation, write_run


def test_the_quickstarts_models_are_found_beside_its_runs_and_paired_by_problem():
    run = read_run(QUICKSTART / "tool_rl")
    reports, notes = all_reports([run], ())
    assert len(reports) == 6 and not notes
    first, second = before_and_after(run, reports)
    assert first.before and first.after and first.before.key[1], "the way of the training comes first"
    assert first.before.path.parent.name == "sft" and first.after.path.parent.name == "tool_rl"
    expected = compare(*(read_report(QUICKSTART / "evaluation" / name) for name in ("sft", "tool_rl")))
    assert first.change == expected and expected.difference > 0.5
    assert second.after and second.after.path.parent.name == "tool_rl_text"


def test_a_run_trained_on_text_is_shown_first_as_it_was_trained():
    run = read_run(QUICKSTART / "text_rl")
    pairs = before_and_after(run, all_reports([run], ())[0])
    assert pairs[0].after and pairs[0].after.path.parent.name == "text_rl_text"


def test_a_model_of_another_run_is_not_taken_for_this_ones(tmp_path: Path):
    run = read_run(write_run(tmp_path / "run"))
    write_evaluation(tmp_path / "eval" / "other", f"{tmp_path}/run2/export", [1, 2])
    write_evaluation(tmp_path / "eval" / "start", "models/start2", [1, 2])
    assert before_and_after(run, all_reports([run], ())[0]) == []


def test_evaluations_of_other_problems_are_told_and_not_compared(tmp_path: Path):
    run = read_run(write_run(tmp_path / "run"))
    write_evaluation(tmp_path / "eval" / "before", "models/start", [1, 2])
    write_evaluation(tmp_path / "eval" / "after", f"{tmp_path}/run/export", [1, 2, 3])
    (pair,) = before_and_after(run, all_reports([run], ())[0])
    assert pair.before and pair.after and pair.change is None


@pytest.mark.parametrize("names", [("a", "b"), ("b", "a")])
def test_the_newest_of_two_evaluations_of_one_model_counts(tmp_path: Path, names: tuple[str, str]):
    run = read_run(write_run(tmp_path / "run"))
    old, new = (write_evaluation(tmp_path / "eval" / name, f"{tmp_path}/run/export", [1, 2]) for name in names)
    for age, folder in ((100, old), (50, new)):
        os.utime(folder / "report.json", (1e9 - age, 1e9 - age))
    (pair,) = before_and_after(run, all_reports([run], ())[0])
    assert pair.after and pair.after.path.parent == new


def test_a_foreign_report_beside_a_run_is_a_note_and_a_named_one_an_error(tmp_path: Path):
    run = read_run(write_run(tmp_path / "run"))
    (tmp_path / "plots").mkdir()
    (tmp_path / "plots" / "report.json").write_text('{"coverage": 1}')
    reports, (note,) = all_reports([run], ())
    assert not reports and "plots/report.json: not a report of `retool eval`" in note
    with pytest.raises(DataError, match="not a report of `retool eval`"):
        all_reports([run], [tmp_path / "plots"])
    with pytest.raises(DataError, match=r"holds no report.json"):
        all_reports([run], [tmp_path / "run"])


def test_a_report_without_scores_is_damaged(tmp_path: Path):
    folder = write_evaluation(tmp_path / "eval", "m", [1])
    text = (folder / "report.json").read_text()
    (folder / "report.json").write_text(text.replace('"scores"', '"marks"'))
    with pytest.raises(DataError, match="lacks its model, n or scores"):
        all_reports([read_run(write_run(tmp_path / "run"))], [folder])


def test_a_folder_named_by_the_user_is_searched_too(tmp_path: Path):
    run = read_run(write_run(tmp_path / "runs" / "run"))
    far = write_evaluation(tmp_path / "far" / "deep" / "after", f"{tmp_path}/runs/run/export", [1, 2])
    assert before_and_after(run, all_reports([run], ())[0]) == []
    (pair,) = before_and_after(run, all_reports([run], [tmp_path / "far"])[0])
    assert pair.after and pair.after.path.parent == far


def test_runs_are_paired_with_runs_of_their_kind_as_trained_and_like_with_like():
    names = ["sft", "tool_rl", "text_rl"]
    runs = [read_run(QUICKSTART / name) for name in names]
    reports, _ = all_reports(runs, ())
    pairings = between_runs(names, [run.kind for run in runs], [before_and_after(run, reports) for run in runs])
    assert {(each.first, each.second) for each in pairings} == {("tool_rl", "text_rl")}
    trained, with_tool, text_only = pairings
    folders = ("tool_rl", "text_rl_text"), ("tool_rl", "text_rl"), ("tool_rl_text", "text_rl_text")
    for found, pair in zip((trained, with_tool, text_only), folders, strict=True):
        assert found.found == compare(*(read_report(QUICKSTART / "evaluation" / name) for name in pair))
    assert "each as it was trained: with the tool, text only" in trained.words
