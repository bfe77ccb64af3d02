"""Report sections on a run's metrics: curves, behaviour, speed, phases, dropped data.

Metrics that a run did not record are listed as missing, never filled in.
"""

from collections.abc import Sequence
from math import isfinite
from statistics import fmean, median

from retool_mcore.report.charts import Bar, LegendEntry, Line, bar_chart, line_chart
from retool_mcore.report.document import Block, Picture, Pictures, ReportSection, Table, Text
from retool_mcore.report.numbers import duration, number
from retool_mcore.report.panels import BEHAVIOUR, LEARNING, SPEED, Panel
from retool_mcore.report.record import Row, RunRecord

FEW_ROWS = 3  # with at most this many rows, the first (warm-up) step counts too
SMALL_PHASE = 0.005  # share of the total; phases below it are merged
TIMES = "timing_s/"
SUMS = ("step", "start")  # sums of other phases
INSIDE = ("tool_wait", "engine_sleep")  # parts of "gen"
TIMERS = {"gen": "generation", "adv": "advantages", "ref": "reference", "testing": "validation"}  # verl's names
LOST = "lost: killed steps, time between starts, and unrecorded time"
CLOCKS = 0.001  # largest difference of two clocks, as a share of the total
NOTE = "From the first start to the newest step. The lost time includes steps that were repeated after a resume."

Labelled = Sequence[tuple[str, RunRecord]]


def learning(runs: Labelled) -> ReportSection:
    return ReportSection(title="Learning", blocks=_by_kind(LEARNING, runs))


def behaviour(runs: Labelled) -> ReportSection:
    """Section with the paper's charts of tool use over steps."""
    of_rl = [label for label, run in runs if run.kind == "rl"]
    if not of_rl:
        return ReportSection(title="Behaviour", blocks=[Text(text="SFT samples no trajectories.", quiet=True)])
    blocks = _panels(BEHAVIOUR, runs, "rl")
    without = [label for label, run in runs if run.kind == "rl" and not any(run.values("behavior/calls"))]
    if without:
        text = f"No calls in {', '.join(without)}, so metrics of calls have no values there."
        blocks.append(Text(text=text, quiet=True))
    return ReportSection(title="Behaviour", blocks=blocks)


def _by_kind(panels: Sequence[Panel], runs: Labelled) -> list[Block]:
    """Draw SFT and RL runs in separate charts, because their steps are not comparable."""
    kinds = list(dict.fromkeys(run.kind for _, run in runs))
    blocks: list[Block] = []
    for kind in kinds:
        blocks += _panels(panels, runs, kind, suffix=f", {kind.upper()}" if len(kinds) > 1 else "")
    return blocks


def _panels(panels: Sequence[Panel], runs: Labelled, kind: str, suffix: str = "") -> list[Block]:
    """Draw the panels of this kind for which a run has data, and list those without data."""
    pictures: list[Picture] = []
    missing: list[str] = []
    for panel in panels:
        if kind not in panel.kinds:
            continue
        title = f"{panel.title}{suffix}"
        lines, legend = _lines(panel, runs, kind)
        if lines:
            svg = line_chart(lines, legend, from_zero=panel.from_zero, least=panel.least, title=title)
            pictures.append(Picture(title=title, unit=panel.unit, svg=svg))
        else:
            missing.append(title)
    blocks: list[Block] = [Pictures(pictures=pictures)] if pictures else []
    if missing:
        blocks.append(Text(text=f"Not recorded: {', '.join(missing)}.", quiet=True))
    return blocks


def _lines(panel: Panel, runs: Labelled, kind: str) -> tuple[list[Line], list[LegendEntry]]:
    """Return the lines of a panel and their legend.

    With several runs, colours distinguish runs and dashes distinguish metrics. With one run,
    colours distinguish metrics.
    """
    several = len(runs) > 1
    lines: list[Line] = []
    of_runs: dict[str, LegendEntry] = {}
    of_metrics: dict[str, LegendEntry] = {}
    for index, (label, run) in enumerate(runs):
        for number_, (metric, word) in enumerate(panel.lines):
            points = run.series(metric) if run.kind == kind else []
            if not points:
                continue
            look = (index, number_) if several else (number_, 0)
            lines.append(Line(label=f"{label} {word}".strip(), points=points, colour=look[0], style=look[1]))
            if several:
                of_runs[label] = LegendEntry(label=label, colour=index)
            if word:
                of_metrics[word] = LegendEntry(label=word, colour=None if several else number_, style=look[1])
    keys = [*of_runs.values(), *(of_metrics.values() if len(of_metrics) > 1 or not several else ())]
    return lines, keys


def speed(runs: Labelled) -> ReportSection:
    rows: list[tuple[str, ...]] = []
    for metric, heading in (  # those not shown under "At a glance"
        ("perf/throughput", "tokens per second and device"),
        ("engine/cache_hit_rate", "hit rate of the prefix cache"),
    ):
        values = [median_after_warmup(run, metric) for _, run in runs]
        if any(value is not None for value in values):
            rows.append((heading, *("not recorded" if value is None else number(value) for value in values)))
    blocks: list[Block] = []
    if rows:
        blocks.append(Table(head=("median over steps", *(label for label, _ in runs)), rows=rows))
    blocks += _by_kind([panel for panel in SPEED if _has_any(panel, runs)], runs)
    without = [label for label, run in runs if not run.values("mfu")]
    if without:
        text = f"No MFU of {', '.join(without)}: no row has it. The device's peak FLOP/s may be unknown."
        blocks.append(Text(text=text, quiet=True))
    return ReportSection(title="Throughput", blocks=blocks)


def _has_any(panel: Panel, runs: Labelled) -> bool:
    return any(run.series(metric) for _, run in runs for metric, _ in panel.lines)


