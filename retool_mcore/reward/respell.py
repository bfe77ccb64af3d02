r"""Bring other spellings of mathematics to the one that the reader knows.

``0.3636\ldots`` becomes ``0.(36)``, ``]1,2]`` becomes ``(1,2]``, ``36^\circ 30'`` a sum of degrees.
Each takes linear time, and is tried only where a text holds its sign.
"""

import re

from retool_mcore.reward.tokens import UNITS, WORDS
from retool_mcore.reward.units import compound

_DIGITS = re.compile("[₀-₉]+")
_LOWERED = str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789")
_ENDLESS = re.compile(r"(?<![\d.])(\d{0,20})\.(\d{3,40})\s{0,2}(?:\.{3}|…|\\(?:ldots|dots|cdots|dotsc)(?![a-z]))")
_ORDINAL = re.compile(
    r"(\d{1,9})\s{0,2}(?:\^\s?\{?\s?)?(?:\\(?:text|textsuperscript|mathrm|rm)\s?\{?\s?)?(st|nd|rd|th)\s?\}{0,2}"
)
_MODULUS = re.compile(
    r"\(\s{0,2}(?:\\(?:text|mathrm|operatorname)\{\s{0,2}mod\s{0,2}\}|\\bmod|mod)\s{0,3}([^()]{1,30})\)"
)
_DEGREES = re.compile(
    r"(\d{1,6})\s?(?:°|\^\s?\{?\\circ\}?|\\degree)\s{0,2}(\d{1,2})\s?(?:\^\{?\\prime\}?|'|′|\\text\{'\})(?!')"
    r"(?:\s{0,2}(\d{1,2})\s?(?:\^\{?\\prime\s?\\prime\}?|''|″|\"))?"
)
_LETTER_DEGREE = re.compile(r"(?<=\d)\s?\^\s?(?:o|\{o\}|\\text\{o\}|\{\\text\{o\}\}|\\mathrm\{o\})(?![A-Za-z])")
_END = r"[^][(){}]{1,80}"
_TURNED = re.compile(rf"[][()]{_END}[][()](?:\s{{0,2}}(?:\\cup|∪|U)\s{{0,2}}[][()]{_END}[][()]){{0,9}}")
_ONE_TURNED = re.compile(rf"([][()])({_END})([][()])")
_SIZED = re.compile(r"\\(?:left|right)\s?(?=[][])")
_UNION = re.compile(r"(?<=[)\]])\s{0,2}U\s{0,2}(?=[(\[])")
_LOG = re.compile(r"(?<![\w\\])log(2|10)\(")
_BASED_LOG = re.compile(r"(?<![\w\\])log\(([^(),]{1,30}), ?([^(),]{1,30})\)")
_UNIT_BRACKETS = re.compile(
    r"(?<=\d)\s{0,3}[(\[]\s{0,2}((?:(?:square |cubic |sq\.? )?[a-z]{2,12}"
    r"|[\u4e00-\u9fff]{1,6}|\\(?:text|mathrm)\{[^{}]{1,20}\})(?:\^\{?[23]\}?|[²³])?)\s{0,2}[)\]]$"
)
_PAIR = r"[A-Za-z]\w{0,9}\s?:\s?(?:[^,:{}<>|()]|\([^(){}]{0,60}\)){1,60}"
_KEY = re.compile(r"""(['"])([A-Za-z]\w{0,9})\1\s?:""")
_DICT = re.compile(rf"{_PAIR}(?:,\s?{_PAIR}){{0,9}}")
_ITEM = r"[A-Za-z]\s?:\s?[-\d\\][^,:]{0,60}"
_ITEMS = re.compile(rf"{_ITEM}(?:,\s{{0,4}}{_ITEM}){{1,9}}")  # x: 1, y: 2
_POWERS = re.compile(r"[^{}:,<>=|]{1,60}: \d{1,3}(?:, [^{}:,<>=|]{1,60}: \d{1,3}){0,19}")  # 2: 10, 3: 5
_COUNTED = re.compile(  # 1, 2, ..., 10
    r"(?<![\w.,])(-?\d{1,6}(?:\s?,\s?-?\d{1,6}){1,9})\s?,\s?(?:\.{3}|…|\\(?:ldots|dots|cdots|dotsc)(?![a-z]))\s?,\s?"
    r"(-?\d{1,6})(?![\w.^(])"
)
MAX_COUNTED = 100
_D = r"(?:\\(?:mathrm|text|rm)\s?\{\s?d\s?\}|d)\s?"
_DERIVATIVE = re.compile(
    rf"(?:\\[dt]?frac\s?\{{\s?{_D}([a-z])\s?\}}\s?\{{\s?{_D}[a-z]\s?\}}|{_D}([a-z])\s?/\s?{_D}[a-z]"
    rf"|\\[dt]?frac\s?\{{\s?{_D}\}}\s?\{{\s?{_D}x\s?\}}\s?([a-z])\s?\(x\))\s?="
)  # dy/dx = and d/dx f(x) =
_POINT = r"[A-Z]\s?=\s?\([^()=]{1,40}\)"
_LABELLED = re.compile(
    rf"{_POINT}(?:(?:\s|[,;]|and|\\text\s?\{{\s?and\s?\}}){{1,4}}{_POINT}){{1,5}}"
)  # A=(1,2), B=(3,4)
_LABEL_SIGN = re.compile(r"(?<=[A-Z])\s?=\s?(?=\()")
_CONDITION = re.compile(r"[|:]|\\mid(?![a-z])")
_ORDER = re.compile(r"[<>≤≥≠]|!=|\\(?:le|ge|lt|gt|leq|geq|in|ne|neq)(?![a-z])|∈| in (?:[A-Z]|\\)")
_ANGLES = re.compile(r"<[^<>=]{1,60},[^<>=]{1,60}>")  # <1, -2>
_SCIENTIFIC = re.compile(r"(?<=\d)\s?[xX]\s?(?=10\s?(?:\^|\*\*))")  # 7.7 x 10^6
_TO = r"\s?(?:\\(?:text|mathrm)\s?\{\s?to\s?\}|to|比)\s?"
_RATIO = re.compile(rf"(-?\d{{1,9}}(?:\.\d{{1,9}})?|[a-z])(?:{_TO}(-?\d{{1,9}}(?:\.\d{{1,9}})?|[a-z])){{1,5}}")
_TO_SIGN = re.compile(_TO)
_COUNT = r"(-?\d{1,15}(?:\.\d{1,9}|\s?/\s?\d{1,9}|\s\d{1,9}/\d{1,9})?)"
_PART_OF = r"(?:of (?:an? |the |all (?:the )?|her |his |their |its )?)"
_SEVERAL = r"[A-Za-z]{2,15}(?: [A-Za-z]{2,15})"
_WORDS_BEHIND = re.compile(rf"{_COUNT} (?:{_PART_OF}((?=[A-Za-z]{{3}}){_SEVERAL}{{0,4}})|({_SEVERAL}{{1,4}}))")
_ONE_BEHIND = re.compile(rf"{_COUNT} (cup|in|mi)")  # else a union, and i times n
_A_TIME = re.compile(
    r"(?<=[a-z\d])(?<!of) an? (day|week|month|year|hour|minute|second"
    r"|pound|ounce|gallon|litre|liter|mile|person|ticket|bottle|box)$"
)  # 72 dollars a day
_WHOLE_AND_PART = re.compile(r"\A(\d{1,9})(?: and |-)(\d{1,9}/\d{1,9})(?= [a-z])")  # 1 and 1/2 cups, 1-1/2 cups
_INCHES_RAISED = re.compile(r"(\d[\d./]{0,20}) in\.?\s?(?:\^\s?\{?([23])\}?|([²³]))")
_INCHES = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)\s?(?:\"|″|'')")
_EACH = re.compile(
    r"(\d{1,15}(?:\.\d{1,9})?)\s?/\s?(day|week|month|year|hour|minute|person|child|student|item|box|ticket|pound|each)"
)
_PERCENT_OF = re.compile(
    rf"(?:an? )?(\d{{1,9}}(?:\.\d{{1,9}})?\s?\\?%) (?:{_PART_OF}[A-Za-z]{{3,15}}(?: [A-Za-z]{{2,15}}){{0,4}}"
    "|increase|profit|chance|probability|interest|discount|commission|tax|tip)"
)
_PERCENT_TEXT = re.compile(
    r"(\d{1,9}(?:\.\d{1,9})?\s?\\?%)\s?\\text\s?\{\s?(?:increase|profit|chance|probability)\s?\}"
)
_COMPARED = re.compile(r"[<>≤≥]|\\(?:le|ge|leq|geq|leqslant|geqslant|lt|gt|ne|neq)(?![a-z])")
_NUMERAL = re.compile(r"\\(?:over|under)line\s?\{([\dA-F]{1,40})\}(?=_)")
_SYSTEM = re.compile(
    r"(?:\\left\s?)?\\\{\s*\\begin\{(?:array|aligned|matrix|gathered)\}(?:\{[lcr| ]{1,9}\})?(.*?)"
    r"\\end\{(?:array|aligned|matrix|gathered)\}(?:\s*\\right\s?\.)?",
    re.DOTALL,
)
_LINES = re.compile(
    r"\\begin\{(?:aligned|align\*?|gathered|split)\}(.*?)\\end\{(?:aligned|align\*?|gathered|split)\}", re.DOTALL
)
_BOUND = r"[A-Za-z](?:\s?,\s?[A-Za-z])?\s{0,2}(?:\\neq?|≠|\\in|∈)(?![a-z])"
_FOR = re.compile(
    r"(?:\\quad|\\[ ,;]|,|\s){0,4}(?:\\(?:text|mathrm|textrm)\s?\{[\s,]{0,2}"
    r"(?:for|where|with|if|when|provided that)(?: any| all| some)?"
    rf"(?: integers?)?\s{{0,2}}\}}|(?<=[\s\d)}}])(?:for|where|with))\s{{0,2}}(?={_BOUND})"
)
_ANY = r"(?: any| all| some| every| each| an?)?(?: (?:positive |non-?negative )?(?:integers?|whole numbers?))?"
_FOR_EACH = re.compile(  # 2^k \text{ for some integer } k \ge 1
    rf"(?:\\quad|\\[ ,;]|,|\s){{0,4}}(?:\\text\s?\{{[\s,]{{0,2}}(?:for|where|with){_ANY}\s{{0,2}}\}}"
    rf"|(?<=[\s\d)}}])(?:for|where|with){_ANY})"
    r"\s{0,2}\$?(?=[a-z]\s?(?:>|≥|\\geq?(?:slant)?(?![a-z]))\s?\d{1,9}\$?$)"
)
_FOR_ALL = re.compile(r"(?:\s|\\quad|\\[ ,;]){0,3}\\text\s?\{\s?,?\s?for all(?: real)?(?:\s?\}\s?[a-z]| [a-z]\s?\})$")
_BRACKETED_NOTE = re.compile(rf"(?:\s|~|\\quad|\\[ ,;:]|,){{0,4}}\(({_BOUND}[^()]{{1,30}})\)$")
_RANGE_NOTE = re.compile(  # y^2 = 4x (x > 0)
    r"(?<=[\w}])(?:\s|~|\\quad|\\[ ,;:]){0,4}"
    r"\(([a-z]\s?(?:[<>≤≥]|\\(?:le|ge|leq|geq|leqslant|geqslant|lt|gt)(?![a-z]))[^()]{1,30})\)$"
)
_JOIN = r"(?:∪|∩|\\cup(?![a-z])|\\cap(?![a-z]))"
_BARE_SET = re.compile(
    rf"(?:(?<=∪)|(?<=∩)|(?<=∪ )|(?<=∩ )|(?<=cup)|(?<=cup )|(?<=cap)|(?<=cap )|^)"
    rf"\{{([^{{}}]{{1,60}})\}}(?=\s?{_JOIN}|$)"
)  # {5} \cup (2,3)
_IN = re.compile(r"(?:(?<=[|:,] )|\A)([a-z]) in (?=[\[({\\])")  # x in [1, 2]
_STACKED = re.compile(r"\^\{?(\d{1,9})\}?(?:\\!)?/(?:\\!)?_\{?(\d{1,9})\}?")  # ^3/_4
_BOTH_ROOTS = re.compile(r"\A([a-z])_(?:\{\s?1\s?,\s?2\s?\}|12|\{12\}|1,2|\{1/2\})\s?=\s?")
_NO_ZERO = re.compile(r"(?<!\d)\.\\overline")
_THIN = ("\\,", "\\;", "\\:", "\\!", "\\ ")
_MAPPED = re.compile(r"([A-Za-z])\s?:\s?([a-z])\s?(?:\\mapsto|↦)\s?")  # f: x \mapsto x^2
_CIRCLE = re.compile(r"\\odot\s?([A-Z])\s?:")
_BRACED_SIGN = re.compile(r"(?:\\(?:text|mathrm))?\{([:.])\}")
_SECONDS = re.compile(r"(\d{1,2}:\d\d):00")  # 10:30:00
_MILES = re.compile(r"(?<=[\d}\s])mi(?:les?)?\s?/\s?(?:hr?|hour)$")
_MIXED = re.compile(r"(?<=\d)\s?又\s?(?=\d|\\[dt]?frac)")  # 1又3/5
_BRACED_DICT = re.compile(rf"\\\{{\s?({_PAIR}(?:,\s{{0,4}}{_PAIR}){{1,9}})\\\}}")
_LEADING = re.compile(
    r"^(?:=|→|✓|✅|\\checkmark(?![a-z])|(?:#{1,6}|\*)(?= )"
    r"|\\(?:Rightarrow|implies|therefore|rightarrow|to)(?![a-z]))\s{0,3}(?=[^\s=])"
)


