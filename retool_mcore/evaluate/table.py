"""Formats evaluations as a table for the terminal and as ``report.md``.

``report.md`` also lists the result of each sample of each problem.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from retool_mcore.evaluate.stats import sizes

if TYPE_CHECKING:
    from rich.table import Table

KINDS = ("pass", "maj")
FEW_PROBLEMS = 100
MARKS = "# right, . wrong, - without an answer"


def summary_table(reports: Mapping[str, Mapping[str, Any]]) -> Table:
    """A table with one row per evaluation. All evaluations must have the same n."""
    from rich.table import Table

    n = next(iter(reports.values()))["n"]
    table = Table(box=None, padding=(0, 1, 0, 0))  # a row fits one line of 80 columns, except for long names
    scores = [f"mean@{n}", *(f"{kind}@{n}" for kind in KINDS if n > 1)]
    for heading in ("model", "tool", *scores, "95 % of mean", "turns", "calls", "tokens"):
        left = heading == "model"
        table.add_column(heading, justify="left" if left else "right", no_wrap=not left, overflow="fold")
    for name, report in reports.items():
        behavior = report["behavior"]
        table.add_row(
            name,
            "on" if report["tool"] else "off",
            *(f"{report['scores'][score]:.3f}" for score in scores),
            _interval(report["scores"], f"mean@{n}"),
            f"{behavior['behavior/turns']:.2f}",
            f"{behavior['behavior/calls']:.2f}",
            f"{behavior['behavior/response_tokens']:.0f}" if "behavior/response_tokens" in behavior else "-",
        )
    return table


def interval_note(report: Mapping[str, Any]) -> str:
    """A sentence that explains the interval, with a warning if there are few problems."""
    n, scores = report["n"], report["scores"]
    width = scores[f"mean@{n}/high"] - scores[f"mean@{n}/low"]
    if not width:
        return f"All {report['problems']} problems have the same score, so there is no interval over problems."
    wide = (
        f" Few problems give wide intervals, here {width:.3f}: a smaller difference between two models may be chance. "
        "`retool eval compare A B` pairs the problems, which narrows the interval."
        if report["problems"] < FEW_PROBLEMS
        else ""
    )
    all_equal = scores[f"mean@{n}"] in (0.0, 1.0)
    kind = "Wilson" if all_equal else "bootstrap"  # a bootstrap interval of equal scores has width 0
    return f"Intervals are 95 % {kind} intervals over the {report['problems']} problems.{wide}"


def markdown(report: Mapping[str, Any]) -> str:
    """The text of ``report.md``: scores with intervals, behaviour, and one line per problem."""
    return "\n".join(_lines(report)) + "\n"


def _lines(report: Mapping[str, Any]) -> Iterator[str]:
    n, scores = report["n"], report["scores"]
    tool = "with the tool" if report["tool"] else "text only"
    yield f"# {report['model']} on {report['data']}"
    yield f"\n{report['problems']} problems, {n} samples each, protocol {report['protocol']}, {tool}.\n"
    yield "| score | value | 95 % interval |"
    yield "|---|---|---|"
    names = [f"mean@{n}", *(f"{kind}@{size}" for kind in KINDS for size in sizes(n))]
    for name in names:
        yield f"| {name} | {scores[name]:.4f} | {_interval(scores, name)} |"
    yield f"\n{interval_note(report)}\n"
    yield "| behaviour | value |"
    yield "|---|---|"
    for name, value in report["behavior"].items():
        yield f"| {name.removeprefix('behavior/')} | {value:.4g} |"
    yield f"\nEach problem's samples in order ({MARKS}).\n"
    yield "| problem | truth | right | samples |"
    yield "|---|---|---|---|"
    for row in report["per_problem"]:
        truth = row["truth"].replace("|", "\\|").replace("\n", " ")
        yield f"| {row['id']} | {truth:.60} | {sum(row['correct'])}/{n} | `{_marks(row)}` |"


def _marks(row: Mapping[str, Any]) -> str:
    pairs = zip(row["correct"], row["extracted"], strict=True)
    return "".join("#" if right else "-" if extracted is None else "." for right, extracted in pairs)


def _interval(scores: Mapping[str, float], name: str) -> str:
    return f"{scores[f'{name}/low']:.3f} to {scores[f'{name}/high']:.3f}"
