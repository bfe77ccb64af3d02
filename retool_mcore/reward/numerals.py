"""Numbers in words beside the same number: ``twenty-five (25)``, ``one third (1/3)``.

In words alone it is no number: ``five`` is not 5.
"""

from __future__ import annotations

import re
from fractions import Fraction

_ONES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
)
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety"
_PARTS = "half third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth"
_VALUES = {word: at for at, word in enumerate(_ONES.split())} | {
    word: 10 * at for at, word in enumerate(_TENS.split(), 2)
}
_UNDER = {f"{word}{plural}": at for at, word in enumerate(_PARTS.split(), 2) for plural in ("", "s")} | {
    "halves": 2, "quarter": 4, "quarters": 4
}  # fmt: skip
_SCALES = {"thousand": 10**3, "million": 10**6}
_WORDS = r"[A-Za-z]{1,15}(?:[ -][A-Za-z]{1,15}){0,9}"
_VALUE = r"\$?\\?-?[\d,./]{1,20}(?:\\?%)?"
_FIRST = re.compile(rf"\A({_WORDS})\s?\(({_VALUE})\)")
_LAST = re.compile(rf"\A({_VALUE})\s?\(({_WORDS})\)")


def beside_words(text: str) -> str | None:
    """The number of ``twenty-five (25)`` and ``25 (twenty-five)``, with its unit; else None."""
    if match := _FIRST.fullmatch(text):
        words, said = match[1], match[2]
    elif match := _LAST.fullmatch(text):
        said, words = match[1], match[2]
    else:
        return None
    found = words.casefold().replace("-", " ").replace("per cent", "percent").split()
    unit = found.pop() if len(found) > 1 and not _known(found[-1]) else ""
    if said[-1] == "%" and unit != "percent":
        return None
    try:
        value = Fraction(said.lstrip("$\\").rstrip("\\%").replace(",", ""))
    except (ValueError, ZeroDivisionError):
        return None
    sign = -1 if found[:1] in (["negative"], ["minus"]) else 1
    if _spelt(found[1:] if sign < 0 else found) != sign * value:
        return None
    return rf"{said}\text{{ {unit}}}" if unit and said[-1] != "%" else said


def _known(word: str) -> bool:
    return word in _VALUES or word == "a" or word in _UNDER or word in _SCALES or word in ("hundred", "dozen", "and")


def _spelt(words: list[str]) -> Fraction | None:
    if words[-3:] == ["and", "a", "half"] and (whole := _spelt(words[:-3])) is not None:
        return whole + Fraction(1, 2)
    words = words[1:] if words[:1] == ["a"] and len(words) > 1 else words  # a hundred
    under = _UNDER[words[-1]] if words and words[-1] in _UNDER else 1
    words = words[:-1] if under > 1 else words
    total = part = 0
    for word in words:
        if word in _VALUES:
            part += _VALUES[word]
        elif word in ("hundred", "dozen"):
            part = max(part, 1) * (100 if word == "hundred" else 12)
        elif word in _SCALES:
            total, part = total + max(part, 1) * _SCALES[word], 0
        elif word != "and":
            return None
    return Fraction(total + part if words else 1, under)
