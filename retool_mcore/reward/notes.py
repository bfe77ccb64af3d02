r"""Words before an answer and notes behind it: ``the point (3, 7)``, ``k\pi for any integer k``.

They become nothing, or the mathematics that they say. Each takes linear time, and is tried only
where a text holds its sign.
"""

import re

from retool_mcore.reward.numerals import beside_words
from retool_mcore.reward.spans import interval

MAX_NOTE_CHARS = 300  # of a text with a note
_KINDS = (
    r"(?:ordered )?(?:pair|triple)s?|points?|ratio|vector|interval|set|line|number|value|matrix|total(?: of)?"
    r"|vertex|center|centre|focus|parabola|circle|ellipse|hyperbola|plane|curve|equation|function|fraction|polynomial|integer"
    r"|exactly|only|just|(?:probability|length|area|volume|distance|speed|rate|price|cost|value|profit|radius) of"
)
_BEFORE = re.compile(
    rf"(?:\\text(?:rm|bf)?\s?\{{\s?)?(?:(?:the|an?) )?(?:{_KINDS}|there (?:are|is)(?: exactly)?)"
    r"\s{0,2}(?:(?:\}|\\[ ,;])\s{0,2}|(?<=\s))(?=[-\d(\[{\\$<]|[a-z]\s?[=^²+*]|[a-z]\s?-\s?\d"
    r"|(?:math|np|sqrt|pi|log|exp|sin|cos|tan)[.(*/])",
    re.IGNORECASE,
)
_LABEL = re.compile(r"(?:\\text(?:bf)?\s?\{\s?)?ans(?:wer)?\s?[:.]\s?(?:\}\s?)?(?=[-\d(\[{\\$])", re.IGNORECASE)
_EXCEPT = re.compile(
    r"(?:\\text\s?\{\s?)?(?:all|any|every) (?:real(?:s| numbers?| values(?: of)?)?(?: \$?[a-z]\$?)?|\$?[a-z]\$?),? "
    r"(?:except|other than|but|not equal to)(?: for)?\s?(?:\}\s?)?((?:[a-z]\s?=\s?)?(?:[-\d]|\\pm)[^<>]{0,80})",
    re.IGNORECASE,
)
_COMPARED = re.compile(
    r"(?:\\text\s?\{\s?)?([a-z])(?:\s?\})?(?:\\text\s?\{)? (?:is |are |must be |has to be )?(?:strictly )?"
    r"(greater than or equal to|less than or equal to|at least|at most|no more than|no less than|greater than"
    r"|less than|more than)(?:\s?\})? ?([-\d\\][^A-Za-z,;<>=]{0,30})"
)
_SIGNS_SAID = {"greater than or equal to": ">=", "at least": ">=", "no less than": ">=",
               "less than or equal to": "<=", "at most": "<=", "no more than": "<=",
               "greater than": ">", "more than": ">", "less than": "<"}  # fmt: skip