def bare_braces(inner: str) -> str:
    """What a text in plain braces says: a set, Python's dictionary, or only what is in it."""
    if not inner:
        return r"\emptyset"
    if len(inner) < 400 and ":" in inner and inner[0] in "'\"":
        inner = _KEY.sub(r"\2:", inner)
    if len(inner) < 400 and ": " in inner and (", " in inner or inner[0].isdigit()) and _POWERS.fullmatch(inner):
        return _factors_or_roots(inner)
    if len(inner) < 400 and ":" in inner and _DICT.fullmatch(inner) and not _ORDER.search(inner):
        return inner.replace(":", " =")
    if inner in ("∅", r"\emptyset", r"\varnothing"):
        return r"\{\emptyset\}"
    return rf"\{{{inner}\}}" if inner[:2] != r"\{" and _CONDITION.search(inner) and _ORDER.search(inner) else inner


def _factors_or_roots(inner: str) -> str:
    """``2: 10, 3: 5`` of ``factorint`` as a product, the keys of ``roots`` as a set."""
    pairs = [each.rpartition(": ") for each in inner.split(", ")]
    keys, times = [key for key, _, _ in pairs], [power for _, _, power in pairs]
    once, whole = set(times) == {"1"}, all(map(str.isdigit, keys))
    primes = [int(key) for key in keys] if whole else []
    if whole and not once and primes == sorted(set(primes)) and all(map(_is_prime, primes)):
        return " * ".join(f"{key}^{{{power}}}" for key, _, power in pairs)
    named = any(map(str.isidentifier, keys))
    return rf"\{{{', '.join(keys)}\}}" if not named and (once or not whole) else inner


