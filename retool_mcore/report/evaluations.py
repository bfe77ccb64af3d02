"""Finds the evaluations of a run: those of its initial model and those of its trained model.

It searches for report.json files of `retool eval` in the run's folder, in its sibling folders, and
in folders that the user names. A report belongs to a run if its model is the run's ``model.path``
(before) or is in the run's folder (after).
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from retool_mcore.config.sampling import INTERPRETER
from retool_mcore.errors import DataError
from retool_mcore.evaluate.compare import REPORT, Comparison, compare, read_report
from retool_mcore.report.record import RunRecord

Key = tuple[str, bool]  # the problem files; whether the tool was available


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """One report of `retool eval`."""

    path: Path
    report: dict[str, Any]

    @property
    def key(self) -> Key:
        return str(self.report.get("data", "")), bool(self.report.get("tool"))

    @property
    def tool(self) -> str:
        return "with the tool" if self.key[1] else "text only"

    @property
    def description(self) -> str:
        return f"{self.report['problems']} problems, mean@{self.report['n']}, {self.tool}"

    @property
    def mean(self) -> tuple[float, float, float]:
        """mean@n, and the lower and upper end of its 95 % interval."""
        scores, name = self.report["scores"], f"mean@{self.report['n']}"
        return scores[name], scores[f"{name}/low"], scores[f"{name}/high"]


@dataclass(frozen=True, kw_only=True)
class BeforeAfter:
    """Evaluations of the initial and the trained model on one problem set; at least one of them."""

    before: Evaluation | None
    after: Evaluation | None

    @property
    def newest(self) -> Evaluation:
        newest = self.after or self.before
        assert newest is not None, "a pair has at least one evaluation"
        return newest


def all_reports(runs: Sequence[RunRecord], named: Sequence[Path]) -> tuple[list[Evaluation], list[str]]:
    """Find all reports in the runs' folders, their sibling folders, and ``named``.

    Also returns a note for each unreadable report. Raises DataError when a path in ``named``
    contains no report or a damaged one.
    """
    reports: dict[Path, Evaluation] = {}
    notes: list[str] = []
    for path in named:
        files = [path] if path.is_file() else sorted(_reports_in([path], ("", "*", "*/*")))
        if not files:
            raise DataError(f"Neither {path} nor its folders contain a {REPORT} of `retool eval`.")
        reports |= {file.resolve(): Evaluation(path=file, report=_whole(file)) for file in files}
    places = [run.path for run in runs], [run.path.absolute().parent for run in runs]
    near = {*_reports_in(places[0], ("*", "*/*")), *_reports_in(places[1], ("*", "*/*"))}
    for file in sorted(near):
        if file.resolve() in reports:
            continue
        try:
            reports[file.resolve()] = Evaluation(path=file, report=_whole(file))
        except DataError as error:
            notes.append(f"Omitted: {error}")
    return list(reports.values()), notes


def _reports_in(folders: Iterable[Path], patterns: Sequence[str]) -> Iterator[Path]:
    for folder in folders:
        for pattern in patterns:
            yield from folder.glob(f"{pattern}/{REPORT}" if pattern else REPORT)


def _whole(file: Path) -> dict[str, Any]:
    """Read a report, and check that it has the fields used here. Raises DataError."""
    report = read_report(file)
    try:
        mean = Evaluation(path=file, report=report).mean
        assert all(isinstance(value, float) for value in mean) and isinstance(report["model"], str)
        assert isinstance(report["problems"], int)
    except (KeyError, TypeError, AssertionError) as error:
        raise DataError(f"{file} is not a report of `retool eval`: model, n or scores are missing") from error
    return report


def before_and_after(run: RunRecord, reports: Sequence[Evaluation]) -> list[BeforeAfter]:
    """Pair the evaluations before and after the run by problem set and tool.

    Pairs that match how the run was trained (with or without the tool) come first.
    """
    own = {os.path.abspath(run.path), os.path.abspath(os.path.join(str(run.setting("run.root", "runs")), run.name))}
    starts_from = os.path.abspath(str(run.setting("model.path", "")))
    before = _newest(reports, lambda model: model == starts_from)
    after = _newest(reports, lambda model: any(model.startswith(f"{folder}{os.sep}") for folder in own))
    keys = sorted({*before, *after}, key=lambda key: (key[1] != trained_with_tool(run), key[0]))
    return [BeforeAfter(before=before.get(key), after=after.get(key)) for key in keys]


def trained_with_tool(run: RunRecord) -> bool:
    return bool(run.setting("rollout.tools", [INTERPRETER]) or run.setting("rollout.mcp"))


def _newest(reports: Sequence[Evaluation], is_it: Callable[[str], bool]) -> dict[Key, Evaluation]:
    mine = [evaluation for evaluation in reports if is_it(os.path.abspath(evaluation.report["model"]))]
    mine.sort(key=lambda evaluation: evaluation.path.stat().st_mtime)
    return {evaluation.key: evaluation for evaluation in mine}


def difference(first: Evaluation, second: Evaluation) -> Comparison | None:
    """Return the difference paired by problem; None if the problems differ."""
    try:
        return compare(first.report, second.report)
    except DataError:
        return None
