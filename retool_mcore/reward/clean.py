r"""Removes formatting from answers: delimiters, sizes, Unicode variants, separators, units.

Everything here takes linear time, because it runs in the caller's process without limits.
"""

import re
import unicodedata
from fractions import Fraction
from functools import lru_cache

MAX_ANSWER_CHARS = 2000  # a longer answer is wrong without a check
MAX_PASSES = 12  # for nested delimiters

_SPELLINGS = {
    **dict.fromkeys("\u2010\u2011\u2012\u2212\ufe63\uff0d", "-"),
    **dict.fromkeys("·⋅∙", r"\cdot "),
    "×": r"\times ", "÷": "/", "⁄": "/", "∕": "/", "∞": r"\infty ", "±": r"\pm ", "≤": r"\le ", "≥": r"\ge ",
    "≠": r"\ne ", "≈": r"\approx ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "∅": r"\emptyset ",
    "°": r"^\circ ", "º": r"^\circ ", "⟨": r"\langle ", "⟩": r"\rangle ", "ℝ": r"\mathbb{R}",
    "“": '"', "”": '"', "‘": "'", "’": "'", "′": "'", "、": ",", "。": ".", "￥": "¥",
}  # fmt: skip
_FORMATTING = re.compile(
    r"\\(?:left|right|middle|displaystyle|textstyle|limits|[bB]igg?[lrm]?|checkmark|square|blacksquare|large|Large)(?![a-zA-Z])"
)
_BAR = re.compile(r"\\(?:lvert|rvert|vert|mid)(?![a-zA-Z])")
_SPACES = re.compile(r"(?<!\\)\\(?:[,;:> ]|q?quad(?![a-z])|\n)|[~\s]+|&nbsp;")
_ROOT = re.compile(r"√\s?(\d+(?:\.\d+)?|[a-zA-Z]|\\pi)")
_SHORT_FRACTION = re.compile(r"\\frac\s*(?:(\d|[a-zA-Z]|\\pi)|(\{[^{}]*\}))\s*(?:(\d|[a-zA-Z]|\\pi)|(\{[^{}]*\}))")
_SHORT_ROOT = re.compile(r"\\sqrt\s*(\\pi|[A-Za-z]|\d+)")
_TEXT = r"\\(?:text|textbf|textit|textrm|textnormal|mbox|mathrm|operatorname)"
_WRAPPER = re.compile(rf"(?:{_TEXT}|\\(?:boxed|fbox|mathbf|boldsymbol|underline|emph))\s*\{{")
_TEXT_COMMAND = re.compile(rf"{_TEXT}\s*\{{([^{{}}]*)\}}")
_BOLD = re.compile(r"\\(?:mathbf|boldsymbol|mathit|vec)\s*\{([A-Za-z]{1,2})\}|\\(?:mathrm|text)\s*\{([ie])\}")
_DELIMITERS = (
    ("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"), ("**", "**"), ("`", "`"), ('"', '"'), ("'", "'"),
)  # fmt: skip
_COMMA = r"(?:,|\{,\}|\\!,|,\\!)"
_THOUSANDS = re.compile(rf"(?<![\d.,}}])\d{{1,3}}(?:{_COMMA} ?\d{{3}})+(?!\d|{_COMMA} ?\d)")
_SPACED_THOUSANDS = re.compile(r"[-+]?\d{1,3}(?:(?: |\\,)\d{3})+(?:\.\d+)?")
_IN_BRACKETS = re.compile(r"[(\[{]")
_BRACKETS = re.compile(r"(?<=^\{)[(\[].*[)\]](?=\}$)")
_SET = re.compile(r"[,:]|\\(?:emptyset|varnothing)")
_AM_PM = re.compile(r"(?<=\d) ?(?:\\text ?\{ ?)?([ap])\.? ?m(?![a-z])\.?(?: ?\})?", re.IGNORECASE)
_CURRENCY = re.compile(r"(?:US|USD ?|RMB ?|Rs\.? ?)?(?:\$?\\\$|\$(?=[-\d.])|[€£¥₹]) ?")
_ORDINAL = re.compile(r"(?<=\d) ?(?:\^ ?\{? ?(?:\\text ?\{ ?)?(?:st|nd|rd|th) ?\}? ?\}?|st|nd|rd|th)$")


