r"""Parses and compares numbers exactly: integers, decimals, fractions, mixed numbers, bases.

Most answers are numbers. Comparing them needs neither SymPy nor a checker process.
"""

import re
from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache

from retool_mcore.reward.clean import split_unit, unit_ratio

FLOAT_DIGITS = 15  # a decimal with this many significant digits may be a printed float
ROUNDED_DIGITS = 6  # a decimal with this many significant digits may round an irrational value
FLOAT_ERROR = Fraction(1, 2**51)  # relative error of a float: 2 ulp
_SIGN, _INTEGER = r"(?P<sign>[-+]?) ?", r"\d{1,2000}"
_VALUE = r"(?:\d{1,2000}\.?\d{0,2000}|\.\d{1,2000})"
_WORDS = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
)  # fmt: skip


def _decimal(match: re.Match[str]) -> Fraction:
    return Fraction(match["value"].rstrip(".") or "0")


def _scientific(match: re.Match[str]) -> Fraction:
    exponent = next(filter(None, match.groups()[2:]))
    return Fraction((match["value"] or "1").rstrip(".")) * Fraction(10) ** int(exponent)


def _quotient(match: re.Match[str]) -> Fraction:
    above, below = filter(None, match.groups()[1:])
    return Fraction(above.rstrip(".")) / Fraction(below.rstrip("."))


def _mixed(match: re.Match[str]) -> Fraction:
    whole, above, below = map(int, filter(None, match.groups()[1:]))
    if above >= below:
        raise ValueError("2 4/3 may be a product")
    return whole + Fraction(above, below)


def _repeating(match: re.Match[str]) -> Fraction:
    whole, fixed, again = match["whole"] or "0", match["fixed"], match["again"]
    shift = 10 ** len(fixed)
    return Fraction(int(whole + fixed), shift) + Fraction(int(again), (10 ** len(again) - 1) * shift)


def _based(match: re.Match[str]) -> Fraction:
    name = next(filter(None, match.groups()[2:]))
    return Fraction(int(match["digits"], int(name) if name.isdigit() else _WORDS.index(name)))


_READERS: tuple[tuple[re.Pattern[str], Callable[[re.Match[str]], Fraction]], ...] = tuple(
    (re.compile(pattern), read)
    for pattern, read in (
        (rf"{_SIGN}(?P<value>{_VALUE})", _decimal),
        (rf"{_SIGN}\\frac ?\{{ ?([-+]?{_VALUE}) ?\}} ?\{{ ?([-+]?{_VALUE}) ?\}}", _quotient),
        (rf"{_SIGN}({_VALUE}) ?/ ?({_VALUE})", _quotient),
        (rf"{_SIGN}({_INTEGER}) ?\\frac ?\{{ ?({_INTEGER}) ?\}} ?\{{ ?({_INTEGER}) ?\}}", _mixed),
        (rf"{_SIGN}({_INTEGER}) (?:and )?({_INTEGER}) ?/ ?({_INTEGER})", _mixed),
        (rf"{_SIGN}(?P<value>{_VALUE})[eE]([-+]?\d{{1,3}})", _scientific),
        (
            rf"{_SIGN}(?:(?P<value>{_VALUE}) ?(?:\\times|\\cdot|\*) ?)?10 ?(?:\^|\*\*) ?"
            r"(?:\{ ?([-+]?\d{1,3}) ?\}|\(([-+]?\d{1,3})\)|(\d{1,3}))",
            _scientific,
        ),
        (rf"{_SIGN}(?P<whole>\d{{0,50}})\.(?P<fixed>\d{{0,50}})\\overline ?\{{(?P<again>\d{{1,50}})\}}", _repeating),
        (
            rf"{_SIGN}\(?(?P<digits>[\dA-F]{{1,200}})\)? ?_ ?"
            r"(?:\{ ?(?:\\text ?\{ ?([a-z]+) ?\}|(\d{1,2})) ?\}|(\d{1,2}))",
            _based,
        ),
    )
)


@lru_cache(maxsize=8192)
def number(text: str) -> Fraction | None:
    r"""The exact value of a cleaned text, or None if the text is not one number.

    ``34``, ``.5``, ``1e3``, ``3.4 \times 10^{5}``, ``3/4``, ``\frac{3}{4}``, ``1\frac{1}{2}``,
    ``0.\overline{3}``, ``1011_2`` and ``twelve`` are numbers.
    """
    if text.isalpha():
        return Fraction(_WORDS.index(text.lower())) if text.lower() in _WORDS else None
    text = text.removeprefix("(").removesuffix(")") if text[:1] == "(" and text.find(")") == len(text) - 1 else text
    for pattern, read in _READERS:
        if match := pattern.fullmatch(text):
            try:
                return -read(match) if match["sign"] == "-" else read(match)
            except (ValueError, ZeroDivisionError):
                return None
    return None


def same_numbers(answer: str, truth: str) -> bool | None:
    """Whether two numbers, with or without units, are equal; None if a text is not a number.

    Ignores a unit on only one side. A percent sign on only one side may be a unit (50% is 50) or
    mean hundredths (50% is 0.5).
    """
    (mine, my_unit), (theirs, their_unit) = split_unit(answer), split_unit(truth)
    value, expected = number(mine), number(theirs)
    if value is None or expected is None:
        return None
    times = unit_ratio(my_unit, their_unit)
    if times is None:
        return False
    if value * times == expected or is_printed_float(mine, expected) or is_printed_float(theirs, value):
        return True
    if my_unit == "%" and not their_unit:
        return value == expected * 100
    return their_unit == "%" and not my_unit and value * 100 == expected


def significant_digits(text: str) -> int:
    """The number of significant digits of a decimal; 0 for any other text."""
    return len(text.replace(".", "").lstrip("-+ 0")) if "." in text and number(text) is not None else 0


def is_printed_float(decimal: str, value: Fraction) -> bool:
    """Whether a decimal is the printed float of a fraction whose decimal expansion is infinite.

    ``0.3333333333333333`` is 1/3; ``0.30000000000000004`` is not 3/10.
    """
    if significant_digits(decimal) < FLOAT_DIGITS or "/" in decimal or "\\" in decimal:
        return False
    rest = value.denominator
    for prime in (2, 5):
        while rest % prime == 0:
            rest //= prime
    return rest != 1 and is_near(decimal, value)


def is_near(decimal: str, value: Fraction) -> bool:
    """Whether a decimal is a value rounded to its last digit, or within a float's error of it."""
    unit = Fraction(1, 10 ** len(decimal.partition(".")[2])) / 2
    if significant_digits(decimal) >= FLOAT_DIGITS:
        unit = max(2 * unit, abs(value) * FLOAT_ERROR)
    return abs((number(decimal) or 0) - value) <= unit
