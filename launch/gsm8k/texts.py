r"""Finds and replaces the numbers in a problem's texts.

A number is fixed if another number would make no sense or would change the calculation:
percentages, fractions, decimals, ordinals, times and dates, multiples ("3 times"), counts of things
mentioned before ("the 3 friends"), and 0 and 1.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from solutions import NUMBER, value_of

from retool_mcore.data.verify import Rejected

_UNIT = r"(?:seconds?|minutes?|hours?|days?|nights?|weeks?|weekends?|months?|years?|decades?|century|centuries)"
_FIXED_AFTER = re.compile(
    rf"\A(?:\s*(?:%|percent|°|degrees?)|\s*/|:\d|[A-Za-z]|\s+\d+/\d|\s*-?\s*{_UNIT}\b|\s*-?\s*(?:times|fold)\b"
    r"|\s*(?:am|pm|a\.m|p\.m|o'clock)\b|\s+(?:out of|in every|of every)\b|\s*-\s*\d|\s+to\s+\d+\s+ratio)",
    re.IGNORECASE,
)
_MONTHS = "january|february|march|april|may|june|july|august|september|october|november|december"
_FIXED_BEFORE = re.compile(
    rf"(?:/\s*|\d:|\d\s*-\s*|\bout of |\bin every |\b(?:{_MONTHS}) |\b(?:grades?|room|route|number|top) "
    r"|\b(?:the|all|these|those|both|between|other) |#)\Z",
    re.IGNORECASE,
)
_YEAR_BEFORE = re.compile(r"\b(?:in|year|since|by|until|from|of) \Z", re.IGNORECASE)
_BOUND = re.compile(
    r"\b(?:more than|less than|fewer than|greater than|over|under|above|below|beyond|exceeds?|exceeding|at least"
    r"|at most|up to|first|limit of|maximum of|minimum of|after)\s+\$?\Z",
    re.IGNORECASE,
)
AGES = re.compile(r"\b(?:ages?|aged|old|older|oldest|younger|youngest|birthdays?)\b", re.IGNORECASE)
AVERAGE = re.compile(r"\b(?:average|mean)\b", re.IGNORECASE)
_EXPRESSION = re.compile(r"(?<![\w.])[-+*/x×÷$().,%\d\s–]*=[\s$]*\Z")

# Words -> constants that a calculation may use although no text contains them.
_EXPLAINED: tuple[tuple[str, tuple[str, ...]], ...] = (
    (r"half|halves|halved|twice|doubl|both|couple|pair|two|twin|equal", ("2", "0.5")),
    (r"thrice|tripl|third|three", ("3",)),
    (r"quarter|fourth|quadrupl|four", ("4", "0.25", "0.75")),
    (r"fifth|five", ("5", "0.2")),
    (r"week|dail|day", ("7",)),
    (r"dozen|foot|feet|inch|year|month|annual", ("12",)),
    (r"year|annual|week", ("52", "12", "365")),
    (r"month", ("12", "4", "30")),
    (r"hour|minute|second", ("60", "3600", "24")),
    (r"day|dail|hour", ("24",)),
    (r"%|percent|cents?\b|penny|pennies|coin|meter|discount", ("100", "0.01")),
    (r"kilo|kg|km|gram|liter|litre|meter|ton", ("1000", "100")),
    (r"yard|feet|foot", ("3",)),
    (r"pound|ounce", ("16",)),
    (r"decade", ("10",)),
    (r"average", ("2",)),
)


@dataclass(frozen=True)
class Number:
    """A number in digits, from ``start`` to ``end``. ``bound``: after "more than" etc."""

    text: str
    start: int
    end: int
    fixed: bool
    bound: bool

    @property
    def value(self) -> Fraction:
        return value_of(self.text)


def numbers_in(text: str) -> list[Number]:
    """All numbers in digits in a text, in order."""
    return [_number(text, match) for match in NUMBER.finditer(text)]


def _number(text: str, match: re.Match[str]) -> Number:
    before, after = text[max(0, match.start() - 24) : match.start()], text[match.end() : match.end() + 24]
    value = value_of(match[0])
    dated = re.fullmatch(r"(?:19|20)\d\d", match[0]) is not None and _YEAR_BEFORE.search(before) is not None
    around = _FIXED_AFTER.search(after) is not None or _FIXED_BEFORE.search(before) is not None
    fixed = around or dated or value <= 1 or value.denominator != 1
    return Number(match[0], match.start(), match.end(), fixed, _BOUND.search(before) is not None)


def explained_constants(question: str, answer: str) -> set[Fraction]:
    """The constants that words of the texts explain, and those from the question's percentages."""
    texts = f"{question} {re.sub(r'<<[^<>]*>>', '', answer)}".lower()
    found = {Fraction(1)}
    for words, values in _EXPLAINED:
        if re.search(words, texts):
            found |= {Fraction(value) for value in values}
    for number in numbers_in(question):
        if re.match(r"\s*(?:%|percent)", question[number.end :]):
            part = number.value / 100
            found |= {part, 1 - part, 1 + part, 100 - number.value, 100 + number.value}
    return found


def replace_numbers(text: str, new: Sequence[tuple[Number, Fraction]]) -> str:
    """Replace numbers with new values. A number whose value does not change keeps its spelling."""
    for number, value in reversed(new):
        if value != number.value:
            digits = f"{value.numerator:,}" if "," in number.text else str(value.numerator)
            text = f"{text[: number.start]}{digits}{text[number.end :]}"
    return text


def rewrite(
    text: str,
    candidates: Mapping[Fraction, set[Fraction]],
    *,
    first: tuple[Fraction, Fraction] | None,
    last: Sequence[tuple[Fraction, Fraction]],
) -> str:
    """Rewrite a solution's text between two marks with the new numbers.

    ``candidates``: old value -> possible new values. ``first``: old and new value of the mark
    before the text; the text's first number repeats the old one. ``last``: old and new operands of
    the mark after the text; the expression at the text's end repeats the old ones. Raises Rejected
    for any other number that is unknown or ambiguous.
    """
    numbers = numbers_in(text)
    known: dict[int, Fraction] = {}
    if first is not None and numbers and not text[: numbers[0].start].strip(" $") and numbers[0].value == first[0]:
        known[numbers[0].start] = first[1]
    if expression := _EXPRESSION.search(text):
        inside = [number for number in numbers if number.start >= expression.start()]
        if [number.value for number in inside] == [old for old, _ in last]:
            known |= {number.start: new for number, (_, new) in zip(inside, last, strict=True)}
    new = list[tuple[Number, Fraction]]()
    for number in numbers:
        found = {known[number.start]} if number.start in known else candidates.get(number.value, set())
        if len(found) != 1:
            how = "two numbers" if found else "unknown number"
            raise Rejected("source", f"{how} in the text: {number.text} in {text.strip()!r:.120}")
        new.append((number, next(iter(found))))
    return replace_numbers(text, new)