def median_after_warmup(run: RunRecord, metric: str) -> float | None:
    """Return the median over steps, without the first (warm-up) step."""
    values = run.values(metric)
    return median(values[1:] if len(values) > FEW_ROWS else values) if values else None


def phases(runs: Labelled) -> ReportSection:
    """Section on time: the seconds of each phase, summed over the run."""
    pictures: list[Picture] = []
    missing: list[Block] = []
    for index, (label, run) in enumerate(runs):
        times = time_spent(run)
        if not times:
            missing.append(Text(text=f"{label}: the run recorded no phases.", quiet=True))
            continue
        whole = sum(times.values())
        bars = [
            Bar(label=name, value=value, text=f"{duration(value)}, {value / whole:.0%}", colour=index)
            for name, value in times.items()
        ]
        svg = bar_chart(bars, title=f"Time of the run, {label}")
        pictures.append(Picture(title=label, unit=f"{duration(whole)} in total", svg=svg))
    drawn: list[Block] = [Pictures(pictures=pictures), Text(text=NOTE, quiet=True)] if pictures else []
    return ReportSection(title="Where the time went", blocks=[*drawn, *missing])


def time_spent(run: RunRecord) -> dict[str, float]:
    """Return seconds by phase: starts first, then descending; {} if nothing is recorded."""
    rows = [row for row in run.rows if row["step"] > 0]
    of_rows = [phases_of(row) for row in rows]
    names = {name for phases in of_rows for name in phases}
    sums = {name: sum(phases.get(name, 0.0) for phases in of_rows) for name in names}
    sums = {name: value for name, value in sums.items() if isfinite(value)}
    if not sums:
        return {}
    starts_s = sum(row.get("timing_s/start", 0.0) for row in rows)
    left_s = max(0.0, _wall_s(rows) - starts_s - sum(sums.values()))
    whole = starts_s + sum(sums.values()) + left_s
    large = {name: value for name, value in sums.items() if value >= SMALL_PHASE * whole}
    seconds = {"starts": starts_s} | dict(sorted(large.items(), key=lambda item: -item[1]))
    seconds |= {"smaller phases": sum(sums.values()) - sum(large.values()), LOST: left_s}
    return {name: value for name, value in seconds.items() if value > (CLOCKS * whole if name == LOST else 0)}


def phases_of(row: Row) -> dict[str, float]:
    """Return a row's seconds by phase name; they add up to the time since the previous row."""
    times = {name.removeprefix(TIMES): value for name, value in row.items() if name.startswith(TIMES)}
    seconds = {name: value for name, value in times.items() if name not in SUMS and "/" not in name}
    if "gen" in seconds:
        seconds["gen"] -= sum(seconds.get(name, 0.0) for name in INSIDE)
    return {TIMERS.get(name, name.replace("_", " ")): value for name, value in seconds.items()}


def _wall_s(rows: list[Row]) -> float:
    """Return the seconds from the start that wrote the first row until the last row."""
    first, last = rows[0], rows[-1]
    if "unix_s" not in first or "unix_s" not in last:
        return 0.0
    own_s = sum(phases_of(first).values()) + first.get("timing_s/start", 0.0)
    return last["unix_s"] - first["unix_s"] + own_s


DROPS = (  # metric, label, aggregation over steps
    ("rollout/dropped", "trajectories dropped", sum),
    ("rollout/refilled_prompts", "replacement prompts", sum),
    ("training/filter_groups/discarded_surplus_samples", "surplus trajectories of algorithm.filter_groups", sum),
    ("behavior/stop/length", "responses cut off at the token limit (mean share)", fmean),
    ("behavior/stop/no_room", "responses ended because a result did not fit (mean share)", fmean),
    ("behavior/stop/turns", "responses ended by the limit of turns (mean share)", fmean),
    ("behavior/stop/malformed_calls", "responses ended by malformed calls (mean share)", fmean),
    ("behavior/stop/tool_time", "responses ended by the limit of tool time (mean share)", fmean),
    ("behavior/cut_tokens", "tokens cut from results, per trajectory", fmean),
    ("reward/check_failed", "answers whose check failed (mean share)", fmean),
)


def _named(runs: Labelled, prefix: str, heading: str, leave: Sequence[str] = ()) -> list[tuple[str, ...]]:
    """Return rows with the mean of each metric that starts with ``prefix``; missing counts as 0."""
    names = sorted({name for _, run in runs for row in run.rows for name in row if name.startswith(prefix)})
    means = {name: [fmean(row.get(name, 0.0) for row in run.rows) for _, run in runs] for name in names}
    return [
        (f"{heading}: {name.removeprefix(prefix).replace('_', ' ')}", *(number(mean) for mean in values))
        for name, values in means.items()
        if name not in leave
    ]


def dropped(runs: Labelled) -> ReportSection:
    of_rl = [(label, run) for label, run in runs if run.kind == "rl"]
    rows: list[tuple[str, ...]] = []
    for metric, heading, put in DROPS:
        values = [run.values(metric) for _, run in of_rl]
        if any(values):
            rows.append((heading, *(number(put(each)) if each else "not recorded" for each in values)))
    rows += _named(of_rl, "behavior/malformed/", "malformed calls per trajectory")
    rows += _named(of_rl, "reward/", "reward part", leave=("reward/check_failed",))
    blocks: list[Block] = []
    if rows:
        blocks.append(Table(head=("over all steps", *(label for label, _ in of_rl)), rows=rows))
    elif of_rl:
        blocks.append(Text(text="Not recorded.", quiet=True))
    if len(of_rl) < len(runs):
        text = "At its start, SFT prints how many rows are too long, but does not record it."
        blocks.append(Text(text=text, quiet=True))
    return ReportSection(title="Dropped, cut and malformed", blocks=blocks)
