r"""Decides whether a right answer is worked out, or could be copied from the problem.

``e^{\ln 42}``, ``42+0x`` and ``\frac{84}{2}`` equal 42, but the problem may contain such an
expression. With "simplified" in reward.require they earn the reward of a wrong answer.
"""

import re

from retool_mcore.reward.clean import split_unit
from retool_mcore.reward.numbers import number
from retool_mcore.reward.statement import statement_of, words

MAX_RATIO, MAX_EXTRA = 2, 1  # limits of an answer's size, relative to the truth's
_LAYOUT = re.compile(r"\\(?:frac|sqrt|cdot|times|text|circ|pm|cup|infty|begin|end|in|le|ge)(?![a-z])|[bp]matrix")
_PART = re.compile(r"\\[A-Za-z]+|\d+(?:\.\d+)?|[A-Za-z]")
_OVER = re.compile(r"\\frac|/")


def simplified(answer: str, truth: str) -> bool:
    """Whether a right answer is about as simple as its truth.

    If the truth is a rational number and not in degrees, the answer must be written as one: digits,
    a decimal, scientific notation, a mixed number, or a fraction whose value is not an integer. A
    truth with a decimal point also allows an answer that is not a number. Such an answer, and one
    to any other truth, has a limit: if the truth has n numbers, letters and functions, the answer
    may have at most ``MAX_RATIO`` n + ``MAX_EXTRA``.
    """
    mine, theirs = statement_of(answer).text, statement_of(truth).text
    if words(mine) is not None:
        return True
    last = mine if "=" in theirs else re.split(r"=|\\approx", mine)[-1 if "\\approx" not in mine else 0].strip()
    written, expected = number(split_unit(last)[0]), number(split_unit(theirs)[0])
    if expected is not None and split_unit(theirs)[1] != "deg" and ("." not in theirs or written is not None):
        return written is not None and not (_OVER.search(last) and written.denominator == 1)
    return _parts(last) <= MAX_RATIO * _parts(theirs) + MAX_EXTRA


def _parts(text: str) -> int:
    """The number of numbers, letters and functions in a text."""
    return len(_PART.findall(_LAYOUT.sub(" ", text)))
