r"""Reduces an answer to its statement: a choice, a value, words, or a sentence's only number.

An answer states one thing. A text with two values, such as ``80 girls and 16 boys``, states none.
"""

import re
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

from retool_mcore.reward.clean import changes_value, clean, split_unit, unit_of, unit_ratio
from retool_mcore.reward.numbers import number, same_numbers

MAX_SENTENCE_WORDS = 40
MAX_WORDS = 6  # in a truth that consists of words

_LABEL = re.compile(r"(?:\\text ?\{ ?)?\(([A-Ja-j])\)(?: ?\})? ?(.+)|\\text ?\{ ?\(([A-Ja-j])\) ([^{}]+)\}")
_NEXT_CHOICE = re.compile(r"\([B-Jb-j]\)|^(?:and|or|answer)\b|[.)] ?\(?[B-J][.)]")
_CHOICE = re.compile(
    r"(?:(?:the )?(?:option|choice|answer)(?: is)? )?\(?(?:\\text ?\{ ?)?\(?([A-J])\)?(?: ?\})?[).]*", re.IGNORECASE
)
_LEAD_IN = re.compile(
    r"(?:(?:so|thus|hence|therefore),? )?(?:the )?(?:final |correct |required )?"
    r"(?:answer|result)(?: is|:| is:)? (?=\S)",
    re.IGNORECASE,
)
_FORMULA = re.compile(r"\$([^$]+)\$|\\\((.+?)\\\)")
_FORMULA_SIGN = re.compile(r"\$|\\\(")
_BOX = re.compile(r"\\boxed ?\{([^{}]+(?:\{[^{}]*\}[^{}]*)*)\}")
_EQUALITY = re.compile(r"=|\\(?:approx|simeq|equiv)(?![a-z])")
_APPROXIMATION = re.compile(r"\A(.*[\d}]) ?\((?:\\approx ?|approximately )?(-?\d*\.\d+)\)")
_RUN = re.compile(r"[A-Za-z]+")
_PLAIN_TEXT = re.compile(r"[A-Za-z][A-Za-z\d .,:;'&-]*")
_MONTHS = (
    "january", "february", "march", "april", "may", "june", "july", "august", "september", "october",
    "november", "december",
)  # fmt: skip
_YEAR_FIRST = re.compile(r"(\d{4})([-/.])(\d{1,2})\2(\d{1,2})")
_YEAR_LAST = re.compile(r"(\d{1,2})([-/.])(\d{1,2})\2(\d{4})")
_DATE_IN_WORDS = re.compile(
    r"(?:(?P<day>\d{1,2})(?:st|nd|rd|th)? (?:of )?)?(?P<month>[a-z]{3,9})\.?"
    r"(?: (?P<day_after>\d{1,2})(?:st|nd|rd|th)?)?,? (?P<year>\d{4})"
)
_NUMBER = re.compile(r"(?<![\w.,:/^\\{}-])(-?(?:\d+(?:\.\d+)?|\.\d+)(?: ?/ ?\d+)?)(?: ?(\\?%)|(?= |$|[.,!?](?: |$)))")
_HEDGES = frozenset((
    "not", "no", "nor", "or", "if", "between", "least", "most", "about", "approximately", "approx", "around",
    "roughly", "nearly", "almost", "maybe", "perhaps", "either", "neither", "half", "twice", "double", "triple",
    "dozen", "except", "unless", "wrong", "incorrect", "cannot", "isn", "isnt", "guess", "assume", "assuming",
    "suppose", "let", "say", "per", "minus", "plus", "times", "squared", "cubed", "january", "february", "march",
    "april", "june", "july", "august", "september", "october", "november", "december", "two", "three", "four",
    "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve", "hundred", "thousand", "million",
    "billion", "both", "versus", "vs", "instead", "unknown", "impossible", "likely",
))  # fmt: skip
_COMPARISONS = frozenset(("than", "by", "exceeds", "below", "above", "under", "over", "to", "from"))
_FUNCTION = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc|ln|log|arcsin|arccos|arctan|det|gcd|max|min|lim)(?![a-z])")
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{3}|\\text|\\mod|\\pmod")
_NAME = re.compile(
    r"(?:\\(?:angle|triangle|overline|vec|hat|bar) ?)?\{?(?:[A-Z]{1,4}|[A-Za-z]|\\[a-z]{2,7})'?\}?"
    r"(?: ?\([^()=]{1,20}\))?"
)
_CALL = re.compile(r"(?<![A-Za-z])([A-Za-z]'?) ?\([^()=]{1,40}\)")
_DIGIT_WITH_INDEX = re.compile(r"\d ?_.*")
_INDEX = re.compile(r" ?_ ?(?:\w|\\[a-z]+|\{[^{}]{0,40}\})")


class Statement(NamedTuple):
    """A cleaned answer. ``label``: the choice's letter before its content, B in ``(B) 12``."""

    text: str
    label: str = ""


