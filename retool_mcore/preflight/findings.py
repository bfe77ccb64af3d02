"""What a check finds: one line each, with what to do about a warning or an error."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from retool_mcore.errors import ConfigError

Severity = Literal["ok", "note", "warning", "missing", "error"]


@dataclass(frozen=True)
class Finding:
    """``missing``: the run needs it and this machine lacks it, which ``check`` judges."""

    severity: Severity
    name: str
    text: str  # of a warning or an error, it ends with what to do

    def __str__(self) -> str:
        return f"{self.severity:<8}{self.name:<16}{self.text}"


def ok(name: str, text: str) -> Finding:
    return Finding("ok", name, text)


def note(name: str, text: str) -> Finding:
    return Finding("note", name, text)


def warning(name: str, text: str) -> Finding:
    return Finding("warning", name, text)


def missing(name: str, text: str) -> Finding:
    return Finding("missing", name, text)


def error(name: str, text: str) -> Finding:
    return Finding("error", name, text)


def require(findings: Iterable[Finding]) -> list[str]:
    """The notes and warnings, for the user. Raises ConfigError with a line for each error."""
    found = list(findings)
    if wrong := [each.text for each in found if each.severity == "error"]:
        raise ConfigError("\nerror: ".join(wrong))
    return [each.text for each in found if each.severity in ("note", "warning")]
