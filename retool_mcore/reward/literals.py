r"""SymPy's names of sets and numbers, and constants as digits; dates, circles, polynomials.

``S.NegativeOne`` is -1. Within a product ``5*3.141592653589793`` is ``5\pi``, and
``0.8333333333333334*pi`` is ``\frac{5}{6}\pi``. A float is one where it is the nearest to the
constant, or beside it; alone it is a decimal.
"""

import math
import re
from fractions import Fraction

MAX_ROOT = 1000
MAX_UNDER_PI = 12
ROW = re.compile(r"\[([^][]{1,400})\]")
LONG = re.compile(r"(?<![\w.])\d{1,2}\.\d{13,16}(?![\w.])")
_NEAR = 2**-52
_NAMES = {"EmptySet": r"\emptyset", "Reals": r"\mathbb{R}", "Integers": r"\mathbb{Z}", "Naturals": r"\Npos",
          "Naturals0": r"\Nzero", "Rationals": r"\mathbb{Q}", "GoldenRatio": r"\frac{1+\sqrt{5}}{2}"}  # fmt: skip
_HINT = re.compile("S\\.|Reals|EmptySet|GoldenRatio|Integers|Naturals|Rationals")
_FLOAT_CHARS = 17  # of one that is not alone
_SINGLE = {"Infinity": r"\infty", "NegativeInfinity": r"-\infty", "NegativeOne": "(-1)", "One": "(1)", "Zero": "(0)",
           "Half": r"(\frac{1}{2})", "Pi": r"\pi", "Exp1": "e", "ImaginaryUnit": "i"}  # fmt: skip
_NAMED = re.compile(rf"(?<![\w\\.])(?:(?:S\.)?({'|'.join(_NAMES)})(?:\(\))?|S\.({'|'.join(_SINGLE)}))(?!\w)")
_IMAGE = re.compile(r"ImageSet\(Lambda\((_n|n), ([^,]{1,200})\), \\mathbb\{Z\}\)")


def with_constants(text: str) -> str:
    r"""The text with SymPy's names and with floats of ``\pi``, ``e`` and roots as LaTeX."""
    if not text.islower() and _HINT.search(text):
        text = _NAMED.sub(lambda match: _NAMES[match[1]] if match[1] else _SINGLE[match[2]], text)
    if "." in text and len(text) > _FLOAT_CHARS and LONG.fullmatch(text) is None:
        return LONG.sub(_named, text)
    return text


def images(text: str) -> str | None:
    """``ImageSet(Lambda(_n, _n*pi), Integers)``, one or the union of several, with their note."""
    found = list(_IMAGE.finditer(text))
    whole = ", ".join(match[0] for match in found)
    if not found or text not in (whole, f"Union({whole})"):
        return None
    said = ", ".join(match[2].replace(match[1], "n") for match in found)
    return rf"{said}, n \in \mathbb{{Z}}"


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
    factor = (
        "*" in match.string[max(match.start() - 2, 0) : match.start()] + match.string[match.end() : match.end() + 2]
    )
    if factor and float(part) == value:
        return rf"(\frac{{{part.numerator}}}{{{part.denominator}}})"
    part = Fraction(value / math.pi).limit_denominator(MAX_UNDER_PI)
    near = factor and abs(float(part) * math.pi - value) <= _NEAR * value  # 6.283185307179586*r
    return rf"(\frac{{{part.numerator}\pi}}{{{part.denominator}}})" if near else match[0]


def polynomial(args: list[str]) -> str | None:
    """``[2, 0, -1]``, the coefficients of NumPy's polynomial, as a sum."""
    row = ROW.fullmatch(args[0].strip()) if args else None
    values = row[1].split(",") if row else []
    last = len(values) - 1
    return (
        "+".join(f"({value.strip()})x^{{{last - place}}}" for place, value in enumerate(values[:last]))
        + (f"+({values[last].strip()})" if values else "")
        or None
    )


def moment(args: list[str]) -> str | None:
    """``datetime.date(2021, 3, 14)`` as 2021-03-14, ``datetime.time(20, 15)`` as 20:15."""
    if not all(each.isdigit() for each in args) or len(args) not in (2, 3):
        return None
    return ("-" if len(args[0]) == 4 else ":").join(each.zfill(2) for each in args)


def circle(args: list[str]) -> str | None:
    """``Circle(Point2D(2, -1), 3)`` of SymPy as its equation."""
    center = args[0].strip("()").split(",") if len(args) == 2 else []
    return f"(x-({center[0]}))^2+(y-({center[1].strip()}))^2=({args[1]})^2" if len(center) == 2 else None
