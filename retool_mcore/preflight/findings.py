"""Findings, one per line: ok, warning or error, what was checked, and what to do about it."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from retool_mcore.errors import ReToolError

Severity = Literal["ok", "warning", "error"]


@dataclass(frozen=True)
class Finding:
    severity: Severity
    name: str
    text: str  # for a warning or an error it ends with what to do

    def __str__(self) -> str:
        return f"{self.severity:<8}{self.name:<16}{self.text}"


def ok(name: str, text: str) -> Finding:
    return Finding("ok", name, text)


def warning(name: str, text: str) -> Finding:
    return Finding("warning", name, text)


def error(name: str, text: str) -> Finding:
    return Finding("error", name, text)


Check = Callable[[], Iterable[Finding]]


def run_checks(checks: Sequence[tuple[str, Check]], tell: Callable[[Finding], None]) -> list[Finding]:
    """Run every check and report each finding as it comes.

    A ReToolError that a check raises becomes that check's error finding.
    """
    found: list[Finding] = []
    for name, check in checks:
        try:
            for finding in check():
                found.append(finding)
                tell(finding)
        except ReToolError as problem:
            found.append(error(name, str(problem)))
            tell(found[-1])
    return found
