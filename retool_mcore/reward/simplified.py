r"""Whether a right answer is worked out, or could be a copy of the problem's own expression.

``e^{\ln 42}``, ``42+0x`` and ``\frac{84}{2}`` are 42, and say nothing that a problem may not have
said. "simplified" in reward.require pays none of them.
"""

import re

from retool_mcore.reward.clean import split_unit
from retool_mcore.reward.numbers import number
from retool_mcore.reward.said import said, words

TIMES, MORE = 2, 1  # an answer may have so many times the truth's numbers and letters, and so many more
_LAYOUT = re.compile(r"\\(?:frac|sqrt|cdot|times|text|circ|pm|cup|infty|begin|end|in|le|ge)(?![a-z])|[bp]matrix")
_PART = re.compile(r"\\[A-Za-z]+|\d+(?:\.\d+)?|[A-Za-z]")
_OVER = re.compile(r"\\frac|/")


def simplified(answer: str, truth: str) -> bool:
    """Whether a right answer is written as simply as its truth asks for.

    Where the truth is a rational number, the answer is one as written: digits, a decimal, a power
    of ten times one, a mixed number, or, of a value that is not whole, a fraction of two numbers.
    Else it has at most ``TIMES`` the numbers, letters and functions of the truth, and ``MORE``.
    """
    mine, theirs = said(answer).text, said(truth).text
    if words(mine) is not None:
        return True
    last = mine if "=" in theirs else re.split(r"=|\\approx", mine)[-1 if "\\approx" not in mine else 0].strip()
    written, expected = number(split_unit(last)[0]), number(split_unit(theirs)[0])
    if expected is not None and split_unit(theirs)[1] != "deg" and ("." not in theirs or written is not None):
        return written is not None and not (_OVER.search(last) and written.denominator == 1)
    return _parts(last) <= TIMES * _parts(theirs) + MORE


def _parts(text: str) -> int:
    """How many numbers, letters and functions a text has."""
    return len(_PART.findall(_LAYOUT.sub(" ", text)))
