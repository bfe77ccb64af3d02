r"""Sums, products and lists as Python and SymPy write them: ``sum(2**k for k in range(5))``.

They become a sum or product with a sign, ``\sum_{k=0}^{4}``, or their elements one by one.
"""

from __future__ import annotations

import re

MAX_ITEMS = 60  # of what is written one by one
_RANGE = r"range\(\s?([^(),]{1,30}?)\s?(?:,\s?([^(),]{1,30}?)\s?)?(?:,\s?(-?\d{1,4})\s?)?\)"
_FOR = re.compile(
    rf"\A(.{{1,200}}?)\sfor\s([A-Za-z_]\w{{0,9}})\sin\s(?:{_RANGE}|[\[(]([^][(){{}}]{{1,200}})[\])])"
    r"(?:\sif\s(.{1,60}))?",
    re.DOTALL,
)
_ONLY_RANGE = re.compile(_RANGE)
_SIMPLE = re.compile(r"([A-Za-z_]\w{0,9}) ?% ?(\d{1,4}) ?(==|!=) ?(\d{1,4})")
_LIMITS = re.compile(r"\(\s?([A-Za-z]\w{0,3}),\s?(.{1,60}),\s?([^,]{1,60})\)")
_COMPREHENSION = re.compile(r"([\[{])([^\[\]{}]{1,300})([\]}])")
_CLOSES = {"[": "]", "{": "}", "(": ")"}
_SIGNS = {"sum": r"\sum", "prod": r"\prod", "Sum": r"\sum", "Product": r"\prod"}
_BETWEEN = {"sum": "+", "prod": "*"}


def turned(name: str, args: list[str]) -> str | None:
    """A call of ``sum``, ``prod``, ``len``, ``Sum`` or ``Product`` as mathematics; else None."""
    if name in ("Sum", "Product"):
        match = _LIMITS.fullmatch(args[1]) if len(args) == 2 else None
        return None if match is None else _signed(name, match[1], match[2], match[3], args[0])
    if len(args) != 1:
        return None
    inner = _inside(args[0])
    if inner == args[0] and not (_FOR.fullmatch(inner) or _ONLY_RANGE.fullmatch(inner)):
        return None  # sum(x)
    if name == "len":
        found = _items(inner)
        return None if found is None else str(len(found))
    if (match := _FOR.fullmatch(inner)) and match[3] and not match[5] and not match[7]:
        low, high = ("0", match[3]) if match[4] is None else (match[3], match[4])
        return _signed(name, match[2], low, _before(high), match[1])
    found = _items(inner)
    if not found:
        counts = _ONLY_RANGE.fullmatch(inner)
        if counts is None or counts[3]:
            return None
        low, high = ("0", counts[1]) if counts[2] is None else (counts[1], counts[2])
        return _signed(name, "k", low, _before(high), "k")  # sum(range(1, 101))
    return "(" + _BETWEEN[name].join(f"({each})" for each in found) + ")"


def comprehended(text: str) -> str:
    """``[k**2 for k in range(1, 4)]`` with its elements; any other text as it is."""
    match = _COMPREHENSION.fullmatch(text)
    if match is None or _CLOSES[match[1]] != match[3]:
        return text
    found = _items(match[2]) if _FOR.fullmatch(match[2]) else None
    return f"{match[1]}{', '.join(found)}{match[3]}" if found else text


def _inside(text: str) -> str:
    """What a list, set or tuple around all of a text holds."""
    whole = len(text) > 2 and text[0] != "{" and _CLOSES.get(text[0]) == text[-1] and text[0] not in text[1:]
    return text[1:-1].strip() if whole else text


def _items(inner: str) -> list[str] | None:
    """The elements one by one; None where they cannot be told."""
    if match := _ONLY_RANGE.fullmatch(inner):
        return _numbers(*match.groups())
    if match := _FOR.fullmatch(inner):
        body, letter, *ends, listed, condition = match.groups()
        values = _numbers(*ends) if listed is None else [each.strip() for each in listed.split(",") if each.strip()]
        kept = _kept(values, letter, condition)
        held = re.compile(rf"(?<![\w.]){letter}(?!\w)")
        return None if kept is None else [held.sub(f"({value})", body) for value in kept]
    parts = [each.strip() for each in inner.split(",")]
    parts = parts[:-1] if len(parts) > 1 and not parts[-1] else parts
    plain = all(parts) and not re.search(r"[(\[{]|\bfor\b|\brange\b", inner)
    return parts if plain and len(parts) <= MAX_ITEMS else None


def _numbers(first: str, second: str | None, step: str | None) -> list[str] | None:
    try:
        found = range(int(first)) if second is None else range(int(first), int(second), int(step or 1))
    except ValueError:
        return None
    return list(map(str, found)) if len(found) <= MAX_ITEMS else None


def _kept(values: list[str] | None, letter: str, condition: str | None) -> list[str] | None:
    """The values for which a simple condition holds, ``k % 2 == 0``; None for any other one."""
    if values is None or condition is None:
        return values if values is None or len(values) <= MAX_ITEMS else None
    match = _SIMPLE.fullmatch(condition.strip("() "))
    if match is None or match[1] != letter or not int(match[2]):
        return None
    try:
        return [each for each in values if (int(each) % int(match[2]) == int(match[4])) == (match[3] == "==")]
    except ValueError:
        return None


def _before(high: str) -> str:
    """The last number of a range: one less than its end."""
    plain = high.strip().replace(" ", "")
    if plain.isdigit():
        return str(int(plain) - 1)
    return plain.removesuffix("+1") if plain.endswith("+1") and plain[:-2].isalnum() else f"{plain}-1"


def _signed(name: str, letter: str, low: str, high: str, body: str) -> str:
    return rf"({_SIGNS[name]}_{{{letter}={low}}}^{{{high}}} ({body}))"