def clean(text: str) -> str:
    """The text without delimiters, sizes and spacing commands, with one spelling of each sign."""
    text = text[: MAX_ANSWER_CHARS + 1].strip()
    if text.isdigit() and text.isascii():
        return text
    if not text.isascii():
        text = "".join(map(_to_ascii, text))
        text = _ROOT.sub(r"\\sqrt{\1}", text).replace("√", r"\sqrt")
    if "\\" in text:
        text = text.replace("dfrac", "frac").replace("tfrac", "frac").replace("cfrac", "frac")
        text = _FORMATTING.sub("", text)
        text = _BAR.sub("|", text)
    text = _join_thousands(text)
    text = _SPACES.sub(" ", text.replace(r"\!", ""))
    text = _unwrap(text)
    if "\\" in text:
        text = _TEXT_COMMAND.sub(r" \\text{\1} ", _BOLD.sub(r" \1\2 ", text))
        text = _SHORT_FRACTION.sub(_full_fraction, text)
        text = _SHORT_ROOT.sub(r"\\sqrt{\1}", text)
    text = _CURRENCY.sub("", " ".join(text.split()))
    text = _AM_PM.sub(r" \1m", text) if ":" in text else text
    return _ORDINAL.sub("", text) if text[-1:] in "tndh}" else text


@lru_cache(maxsize=4096)
def _to_ascii(char: str) -> str:
    if known := _SPELLINGS.get(char):
        return known
    kind, name = unicodedata.category(char), unicodedata.name(char, "")
    if kind in ("Cf", "Mn"):
        return ""
    if kind == "Nd":
        return str(unicodedata.decimal(char))
    if name.startswith("SUPERSCRIPT ") and (plain := unicodedata.normalize("NFKC", char)).isalnum():
        return f"^{{{plain}}}"
    if name.startswith("GREEK SMALL LETTER ") and name.count(" ") == 3:
        return f"\\{name.split()[-1].lower()} "
    plain = unicodedata.normalize("NFKC", char).replace("\N{FRACTION SLASH}", "/")
    if name.startswith("VULGAR FRACTION "):
        return f" {plain}"  # a mixed number behind an integer
    return plain if plain.isascii() else char


def _join_thousands(text: str) -> str:
    r"""Remove thousands separators (``1,234``, ``1{,}234``, ``1,\!234``), but not in a pair."""
    if _SPACED_THOUSANDS.fullmatch(text):
        return text.replace(" ", "").replace(r"\,", "")
    # (1,234) may be a pair, unlike 1{,}234
    pattern = _THOUSANDS if not _IN_BRACKETS.search(text.replace("{,}", "")[:1]) else _MARKED_THOUSANDS
    return pattern.sub(lambda match: re.sub(r"\D", "", match[0]), text)


_MARKED_THOUSANDS = re.compile(r"(?<![\d.,}])\d{1,3}(?:(?:\{,\}|\\!,|,\\!) ?\d{3})+(?!\d)")


def _full_fraction(match: re.Match[str]) -> str:
    above, below = match[1] or match[2].strip("{}"), match[3] or match[4].strip("{}")
    return rf"\frac{{{above}}}{{{below}}}"


def _unwrap(text: str) -> str:
    """Remove delimiters, boxes and text commands around the whole text, and a final full stop."""
    for _ in range(MAX_PASSES):
        before, text = text, text.strip() if text.endswith("..") else text.strip().rstrip(",;. ").strip()
        for opening, closing in _DELIMITERS:
            inside = text[len(opening) : -len(closing)]
            if (
                inside
                and text.startswith(opening)
                and text.endswith(closing)
                and opening not in inside.replace(r"\$", "")
            ):
                text = inside.strip()
        wrapper = _WRAPPER.match(text)
        if wrapper and _closing_brace(text, wrapper.end()) == len(text) - 1:
            text = text[wrapper.end() : -1].strip()
        elif text[:1] == "{" and _closing_brace(text, 1) == len(text) - 1 and not _SET.search(_BRACKETS.sub("", text)):
            text = text[1:-1].strip()
        if text == before:
            break
    return text