def _is_prime(value: int) -> bool:
    return 1 < value < 10**6 and all(value % each for each in range(2, int(value**0.5) + 1))


def lowered(text: str) -> str:
    """Lowered digits of Unicode as an index."""
    return _DIGITS.sub(lambda match: f"_{{{match[0].translate(_LOWERED)}}}", text)


def trimmed(text: str) -> str:
    r"""Without ``\quad`` at both ends, and without a sign of equality before all of it."""
    while text[:2] in _THIN or text[-2:] in _THIN:
        text = (text[2:] if text[:2] in _THIN else text[:-2]).strip()
    for quad in ("\\quad", "\\qquad") if "quad" in text else ():
        if text.startswith(quad) and not text[len(quad) : len(quad) + 1].isalpha():
            text = text[len(quad) :].lstrip()
        text = text.removesuffix(quad).rstrip()
    return _LEADING.sub("", text) if text[:1] in ("=", "\\", "→", "#", "*", "✓", "✅") else text


def respelled(text: str) -> str:
    """The text in the spellings that the reader knows; any other text as it is."""
    if text.count(":") > 1 and len(text) < 400:
        bare = text.replace(r"\left\{", r"\{").replace(r"\right\}", r"\}")
        text = match[1] if (match := _BRACED_DICT.fullmatch(bare)) else text
        text = text.replace(":", " =") if _ITEMS.fullmatch(text) else text
    if "{:}" in text or "{.}" in text:
        text = _BRACED_SIGN.sub(r"\1", text)
    text = _in_ascii(text)
    if "}" in text and ("∪" in text or "cup" in text or "∩" in text or "cap" in text):
        text = _BARE_SET.sub(r"\\{\1\\}", text)
    if text[:1] == "<" and _ANGLES.fullmatch(text):
        text = rf"\langle {text[1:-1]} \rangle"
    if r".\overline" in text:
        text = _NO_ZERO.sub(r"0.\\overline", text)
    if "..." in text or "dots" in text or "…" in text:
        text = _COUNTED.sub(_counted_through, _ENDLESS.sub(_repeating, text))
    if text[-1:] in "hdt}" and (match := _ORDINAL.fullmatch(text)) and _suffix(int(match[1])) == match[2]:
        return match[1]
    text = _measured(_noted(text))
    if "mod" in text:
        text = _MODULUS.sub(r"\\pmod{\1}", text)
    if "^" in text or "°" in text:
        text = _DEGREES.sub(_in_degrees, text) if "'" in text or "prime" in text or "′" in text else text
        text = _LETTER_DEGREE.sub(r"^\\circ", text) if "o" in text else text
    if "log" in text:
        text = _BASED_LOG.sub(r"\\log_{\2}(\1)", _LOG.sub(r"\\log_{\1}(", text))
    if text[-1:] in ")]" and len(text) > 2:
        text = _UNIT_BRACKETS.sub(_unbracketed, text)
    if "]" in text or "[" in text or "U" in text:
        text = _SIZED.sub("", text) if "\\left" in text else text
        text = _UNION.sub(r" \\cup ", text)
        text = _ONE_TURNED.sub(_unturned, text) if _is_turned(text) else text
    return text


