"""Finds the evaluations of a run: those of its initial model and those of its trained model.

Searches for report.json files of `retool eval` in the run's folder, in its sibling folders, and in
folders that the user names. A report belongs to a run if its model is the run's ``model.path``
(before) or lies in the run's folder (after).
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
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
    def words(self) -> str:
        tool = "with the tool" if self.key[1] else "text only"
        return f"{self.report['problems']} problems, mean@{self.report['n']}, {tool}"

    @property
    def mean(self) -> tuple[float, float, float]:
        """mean@n, and the lower and upper end of its 95 % interval."""
        scores, name = self.report["scores"], f"mean@{self.report['n']}"
        return scores[name], scores[f"{name}/low"], scores[f"{name}/high"]


@dataclass(frozen=True, kw_only=True)
class BeforeAfter:
    """Evaluations of the initial and the trained model on one problem set, and their difference."""

    before: Evaluation | None
    after: Evaluation | None
    change: Comparison | None


def all_reports(runs: Sequence[RunRecord], named: Sequence[Path]) -> tuple[list[Evaluation], list[str]]:
    """Find all reports in the runs' folders, their sibling folders, and ``named``.

    Also returns a note for each unreadable report. Raises DataError when a path in ``named``
    contains no report or a damaged one.
    """
    found: dict[Path, Evaluation] = {}
    notes: list[str] = []
    for path in named:
        files = [path] if path.is_file() else sorted(_reports_in([path], ("", "*", "*/*")))
        if not files:
            raise DataError(f"{path} holds no {REPORT} of `retool eval`, nor do its folders.")
        found |= {file.resolve(): Evaluation(path=file, report=_whole(file)) for file in files}
    places = [run.path for run in runs], [run.path.absolute().parent for run in runs]
    near = {*_reports_in(places[0], ("*", "*/*")), *_reports_in(places[1], ("*", "*/*"))}
    for file in sorted(near):
        if file.resolve() in found:
            continue
        try:
            found[file.resolve()] = Evaluation(path=file, report=_whole(file))
        except DataError as error:
            notes.append(f"Left out: {error}")
    return list(found.values()), notes


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
        raise DataError(f"{file}: not a report of `retool eval`: it lacks its model, n or scores") from error
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
    pairs = [(before.get(key), after.get(key)) for key in keys]
    return [BeforeAfter(before=b, after=a, change=difference(b, a)) for b, a in pairs]


def trained_with_tool(run: RunRecord) -> bool:
    return bool(run.setting("rollout.tools", [INTERPRETER]) or run.setting("rollout.mcp"))


def _newest(reports: Sequence[Evaluation], is_it: Callable[[str], bool]) -> dict[Key, Evaluation]:
    mine = [each for each in reports if is_it(os.path.abspath(each.report["model"]))]
    return {each.key: each for each in sorted(mine, key=lambda each: each.path.stat().st_mtime)}


def difference(first: Evaluation | None, second: Evaluation | None) -> Comparison | None:
    """Return the paired difference; None if one is missing or the problems differ."""
    if first is None or second is None:
        return None
    try:
        return compare(first.report, second.report)
    except DataError:
        return None


@dataclass(frozen=True, kw_only=True)
class Pairing:
    """Comparison of two runs' models on the same problems."""

    first: str
    second: str
    words: str
    found: Comparison


def between_runs(names: Sequence[str], kinds: Sequence[str], found: Sequence[Sequence[BeforeAfter]]) -> list[Pairing]:
    """Compare every two runs of the same kind on the same problems, paired by problem.

    Compares evaluations with equal keys. Also compares the first evaluations of both runs, each as
    the run was trained, if their keys differ.
    """
    out: list[Pairing] = []
    for one, two in combinations(range(len(names)), 2):
        if kinds[one] != kinds[two]:
            continue  # RL from an SFT model is already covered by before and after
        mine, theirs = ([pair.after for pair in found[each] if pair.after is not None] for each in (one, two))
        alike = [(a, b) for a in mine for b in theirs if a.key == b.key]
        as_trained = [(a, b) for a, b in zip(mine[:1], theirs[:1], strict=False) if a.key != b.key]
        for a, b in [*as_trained, *alike]:
            change = difference(a, b)
            if change is not None:
                words = a.words if a.key == b.key else "each as it was trained: " + f"{_tool(a)}, {_tool(b)}"
                out.append(Pairing(first=names[one], second=names[two], words=words, found=change))
    return out


def _tool(evaluation: Evaluation) -> str:
    return "with the tool" if evaluation.key[1] else "text only"
