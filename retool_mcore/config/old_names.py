"""Settings of earlier versions: where each is now, and recorded runs under today's names.

A run file with an old name is refused by a sentence that gives the new one. What a run recorded
itself (its config.toml, a checkpoint's state, a baseline of perf/) is read under today's names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from retool_mcore.config.base import is_table

GONE = "gone: {}. Leave the line out"


@dataclass(frozen=True, kw_only=True)
class Merged:
    """Settings that are one now. ``old``: each with the default that it had."""

    old: dict[str, Any]
    new: str
    value: Callable[..., Any]  # of today's setting, given those of ``old`` in their order
    words: str  # what a user writes now

    @property
    def names(self) -> list[str]:
        """The old names that are no setting any more."""
        return [name for name in self.old if name != self.new]


@dataclass(frozen=True, kw_only=True)
class Dropped:
    """A setting that has one value now. A record with another one keeps its line."""

    old: str
    value: Any
    words: str


def _pair(*values: Any) -> list[Any]:
    return list(values)


MERGED = (
    Merged(
        old={"data.val_file": ""},
        new="validation.files",
        value=_pair,
        words='files = ["..."] in the section [validation]',
    ),
    Merged(
        old={"train.val_every_steps": 0},
        new="validation.every",
        value=lambda steps: steps,
        words="every = ... in the section [validation]",
    ),
    Merged(
        old={"optim.beta1": 0.9, "optim.beta2": 0.999},
        new="optim.betas",
        value=_pair,
        words="optim.betas = [beta1, beta2]",
    ),
)
DROPPED = (
    Dropped(
        old="model.bridge",
        value="mbridge",
        words=GONE.format("mbridge is the only bridge, ARCHITECTURE.md says why"),
    ),
)
MOVED = {name: each.words for each in MERGED for name in each.names} | {each.old: each.words for each in DROPPED}
# Settings that kept their name and take another kind of value.
CHANGED = {each.new: each.words for each in MERGED if each.new in each.old}


def under_todays_names(recorded: Mapping[str, Any]) -> dict[str, Any]:
    """``recorded``, sections of settings, with today's names and forms. What is unknown stays."""
    found = {section: dict(table) if is_table(table) else table for section, table in recorded.items()}
    for each in MERGED:
        if any(_has(found, name) for name in each.names):
            values = [_take(found, name, default) for name, default in each.old.items()]
            section, _, key = each.new.partition(".")
            found.setdefault(section, {})[key] = each.value(*values)
    for each in DROPPED:
        section, _, key = each.old.partition(".")
        if _has(found, each.old) and found[section][key] == each.value:
            del found[section][key]
    return found


def _has(settings: Mapping[str, Any], name: str) -> bool:
    section, _, key = name.partition(".")
    return is_table(settings.get(section)) and key in settings[section]


def _take(settings: dict[str, Any], name: str, default: Any) -> Any:
    section, _, key = name.partition(".")
    table = settings.get(section)
    return table.pop(key, default) if is_table(table) else default