def _in_ascii(text: str) -> str:
    """Signs of several characters: ``==``, ``+/-``, ``->``, ``x in [1, 2]``, and ``x_{1,2} =``."""
    if text[1:2] == "_":
        text = _BOTH_ROOTS.sub(r"\1 = ", text)
    if " in " in text:
        text = _IN.sub(r"\1 \\in ", text)
    if "/_" in text:
        text = _STACKED.sub(r"\\frac{\1}{\2}", text)
    if "->" in text:
        text = text.replace("->", r"\to ")
    if "==" in text or "+/-" in text:
        text = text.replace("==", "=").replace("+/-", r"\pm ")
    return text


def _measured(text: str) -> str:
    """Whole minutes with their seconds, miles an hour, mixed numbers in Chinese."""
    if text[-1:] in "\"″'" and (match := _INCHES.fullmatch(text)):
        return rf"{match[1]}\text{{ inches}}"
    if " in" in text and text[-1:] in "23}²³" and (match := _INCHES_RAISED.fullmatch(text)):
        return rf"{match[1]}\text{{ in}}^{{{match[2] or '23'['²³'.index(match[3])]}}}"
    if text[-3:] == ":00" and (match := _SECONDS.fullmatch(text)):
        return match[1]
    text = _MILES.sub("mph", text) if "/" in text and "mi" in text else text
    return _MIXED.sub(" ", text) if "又" in text else text


