"""Numbers in words: ``twelve``, ``minus four``, ``two thirds``, ``seven apples``, ``十二``.

Only a whole answer is one, with one word for what it counts, or two such behind one another:
``none`` and ``one of them`` are no 1. Beside the same number they say it twice: ``five (5)``.
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
_TEENTHS = "thirteenth fourteenth fifteenth sixteenth seventeenth eighteenth nineteenth"
_UNITS = ("first", "second", *_PARTS.split()[1:8])  # of thirty-first to thirty-ninth
_ORDINALS = {word: at for at, word in enumerate((*_PARTS.split(), *_TEENTHS.split()), 2)} | {
    f"{tens[:-1]}ieth": 10 * at for at, tens in enumerate(_TENS.split(), 2)
} | {
    f"{tens}-{unit}": 10 * at + under
    for at, tens in enumerate(_TENS.split(), 2) for under, unit in enumerate(_UNITS, 1)
}  # fmt: skip
_UNDER = {f"{word}{plural}": under for word, under in _ORDINALS.items() for plural in ("", "s")} | {
    "halves": 2, "quarter": 4, "quarters": 4, "hundredth": 100, "hundredths": 100
}  # fmt: skip
_SCALES = {"thousand": 10**3, "million": 10**6}
_NINE = "(?:one|two|three|four|five|six|seven|eight|nine)"
_HUNDRED = (
    rf"(?:(?:{_TENS.replace(' ', '|')})(?:[- ]{_NINE})?|{'|'.join(reversed(_ONES.split()[1:]))})"  # below a hundred
)
_THOUSAND = rf"(?:(?:{_NINE}|a) hundred(?:(?: and)? {_HUNDRED})?|{_HUNDRED})"
_WHOLE = rf"(?:zero|(?:{_THOUSAND}|a) (?:thousand|million)(?:,? (?:and )?{_THOUSAND})?|{_THOUSAND})"
_FRACTION = rf"(?P<over{{0}}>{_HUNDRED}|a)[- ](?P<under{{0}}>{'|'.join(sorted(_UNDER, key=len, reverse=True))})"
_SPELT_OUT = rf"(?:(?:(?P<whole{{0}}>{_WHOLE}) and )?{_FRACTION}|(?P<number{{0}}>{_WHOLE}))"
_NOUN = r"[A-Za-z][A-Za-z'’]{1,14}"
_ALONE = re.compile(
    rf"\A(?P<sign>negative |minus )?{_SPELT_OUT.format(1)}(?: (?P<noun>(?:of (?:an?|the) )?{_NOUN}))?"
    rf"(?:,? (?:and )?{_SPELT_OUT.format(2)} (?P<other>{_NOUN}))?",
    re.IGNORECASE,
)
_STARTS = re.compile(rf"\A(?:{'|'.join((*_VALUES, 'a', 'negative', 'minus'))})(?![A-Za-z])", re.IGNORECASE)
_HAN = {sign: at for at, sign in enumerate("零一二三四五六七八九")} | {"两": 2, "〇": 0}
_HAN_SCALES = {"十": 10, "百": 100, "千": 1000, "万": 10**4}
_HAN_DIGIT = "[一二两三四五六七八九]"
_HAN_NUMBER = (
    rf"(?:零|(?:{_HAN_DIGIT}千零?)?(?:{_HAN_DIGIT}百(?:零|(?={_HAN_DIGIT}?十)|(?![零〇一二两三四五六七八九])))?"
    rf"(?:{_HAN_DIGIT}?十)?{_HAN_DIGIT}?)"
)
_HAN_IN_TIME = re.compile(r"[零一二两三四五六七八九十]{1,3}(?=[点分时月日号])")
_CHINESE = re.compile(
    rf"(负)?(?:(百|{_HAN_NUMBER})分之)?({_HAN_NUMBER})([个只条张人名本支把辆件种次台棵块页岁位天元米]?)"
)
_OTHER_MONEY = re.compile(r".\s?[\d,]{1,40}(?:\.\d{1,10})?")
_MONEY = {"€": "euros", "£": "pounds", "¥": "yuan", "₹": "rupees"}


def spelt_out(text: str) -> str | None:
    """The digits of an answer that is a number in words, with what it counts; else None."""
    if _STARTS.match(text) is None or len(text) > 100 or (match := _ALONE.fullmatch(text)) is None:
        return None
    said, noun, other = _digits(match, 1), match["noun"], match["other"]
    if (other and not noun) or (noun and " " in noun and not match["over1"]):
        return None
    said = ("-" if match["sign"] else "") + said + (f" {noun}" if noun else "")
    return f"{said} {_digits(match, 2)} {other}" if other else said


def _digits(match: re.Match[str], place: int) -> str:
    whole, over, under, number = (match[f"{part}{place}"] for part in ("whole", "over", "under", "number"))
    value = sum(_value(each) for each in (whole, number) if each)
    return str(value + (_value(over) / _UNDER[under.lower()] if over else 0))


def _value(words: str) -> Fraction:
    if words.lower() == "a":
        return Fraction(1)
    total = part = 0
    for word in words.lower().replace("-", " ").replace(",", "").split():
        if word in _VALUES:
            part += _VALUES[word]
        elif word == "hundred":
            part = max(part, 1) * 100
        elif word in _SCALES:
            total, part = total + max(part, 1) * _SCALES[word], 0
    return Fraction(total + part)


def chinese(text: str) -> str | None:
    """The digits of a number in Chinese, with one sign for what it counts; else None."""
    match = _CHINESE.fullmatch(text) if len(text) < 20 else None
    if match is None or not match[3]:
        return None
    if match[2] is not None and (not match[2] or match[4]):
        return None
    said = ("-" if match[1] else "") + str(_han_value(match[3]))
    if match[2]:
        return rf"{said}\%" if match[2] == "百" else f"{said}/{_han_value(match[2])}"
    return said + match[4]


def in_digits(text: str) -> str:
    """A date or time in Chinese with its numbers in digits."""
    return _HAN_IN_TIME.sub(lambda match: str(_han_value(match[0])), text)


def _han_value(text: str) -> int:
    total, digit = 0, 0
    for sign in text:
        if sign in _HAN_SCALES:
            total, digit = total + (digit or 1) * _HAN_SCALES[sign], 0
        else:
            digit = _HAN[sign]
    return total + digit


def priced(text: str) -> str:
    """A price in another currency than dollars with its name: ``€5`` is ``5 euros``."""
    if text[:1] in _MONEY and _OTHER_MONEY.fullmatch(text):
        return rf"{text[1:].strip()}\text{{ {_MONEY[text[0]]}}}"
    return text
