"""The reference of all keys of a run file, generated from the schema."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from retool_mcore.config.rl import RlConfig
from retool_mcore.config.sampling import SAME_AS_ROLLOUT, Validation
from retool_mcore.config.sft import SftConfig
from retool_mcore.config.shared import RunConfig

RUNS: dict[str, type[RunConfig]] = {"sft": SftConfig, "rl": RlConfig}
NAMES: dict[Any, str] = {bool: "true or false", int: "a whole number", float: "a number", str: "a string"}


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A key, or a section if ``kind`` is "", and its meaning in the kinds of run that share it."""

    section: str
    key: str  # "train.steps"; for sections and verl_overrides, the section's name
    kind: str  # the type in plain English
    default: str  # TOML, "required", or the key whose value is the default
    explanation: str
    runs: tuple[str, ...] = ()


def reference(runs: Sequence[str] = tuple(RUNS)) -> list[Entry]:
    """All sections of these kinds of run, in the order of a run file, each with its keys.

    An entry that is identical in several kinds of run appears once.
    """
    runs_of: dict[Entry, tuple[str, ...]] = {}
    for run in runs:
        for entry in _entries(RUNS[run]):
            runs_of[entry] = (*runs_of.get(entry, ()), run)
    order = list(dict.fromkeys(entry.section for entry in runs_of))
    whole = [replace(entry, runs=owners) for entry, owners in runs_of.items()]
    return sorted(whole, key=lambda entry: (order.index(entry.section), entry.kind != ""))


def _entries(run: type[RunConfig]) -> Iterator[Entry]:
    for section, field in run.model_fields.items():
        model = field.annotation
        if isinstance(model, type) and issubclass(model, BaseModel):
            yield Entry(section=section, key=section, kind="", default="", explanation=_one_line(model.__doc__))
            for name, inner in model.model_fields.items():
                copied = model is Validation and name in SAME_AS_ROLLOUT
                default = f"rollout.{SAME_AS_ROLLOUT[name]}" if copied else default_of(inner)
                yield _entry(section, f"{section}.{name}", inner, default)
        elif not field.exclude:
            yield _entry(section, section, field, default_of(field))


def _entry(section: str, key: str, field: FieldInfo, default: str) -> Entry:
    explanation = _one_line(field.description)
    return Entry(section=section, key=key, kind=kind_of(field), default=default, explanation=explanation)


def _one_line(text: str | None) -> str:
    return " ".join((text or "").split())


def default_of(field: FieldInfo) -> str:
    return "required" if field.is_required() else json.dumps(field.default)


def kind_of(field: FieldInfo) -> str:
    """Describe the field's type and bounds."""
    of, arguments = get_origin(field.annotation), get_args(field.annotation)
    if of is Literal:
        return f"one of {', '.join(map(json.dumps, arguments))}"
    if isinstance(field.annotation, UnionType) or of is Union:  # a literal or a number
        return f"one of {', '.join(map(json.dumps, get_args(arguments[0])))}, or {NAMES[arguments[1]]}"
    if of is dict:
        return "a table"
    if of is list:
        if get_origin(arguments[0]) is Literal:
            return f"a list of any of {', '.join(map(json.dumps, get_args(arguments[0])))}"
        least, most = _bound(field, "min_length"), _bound(field, "max_length")
        plural = NAMES[arguments[0]].removeprefix("a ") + "s"
        if least and least == most:
            return f"a list of {least} {plural}"
        return f"a list of {plural}" + (f", at least {least}" if least else "")
    return NAMES[field.annotation] + _range(field)  # without a pattern: the explanation has it


def _range(field: FieldInfo) -> str:
    above, least, below, most = (_bound(field, name) for name in ("gt", "ge", "lt", "le"))
    if below is None and most is None:
        return f", {least} or more" if least is not None else f" above {above}" if above is not None else ""
    start = f" from {least} to" if least is not None else f" above {above} and"
    end = f"below {below}" if below is not None else f"{most}" if least is not None else f"at most {most}"
    return f"{start} {end}"


def _bound(field: FieldInfo, name: str) -> Any:
    return next((value for bound in field.metadata if (value := getattr(bound, name, None)) is not None), None)
