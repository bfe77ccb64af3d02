r"""Write an answer the way math-verify reads best, and compare plain numbers without it.

Normalising drops delimiters, spacing commands, currency signs, thousands separators, units and a
full stop.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

_NUMBER = r"[-+]?(?:\d++\.?\d*+|\.\d++)"  # possessive: never split a thousand digits in a million ways
# No single letters: "5m" may be a product. A letter is dropped only when written \\text{ m}.
_UNITS = (
    "mm|cm|dm|km|inch|inches|ft|foot|feet|yd|yards?|miles?|kg|mg|lbs?|pounds?|oz|ounces?|tons?|ml|lit(?:er|re)s?|gallons?"
    "|sec|seconds?|min|minutes?|hr|hours?|days?|weeks?|months?|years?|mph|cents?|dollars?|usd|euros?|degrees?|deg|rad"
    "|radians|units?|square|cubic|sq|people|persons?|students?|ways?|points?|times?"
)
_SCALES = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_SCALED = re.compile(rf"({_NUMBER})\s*(?:\\text\{{)?\s*({'|'.join(_SCALES)})\s*\}}?", re.IGNORECASE)
_POWER = r"(?:\^\{?[23]\}?|[²³])?"
_UNIT = re.compile(
    rf"(?P<number>[-+]?\d{{1,3}}(?:,\d{{3}})+(?:\.\d+)?|{_NUMBER}|{_NUMBER}/\d+|.*\\[dt]?frac\{{[^{{}}]*\}}\{{[^{{}}]*\}})\s*"
    rf"(?:\\(?:text|textrm|mathrm|mbox)\{{(?P<text>[^{{}}]*)\}}{_POWER}"
    rf"|(?P<words>(?:(?:{_UNITS}){_POWER}(?:\s*[/.]\s*|\s+|$))+)"
    r"|\^\{?\\circ\}?|\\circ|°)\.?",
    re.IGNORECASE,
)
_THOUSANDS = re.compile(r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d+)?|[-+]?\d{1,3}(?: \d{3})+(?:\.\d+)?")
_PERCENT = re.compile(r"\s*(?:\\?%|\\?\s*percent|\\text\{\s*percent\s*\})$", re.IGNORECASE)
_MIXED = re.compile(r"([-+]?)(\d+)\s+(\d+)\s*/\s*(\d+)")
_PLAIN = re.compile(rf"({_NUMBER})(?:[eE]([-+]?\d{{1,3}}))?")
_FRACTION = re.compile(r"([-+]?\d{1,50})\s*/\s*(\d{1,50})")
_COLLECTION = re.compile(
    r"(?:\\left)?\s*(?P<open>\(|\[|\\\{)(?P<inner>[^()\[\]{}\\]*,[^()\[\]{}\\]*)(?:\\right)?\s*(?P<close>\)|\]|\\\})"
)
MAX_EXACT_DIGITS = 400


@dataclass(frozen=True)
class Normal:
    """``text`` without its percent sign, and its value in ``number`` if it is a plain number."""

    text: str
    percent: bool
    number: Fraction | None


def normalise(answer: str) -> Normal:
    """Bring an answer into normal form.

    It never fails, and in practice takes linear time on texts of up to MAX_ANSWER_CHARS.
    """
    text = _unwrap(answer)
    text = re.sub(r"(?<!\\)\\[,;:! ]|~|\\quad|\\displaystyle", _spacing, text).strip()
    text = text.replace("{,}", ",").replace("−", "-")
    text = re.sub(r"\\\$|[$€£¥]|\\euro|\\pounds", "", text).strip()
    without = _PERCENT.sub("", text)
    percent = without != text
    text = without.strip().rstrip(".,;") if len(without) > 1 else without
    if scaled := _SCALED.fullmatch(text):
        text = f"{scaled[1].rstrip('.')}*{_SCALES[scaled[2].lower()]}"
        return Normal(text, percent, Fraction(scaled[1].rstrip(".")) * _SCALES[scaled[2].lower()])
    text = _without_unit(text)
    if _THOUSANDS.fullmatch(text):
        text = text.replace(",", "").replace(" ", "")
    if mixed := _MIXED.fullmatch(text):
        sign, whole, over, under = mixed.groups()
        text = f"{sign}({whole}+{over}/{under})"
    return Normal(text, percent, plain_number(text))


def vote(answer: str | None) -> str:
    """The answer as maj@k counts it: "034", "34" and "$34$" are the same vote; "" for no answer."""
    if answer is None:
        return ""
    normal = normalise(answer)
    return (normal.text if normal.number is None else str(normal.number)) + ("%" if normal.percent else "")


def plain_number(text: str) -> Fraction | None:
    """The exact value of an integer, decimal or fraction of integers.

    None for anything else, and for absurdly long numbers.
    """
    if len(text) > MAX_EXACT_DIGITS:
        text = text.lstrip("0") if text.isdigit() else text
    if len(text) > MAX_EXACT_DIGITS:
        return None
    if match := _PLAIN.fullmatch(text):
        return Fraction(match[1].rstrip(".")) * Fraction(10) ** int(match[2] or 0)
    if (match := _FRACTION.fullmatch(text)) and int(match[2]):
        return Fraction(int(match[1]), int(match[2]))
    return None


def numeric_collection(text: str) -> tuple[str, tuple[Fraction, ...], str] | None:
    r"""Brackets and values of a tuple, interval or set of plain numbers: "(1, 1/2]"; else None.

    The values of a set, ``\{2, 1\}``, are sorted and without repeats. math-verify would need fifty
    milliseconds for each.
    """
    match = _COLLECTION.fullmatch(text)
    if match is None or (match["open"] == "\\{") != (match["close"] == "\\}"):
        return None
    values = [plain_number(part.strip()) for part in match["inner"].split(",")]
    if None in values:
        return None
    numbers = tuple(value for value in values if value is not None)
    return match["open"], tuple(sorted(set(numbers))) if match["open"] == "\\{" else numbers, match["close"]


def equal_numbers(answer: Fraction, answer_percent: bool, truth: Fraction, truth_percent: bool) -> bool:
    """Exact equality, with a choice for a percent sign on one side only.

    The sign may be a unit (50% is 50) or mean a hundredth (50% is 0.5).
    """
    if answer == truth:
        return True
    return answer_percent != truth_percent and answer == (truth / 100 if truth_percent else truth * 100)


def _unwrap(text: str) -> str:
    text = text.strip()
    for opening, closing in (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]")):
        if text.startswith(opening) and text.endswith(closing) and len(text) > 2 * len(opening):
            text = text[len(opening) : -len(closing)].strip()
    while match := re.fullmatch(r"\\(?:boxed|mathbf|textbf|bold|mathrm|text|textrm|textit|mbox)\s*\{([^{}]*)\}", text):
        text = match[1].strip()
    return text


def _spacing(match: re.Match[str]) -> str:
    return " " if match[0] in ("\\quad", "\\ ", "~", "\\;", "\\:") else ""


def _without_unit(text: str) -> str:
    match = _UNIT.fullmatch(text)
    return text if match is None else match["number"].strip()
