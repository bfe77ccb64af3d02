"""Report sections on evaluations: before and after a run, the models of several runs, validations.

Each table of models covers one set of problems, and differences are paired by problem.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations

from retool_mcore.report.document import Block, ReportSection, Table, Text
from retool_mcore.report.evaluations import BeforeAfter, Evaluation, difference, trained_with_tool
from retool_mcore.report.numbers import share, signed
from retool_mcore.report.record import Row, RunRecord

INTERVALS = (
    "Intervals are 95 % bootstrap intervals over the problems; those of differences are paired by problem. "
    "A difference whose interval contains 0 may be chance."
)
VALIDATIONS = (
    "The run's own validations on held-out problems. The 95 % intervals generalize to other problems like these. All "
    "validations have the same problems, so a difference between two is more certain than the intervals suggest. "
    "`retool eval compare` pairs the problems of two evaluations."
)
Labelled = Sequence[tuple[str, RunRecord]]
Evaluated = Sequence[Sequence[BeforeAfter]]  # of each run


@dataclass(kw_only=True)
class _Model:
    """A model and its evaluations on one set of problems, by whether it had the tool."""

    name: str
    run: RunRecord | None  # that trained it
    evaluations: dict[bool, Evaluation] = field(default_factory=dict[bool, Evaluation])


def before_and_after_section(runs: Labelled, evaluated: Evaluated, notes: Sequence[str]) -> ReportSection:
    """Compare each run's initial and trained model, and its first and last validation."""
    rows: list[tuple[str, ...]] = []
    missing: list[Block] = []
    marked: set[int] = set()
    for (label, _), pairs in zip(runs, evaluated, strict=True):
        if pairs:
            marked.add(len(rows))
        else:
            text = f"{label}: found no evaluation of its export or of its initial model. `retool eval` makes one."
            missing.append(Text(text=text, quiet=True))
        for pair in pairs:
            before, after = _mean(pair.before), _mean(pair.after)
            change = _change(pair.before, pair.after) if pair.before and pair.after else ""
            rows.append((label, pair.newest.description, before, after, change))
    blocks: list[Block] = []
    if rows:
        head = ("run", "problems", "before", "after", "difference")
        blocks.append(Table(head=head, rows=rows, numbers_from=2, marked=frozenset(marked)))
    blocks += missing
    if rows:
        blocks.append(Text(text=INTERVALS, quiet=True))
    blocks += [*_validations(runs), *(Text(text=note, quiet=True) for note in notes)]
    return ReportSection(title="Before and after", blocks=blocks)


def models_section(runs: Labelled, evaluated: Evaluated) -> ReportSection:
    """Show the evaluations of all trained and initial models, by problem set."""
    sets = sorted({pair.newest.key[0] for pairs in evaluated for pair in pairs})
    blocks: list[Block] = []
    for data in sets:
        models = [model for model in _models(runs, evaluated, data) if model.evaluations]
        if len(models) < 2:
            continue
        blocks += [Text(text=f"Problems: {data}"), _table(models)]
        if rows := list(_pairs(models)):
            head = ("paired by problem", "difference", "gained / lost")
            blocks.append(Table(head=head, rows=rows))
            text = "Gained / lost: problems where only the second / first model gets over half of the samples right."
            blocks.append(Text(text=text, quiet=True))
    if not blocks:
        blocks.append(Text(text="No two models have evaluations of the same problems.", quiet=True))
    return ReportSection(title="The models", blocks=blocks)