def _counted_through(match: re.Match[str]) -> str:
    """``1, 2, \\ldots, 10`` with all of its numbers, where they rise by one step."""
    head = [int(each) for each in match[1].split(",")]
    last, step = int(match[2]), head[1] - head[0]
    even = step > 0 and head == list(range(head[0], head[-1] + 1, step)) and last > head[-1]
    if not even or (last - head[0]) % step or (last - head[0]) // step >= MAX_COUNTED:
        return match[0]
    return ", ".join(map(str, range(head[0], last + 1, step)))


def _noted(text: str) -> str:
    """Notes of what letters stand for behind a comma, systems as cases, ``3 to 4`` as a ratio."""
    if "d" in text and "=" in text and (match := _DERIVATIVE.match(text)):
        text = f"{match[1] or match[2] or match[3]}'{'' if match[3] is None else '(x)'} = {text[match.end() :]}"
    if "mapsto" in text or "↦" in text or text[:5] == "\\odot":
        text = _CIRCLE.sub(r"\1:", _MAPPED.sub(r"\1(\2) = ", text))
    if "=" in text and _LABELLED.fullmatch(text):
        text = _LABEL_SIGN.sub("", text)
    if "10" in text and ("x" in text or "X" in text):
        text = _SCIENTIFIC.sub(r"\\times ", text)
    if ("to" in text or "比" in text) and _RATIO.fullmatch(text):
        return _TO_SIGN.sub(":", text)
    if "line" in text:
        text = _NUMERAL.sub(r"\1", text)
    if text[:1].isdigit() and not text[-1:].isdigit() and (told := compound(text)) is not None:
        return told
    if (text[:1].isdigit() or text[:2] == "a ") and (text[-1:].isalpha() or (text[-1:] == "}" and "%" in text)):
        return _with_words_behind(text)
    if "begin" in text:
        text = _LINES.sub(_in_cases, _SYSTEM.sub(_in_cases, text))
    if text[-1:] == ")" and "=" in text:
        text = _RANGE_NOTE.sub(r", \1", text)
    if "\\ne" in text or "\\in" in text or "≠" in text or "∈" in text:
        text = _FOR.sub(", ", _BRACKETED_NOTE.sub(r", \1", text))
    if "for" in text or "where" in text or "with" in text:
        text = _FOR_ALL.sub("", _FOR_EACH.sub(", ", text))
    if text[:4] == "\\mid" and text.count("\\mid") == 2:
        text = text.replace("\\mid", "|")
    return text


