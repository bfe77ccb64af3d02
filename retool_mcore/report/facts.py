"""Report sections on settings, versions and hardware."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from retool_mcore.config.base import is_table
from retool_mcore.config.reference import reference
from retool_mcore.report.document import Block, ReportSection, Table, Text
from retool_mcore.report.record import RunRecord

NOT_RECORDED = "not recorded"
REQUIRED = "required"
UNKNOWN = "not a setting of this version"
ABSENT = "not set"
Labelled = Sequence[tuple[str, RunRecord]]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A setting. ``values``: one per run, as JSON or ABSENT. ``default``: JSON or a description."""

    key: str
    values: tuple[str, ...]
    default: str

    @property
    def has_default(self) -> bool:
        return self.default != REQUIRED

    @property
    def differs_between_runs(self) -> bool:
        return len(set(self.values)) > 1


def changed_settings(runs: Sequence[RunRecord]) -> list[Setting]:
    """Return the settings that differ from the default in at least one run, in schema order.

    Includes settings without a default and settings unknown to this version.
    """
    defaults = {entry.key: entry.default for run in runs for entry in reference((run.kind,)) if entry.kind}
    flat = [_flat(run.settings) for run in runs]
    keys = list(dict.fromkeys([*defaults, *(key for settings in flat for key in settings)]))
    changed: list[Setting] = []
    for key in keys:
        values = [settings.get(key) for settings in flat]
        default = defaults.get(key, UNKNOWN)
        if any(_differs(settings[key], _default(default, settings)) for settings in flat if key in settings):
            shown = tuple(ABSENT if value is None else json.dumps(value, ensure_ascii=False) for value in values)
            changed.append(Setting(key=key, values=shown, default=default))
    return changed


def _flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten a run's settings to ``section.key``. A nested table (engine_args) is one value."""
    values: dict[str, Any] = {}
    for section, table in settings.items():
        if is_table(table) and section != "verl_overrides":
            values |= {f"{section}.{key}": value for key, value in table.items()}
        else:
            values[section] = table
    return values


def _default(text: str, settings: Mapping[str, Any]) -> Any:
    """Parse a default as JSON; else return the value of the setting that it names, or the text."""
    try:
        return json.loads(text)
    except ValueError:
        return settings.get(text, text)


def _differs(value: Any, default: Any) -> bool:
    return value != default or isinstance(value, bool) != isinstance(default, bool)


def settings(runs: Labelled) -> ReportSection:
    """Section on settings: those that differ from their default, then those without a default."""
    differing = changed_settings([run for _, run in runs])
    labels = [label for label, _ in runs]
    blocks: list[Block] = []
    changed = [setting for setting in differing if setting.has_default]
    chosen = [setting for setting in differing if not setting.has_default]
    if changed:
        rows = [(setting.key, *setting.values, setting.default) for setting in changed]
        head = ("differs from the default", *labels, "default")
        blocks.append(Table(head=head, rows=rows, numbers_from=len(head), marked=_marked(changed)))
    if chosen:
        rows = [(setting.key, *setting.values) for setting in chosen]
        head = ("has no default", *labels)
        blocks.append(Table(head=head, rows=rows, numbers_from=len(head), marked=_marked(chosen)))
    if len(runs) > 1:
        blocks.append(Text(text="Marked rows differ between the runs.", quiet=True))
    return ReportSection(title="Settings", blocks=blocks)


def _marked(differing: Sequence[Setting]) -> frozenset[int]:
    return frozenset(index for index, setting in enumerate(differing) if setting.differs_between_runs)


def environment(runs: Labelled) -> ReportSection:
    """Section on versions and hardware, as recorded in each run's environment.json."""
    labels = [label for label, _ in runs]
    blocks: list[Block] = []
    for part in ("hardware", "versions"):
        tables = [run.environment.get(part, {}) for _, run in runs]
        names = list(dict.fromkeys(name for table in tables for name in table))
        rows = [(name, *(table.get(name, NOT_RECORDED) for table in tables)) for name in names]
        if part == "hardware":
            rows = [
                ("platform", *(str(run.setting("run.platform", NOT_RECORDED)) for _, run in runs)),
                ("devices (nodes x GPUs)", *(_devices(run) for _, run in runs)),
                *rows,
            ]
        if rows:
            differing = frozenset(index for index, row in enumerate(rows) if len(set(row[1:])) > 1)
            head = (part, *labels)
            blocks.append(Table(head=head, rows=rows, numbers_from=len(head), marked=differing))
    without = [label for label, run in runs if not run.environment]
    if without:
        blocks.append(Text(text=f"{', '.join(without)}: the run did not record versions and hardware.", quiet=True))
    return ReportSection(title="Versions and hardware", blocks=blocks)


def _devices(run: RunRecord) -> str:
    nodes, each = run.setting("cluster.nodes", 1), run.setting("cluster.gpus_per_node", NOT_RECORDED)
    return f"{nodes} x {each}"
