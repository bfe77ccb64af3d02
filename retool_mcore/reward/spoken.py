r"""Answers in words: dates, times of day, and words that stand for a set.

``20 June`` is ``June 20``, ``9 am`` is ``9:00 a.m.``, ``no solution`` is the empty set. Only whole
answers are read so. A number in words is no number: ``five`` is not 5.
"""

import re

from retool_mcore.reward.numerals import in_digits

# What stands for a set or a value; a value is read as mathematics, "does not exist" stays words.
PHRASES = {
    **dict.fromkeys(("no solution", "no solutions", "there is no solution", "there are no solutions", "empty set",
                     "the empty set", "null set", "no real solution", "no real solutions",
                     "no solution exists", "no solutions exist", "no such number exists", "has no solution",
                     "has no solutions", "has no real solutions", "does not have any solutions",
                     "does not have a solution", "no such x exists"),
                    r"\emptyset"),
    **dict.fromkeys(("all real numbers", "all reals", "all real number", "the real numbers", "real numbers",
                     "the set of real numbers", "the set of all real numbers", "any real number", "all real x",
                     "all real values", "all real values of x", "every real number", "each real number",
                     "all values of x", "any real value", "for all real numbers", "any real x", "every real x"),
                    r"\mathbb{R}"),
    **dict.fromkeys(("positive real numbers", "all positive real numbers", "positive reals", "all positive reals"),
                    r"(0, \infty)"),
    **dict.fromkeys(("nonnegative real numbers", "all nonnegative real numbers", "non-negative real numbers",
                     "all non-negative real numbers", "nonnegative reals", "all nonnegative reals"), r"[0, \infty)"),
    **dict.fromkeys(("nonzero real numbers", "all nonzero real numbers", "non-zero real numbers", "nonzero reals",
                     "all non-zero real numbers", "all nonzero reals", "any nonzero real number", "非零实数"),
                    r"\mathbb{R} \setminus \{0\}"),
    "none": r"\emptyset",
    "无解": r"\emptyset", "方程无解": r"\emptyset", "无实数解": r"\emptyset", "空集": r"\emptyset",
    "非负实数": r"[0, \infty)", "正实数": r"(0, \infty)", "所有实数": r"\mathbb{R}",
    "全体实数": r"\mathbb{R}", "一切实数": r"\mathbb{R}", "任意实数": r"\mathbb{R}",
    **dict.fromkeys(("infinity", "positive infinity", "plus infinity", "infinite", "infinitely many",
                     "infinitely many solutions", "there are infinitely many", "there are infinitely many solutions",
                     "diverges to infinity", "无穷大", "正无穷", "无穷", "无穷多个", "无穷多", "无数个"), r"\infty"),
    **dict.fromkeys(("negative infinity", "minus infinity"), r"-\infty"),
}  # fmt: skip
_WEEK = {"monday": "mon 一", "tuesday": "tue tues 二", "wednesday": "wed 三", "thursday": "thu thur thurs 四",
         "friday": "fri 五", "saturday": "sat 六", "sunday": "sun 日 天"}  # fmt: skip