_LINE_WITHOUT = re.compile(r"(?:\\mathbb\s?\{R\}|ℝ|R)\s?(?:\\setminus|\\backslash|∖|-|\\)\s?\\?\{([^{}]{1,80}?)\\?\}")
_AND = re.compile(r"\\text\s?\{\s?and\s?\}|(?<![a-z])and(?![a-z])")
_OF_LETTER = re.compile(r"(?<![A-Za-z\\])[a-z]\s?=\s?")
_ALL = re.compile(
    r"(?:\\text\s?\{\s?)?all(?: real)?\s{0,2}(?:\}\s{0,2})?(?=[a-z]\s?(?:[<>≤≥≠]|\\(?:le|ge|in|ne)))", re.IGNORECASE
)
_HALF_LINE = re.compile(
    r"(?:^|(?<=\\in)\s?|(?<=[∈=])\s?)(?:\\mathbb\s?\{R\}|ℝ|R)\s?"
    r"(?:[_^]\s?(?:\{\s?)?(\+|\*|\\(?:ast|star|times)|>\s?0|\\geq?(?:slant)?\s?0)(?:\s?\})?|\+)\s?(?=$|\\cup|∪)"
)
_COUNTING = re.compile(
    r"(?:(?<=\\in)|(?<=∈))\s?(?:\\math(?:bb|bf)\s?\{[NZ]\}|[NZ])\s?[_^]\s?(?:\{\s?)?"
    r"([*+0]|\\(?:ast|star)|(?:>|≥|\\geq?(?:slant)?)\s?[01])(?:\s?\})?|(?<=∈)\s?N\s?([*+])(?=$|\))"
)
_NOTE = re.compile(r"[,(|:]|\\mid")
_OUT_OF = re.compile(r"(\d{1,9}) (?:out of|over|in) (\d{1,9})")
_HUNDREDTHS = re.compile(r"百分之(\d{1,9}(?:\.\d{1,9})?)")
_A_CONSTANT = re.compile(r"(?<=\+)\s?(?:\\text\s?\{\s?)?const(?:ant|\.)?(?:\s?\})?$")
_OR_DECIMAL = re.compile(r"\s?(?:\\text\s?\{\s?\(or\s?\}|\(or )\s?(-?[\d.]{1,40}\\?%?)\)$")
_QUOTIENT = re.compile(  # 17 R 3
    r"(\d{1,9})\s{0,3}(?:\\(?:text|mathrm)\s?\{\s{0,3})?(?:[Rr]\.?|remainder:?|余)(?:\s{0,3}\})?\s{0,3}(\d{1,9})"
)
_RATIO = r"-?(?:\d{1,9}\s?/\s?\d{1,9}|\\[dt]?frac\s?\{?\d{1,9}\}?\s?\{?\d{1,9}\}?)"
_FRACTION_DECIMAL = re.compile(
    rf"({_RATIO})(?:\s|\\[ ,;]|~){{1,3}}\((-?\d{{0,9}}\.\d{{1,20}}|-?\d{{1,9}}(?:\.\d{{1,20}})?\\?%)\)"
)  # 7/16 (0.4375)
_DECIMAL_FRACTION = re.compile(rf"(-?\d{{0,9}}\.\d{{1,20}})(?:\s|\\[ ,;]|~){{1,3}}\(({_RATIO})\)")
_CASES = re.compile(r"\\begin\{cases\}([^<>≤≥]{1,100}?)\\end\{cases\}")
_VALUES_APART = re.compile(r"[a-z]\s?=\s?-?[\d./]{1,20}(?:\s{1,3}[a-z]\s?=\s?-?[\d./]{1,20}){1,5}")  # x=3 y=-1
_APART = re.compile(r"\s{1,3}(?=[a-z]\s?=)")
_ALL_COMPARED = re.compile(  # , f, s > 0
    r"\s{0,3},\s{0,3}((?:[a-zA-Z]\s?,\s?){1,4}[a-zA-Z])\s?((?:[<>≤≥≠]|>=|\\(?:gt|geq?|geqslant|neq?)(?![a-z]))\s?\d)$"
)
_GROUPS = re.compile(r"\\text\s?\{\s?or\s?\}|(?<![A-Za-z])or(?![A-Za-z])|;|或")
_PARTS = re.compile(r",|\\text\s?\{\s?and\s?\}|(?<![A-Za-z])and(?![A-Za-z])|\\\\")
_ALIKE = re.compile(r"(?<![\w}])([a-z](?:\s?=\s?[a-z](?![a-z])){1,3})\s?=\s?(-?[\d./]{1,20})(?=[\s,;\\]|$)")  # a=b=1
_VALUE = re.compile(r"\s?([A-Za-z])\s?=([^=]{1,60})")
_SO = re.compile(
    r"(?:\\text\s?\{\s?)?(?:so|thus|hence|therefore|finally)\s?,?\s?(?:\}\s?)?(?=[-\d(\[{\\$]|[a-z]\s?=)", re.IGNORECASE
)
_CHINESE = re.compile(
    r"(?:\\text\s?\{\s?)?(?:(?:所以|因此|[故则])?答案?[是为]?:?|(?:(?![不非无没若当如除或错约至近])[\u4e00-\u9fff]){1,8}[是为]:?|(?:所以|因此)?一?共有?|总共有?|合计|等于|(?:面积|体积|周长)?之?比值?[为是]:?)\s?(?:\}\s?)?(?=[-\d\\$])"
)
_CURVE = re.compile(
    r"(?:\\text\s?\{\s?)?(?:抛物线|双曲线|椭圆|直线|切线|圆|曲线)?[A-Z]?的?(?:标准|普通|直角坐标|轨迹)?(?:方程)?[是为]?:?\s?(?:\}\s?)?"
    r"(?=[-\da-z(\\])"
)
_EACH = re.compile(r"每(秒|分钟?|小时|天)(\d{1,9}(?:\.\d{1,9})?)([\u4e00-\u9fff]{1,4})")
_FOREIGN = re.compile(r"(-?\d{1,15}(?:\.\d{1,9})?)\s?([^\W\d_]{2,20}|[つ개명살])")
_ONLY = re.compile(r"(?:\s|~|\\[ ,;])?\s?(?:\\text\s?\{\s?)?\(?(?:only|exactly|exact|only solution)\)?\s?\}?$")

