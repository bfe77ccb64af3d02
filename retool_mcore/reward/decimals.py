"""Decimals as they are written, beside the fractions that they stand for."""

from __future__ import annotations

import re
from fractions import Fraction

PRINTED_DIGITS = 15  # with so many it may be a float as Python prints it, off by one in the last digit
DECIMAL = re.compile(r"(?<!\d)(\d*+)\.(\d++)(?:[eE]([-+]?\d{1,4}))?")  # (?<!\d): a search takes linear time


def printed(decimal: str, value: Fraction) -> bool:
    """Whether a decimal of 15 digits or more is within one unit of its last digit of a fraction.

    Only where the fraction has no decimal of so many digits: 1/3 has none, and 3 has one.
    """
    digits = DECIMAL.fullmatch(decimal)
    if digits is None or len((digits[1] + digits[2]).lstrip("0")) < PRINTED_DIGITS or value.denominator == 1:
        return False
    unit = Fraction(10) ** (int(digits[3] or 0) - len(digits[2]))
    return (value / unit).denominator != 1 and abs(abs(value) - int(digits[1] + digits[2]) * unit) <= unit