SAYINGS: dict[str, str] = {
    **dict.fromkeys(("does not exist", "the limit does not exist", "limit does not exist", "不存在"), "dne"),
    **dict.fromkeys(("convergent", "it converges", "series converges", "integral converges", "收敛"), "converges"),
    **dict.fromkeys(("divergent", "it diverges", "series diverges", "integral diverges", "发散"), "diverges"),
    **dict.fromkeys(("is undefined", "it is undefined", "not defined"), "undefined"),
    "奇数": "odd", "奇函数": "odd", "偶数": "even", "偶函数": "even", "双曲线": "hyperbola", "椭圆": "ellipse",
    "抛物线": "parabola", "等腰三角形": "isosceles", "等边三角形": "equilateral", "直角三角形": "right",
    "单调递增": "increasing", "单调递减": "decreasing",
    "true": "yes", "false": "no", "是": "yes", "否": "no", "不是": "no", "正确": "yes", "错误": "no",
    **{said: f"{first}不{second}条件" for first, second in (("充分", "必要"), ("必要", "充分"))
       for no in ("不", "而不", "非", "但不", "而非") for end in ("", "条件")
       for said in (f"{first}{no}{second}{end}",)},
    **dict.fromkeys(("充要条件", "充要", "充分必要", "充分必要条件", "充分且必要条件"), "充要条件"),
    **dict.fromkeys(("既不充分也不必要条件", "既不充分也不必要", "既不充分又不必要条件", "既不充分又不必要",
                     "既非充分也非必要条件", "既非充分又非必要条件", "既非充分又非必要"), "既不充分也不必要条件"),
    **{said: f"第{place}象限" for place in "一二三四" for said in (f"第{place}象限", f"第{place}", f"在第{place}象限")},
    **{said: f"quadrant {place}"
       for place, nth in (("i", "first"), ("ii", "second"), ("iii", "third"), ("iv", "fourth"))
       for said in (f"{nth} quadrant", f"the {nth} quadrant", f"in quadrant {place}", f"in the {nth} quadrant")},
    **{f"{on}{day}": day for day in _WEEK
       for on in ("on ", "next ", "the following ", "on a ", "it is ", "it is a ", "it's ")},
    **{short: day for day, said in _WEEK.items() for short in said.split() if short.isascii()},
    **{week + sign: day for day, said in _WEEK.items() for sign in said.split() if not sign.isascii()
       for week in ("星期", "周", "礼拜")},
}  # fmt: skip
# No solutions in other words, of which there are many: there are no real roots.
_NONE = re.compile(
    r"(?:there (?:is|are|exists?) )?no (?:such |real )?(?:solutions?|roots?|values?|numbers?|integers?|zeros?)"
    r"(?: exists?| in (?:the )?reals?(?: numbers)?)?"
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
_AT = re.compile(r"at (?=\d)")
_CLOCK = re.compile(r"(\d{1,2})(?::(\d{2}))?\s{0,3}([ap])\.?\s?m\.?(?![a-z])")
_SECONDS = re.compile(r"(?<=\d:\d\d):00(?= ?[ap])")
_HOUR_WORDS = "one two three four five six seven eight nine ten eleven twelve"
_HOURS_SAID = {word: hour for hour, word in enumerate(_HOUR_WORDS.split(), 1)}
_PAST = re.compile(rf"(half|(?:a )?quarter) (past|to) ({'|'.join(_HOURS_SAID)}|1?\d)(?: ([ap])\.?m\.?)?")
_OCLOCK = re.compile(r"(\d{1,2}) o['’]?clock")
_ISO = re.compile(r"(\d{4})([-/.])(0[1-9]|1[0-2])\2([0-3]\d)(?: 00:00(?::00)?)?")
_MONTH_DAY_YEAR = re.compile(r"(0?[1-9]|1[0-2])/(1[3-9]|2\d|3[01])/(\d{4})")  # no day that may be a month
_CHINESE_DATE = re.compile(r"(?:(\d{4})年)?(\d{1,2})月(\d{1,2})[日号]")
_HALF_OF_DAY = re.compile(r"\s?(?:in the (morning|afternoon|evening)|at night)$")
_CHINESE_HALF = re.compile(
    r"(上午|早上|凌晨|下午|晚上|傍晚)\s?(\d{1,2})(?:(?::|[点时](?=\d))(\d\d)分?|[点时]?整?|[点时](半))"
)
_HINT = re.compile(
    r"clock|half past|quarter (?:past|to)|月[\d一二三十]|[上下]午|早上|晚上|in the [mae]|at night"
    r"|\d{4}[-/.]\d\d[-/.]|/\d{4}$|[ap]\.?\s?m\.?(?![a-z])|" + "|".join(month[:3] for month in _MONTHS),
    re.IGNORECASE,
)
_SHORT_DAYS = {short: day for day, said in _WEEK.items() for short in (day, *said.split()) if short.isascii()}
_DAY_BEFORE = re.compile(rf"(?:on )?({'|'.join(sorted(_SHORT_DAYS, key=len, reverse=True))})\.?,? ")
_HOURS = re.compile(r"(\d{1,2}):(\d{2})(?::00)?")


_KIND = re.compile(
    r"(?:an? )?([a-z]{3,15}) (?:functions?|triangles?|numbers?|quadrilaterals?|angles?|sequences?|series)"
)


# What stands behind "yes" or "no" in a sentence, and what would say more or less than that.
_CLAUSE = re.compile(r"(yes|no)[,;.]? ((?:[a-z'’]{1,15} ?){1,9})")
_LIMITS_SAID = "but unless if except only or maybe perhaps yes when sometimes usually partly although"
_DENIALS_SAID = "not no never cannot can't none impossible neither nor false untrue"
_LIMITING, _NEGATING = frozenset(_LIMITS_SAID.split()), frozenset(_DENIALS_SAID.split())


def _answered(words: str) -> str | None:
    """Yes of ``yes it is``, no of ``no it does not``; None where the clause says anything else."""
    match = _CLAUSE.fullmatch(words)
    if match is None:
        return None
    said = match[2].replace("’", "'").split()
    denied = any(each in _NEGATING or each.endswith("n't") for each in said)
    return match[1] if denied == (match[1] == "no") and not _LIMITING & set(said) else None


def said_of(words: str) -> tuple[str | None, str]:
    """What words say as mathematics, if they do, and the words with one spelling."""
    words = match[1] if (match := _KIND.fullmatch(words)) and words not in PHRASES else words
    meant = PHRASES.get(words) or (
        r"\emptyset" if words.startswith(("no ", "there ")) and _NONE.fullmatch(words) else None
    )
    if words[:4] == "yes " or words[:3] == "no ":
        words = _answered(words) or words
    return meant, SAYINGS.get(words, words)


def date_or_time(text: str) -> str | None:
    """A date or a time of day with one spelling: ``june 20 2024``, ``3:30 pm``; None for others."""
    if len(text) > 60 or not _HINT.search(text):
        return None
    text = text if text.isascii() else in_digits(text)
    if match := _ISO.fullmatch(text):
        return f"{_MONTHS[int(match[3]) - 1]} {int(match[4])} {match[1]}"
    if match := _MONTH_DAY_YEAR.fullmatch(text):
        return f"{_MONTHS[int(match[1]) - 1]} {int(match[2])} {match[3]}"
    plain = " ".join(_MARKED.sub(lambda match: f" {match[1] or ''}", text).casefold().replace("{:}", ":").split())
    if match := _DAY_BEFORE.match(plain):
        dated = date_or_time(plain[match.end() :])
        return f"{dated} {_SHORT_DAYS[match[1]]}" if dated and dated[0].isalpha() else None
    plain = re.sub(r"(?<=\d) (?=(?:st|nd|rd|th)\b)", "", plain)
    plain = _AT.sub("", plain, count=1) if plain[:3] == "at " else plain
    plain = _HALF_OF_DAY.sub(lambda match: " am" if match[1] == "morning" else " pm", plain)
    plain = _SECONDS.sub("", plain)
    if (match := _PAST.fullmatch(plain)) and (match[1] != "half" or match[2] == "past"):
        hour = int(match[3]) if match[3].isdigit() else _HOURS_SAID[match[3]]
        hour, minutes = (hour, "15") if match[2] == "past" else ((hour - 2) % 12 + 1, "45")
        return f"{hour}:{'30' if match[1] == 'half' else minutes} {match[4] or 'a'}m"
    if match := _CHINESE_HALF.fullmatch(plain):
        minutes = "30" if match[4] else match[3] or "00"
        plain = f"{match[2]}:{minutes} {'am' if match[1] in ('上午', '早上', '凌晨') else 'pm'}"
    if (match := _CHINESE_DATE.fullmatch(plain)) and 0 < int(match[2]) < 13:
        return " ".join(filter(None, (_MONTHS[int(match[2]) - 1], match[3].lstrip("0"), match[1])))
    if match := _CLOCK.fullmatch(plain):
        return f"{int(match[1])}:{match[2] or '00'} {match[3]}m"
    if match := _OCLOCK.fullmatch(plain):
        return f"{int(match[1])}:00 am"
    if match := _MONTH_FIRST.fullmatch(plain):
        return " ".join(filter(None, (_SHORT[match[1]], match[2].lstrip("0"), match[3])))
    if match := _DAY_FIRST.fullmatch(plain):
        return " ".join(filter(None, (_SHORT[match[2]], match[1].lstrip("0"), match[3])))
    return None


def same_day(first: str, second: str) -> bool:
    """Whether ``december 25 2023`` and ``december 25 2023 monday`` are one day."""
    shorter, longer = sorted((first, second), key=len)
    return shorter[-1].isdigit() and longer.startswith(f"{shorter} ") and longer[len(shorter) + 1 :] in _WEEK


def same_time(words: str, text: str) -> bool:
    """Whether ``3:30 pm`` is the ``15:30`` of a day of 24 hours."""
    said, hours = _CLOCK.fullmatch(words), _HOURS.fullmatch(text)
    if said is None or hours is None or not int(hours[1]) < 24:
        return False
    hour = int(said[1]) % 12 + (12 if said[3] == "p" else 0)
    return hour == int(hours[1]) and said[2] == hours[2]
