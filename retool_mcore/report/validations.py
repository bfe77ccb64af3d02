"""A run's own validations: the first and the last, with intervals, several runs side by side."""

from retool_mcore.report.document import Block, Table, Text
from retool_mcore.report.numbers import share
from retool_mcore.report.record import Row, RunRecord

NOTE = (
    "By the run itself, on its own held-out problems. Intervals are 95 %, for other problems of the kind; those of two "
    "validations are of the same problems, so a difference is surer than they look: `retool eval` pairs them."
)


def validated(run: RunRecord) -> list[Row]:
    return [row for row in run.rows if "val/accuracy" in row]


def with_interval(row: Row) -> str:
    low, high = row.get("val/accuracy/low"), row.get("val/accuracy/high")
    interval = "" if low is None or high is None else f" ({share(low)} to {share(high)})"
    return f"{share(row['val/accuracy'])}{interval}"


def validations(labelled: list[tuple[str, RunRecord]]) -> list[Block]:
    """A table of the runs that validated; nothing if none did."""
    found = [(label, validated(run)) for label, run in labelled]
    rows = [
        (label, *(f"step {int(row['step'])}: {with_interval(row)}" for row in (each[0], each[-1])), _best(each))
        for label, each in found
        if each
    ]
    if not rows:
        return []
    return [
        Table(head=("validation's accuracy", "first", "last", "best"), rows=rows),
        Text(text=NOTE, quiet=True),
    ]


def _best(rows: list[Row]) -> str:
    best = max(rows, key=lambda row: row["val/accuracy"])
    return f"step {int(best['step'])}: {share(best['val/accuracy'])}"