_SPANS = re.compile(r"clu(?:siv|d)|end ?points|strictly| than | at | above | below ", re.IGNORECASE)
_QUANTITY = re.compile(r"\\(?:SI|qty)\s?\{([^{}]{1,60})\}\s?\{([A-Za-z/^\d. ]{1,30})\}")
_EQUATION = re.compile(r"\s{0,9}[A-Za-z](?:_?\w|_\{\w{1,9}\})?\s{0,3}=")
_ROWS = re.compile(r"\n|\\\\")
_TEXT = re.compile(r"\\(?:text|mathrm|textrm)\s?\{([^{}]{0,80})\}|\\q?quad(?![a-z])|\\[ ,;:]|[$~]")
_CUT = re.compile(r"[,(]|\\(?:text|mathrm|quad)(?![a-z])|\s(?=for |where |with )")
_LAST = ("only", "nly}", "nly)", "ctly", "tly}", "tly)", "act)", "ion)", "y)}", "n)}", "ly }")
_CHANGING = ("тыс", "мил", "млн", "сот", "полов", "трет", "четверт", "или")  # thousands, halves
_ANY = r"(?:any |all |some |every |each |an? |an arbitrary )?"
_OF_NUMBERS = (
    r"((?:non-?negative |positive )?integers?|(?:whole|natural) numbers?|(?:real )?constants?|reals?|real numbers?)"
)
_SPACES = (("negative", r"\Nzero "), ("positive", r"\Npos "), ("whole", r"\Nzero "), ("natural", r"\mathbb{N}"),
           ("integer", r"\mathbb{Z}"))  # fmt: skip
_NUMBER_NOTE = re.compile(
    rf"[,(]?\s?(?:where |with |for |and )?(?:{_ANY}{_OF_NUMBERS} (?:values? of )?([A-Za-z])"
    rf"|([A-Za-z]) (?:is |be |being |= ?){_ANY}{_OF_NUMBERS})\s?\)?"
)


def without_words(text: str) -> str:
    """The answer without a word before it that says what it is: ``the point (3, 7)``."""
    if not text.isascii():
        text = "-" + text[1:] if text[0] == "负" and text[1:2].isdigit() else text
        text = _foreign_unit(match) if text[-1].isalpha() and (match := _FOREIGN.fullmatch(text)) else text
        text = rf"{match[1]}\%" if (match := _HUNDREDTHS.fullmatch(text)) else text
        text = rf"{match[2]}\text{{{match[3]}/{match[1]}}}" if (match := _EACH.fullmatch(text)) else text
        text = text[match.end() :] if "=" in text and (match := _CURVE.match(text)) else text
        text = text[match.end() :] if (match := _CHINESE.match(text)) else text
    if text[-4:] in _LAST and (match := _ONLY.search(text)) and match.start():
        text = text[: match.start()]
    if text[:1].isdigit() and text[-1:].isdigit() and (match := _QUOTIENT.fullmatch(text)):
        return rf"{match[1]}\text{{ remainder }}{match[2]}"
    if text[:1].isalpha() or text[:1] == "\\":
        bare = " ".join(_TEXT.sub(r" \1 ", text).split()) if "except" in text and "\\text" in text else text
        if _SPANS.search(text) and (said := interval(text)) is not None:
            return said
        if (" than " in text or " at " in text) and (match := _COMPARED.fullmatch(text)):
            return f"{match[1]} {_SIGNS_SAID[match[2]]} {match[3]}"
        if match := _EXCEPT.fullmatch(bare) or _LINE_WITHOUT.fullmatch(text):
            return rf"\mathbb{{R}} \setminus \{{{_OF_LETTER.sub('', _AND.sub(',', match[1]))}\}}"
        if match := _BEFORE.match(text) or _ALL.match(text) or _LABEL.match(text) or _SO.match(text):
            return text[match.end() :]
        if text[:3] in (r"\SI", r"\qt") and (match := _QUANTITY.fullmatch(text)):
            return rf"{match[1]}\text{{ {match[2]}}}"
    return text


def _foreign_unit(match: re.Match[str]) -> str:
    """A word in another alphabet behind a number as a unit, but for words that change it.

    Greek letters are names: ``2πr``.
    """
    said = match[2].casefold()
    names = any("\u0370" <= letter <= "\u03ff" or "\u4e00" <= letter <= "\u9fff" for letter in said)
    if said.isascii() or names or said.startswith(_CHANGING):
        return match[0]
    return rf"{match[1]}\text{{ {match[2]}}}"


