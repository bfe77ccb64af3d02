"""The sections of a report on settings, versions and hardware."""

from collections.abc import Sequence

from retool_mcore.report.document import Block, ReportSection, Table, Text
from retool_mcore.report.record import RunRecord
from retool_mcore.report.settings import Setting, changed_settings

NOT_RECORDED = "not recorded"
Labelled = Sequence[tuple[str, RunRecord]]


def settings(runs: Labelled) -> ReportSection:
    """What differs from the defaults; then what has none, and so had to be chosen."""
    found = changed_settings([run for _, run in runs])
    labels = [label for label, _ in runs]
    blocks: list[Block] = []
    changed = [setting for setting in found if setting.has_default]
    chosen = [setting for setting in found if not setting.has_default]
    if changed:
        rows = [(setting.key, *setting.values, setting.default) for setting in changed]
        head = ("differs from the default", *labels, "default")
        blocks.append(Table(head=head, rows=rows, numbers_from=len(head), marked=_marked(changed)))
    if chosen:
        rows = [(setting.key, *setting.values) for setting in chosen]
        head = ("has no default", *labels)
        blocks.append(Table(head=head, rows=rows, numbers_from=len(head), marked=_marked(chosen)))
    if len(runs) > 1:
        blocks.append(Text(text="Marked: the runs differ.", quiet=True))
    return ReportSection(title="Settings", blocks=blocks)


def _marked(found: Sequence[Setting]) -> frozenset[int]:
    return frozenset(index for index, setting in enumerate(found) if setting.differs_between_runs)


def environment(runs: Labelled) -> ReportSection:
    """Versions and hardware, as the run itself has written them."""
    labels = [label for label, _ in runs]
    blocks: list[Block] = []
    for part in ("hardware", "versions"):
        tables = [run.environment.get(part, {}) for _, run in runs]
        names = list(dict.fromkeys(name for table in tables for name in table))
        rows = [(name, *(table.get(name, NOT_RECORDED) for table in tables)) for name in names]
        if part == "hardware":
            rows = [
                ("platform", *(str(run.setting("run.platform", NOT_RECORDED)) for _, run in runs)),
                ("devices asked for", *(_devices(run) for _, run in runs)),
                *rows,
            ]
        if rows:
            differing = frozenset(index for index, row in enumerate(rows) if len(set(row[1:])) > 1)
            head = (part, *labels)
            blocks.append(Table(head=head, rows=rows, numbers_from=len(head), marked=differing))
    without = [label for label, run in runs if not run.environment]
    if without:
        text = (
            f"{', '.join(without)}: versions and hardware were not recorded by the run, which is of an older version."
        )
        blocks.append(Text(text=text, quiet=True))
    return ReportSection(title="Versions and hardware", blocks=blocks)


def _devices(run: RunRecord) -> str:
    nodes, each = run.setting("cluster.nodes", 1), run.setting("cluster.gpus_per_node", NOT_RECORDED)
    return f"{nodes} x {each}"