def _with_words_behind(text: str) -> str:
    """A unit in words behind a number: ``2/3 of the pizza``, ``18/day``, ``66 in``."""
    text = _A_TIME.sub(r" per \1", _WHOLE_AND_PART.sub(r"\1 \2", text))
    if "%" in text:
        return match[1] if (match := _PERCENT_OF.fullmatch(text) or _PERCENT_TEXT.fullmatch(text)) else text
    if match := _EACH.fullmatch(text):
        return rf"{match[1]}\text{{ per {match[2]}}}"
    if match := _WORDS_BEHIND.fullmatch(text) or _ONE_BEHIND.fullmatch(text):
        said = match[match.lastindex or 0]
        return text if WORDS.keys() & set(said.split()) - {"cup"} else rf"{match[1]}\text{{ {said}}}"
    return text


def _in_cases(match: re.Match[str]) -> str:
    """A system of equations or inequalities as ``cases``."""
    inner = match[1]
    if _COMPARED.search(inner) or "if" in inner:
        return rf"\begin{{cases}}{inner}\end{{cases}}"
    return rf"\begin{{cases}}{inner.replace('&', ' ')}\end{{cases}}" if "=" in inner else match[0]


def _repeating(match: re.Match[str]) -> str:
    """``0.1666...`` as ``0.1(6)``: one digit three times repeats, and several twice."""
    digits = match[2]
    for length in range(1, len(digits) // 2 + 1):
        block = digits[-length:]
        times = 1
        while digits.endswith(block * (times + 1)):
            times += 1
        if times >= (3 if length == 1 else 2):
            return f"{match[1] or 0}.{digits[: len(digits) - length]}({block})"
    return match[0]


def _unbracketed(match: re.Match[str]) -> str:
    """A known unit, or one that is marked, without the brackets around it."""
    plain = match[1].partition("^")[0].rstrip("²³").rpartition(" ")[2]
    marked = plain.startswith("\\") or not plain.isascii()
    if plain.isalpha() and plain.isascii() and len(plain) > 3 and plain == match[1] and plain not in UNITS | WORDS:
        return rf"\text{{ {plain}}}"  # 72 (clips)
    return f" {match[1]}" if plain in UNITS or marked else match[0]


def _suffix(value: int) -> str:
    return "th" if value % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(value % 10, "th")


def _in_degrees(match: re.Match[str]) -> str:
    seconds = int(match[2]) * 60 + int(match[3] or 0)
    return rf"({match[1]}+\frac{{{seconds}}}{{3600}})^\circ"


def _is_turned(text: str) -> bool:
    """Whether it is intervals of which one has a bracket turned outward: ``]1,2]``, ``[1,2[``."""
    if _TURNED.fullmatch(text) is None or ("," not in text and ";" not in text):
        return False
    return any(match[1] == "]" or match[3] == "[" for match in _ONE_TURNED.finditer(text))


def _unturned(match: re.Match[str]) -> str:
    opening, closing = {"]": "("}.get(match[1], match[1]), {"[": ")"}.get(match[3], match[3])
    return f"{opening}{match[2]}{closing}"
