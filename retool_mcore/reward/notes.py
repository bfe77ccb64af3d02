r"""Words before an answer and notes behind it: ``the point (3, 7)``, ``k\pi for any integer k``.

They become nothing, or the mathematics that they say. Each takes linear time, and is tried only
where a text holds its sign.
"""

from __future__ import annotations

import re

MAX_NOTE_CHARS = 300  # of a text with a note
_KINDS = (
    r"(?:ordered )?(?:pair|triple)s?|points?|ratio|vector|interval|set|line|number|value|matrix|total(?: of)?|exactly"
)
_BEFORE = re.compile(
    rf"(?:\\text(?:rm|bf)?\s?\{{\s?)?(?:(?:the|an?) )?(?:{_KINDS}|there (?:are|is)(?: exactly)?)"
    r"\s{0,2}(?:(?:\}|\\[ ,;])\s{0,2}|(?<=\s))(?=[-\d(\[{\\$<]|[a-z]\s?=)",
    re.IGNORECASE,
)
_LABEL = re.compile(r"(?:\\text(?:bf)?\s?\{\s?)?ans(?:wer)?\s?[:.]\s?(?:\}\s?)?(?=[-\d(\[{\\$])", re.IGNORECASE)
_EXCEPT = re.compile(
    r"(?:\\text\s?\{\s?)?all real(?: numbers?| values(?: of)?)?(?: \$?[a-z]\$?)?,? "
    r"(?:except|other than|but|not equal to)(?: for)?\s?(?:\}\s?)?(?:[a-z]\s?=\s?)?([-\d][^<>=]{0,80})",
    re.IGNORECASE,
)
_LINE_WITHOUT = re.compile(r"(?:\\mathbb\s?\{R\}|ℝ|R)\s?(?:\\setminus|\\backslash|∖|-|\\)\s?\\?\{([^{}]{1,80}?)\\?\}")
_AND = re.compile(r"\\text\s?\{\s?and\s?\}|(?<![a-z])and(?![a-z])")
_ALL = re.compile(r"(?:\\text\s?\{\s?)?all\s{0,2}(?:\}\s{0,2})?(?=[a-z]\s?(?:[<>≤≥]|\\(?:le|ge|in)))", re.IGNORECASE)
_CHINESE = re.compile(r"(?:一?共有?|总共有?|合计|答案[是为]?[::]?|等于)\s?(?=[-\d\\$])")
_QUANTITY = re.compile(r"\\(?:SI|qty)\s?\{([^{}]{1,60})\}\s?\{([A-Za-z/^\d. ]{1,30})\}")
_EQUATION = re.compile(r"\s{0,9}[A-Za-z](?:_?\w|_\{\w{1,9}\})?\s{0,3}=")
_ROWS = re.compile(r"\n|\\\\")
_TEXT = re.compile(r"\\(?:text|mathrm|textrm)\s?\{([^{}]{0,80})\}|\\q?quad(?![a-z])|\\[ ,;:]|[$~]")
_CUT = re.compile(r"[,(]|\\(?:text|mathrm|quad)(?![a-z])|\s(?=for |where |with )")
_ANY = r"(?:any |all |some |every |each |an? |an arbitrary )?"
_INTEGER = re.compile(
    rf"[,(]?\s?(?:where |with |for |and )?(?:{_ANY}integers? (?:values? of )?([A-Za-z])"
    rf"|([A-Za-z]) (?:is |be |being |= ?){_ANY}integers?)\s?\)?"
)


def without_words(text: str) -> str:
    """The answer without a word before it that says what it is: ``the point (3, 7)``."""
    if not text[:1].isascii():
        return _CHINESE.sub("", text, count=1) if "\u4e00" <= text[0] <= "\u9fff" else text
    if text[:1].isalpha() or text[:1] == "\\":
        if match := _EXCEPT.fullmatch(text) or _LINE_WITHOUT.fullmatch(text):
            return rf"\mathbb{{R}} \setminus \{{{_AND.sub(',', match[1])}\}}"
        if match := _BEFORE.match(text) or _ALL.match(text) or _LABEL.match(text):
            return text[match.end() :]
        if text[:3] in (r"\SI", r"\qt") and (match := _QUANTITY.fullmatch(text)):
            return rf"{match[1]}\text{{ {match[2]}}}"
    return text


def with_notes(text: str) -> str:
    r"""``k\pi, where k is an integer`` as ``k\pi, k \in \mathbb{Z}``; equations below as a list."""
    if "integer" in text and len(text) <= MAX_NOTE_CHARS:
        for cut in _CUT.finditer(text):
            plain = " ".join(_TEXT.sub(lambda match: f" {match[1] or ''} ", text[cut.start() :]).split())
            if cut.start() and (match := _INTEGER.fullmatch(plain.replace(" ,", ","))):
                return rf"{text[: cut.start()].rstrip()}, {match[1] or match[2]} \in \mathbb{{Z}}"
    if ("\n" in text or "\\\\" in text) and "begin" not in text and len(text) <= MAX_NOTE_CHARS:
        rows = [row.strip(" ,;") for row in _ROWS.split(text)]
        if len(rows) > 1 and all(map(_EQUATION.match, rows)):
            return ", ".join(rows)
    return text
