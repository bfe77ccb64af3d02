"""Where a run's hours went, from its first start to its newest step, several runs side by side."""

from math import isfinite

from retool_mcore.report.document import Block, Table, Text
from retool_mcore.report.numbers import duration
from retool_mcore.report.record import Row, RunRecord

OUTSIDE = ("time_step_s", "time_start_s")  # sums of other phases
LEFT = "lost to kills, between starts, or not recorded"
SMALL = 0.005  # of the whole; smaller ones are told as one
CLOCKS = 0.001  # of the whole, by which two clocks may differ
NOTE = "From the first start to the newest step. What a kill took and a resume repeated is in the row of lost time."


def spent(run: RunRecord) -> dict[str, float]:
    """Seconds by what they went to, largest first, starts at the head; {} without any recorded."""
    rows = [row for row in run.rows if row["step"] > 0]
    names = {name for row in rows for name in row if is_phase(name)}
    sums = {_words(name): sum(row.get(name, 0.0) for row in rows) for name in names}
    sums = {name: value for name, value in sums.items() if isfinite(value)}
    if not sums:
        return {}
    starts_s = sum(row.get("time_start_s", 0.0) for row in rows)
    left_s = max(0.0, _wall_s(rows) - starts_s - sum(sums.values()))
    whole = starts_s + sum(sums.values()) + left_s
    large = {name: value for name, value in sums.items() if value >= SMALL * whole}
    found = {"starts": starts_s} | dict(sorted(large.items(), key=lambda item: -item[1]))
    found |= {"smaller phases": sum(sums.values()) - sum(large.values()), LEFT: left_s}
    return {name: value for name, value in found.items() if value > (CLOCKS * whole if name == LEFT else 0)}


def is_phase(name: str) -> bool:
    """Whether a metric is the seconds of one phase of a step, and no sum of others."""
    return name.startswith("time_") and name not in OUTSIDE and "/" not in name


def _words(name: str) -> str:
    return name.removeprefix("time_").removesuffix("_s").replace("_", " ")


def _wall_s(rows: list[Row]) -> float:
    """From the start that made the first row to the last one."""
    first, last = rows[0], rows[-1]
    if "unix_s" not in first or "unix_s" not in last:
        return 0.0
    own_s = sum(value for name, value in first.items() if is_phase(name) or name == "time_start_s")
    return last["unix_s"] - first["unix_s"] + own_s


def time_table(labelled: list[tuple[str, RunRecord]]) -> list[Block]:
    """One column for each run that has recorded its phases."""
    found = [(label, spent(run)) for label, run in labelled]
    found = [(label, times) for label, times in found if times]
    if not found:
        return []
    names = dict.fromkeys(name for _, times in found for name in times)
    rows = [(name, *(_cell(times, name) for _, times in found)) for name in sorted(names, key=_last)]
    rows.append(("all", *(duration(sum(times.values())) for _, times in found)))
    head = ("over the whole run", *(label for label, _ in found))
    return [Table(head=head, rows=rows, marked=frozenset([len(rows) - 1])), Text(text=NOTE, quiet=True)]


def _last(name: str) -> int:
    """Rests come last, whichever run has the first of them."""
    return ["smaller phases", LEFT].index(name) + 1 if name in ("smaller phases", LEFT) else 0


def _cell(times: dict[str, float], name: str) -> str:
    if name not in times:
        return ""
    return f"{duration(times[name])}, {times[name] / sum(times.values()):.0%}"
