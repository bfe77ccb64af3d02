r"""Answers in words: dates, times of day, and words that stand for a set.

``20 June`` is ``June 20``, ``9 am`` is ``9:00 a.m.``, ``no solution`` is the empty set. Only whole
answers are read so. A number in words is no number: ``five`` is not 5.
"""

from __future__ import annotations

import re

# What stands for a set or a value; a value is read as mathematics, "does not exist" stays words.
PHRASES = {
    **dict.fromkeys(("no solution", "no solutions", "there is no solution", "there are no solutions", "empty set",
                     "the empty set", "null set", "no real solution", "no real solutions",
                     "no solution exists", "no solutions exist", "no such number exists"),
                    r"\emptyset"),
    **dict.fromkeys(("all real numbers", "all reals", "all real number", "the real numbers", "real numbers",
                     "the set of real numbers", "the set of all real numbers", "any real number", "all real x",
                     "all real values", "all real values of x"), r"\mathbb{R}"),
    **dict.fromkeys(("positive real numbers", "all positive real numbers", "positive reals", "all positive reals"),
                    r"(0, \infty)"),
    **dict.fromkeys(("nonnegative real numbers", "all nonnegative real numbers", "non-negative real numbers",
                     "all non-negative real numbers", "nonnegative reals", "all nonnegative reals"), r"[0, \infty)"),
    "无解": r"\emptyset", "方程无解": r"\emptyset", "无实数解": r"\emptyset", "空集": r"\emptyset",
    "全体实数": r"\mathbb{R}", "一切实数": r"\mathbb{R}", "任意实数": r"\mathbb{R}",
    **dict.fromkeys(("infinity", "positive infinity", "plus infinity"), r"\infty"),
    **dict.fromkeys(("negative infinity", "minus infinity"), r"-\infty"),
}  # fmt: skip
SAYINGS: dict[str, str] = dict.fromkeys(
    ("does not exist", "the limit does not exist", "limit does not exist", "不存在"), "dne"
)

_MONTHS = ("january", "february", "march", "april", "may", "june", "july", "august", "september", "october",
           "november", "december")  # fmt: skip
_SHORT = {month[:3]: month for month in _MONTHS} | {"sept": "september"} | {month: month for month in _MONTHS}
_MONTH = rf"({'|'.join(sorted(_SHORT, key=len, reverse=True))})\.?"
_DAY = r"(\d{1,2})(?:st|nd|rd|th)?"
_YEAR = r"(?:,?\s{1,2}(\d{4}))?"
_MONTH_FIRST = re.compile(rf"{_MONTH}\s{{0,2}}{_DAY}{_YEAR}")
_DAY_FIRST = re.compile(rf"(?:the\s)?{_DAY}\s{{1,2}}(?:of\s)?{_MONTH}{_YEAR}")
_MARKED = re.compile(r"\\(?:text|mathrm|textbf)\s?\{([^{}]{0,60})\}|\^\{?(?=(?:st|nd|rd|th))|\\[ ,;]|~")
_CLOCK = re.compile(r"(\d{1,2})(?::(\d{2}))?\s{0,3}([ap])\.?\s?m\.?(?![a-z])")
_ISO = re.compile(r"(\d{4})([-/])(0[1-9]|1[0-2])\2([0-3]\d)(?: 00:00(?::00)?)?")
_MONTH_DAY_YEAR = re.compile(r"(0?[1-9]|1[0-2])/(1[3-9]|2\d|3[01])/(\d{4})")  # no day that may be a month
_HINT = re.compile(
    rf"\d{{4}}[-/]\d\d[-/]|/\d{{4}}$|[ap]\.?\s?m\.?(?![a-z])|{'|'.join(month[:3] for month in _MONTHS)}", re.IGNORECASE
)
_HOURS = re.compile(r"(\d{1,2}):(\d{2})(?::00)?")


def date_or_time(text: str) -> str | None:
    """A date or a time of day with one spelling: ``june 20 2024``, ``3:30 pm``; None for others."""
    if len(text) > 60 or not _HINT.search(text):
        return None
    if match := _ISO.fullmatch(text):
        return f"{_MONTHS[int(match[3]) - 1]} {int(match[4])} {match[1]}"
    if match := _MONTH_DAY_YEAR.fullmatch(text):
        return f"{_MONTHS[int(match[1]) - 1]} {int(match[2])} {match[3]}"
    plain = " ".join(_MARKED.sub(lambda match: f" {match[1] or ''}", text).casefold().replace("{:}", ":").split())
    plain = re.sub(r"(?<=\d) (?=(?:st|nd|rd|th)\b)", "", plain)
    if match := _CLOCK.fullmatch(plain):
        return f"{int(match[1])}:{match[2] or '00'} {match[3]}m"
    if match := _MONTH_FIRST.fullmatch(plain):
        return " ".join(filter(None, (_SHORT[match[1]], match[2].lstrip("0"), match[3])))
    if match := _DAY_FIRST.fullmatch(plain):
        return " ".join(filter(None, (_SHORT[match[2]], match[1].lstrip("0"), match[3])))
    return None


def same_time(words: str, text: str) -> bool:
    """Whether ``3:30 pm`` is the ``15:30`` of a day of 24 hours."""
    said, hours = _CLOCK.fullmatch(words), _HOURS.fullmatch(text)
    if said is None or hours is None or not 13 <= int(hours[1]) < 24:
        return False
    return said[3] == "p" and int(said[1]) + 12 == int(hours[1]) and said[2] == hours[2]