@lru_cache(maxsize=8192)
def statement_of(answer: str) -> Statement:
    """Clean an answer and remove its label and introduction. Takes linear time."""
    text = clean(answer)
    if "####" in text:
        text = _after_hashes(text)
    if lead := _LEAD_IN.match(text):
        text = clean(text[lead.end() :])
    if (only := _only_formula(text)) is not None:
        text = clean(only)
    text = _APPROXIMATION.sub(r"\1 \\approx \2", text) if text.endswith(")") else text
    if match := _LABEL.fullmatch(text):
        label, rest = (match[1], match[2]) if match[1] else (match[3], match[4])
        if not _NEXT_CHOICE.search(rest):  # otherwise it is a copied list of choices
            return Statement(clean(rest), label.upper())
    return Statement(text)


def _after_hashes(text: str) -> str:
    """``40`` for ``40 songs. #### 40``, the form of GSM8K's solutions. Both parts must agree."""
    before, _, after = text.rpartition("####")
    after = clean(after)
    value = number(one_number(clean(before)) or "")
    return after if not before.strip(" #") or (value is not None and value == number(after)) else text


def _only_formula(text: str) -> str | None:
    r"""The only formula of a sentence without other numbers, such as ``it is \(x = 3\)``, or None.

    If the sentence has a box, the box is its formula, and formulas in dollar signs do not count.
    """
    found = (
        [*_BOX.finditer(text)]
        if r"\boxed" in text
        else [*_FORMULA.finditer(text)]
        if _FORMULA_SIGN.search(text)
        else []
    )
    if len(found) != 1:
        return None
    outside = text[: found[0].start()] + text[found[0].end() :]
    if re.search(r"[\d\\=+<>]", outside) or _HEDGES & set(_RUN.findall(outside.lower())):
        return None
    return next(filter(None, found[0].groups()))


def spelling(text: str) -> str:
    r"""A text without redundant spaces and braces: ``x^2`` for ``x ^ {2}``."""
    text = re.sub(r"(?<![A-Za-z\d]) | (?![A-Za-z\d])", "", text)
    text = re.sub(r"\\(?:text|mathrm) ?\{([^{}\\]*)\}", r"\1", text)
    text = re.sub(r"([_^])\{(\w)\}", r"\1\2", text)
    return text.casefold() if len(_RUN.findall(text)) and words(text) is not None else text


def words(text: str) -> str | None:
    """An answer that consists of words, in lower case (``october 30``); None for mathematics."""
    text = re.sub(r"\\text ?\{([^{}\\]*)\}", r"\1", text).strip(" .,!")
    if not _PLAIN_TEXT.fullmatch(text):
        return None
    runs = _RUN.findall(text)
    if not any(len(run) > 2 or (len(run) == 2 and run.isalpha() and run.lower() in ("no", "up", "ok")) for run in runs):
        return None
    plain = " ".join(re.findall(r"[a-z\d:]+", text.casefold()))
    for month in _MONTHS:
        plain = re.sub(rf"\b{month[:3]}\b", month, plain)
    return plain


def date_of(text: str) -> tuple[int, ...] | None:
    """The date that a text is: (2023, 7, 22) for ``2023-07-22`` and ``22 July 2023``.

    ``22/07/2023`` is (22, 7, 2023), because countries write day and month in either order.
    """
    if match := _YEAR_FIRST.fullmatch(text):
        year, month, day = int(match[1]), int(match[3]), int(match[4])
        return (year, month, day) if 1 <= month <= 12 and 1 <= day <= 31 else None
    if match := _YEAR_LAST.fullmatch(text):
        first, second, year = int(match[1]), int(match[3]), int(match[4])
        return (first, second, year) if 1 <= first <= 31 and 1 <= second <= 31 else None
    match = _DATE_IN_WORDS.fullmatch(text.lower())
    if match is None or bool(match["day"]) == bool(match["day_after"]):
        return None
    months = [number for number, name in enumerate(_MONTHS, start=1) if match["month"] in (name, name[:3])]
    return (int(match["year"]), months[0], int(match["day"] or match["day_after"])) if months else None


def choice(text: str) -> str | None:
    """The letter of an answer that is only a choice: ``B``, ``(b)``, ``B.``, ``option B``."""
    match = _CHOICE.fullmatch(text)
    if match is None:
        return None
    return match[1].upper() if len(text) > 1 or text.isupper() else None


def one_number(text: str) -> str | None:
    """A sentence's only number, with its percent sign, or None.

    Returns None if the sentence denies, compares or estimates, or contains a number word.
    """
    text = re.sub(r"\\text ?\{([^{}\\]*)\}", r"\1", text).replace("\\$", "").replace("$", "")
    text = " ".join(text.split())
    found = list(_NUMBER.finditer(text))
    if len(found) != 1 or len(re.findall(r"\d+", text)) > 1 + found[0][0].count(".") + found[0][0].count("/"):
        return None
    before, after = text[: found[0].start()].lower().split(), text[found[0].end() :].lower()
    runs = [*_RUN.findall(" ".join(before)), *_RUN.findall(after)]
    if (
        not runs
        or len(runs) > MAX_SENTENCE_WORDS
        or _HEDGES & set(runs)
        or re.search(r"[\\=<>+*^_{}\[\]|~]", text.replace("\\%", ""))
        or (before and before[-1].strip(",") in _COMPARISONS)
    ):
        return None
    following = _RUN.match(after.strip(" -"))
    if following and following[0] not in _UNIT_LIKE and changes_value(following[0]):
        return None
    return found[0][1].replace(" ", "") + ("%" if found[0][2] else "")


