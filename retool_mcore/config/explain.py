"""Turns pydantic's errors into sentences: the key, the value, the rule, the nearest known key."""

import difflib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"  # a run's name, which is also used for folders and trackers
PATTERNS = {NAME: 'only letters, digits, ".", "_" and "-", and begin with a letter or a digit'}
# pydantic's error type -> the rule. The error's context fills the {} fields.
RULES = {
    "missing": "add it to its section",
    "int_type": "expected a whole number, without quotes",
    "int_from_float": "expected a whole number",
    "float_type": "expected a number, without quotes",
    "bool_type": "expected true or false, without quotes",
    "string_type": 'expected a string, in quotes: "..."',
    "list_type": "expected a list: [...]",
    "dict_type": "expected a table: {{ name = value }}",
    "model_type": "expected a section: [{}], followed by its settings",
    "greater_than": "must be more than {gt:g}",
    "greater_than_equal": "must be {ge:g} or more",
    "less_than": "must be less than {lt:g}",
    "less_than_equal": "must be at most {le:g}",
    "finite_number": "expected a finite number",
    "literal_error": "choose one of {expected}",
    "too_short": "expected {min_length} or more",
    "too_long": "expected at most {max_length}",
}
# verl's names -> our values.
VERL_VALUES = {
    "low_var_kl": "k3",
    "kl": "k1",
    "mse": "k2",
    "gae": "ppo",
    "vanilla": "ppo",
    "colocate_async": "partial_rollout",
    "separate_async": "async",
}


def explain(kind: type[BaseModel], error: ValidationError, source: str, overridden: Sequence[str]) -> str:
    """One sentence for each of pydantic's errors, and the source of the values.

    ``overridden``: the keys that the command line sets.
    """
    sentences: list[str] = []
    on_command_line = True
    for item in error.errors():
        where = ".".join(str(part) for part in item["loc"])
        sentences.append(_sentence(kind, item, where))
        on_command_line &= any(where == key or where.startswith(f"{key}.") for key in overridden)
    text = "; ".join(sentences)
    return f"{text} ({'command line' if on_command_line else source}){'' if text.endswith('?') else '.'}"


def _sentence(kind: type[BaseModel], item: Any, where: str) -> str:
    rule, entered, context = item["type"], item["input"], item.get("ctx", {})
    value = json.dumps(entered, default=str)[:80]
    if rule == "extra_forbidden":
        return f"{where} is not a setting{_nearest(kind, item['loc'])}"
    if rule == "value_error":
        message = item["msg"].removeprefix("Value error, ")
        return message if not where or message.startswith(f"{where} =") else f"{message} (section [{where}])"
    if rule == "missing":
        return f"{where} is missing: {RULES[rule]}"
    if rule == "string_pattern_mismatch":
        return f"{where} = {value}: it must have {PATTERNS[context['pattern']]}"
    if rule == "list_type" and isinstance(entered, str):
        return f"{where} = {value}: expected a list. In a shell, quote it: '{where}=[\"...\"]'"
    if rule == "literal_error" and entered in VERL_VALUES and repr(VERL_VALUES[entered]) in context["expected"]:
        return f'{where} = {value} is verl\'s name. Write {where} = "{VERL_VALUES[entered]}"'
    message = RULES[rule].format(where, **context) if rule in RULES else f"{item['msg'][0].lower()}{item['msg'][1:]}"
    return f"{where} = {value}: {message}"


def _nearest(kind: type[BaseModel], loc: tuple[int | str, ...]) -> str:
    fields: Mapping[str, Any] = kind.model_fields
    for part in loc[:-1]:
        section = fields[str(part)].annotation
        if not (isinstance(section, type) and issubclass(section, BaseModel)):
            return ""
        fields = section.model_fields
    return nearest(str(loc[-1]), list(fields), "".join(f"{part}." for part in loc[:-1]))


def nearest(name: str, known: Sequence[str], section: str = "") -> str:
    """The end of a sentence: suggests the nearest known name, or lists all names.

    ``section``: the prefix of the name, with a dot at its end.
    """
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {section}{close[0]}?" if close else f"; choose one of: {', '.join(known)}"
