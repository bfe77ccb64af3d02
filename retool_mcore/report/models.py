"""Table of the models of several runs: initial model, SFT and RL, each with and without the tool.

Each table covers one set of problems, and differences are paired by problem.
"""

import os
from collections.abc import Sequence

from retool_mcore.report.document import Block, ReportSection, Table, Text
from retool_mcore.report.evaluations import BeforeAfter, Evaluation, difference, trained_with_tool
from retool_mcore.report.numbers import share, signed
from retool_mcore.report.record import RunRecord

TITLE = "The models"
START = "start model"


class _Model:
    """A model: its display name, and its evaluations on one set of problems."""

    def __init__(self, name: str, tool: bool, run: bool) -> None:
        self.name, self.trained_with_tool, self.is_rl = name, tool, run
        self.ways: dict[bool, Evaluation] = {}  # key: with the tool?


def models(
    labels: Sequence[str], runs: Sequence[RunRecord], evaluated: Sequence[Sequence[BeforeAfter]]
) -> ReportSection:
    """Section with the evaluations of all trained and initial models, by problem set."""
    sets = sorted({one.key[0] for pairs in evaluated for pair in pairs for one in (pair.before, pair.after) if one})
    blocks: list[Block] = []
    for data in sets:
        found = [each for each in _models(labels, runs, evaluated, data) if each.ways]
        if len(found) < 2:
            continue
        blocks += [Text(text=f"Problems: {data}"), _table(found), *_pairs(found)]
    if not blocks:
        blocks.append(Text(text="No two models have evaluations of the same problems.", quiet=True))
    return ReportSection(title=TITLE, blocks=blocks)


def _models(
    labels: Sequence[str], runs: Sequence[RunRecord], evaluated: Sequence[Sequence[BeforeAfter]], data: str
) -> list[_Model]:
    """Return initial models that no run trained, then the runs' models, SFT before RL."""
    made: dict[str, _Model] = {}
    starts: dict[str, _Model] = {}
    ordered = sorted(zip(labels, runs, evaluated, strict=True), key=lambda each: each[1].kind == "rl")
    for label, run, pairs in ordered:
        mine = _Model(label, trained_with_tool(run), run.kind == "rl")
        for pair in pairs:
            if pair.after is not None and pair.after.key[0] == data:
                mine.ways[pair.after.key[1]] = pair.after
                made[os.path.abspath(pair.after.report["model"])] = mine
            if pair.before is not None and pair.before.key[0] == data:
                path = os.path.abspath(pair.before.report["model"])
                name = f"{START} ({os.path.basename(path)})"
                starts.setdefault(path, _Model(name, True, False)).ways[pair.before.key[1]] = pair.before
    return [*(each for path, each in starts.items() if path not in made), *dict.fromkeys(made.values())]


def _table(found: Sequence[_Model]) -> Table:
    """Table of accuracies. Differences are to the first model with the same tool setting."""
    first: dict[bool, Evaluation] = {}
    rows: list[tuple[str, ...]] = []
    for model in found:
        for tool, one in sorted(model.ways.items(), reverse=True):
            base = first.setdefault(tool, one)
            against = "" if base is one else _words(base, one)
            value, low, high = one.mean
            interval = f"{share(value)} ({share(low)} to {share(high)})"
            rows.append((model.name, _way(tool), str(one.report["problems"]), interval, against))
    head = ("model", "asked", "problems", "accuracy", "against the first")
    return Table(head=head, rows=rows, numbers_from=2)


def _pairs(found: Sequence[_Model]) -> list[Block]:
    """Compare with and without the tool: for each model, and between RL with and without it."""
    rows: list[tuple[str, ...]] = []
    for model in found:
        if model.ways.keys() == {True, False}:
            rows.append((f"{model.name}: text only, then with the tool", _words(model.ways[False], model.ways[True])))
    of_rl = [each for each in found if each.is_rl]
    for text in (each for each in of_rl if not each.trained_with_tool):
        for tool in (each for each in of_rl if each.trained_with_tool):
            if False in text.ways and True in tool.ways:
                words = f"{text.name}, text only, then {tool.name}, with the tool"
                rows.append((words, _words(text.ways[False], tool.ways[True])))
    if not rows:
        return []
    return [Table(head=("tool against text, paired by problem", "difference"), rows=rows)]


def _words(first: Evaluation, second: Evaluation) -> str:
    change = difference(first, second)
    if change is None:
        return "not the same problems"
    return f"{signed(change.difference)} ({signed(change.low)} to {signed(change.high)})"


def _way(tool: bool) -> str:
    return "with the tool" if tool else "text only"