_UNIT_LIKE = frozenset(
    ("and", "more", "less", "fewer", "to", "is", "for", "with", "over", "where", "when", "i", "a", "e")
)


def is_name(side: str) -> bool:
    r"""Whether a left side is a name for a value: ``f(3)``, ``m + n``, ``\cos t``, ``total cost``.

    ``3x``, ``x^2`` and ``x - 5`` are not: with them, the equation is not solved yet.
    """
    if re.search(r"[.,;?!]", side) or _HEDGES & set(_RUN.findall(side.lower())):
        return False
    if _FUNCTION.match(side) or _WORD.search(side) or is_plain_name(side):
        return True
    bare = re.sub(r" ?\^ ?\{? ?\d ?\}?", "", _INDEX.sub("", _CALL.sub(r"\1", side)))
    letters = set(_RUN.findall(re.sub(r"\\[a-z]+", " ", bare)))
    return not re.search(r"\d", bare) and len("".join(letters)) > 1


def is_plain_name(side: str) -> bool:
    r"""Whether a left side is one name: ``x``, ``m_{\max}``, ``f(x)``, ``AB``, ``\angle A``."""
    return _NAME.fullmatch(_INDEX.sub("", side).strip("|")) is not None


def number_of(answer: str) -> Fraction | None:
    """The value of an answer that is one number, with or without a unit, or None."""
    return number(split_unit(statement_of(answer).text)[0])


def vote(answer: str | None) -> str:
    r"""The answer as maj@k counts it; "" if there is none.

    ``034``, ``34`` and ``$34$`` are the same vote, and so are ``\frac{1}{2}``, ``1/2`` and ``0.5``.
    """
    if answer is None:
        return ""
    text = statement_of(answer).text
    value, unit = split_unit(text)
    if (exact := number(value)) is not None:
        return f"{exact}%" if unit == "%" else str(exact)
    return words(text) or spelling(text)


def quick_verdict(answer: str, truth: str) -> bool | None:
    """Whether an answer equals the truth, or None if comparing texts and numbers cannot decide."""
    mine, theirs = statement_of(answer), statement_of(truth)
    if not mine.text or not theirs.text:
        return False
    if answer.strip() != truth.strip() and _other_currency(answer, truth):
        return False
    if mine.text == theirs.text or spelling(mine.text) == spelling(theirs.text):
        return not (mine.label and theirs.label) or mine.label == theirs.label
    if (date := date_of(theirs.text)) is not None:
        return date_of(mine.text) == date  # as an expression, 2023-07-22 would be 1994
    if _DIGIT_WITH_INDEX.fullmatch(mine.text) and "_" not in theirs.text:
        return False  # 5_7 would be read as 5 in base 7, but hedges between 5 and 7
    if (known := same_numbers(mine.text, theirs.text)) is not None:
        return known
    if (letter := choice(theirs.text)) is not None:
        sign = _EQUALITY.search(mine.text)
        if sign and choice(mine.text[: sign.start()].strip()):
            return False  # A = B names two choices
        named = mine.label or choice(mine.text) or (mine.text.upper() if mine.text in "abcde" else "")
        return letter == named if named else None
    if theirs.label and (letter := choice(mine.text)) is not None:
        return letter == theirs.label
    texts = words(mine.text), words(theirs.text)
    if texts[0] and texts[1]:
        return texts[0] == texts[1]
    if number(split_unit(theirs.text)[0]) is None:
        return None
    if (value := one_number(mine.text)) is not None:
        return _same_stated_number(value, mine.text, theirs.text)
    name, sign, value = mine.text.partition("=")
    if sign and "=" not in value and not re.search(r"\d", name) and is_plain_name(name.strip()):
        return same_numbers(clean(value), theirs.text)
    return False if texts[0] else None


def _other_currency(answer: str, truth: str) -> bool:
    """Whether the two have different currencies, or one is money and the other a percentage."""
    found = [next((sign for sign in "$€£¥₹" if sign in re.sub(r"^\$|\$$", "", text)), "") for text in (answer, truth)]
    return (found[0] != found[1] and "" not in found) or any(
        sign in "$€£¥₹" and sign and other.rstrip("\\ }$").endswith("%")
        for sign, other in zip(found, (truth, answer), strict=True)
    )


def _same_stated_number(value: str, sentence: str, truth: str) -> bool:
    """Whether a sentence's number equals the truth. Converts units if both sides have one."""
    following = _RUN.match(sentence.rpartition(value)[2].strip(" -"))
    unit, expected = unit_of(following[0]) if following else "", split_unit(truth)[1]
    comparable = unit and expected and unit_ratio(unit, expected) is not None
    return bool(same_numbers(f"{value} {unit}" if comparable else value, truth if comparable else split_unit(truth)[0]))