def _closing_brace(text: str, start: int) -> int:
    """Index of the brace that closes the one before ``start``, or -1."""
    depth = 1
    for at in range(start, len(text)):
        if text[at] == "{":
            depth += 1
        elif text[at] == "}":
            depth -= 1
            if not depth:
                return at
    return -1


# Units

_PERCENT = re.compile(r" ?(?:\\?%|\\text ?\{ ?(?:\\?%|percent) ?\}|(?<=[\d} ])(?:percent|pct))$")
_DEGREES = re.compile(r" ?(?:\^ ?\{? ?\\circ ?\}?|(?:(?<=[\d} ])|\\text ?\{ ?)degrees? ?\}?)$")
_ANGLE_WITHIN = re.compile(r"\\(?:circ|sin|cos|tan|cot|sec|csc)(?![a-z])")
_AFTER_VALUE = r"(?:(?<=[\d.)}!\]])|(?<=\\pi))"
_EXPONENT = r"(?: ?\^ ?\{?-?\d\}?)?"
_MARKED_UNIT = re.compile(rf"{_AFTER_VALUE} ?((?:\\text ?\{{[^{{}}]{{1,60}}\}}{_EXPONENT} ?(?:\\cdot|/|-)? ?){{1,6}})$")
_WORD_UNIT = re.compile(rf"{_AFTER_VALUE} ([A-Za-z][A-Za-z .,/'-]{{0,60}}{_EXPONENT})$")
_GLUED_UNIT = re.compile(rf"(?<=\d)((?:cm|mm|km|kg|mph|ml|mL|km/h|m/s|lbs?|min|hrs?|sqft|ft){_EXPONENT})$")
VALUE_CHANGING = frozenset((
    "squared", "cubed", "half", "halves", "quarter", "quarters", "dozen", "dozens", "pair", "pairs", "score",
    "hundred", "hundreds", "thousand", "million", "billion", "trillion", "and", "or", "not", "if", "base", "mod",
    "modulo", "remainder", "incorrect", "wrong", "times", "plus", "minus", "over", "more", "less", "fewer",
    "than", "least", "most", "about", "approximately", "i", "e", "x", "y", "z", "to", "is", "infinity", "between",
    "unless", "except", "decrease", "where", "when", "for", "with", "mixed", "reduced", "negative", "percent",
    "prime",
))  # fmt: skip
_ORDINAL_WORD = re.compile(
    r"(?:^third|(?:four|fif|six|seven|eigh|nin|ten|eleven|twelf|teen|ieth|hundred|thousand|million)t?h?)s?$"
)
_SHORT_UNITS = frozenset((
    "au", "ft", "lb", "oz", "hr", "mi", "yd", "kw", "hz", "pm", "am",
))  # fmt: skip
_ONE_LETTER_UNITS = frozenset("mgshl")
_SINGULAR = {"feet": "foot", "inches": "inch", "children": "child", "people": "person", "boxes": "box"}
_CONVERSIONS = {  # unit -> its kind, and its size in the smallest unit of that kind
    "mm": ("length", 1), "cm": ("length", 10), "m": ("length", 1000), "km": ("length", 10**6),
    "in": ("inches", 1), "ft": ("inches", 12), "yd": ("inches", 36), "mi": ("inches", 63360),
    "s": ("time", 1), "min": ("time", 60), "h": ("time", 3600), "day": ("time", 86400), "week": ("time", 604800),
    "mg": ("mass", 1), "g": ("mass", 1000), "kg": ("mass", 10**6), "oz": ("ounces", 1), "lb": ("ounces", 16),
    "ml": ("volume", 1), "l": ("volume", 1000), "cent": ("money", 1), "dollar": ("money", 100),
    "m/s": ("speed", 18), "km/h": ("speed", 5),
}  # fmt: skip
_UNIT_NAMES = {
    "millimeter": "mm", "centimeter": "cm", "meter": "m", "metre": "m", "kilometer": "km", "inch": "in", "foot": "ft",
    "yard": "yd", "mile": "mi", "second": "s", "sec": "s", "minute": "min", "hour": "h", "hr": "h", "gram": "g",
    "gm": "g", "kilogram": "kg", "kgs": "kg", "ounce": "oz", "pound": "lb", "milliliter": "ml", "liter": "l",
    "litre": "l", "kilometers per hour": "km/h", "km per hour": "km/h", "kph": "km/h", "meters per second": "m/s",
    "miles per hour": "mph",
}  # fmt: skip


