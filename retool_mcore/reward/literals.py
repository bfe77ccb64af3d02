r"""Constants that Python prints as digits within a product: ``5*3.141592653589793`` is ``5\pi``,
``0.8333333333333334*pi`` is ``\frac{5}{6}\pi``.

A float is one where it is the nearest to the constant, or beside it; alone it is a decimal.
"""

import math
import re
from fractions import Fraction

MAX_ROOT = 1000
_LONG = re.compile(r"(?<![\w.])\d{1,2}\.\d{13,16}(?![\w.])")
_NEAR = 2**-52


def with_constants(text: str) -> str:
    r"""The text with its floats of ``\pi``, ``e`` and roots as such; any other text as it is."""
    return _LONG.sub(_named, text) if _LONG.fullmatch(text) is None else text


def _named(match: re.Match[str]) -> str:
    value = float(match[0])
    for constant, said in ((math.pi, r"\pi"), (math.e, "e")):
        if abs(value - constant) <= _NEAR * constant:
            return f"({said})"
    square = round(value * value)
    near = 1 < square < MAX_ROOT and abs(value - math.sqrt(square)) <= _NEAR * value
    if near and math.isqrt(square) ** 2 != square:
        return rf"(\sqrt{{{square}}})"
    part = Fraction(value).limit_denominator(MAX_ROOT)
    factor = "*" in match.string[max(match.start() - 2, 0) : match.start()] + match.string[match.end() : match.end() + 2]
    return rf"(\frac{{{part.numerator}}}{{{part.denominator}}})" if factor and float(part) == value else match[0]