def with_notes(text: str) -> str:
    r"""``k\pi, where k is an integer`` as ``k\pi, k \in \mathbb{Z}``; equations below as a list."""
    if len(text) <= MAX_NOTE_CHARS and any(noun in text for noun in ("integer", "const", "real", "natural", "whole")):
        text = _with_numbers_note(text)
    if ("\n" in text or "\\\\" in text) and "begin" not in text and len(text) <= MAX_NOTE_CHARS:
        rows = [row.strip(" ,;") for row in _ROWS.split(text)]
        pairs = all(row[:1] == "(" and row[-1:] == ")" for row in rows)
        if len(rows) > 1 and (pairs or all(map(_EQUATION.match, rows))):
            return ", ".join(rows)
    if "," in text and text[-1:].isdigit() and (match := _ALL_COMPARED.search(text)) and match.start():
        each = ", ".join(f"{letter.strip()} {match[2]}" for letter in match[1].split(","))
        text = f"{text[: match.start()]}, {each}"
    if text.count("=") > 1 and _VALUES_APART.fullmatch(text):
        return _APART.sub(", ", text)
    if text.count("=") > 3 and len(text) <= MAX_NOTE_CHARS:
        return _as_pairs(text)
    if ("\\in" in text or "∈" in text) and (match := _COUNTING.search(text)) and _NOTE.search(text, 0, match.start()):
        first = match[1] or match[2]
        space = r"\Nzero" if first == "0" or (first[-1] == "0" and first[0] != ">") else r"\Npos"
        text = rf"{text[: match.start()]} {space} {text[match.end() :]}"
    if "R" in text or "ℝ" in text:
        text = _HALF_LINE.sub(_part_of_line, text)
    if (" out of " in text or " over " in text or " in " in text) and (match := _OUT_OF.fullmatch(text)):
        return f"{match[1]}/{match[2]}"
    if text[-1:] == ")":
        if (said := beside_words(text)) is not None:
            return said
        if match := _FRACTION_DECIMAL.fullmatch(text):
            return rf"{match[1]} \approx {match[2]}"
        if match := _DECIMAL_FRACTION.fullmatch(text):
            return rf"{match[2]} \approx {match[1]}"
    return _OR_DECIMAL.sub(r" or \1", text) if "(or" in text else text


def _with_numbers_note(text: str) -> str:
    for cut in _CUT.finditer(text):
        plain = " ".join(_TEXT.sub(lambda match: f" {match[1] or ''} ", text[cut.start() :]).split())
        if cut.start() and (match := _NUMBER_NOTE.fullmatch(plain.replace(" ,", ","))):
            said = match[1] or match[4]
            space = next((space for kind, space in _SPACES if kind in said), r"\mathbb{R}")
            return rf"{text[: cut.start()].rstrip()}, {match[2] or match[3]} \in {space}"
    return _A_CONSTANT.sub(" C", text)


def _part_of_line(match: re.Match[str]) -> str:
    r"""``\mathbb{R}^+``, ``\mathbb{R}_{\ge 0}`` and ``\mathbb{R}^*``, which has no 0."""
    sign = match[1] or "+"
    if sign == "*" or sign in (r"\ast", r"\star", r"\times"):
        return r"(-\infty, 0) \cup (0, \infty)"
    return r"[0, \infty)" if "ge" in sign else r"(0, \infty)"


def _each_named(match: re.Match[str]) -> str:
    return ", ".join(f"{letter.strip()} = {match[2]}" for letter in match[1].split("="))


def _as_pairs(text: str) -> str:
    """``x=2, y=3 or x=3, y=2`` as ``(2, 3), (3, 2)``; any other text as it is."""
    plain = _ALIKE.sub(_each_named, _CASES.sub(r"\1", text))
    groups = [_PARTS.split(group) for group in _GROUPS.split(plain)]
    found = [[_VALUE.fullmatch(part) for part in group] for group in groups]
    said = [{match[1]: match[2].strip() for match in group if match} for group in found]
    letters = sorted(said[0])
    whole = all(sorted(each) == letters and len(each) == len(group) for each, group in zip(said, groups, strict=True))
    if len(groups) < 2 or len(letters) < 2 or not whole:
        return text
    return ", ".join(f"({', '.join(each[letter] for letter in letters)})" for each in said)