def _models(runs: Labelled, evaluated: Evaluated, data: str) -> list[_Model]:
    """Return initial models that no run trained, then the runs' models, SFT before RL."""
    trained: dict[str, _Model] = {}
    initial: dict[str, _Model] = {}
    ordered = sorted(zip(runs, evaluated, strict=True), key=lambda each: each[0][1].kind == "rl")
    for (label, run), pairs in ordered:
        own = _Model(name=label, run=run)
        for pair in pairs:
            if pair.after is not None and pair.after.key[0] == data:
                own.evaluations[pair.after.key[1]] = pair.after
                trained[os.path.abspath(pair.after.report["model"])] = own
            if pair.before is not None and pair.before.key[0] == data:
                path = os.path.abspath(pair.before.report["model"])
                start = initial.setdefault(path, _Model(name=f"start model ({os.path.basename(path)})", run=None))
                start.evaluations[pair.before.key[1]] = pair.before
    untrained = [model for path, model in initial.items() if path not in trained]
    return [*untrained, *{id(model): model for model in trained.values()}.values()]


def _table(models: Sequence[_Model]) -> Table:
    """Table of accuracies. Differences are to the first model with the same tool setting."""
    first: dict[bool, Evaluation] = {}
    rows: list[tuple[str, ...]] = []
    for model in models:
        for tool, evaluation in sorted(model.evaluations.items(), reverse=True):
            base = first.setdefault(tool, evaluation)
            change = "" if base is evaluation else _change(base, evaluation)
            rows.append((model.name, evaluation.tool, str(evaluation.report["problems"]), _mean(evaluation), change))
    head = ("model", "tool", "problems", "accuracy", "difference to the first")
    return Table(head=head, rows=rows, numbers_from=2)


def _pairs(models: Sequence[_Model]) -> Iterator[tuple[str, str, str]]:
    """Compare each model without and with the tool, and every two trained models of a kind.

    Two models are compared as each was trained (with or without the tool), then both with and both
    without it.
    """
    for model in models:
        if len(model.evaluations) == 2:
            text, tool = model.evaluations[False], model.evaluations[True]
            yield (f"{model.name}: text only, then with the tool", *_pair(text, tool))
    trained = [(model, model.run) for model in models if model.run is not None]
    for (first, first_run), (second, second_run) in combinations(trained, 2):
        if first_run.kind != second_run.kind:
            continue  # "difference to the first" compares SFT and RL
        as_trained = trained_with_tool(first_run), trained_with_tool(second_run)
        for a, b in dict.fromkeys([as_trained, (True, True), (False, False)]):
            if a in first.evaluations and b in second.evaluations:
                before, after = first.evaluations[a], second.evaluations[b]
                yield (f"{first.name}, {before.tool}, then {second.name}, {after.tool}", *_pair(before, after))


def _pair(first: Evaluation, second: Evaluation) -> tuple[str, str]:
    change = difference(first, second)
    counts = f"{len(change.gained)} / {len(change.lost)}" if change else ""
    return _change(first, second), counts


def _change(first: Evaluation, second: Evaluation) -> str:
    change = difference(first, second)
    if change is None:
        return "different problems"
    return f"{signed(change.difference)} ({signed(change.low)} to {signed(change.high)})"


def _mean(evaluation: Evaluation | None) -> str:
    if evaluation is None:
        return "not evaluated"
    value, low, high = evaluation.mean
    return f"{share(value)} ({share(low)} to {share(high)})"


def validation_rows(run: RunRecord) -> list[Row]:
    return [row for row in run.rows if "val/accuracy" in row]


def _validations(runs: Labelled) -> list[Block]:
    """Table of validation accuracies; empty if no run validated."""
    rows: list[tuple[str, ...]] = []
    for label, run in runs:
        if validations := validation_rows(run):
            best = max(validations, key=lambda row: row["val/accuracy"])
            rows.append((label, *(_validation(row) for row in (validations[0], validations[-1], best))))
    if not rows:
        return []
    head = ("validation accuracy", "first", "last", "best")
    return [Table(head=head, rows=rows), Text(text=VALIDATIONS, quiet=True)]


def _validation(row: Row) -> str:
    low, high = row.get("val/accuracy/low"), row.get("val/accuracy/high")
    interval = "" if low is None or high is None else f" ({share(low)} to {share(high)})"
    return f"step {int(row['step'])}: {share(row['val/accuracy'])}{interval}"
