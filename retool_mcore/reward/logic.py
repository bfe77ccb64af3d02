r"""Conditions that SymPy joins: ``Eq(x, 1) | Eq(x, 2)``, ``(0 < x) & (x < 1) | (2 < x)``.

As in Python ``&`` binds tighter than ``|``. Takes linear time for each depth of brackets.
"""

from __future__ import annotations

import re

_MAX_DEPTH = 6
_CONDITION = re.compile(r"[<>≤≥]|[=!]=|\b(?:Eq|Ne|Lt|Le|Gt|Ge|Contains|And|Or)\(|\\(?:vee|wedge)|\w\s?=\s?[-\w\\(]")
_EQUATION = re.compile(r"\A\({0,6}(?:Eq\((\w{1,12}), (.{1,80})\)|(\w{1,12}) ?={1,2} ?([^()=<>&|]{1,80}))\){0,6}")


def joined(text: str) -> str:
    r"""The text with ``|`` and ``&`` between conditions as ``\vee`` and ``\wedge``."""
    return _either(text, 0) or text


def _either(text: str, depth: int) -> str | None:
    parts = _split(text, " | ")
    said = [_both(part, depth, bracketed=len(parts) > 1) for part in parts]
    known = [each for each in said if each is not None]
    return r" \vee ".join(known) if len(known) == len(said) else None


def _both(text: str, depth: int, *, bracketed: bool) -> str | None:
    parts = _split(text, " & ")
    if len(parts) == 1:
        return _one(text, depth)
    said = [_one(part, depth) for part in parts]
    known = [each for each in said if each is not None]
    if len(known) < len(said):
        return None
    if _never(parts):
        return r"\emptyset"
    told = r" \wedge ".join(known)
    return f"({told})" if bracketed else told


def _one(text: str, depth: int) -> str | None:
    """A condition as it is, one in brackets with what it joins; None for what is no condition."""
    text = text.strip()
    if _CONDITION.search(text) is None:
        return None
    if text[:1] == "(" and _end(text) == len(text) - 1 and (" | " in text or " & " in text):
        inner = _either(text[1:-1], depth + 1) if depth < _MAX_DEPTH else None
        return None if inner is None else f"({inner})"
    return text


def _never(parts: list[str]) -> bool:
    """Whether equations joined by ``&`` give one name two values: no number is both."""
    said = [match for part in parts if (match := _EQUATION.fullmatch(part.strip()))]
    values: dict[str, set[str]] = {}
    for match in said:
        values.setdefault(match[1] or match[3], set()).add((match[2] or match[4]).strip())
    return any(len(each) > 1 for each in values.values())


def _split(text: str, sign: str) -> list[str]:
    depth, parts, start = 0, list[str](), 0
    for at, letter in enumerate(text):
        depth += (letter in "([{") - (letter in ")]}")
        if not depth and letter == " " and text.startswith(sign, at):
            parts.append(text[start:at])
            start = at + len(sign)
    return [*parts, text[start:]]


def _end(text: str) -> int:
    """Where the bracket that a text begins with is closed."""
    depth = 0
    for at, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if not depth:
            return at
    return -1