def split_unit(text: str) -> tuple[str, str]:
    r"""Split a text into value and unit: ``5 \text{ cm}^2`` into ("5", "cm^2").

    "%" and "deg" are units, too. A word that changes the value (``5 dozen``) is not a unit: the
    whole text is then the value, and the unit is "".
    """
    if text[-1:].isdigit() and "^" not in text:
        return text, ""
    if match := _PERCENT.search(text):
        return text[: match.start()].rstrip(), "%"
    if (match := _DEGREES.search(text)) and not _ANGLE_WITHIN.search(text, 0, match.start()):
        return text[: match.start()].rstrip(), "deg"
    for pattern in (_MARKED_UNIT, _WORD_UNIT, _GLUED_UNIT):
        if match := pattern.search(text):
            head, unit = text[: match.start()].rstrip(), unit_of(match[1])
            return (head, unit) if unit and head else (text, "")
    return text, ""


def unit_of(text: str) -> str:
    r"""The canonical name of a unit, ``cm^2`` for ``\text{ square centimeters}``; "" if none."""
    marked = "\\text" in text
    unit = re.sub(r"\\text ?|\\cdot|[{}.,]", " ", text).lower()
    unit, _, power = " ".join(unit.split()).strip(" -").partition("^")
    parts = re.findall(r"[a-z]+", unit)
    if not parts or any(map(changes_value, parts)):
        return ""
    if not marked and min(map(len, parts)) == 1 and unit not in _ONE_LETTER_UNITS and "/" not in unit:
        return ""
    for word, exponent in (("square", "2"), ("sq", "2"), ("cubic", "3")):
        if parts[0] == word:
            unit, power = unit.removeprefix(word).strip(), exponent
    unit = _UNIT_NAMES.get(unit) or _singular_unit(unit.strip())
    if len(unit) == 2 and not marked and unit not in _CONVERSIONS and unit not in _SHORT_UNITS:
        return ""  # ab is a product
    return f"{unit}^{power.strip()}" if power.strip() else unit


def changes_value(word: str) -> bool:
    """Whether a word after a number changes its value: ``dozen``, ``squared``, ``hundredths``."""
    return word in VALUE_CHANGING or _ORDINAL_WORD.search(word) is not None


def _singular_unit(unit: str) -> str:
    singular = _SINGULAR.get(unit) or (unit[:-1] if unit[-1:] == "s" and len(unit) > 3 else unit)
    return _UNIT_NAMES.get(singular, singular)


def unit_ratio(answer: str, truth: str) -> Fraction | None:
    """The size of the answer's unit in the truth's units: 1000 for km and m; None if incomparable.

    1 if only one side has a unit. ``numbers.same_numbers`` decides what a percent sign means.
    """
    if answer == truth or not answer or not truth or "%" in (answer, truth):
        return Fraction(1) if (answer, truth).count("%") != 1 or "" in (answer, truth) else None
    (mine, _, power), (theirs, _, its_power) = answer.partition("^"), truth.partition("^")
    kinds = _CONVERSIONS.get(mine), _CONVERSIONS.get(theirs)
    if kinds[0] and kinds[1] and kinds[0][0] == kinds[1][0] and power == its_power:
        return Fraction(kinds[0][1], kinds[1][1]) ** int(power or 1)
    return None
