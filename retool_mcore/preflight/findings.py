"""Findings of checks: one line each. A warning or an error ends with what to do."""

from dataclasses import dataclass
from typing import Literal

Severity = Literal["ok", "note", "warning", "missing", "error"]


@dataclass(frozen=True)
class Finding:
    """One finding of a check.

    Severity "missing": this machine lacks what the run needs. ``check`` turns it into an error or,
    in a dry run or a plan, into a note.
    """

    severity: Severity
    name: str
    text: str

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
