"""Explain an invalid configuration: the key, the value, the rule and the nearest known key."""

import difflib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"  # of a run, which is a folder's and a tracker's, too
PATTERNS = {NAME: 'letters, digits, ".", "_" and "-" alone, the first a letter or a digit'}


def explain(kind: type[BaseModel], error: ValidationError, source: str, overrides: Sequence[str]) -> str:
    """One sentence for each of pydantic's findings, after the file name and the overrides."""
    lines: list[str] = []
    for item in error.errors():
        where = ".".join(str(part) for part in item["loc"])
        value = json.dumps(item["input"], default=str)[:80]
        if item["type"] == "extra_forbidden":
            lines.append(f"{where} is not a setting{_nearest(kind, item['loc'])}")
        elif item["type"] == "missing":
            lines.append(f"{where} is missing")
        elif item["type"] == "string_pattern_mismatch":
            lines.append(f"{where} = {value}: it is made of {PATTERNS[item.get('ctx', {})['pattern']]}")
        elif item["type"] == "too_short":
            lines.append(f"{where} = {value}: {item.get('ctx', {})['min_length']} or more are needed")
        elif item["type"] == "list_type" and isinstance(item["input"], str):
            lines.append(f"{where} = {value}: a list is needed; a shell keeps it in quotes: '{where}=[\"...\"]'")
        elif where and item["type"] != "value_error":
            lines.append(f"{where} = {value}: {item['msg'][0].lower()}{item['msg'][1:]}")
        else:
            said = item["msg"].removeprefix("Value error, ")
            named = not where or said.startswith(f"{where} =")
            lines.append(said if named else f"{said} (section [{where}])")
    given = [text if text.isprintable() else repr(text) for text in overrides]  # a line break makes no second line
    origin = source + (f" with {' '.join(given)}" if given else "")
    told = "; ".join(lines)
    return f"{origin}: {told}{'' if told.endswith('?') else '.'}"


def _nearest(kind: type[BaseModel], loc: tuple[int | str, ...]) -> str:
    fields: Mapping[str, Any] = kind.model_fields
    for part in loc[:-1]:
        section = fields[str(part)].annotation
        if not (isinstance(section, type) and issubclass(section, BaseModel)):
            return ""
        fields = section.model_fields
    return nearest(str(loc[-1]), list(fields), "".join(f"{part}." for part in loc[:-1]))


def nearest(name: str, known: Sequence[str], section: str = "") -> str:
    """The known name that was meant, as the end of a sentence; all of them where none is near.

    ``section``: with a dot at its end, what stands before the name.
    """
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {section}{close[0]}?" if close else f"; known here: {', '.join(known)}"
