"""What a run's settings say that the defaults do not."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from retool_mcore.config.base import is_table
from retool_mcore.config.reference import reference
from retool_mcore.report.record import RunRecord

REQUIRED = "required"
UNKNOWN = "not a setting of this version"
ABSENT = "not set"


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One key; ``values``: of each run, as JSON or ABSENT; ``default``: as JSON, or in words."""

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
    """The keys of which at least one run's value is not the default, in the schema's order.

    Keys without a default are among them, and so are keys that this version does not know.
    """
    defaults = {entry.key: entry.default for run in runs for entry in reference((run.kind,)) if entry.kind}
    flat = [_flat(run.settings) for run in runs]
    keys = list(dict.fromkeys([*defaults, *(key for settings in flat for key in settings)]))
    found: list[Setting] = []
    for key in keys:
        values = [settings.get(key) for settings in flat]
        present = [_default(defaults.get(key, UNKNOWN), settings) for settings in flat if key in settings]
        if any(_differs(value, default) for value, default in zip(_without_none(values), present, strict=True)):
            shown = tuple(ABSENT if value is None else json.dumps(value, ensure_ascii=False) for value in values)
            found.append(Setting(key=key, values=shown, default=defaults.get(key, UNKNOWN)))
    return found


def _without_none(values: Sequence[Any]) -> list[Any]:
    return [value for value in values if value is not None]


def _flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Key -> value of one run; a table inside a section, as engine_args, is one value."""
    found: dict[str, Any] = {}
    for section, table in settings.items():
        if is_table(table) and section != "verl_overrides":
            found |= {f"{section}.{key}": value for key, value in table.items()}
        else:
            found[section] = table
    return found


def _default(text: str, settings: Mapping[str, Any]) -> Any:
    """The default's value: of JSON, or of the other key that it names; else the text itself."""
    try:
        return json.loads(text)
    except ValueError:
        return settings.get(text, text)


def _differs(value: Any, default: Any) -> bool:
    return value != default or isinstance(value, bool) != isinstance(default, bool)
