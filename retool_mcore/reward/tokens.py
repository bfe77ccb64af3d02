r"""Cut an answer into tokens: numbers, symbols, commands, words of text and units.

One pass over the text, in linear time. Spellings that mean the same leave here as the same token:
``\dfrac`` as ``\frac``, ``≤`` as ``\le``, ``\left(`` as ``(``.
"""

import re
from functools import lru_cache
from typing import Literal, NamedTuple

Kind = Literal["number", "letter", "command", "word", "text", "sign"]


class Unreadable(Exception):
    """A text is no answer that can be read as a whole; says why."""


class Token(NamedTuple):
    """``glued``: nothing, not even a space, stands between it and the token before it."""

    kind: Kind
    text: str
    glued: bool = False


_TOKEN = re.compile(
    r"(?P<space>\s+|~|\\[ ,;:!>]|\\(?:displaystyle|textstyle|limits|nolimits|rm|bf|it)(?![a-zA-Z])|&nbsp;"
    r"|\\(?:left|right|middle|[bB]ig+[lr]?)(?![a-zA-Z])\s*+\.?)"
    r"|(?P<digits>(?<![A-Za-z])(?:\d[\dA-F]*+|[A-F][\dA-F]++)"
    r"(?=\)?_\{?\(?(?:1[1-6](?!\d)|(?:\\text\{)?(?:sixteen|twelve|eleven|hex))))"
    r"|(?P<number>(?:\d++(?:\.(?!\d*+\\?ldots)\d*+)?|\.\d++)(?:[eE][-+]?\d{1,4}(?![\da-zA-Z]))?)"
    r"|\\(?P<text>text(?:rm|bf|it|tt|sf|normal)?|mathrm|mathbf|mathit|mathsf|mathbb|Bbb|mathcal|mbox|hbox|operatorname\*?"
    r"|boldsymbol|bold|bm(?![a-z])|textup)\s*+(?=\{|[A-Za-z])"
    r"|(?P<row>\\\\\s*+\[\s*+-?[\d.]{1,6}\s*+[a-z]{2}\s*+\])"
    r"|(?P<command>\\(?:[a-zA-Z]++|.))"
    r"|(?P<letters>[a-zA-Z]++)"
    r"|(?P<words>[\u4e00-\u9fff]++)"
    r"|(?P<sign>\*\*|<=|>=|!=|.)",
    re.DOTALL,
)
_SIMPLE = {sign: (Token("sign", sign), Token("sign", sign, True)) for sign in "+-=()[]{}|,;:^_/'"}
_ALONE = re.compile(r"[0-9]+(?![0-9.eEA-F])|[A-Za-z](?![A-Za-z0-9])")
_GREEK = (
    "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi rho sigma tau upsilon phi chi psi omega"
)
_SIGNS = dict(zip("αβγδεζηθικλμνξρστυφχψωΓΔΘΛΞΠΣΦΨΩ", (
    "\\" + name for name in f"{_GREEK} Gamma Delta Theta Lambda Xi Pi Sigma Phi Psi Omega".split()
), strict=True)) | {
    "−": "-", "–": "-", "—": "-", "×": "*", "·": "*", "⋅": "*", "∙": "*", "÷": "/", "∕": "/", "**": "^", "＝": "=",
    "<=": r"\le", "≤": r"\le", "⩽": r"\le", ">=": r"\ge", "≥": r"\ge", "⩾": r"\ge", "!=": r"\ne", "≠": r"\ne",
    "≈": r"\approx", "±": r"\pm", "∓": r"\mp", "∞": r"\infty", "π": r"\pi", "√": r"\sqrt", "∪": r"\cup", "∩": r"\cap",
    "∈": r"\in", "°": r"\degree", "%": r"\%", "ℝ": r"\R", "∅": r"\emptyset", "’": "'", "′": "'", "，": ",", "（": "(",
    "）": ")", "：": ":", "；": ";", "⁄": "/", "⌊": r"\lfloor", "⌋": r"\rfloor", "⌈": r"\lceil", "⌉": r"\rceil",
    "⟨": r"\langle", "⟩": r"\rangle", "ℤ": r"\Z", "ℕ": r"\N", "ℚ": r"\Q",
    "≡": r"\equiv", "∖": r"\setminus", "→": r"\to", "¬": r"\neg", "∠": r"\angle", "∥": r"\parallel", "⊥": r"\perp",
}  # fmt: skip
_RAISED = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺]+")
_METER = re.compile(r"(?<=\d )m(?=[²³])")  # the one letter that a raised digit marks as a unit
_LOWERED = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺", "0123456789-+")
_PARTS = {"½": "12", "⅓": "13", "⅔": "23", "¼": "14", "¾": "34", "⅕": "15", "⅙": "16", "⅛": "18",
          "⅖": "25", "⅗": "35", "⅘": "45", "⅚": "56", "⅜": "38", "⅝": "58", "⅞": "78"}  # fmt: skip
_VULGAR = {ord(sign): rf"\frac{{{parts[0]}}}{{{parts[1]}}}" for sign, parts in _PARTS.items()}
_COMMANDS = {
    r"\dfrac": r"\frac", r"\tfrac": r"\frac", r"\cfrac": r"\frac", r"\nicefrac": r"\frac", r"\sfrac": r"\frac",
    r"\surd": r"\sqrt", r"\top": "T", r"\intercal": "T", r"\leq": r"\le", r"\leqslant": r"\le",
    r"\geq": r"\ge", r"\geqslant": r"\ge", r"\neq": r"\ne", r"\lt": "<", r"\gt": ">", r"\cdot": "*", r"\times": "*",
    r"\ast": "*", r"\div": "/", r"\lbrace": r"\{", r"\rbrace": r"\}", r"\lbrack": "[", r"\rbrack": "]",
    r"\lparen": "(", r"\rparen": ")", r"\lvert": "|", r"\rvert": "|", r"\vert": "|", r"\mid": r"\mid", r"\colon": ":",
    r"\dbinom": r"\binom", r"\tbinom": r"\binom", r"\varepsilon": r"\epsilon", r"\varphi": r"\phi",
    r"\vartheta": r"\theta", r"\reals": r"\R", r"\varnothing": r"\emptyset", r"\land": r"\wedge",
    r"\lor": r"\vee", r"\bullet": "*", r"\backslash": r"\setminus", r"\rightarrow": r"\to", r"\smallsetminus":
    r"\setminus", r"\arcsinh": r"\asinh", r"\tg": r"\tan", r"\ctg": r"\cot", r"\degrees": r"\degree",
    r"\doteq": r"\approx", r"\triangleq": "=", r"\coloneqq": "=", r"\coloneq": "=", r"\mod": r"\bmod", r"\cr": "\\\\",
    r"\oslash": r"\emptyset", r"\quad": ";", r"\qquad": ";",
    r"\bigcup": r"\cup", r"\bigcap": r"\cap", r"\iff": r"\iff", r"\sqrt": r"\sqrt", r"\operatorname": "", r"\*": "*",
    r"\/": "", r"\-": "", r"\_": "_", r"\$": "", r"\&": "&", r"\infin": r"\infty", r"\overrightarrow": r"\vec",
    r"\widehat": r"\hat", r"\bar": r"\overline", r"\dots": r"\ldots", r"\cdots": r"\ldots",
    r"\Pr": "P", r"\implies": r"\iff", r"\approx": r"\approx", r"\|": "|", r"\neg": r"\neg", r"\degree": r"\degree",
    r"\lnot": r"\neg", r"\simeq": r"\approx", r"\imath": "i", r"\jmath": "j",
    r"\textdegree": r"\degree", r"\euro": "", r"\pounds": "", r"\ell": r"\ell", r"\prime": "'",
}  # fmt: skip
# Letters that stand for a function, constant or word where they stand together.
WORDS = {
    "sqrt": r"\sqrt", "sin": r"\sin", "cos": r"\cos", "tan": r"\tan", "cot": r"\cot", "sec": r"\sec", "csc": r"\csc",
    "arcsin": r"\arcsin", "arccos": r"\arccos", "arctan": r"\arctan", "asin": r"\arcsin", "acos": r"\arccos",
    "atan": r"\arctan", "sinh": r"\sinh", "cosh": r"\cosh", "tanh": r"\tanh", "ln": r"\ln", "log": r"\log",
    "exp": r"\exp", "pi": r"\pi", "infinity": r"\infty", "infty": r"\infty", "inf": r"\infty", "oo": r"\infty",
    "abs": r"\abs", "gcd": r"\gcd", "lcm": r"\lcm", "max": r"\max", "min": r"\min", "theta": r"\theta",
    "alpha": r"\alpha", "beta": r"\beta", "lambda": r"\lambda", "cup": r"\cup", "choose": r"\choose", "lg": r"\lg",
    "percent": r"\%", "pct": r"\%", "arcctg": r"\arccot", "arccot": r"\arccot", "det": r"\det", "mod": r"\bmod",
    "asinh": r"\asinh", "acosh": r"\arccosh", "atanh": r"\arctanh", "acot": r"\arccot", "coth": r"\coth",
    "arctg": r"\arctan", "cis": r"\cis", "union": r"\cup",
}  # fmt: skip


# What stands for itself as text, too; other words may be units or names there.
_FUNCTIONS = "cis choose sin cos tan cot csc arcsin arccos arctan ln log lg gcd lcm exp"
_SPELT = frozenset(_FUNCTIONS.split())
# A function and its letter in one run: sinx, lnx, sinA, xlnx.
GLUED = re.compile(r"(x?)(arcsin|arccos|arctan|sin|cos|tan|cot|sec|csc|ln|lg|log)([xyABC])")
# A function of several values has a bracket behind it; letters without one are a product.
BRACKETED = ("abs", "max", "gcd", "lcm", "det")


def tokens(text: str) -> list[Token]:
    """The tokens of an answer. Raises Unreadable for braces that do not match in a text command."""
    return list(_tokens(text))


@lru_cache(maxsize=256)  # an answer is read, spelt for its vote, and perhaps read again with a unit
def _tokens(text: str) -> tuple[Token, ...]:
    if not text.isascii():
        text = _METER.sub(r"\\text{m}", text)
        text = _RAISED.sub(lambda match: f"^{{{match[0].translate(_LOWERED)}}}", text.translate(_VULGAR))
    found: list[Token] = []
    position, end, glued = 0, len(text), False
    while position < end:
        at = text[position]
        if at in _SIMPLE:  # most tokens are one sign, one letter or digits, and need no search
            found.append(_SIMPLE[at][glued])
            position, glued = position + 1, True
            continue
        if at.isalnum() and (match := _ALONE.match(text, position)):
            found.append(Token("number" if at.isdigit() else "letter", match[0], glued))
            position, glued = match.end(), True
            continue
        match = _TOKEN.match(text, position)
        if match is None:  # pragma: no cover  the last alternative takes any character
            raise Unreadable(f"{text[position]!r} is no part of an answer")
        position, kind, said = match.end(), match.lastgroup, match[0]
        if kind == "space":
            glued = False
            continue
        if kind == "text":
            content, position = _argument(text, position)
            found.append(_text(match["text"], content, glued))
        elif kind in ("number", "digits"):
            found.append(Token("number", said, glued))
        elif kind == "words":
            found.append(Token("text", said, glued))
        elif kind == "letters":
            found.extend(_letters(said, glued, text[position : position + 1]))
        elif kind == "row":
            found.append(Token("command", "\\\\", glued))
        elif kind == "command":
            said = _COMMANDS.get(said, said)
            if said:
                kind = "command" if said.startswith("\\") else "letter" if said.isalpha() else "sign"
                found.append(Token(kind, said, glued))
        else:
            found.extend(_sign(said, glued))
        glued = True
    return tuple(found)


def _letters(run: str, glued: bool, following: str) -> list[Token]:
    lower = run if run in WORDS else run.lower()
    if lower in WORDS and (lower not in BRACKETED or following in tuple("(|{[ _")):
        return [Token("command", WORDS[lower], glued)]
    if len(run) > 2 and (match := GLUED.fullmatch(run)):
        head = [Token("letter", match[1], glued)] if match[1] else []
        return [*head, Token("command", WORDS[match[2]], glued or bool(head)), Token("letter", match[3], True)]
    if len(run) > 3 or run in UNITS or run in ("or", "and", "of", "men"):
        return [Token("word", run, glued)]
    return [Token("letter", letter, glued or index > 0) for index, letter in enumerate(run)]


def _sign(said: str, glued: bool) -> list[Token]:
    if said in "$€£¥":
        return []
    said = _SIGNS.get(said, said)
    return [Token("command" if said.startswith("\\") else "sign", said, glued)]


def _argument(text: str, start: int) -> tuple[str, int]:
    """The content of the braces at ``start``, or the one letter there, and where it ends."""
    if text[start] != "{":
        return text[start], start + 1
    depth = 0
    for position in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[start + 1 : position], position + 1
    raise Unreadable("its braces do not match")


def _text(command: str, content: str, glued: bool) -> Token:
    plain = re.sub(r"[\s~]+|\\[ ,;:!]", " ", content).strip()
    if command in ("mathbb", "Bbb") and plain in ("R", "Z", "N", "Q", "C"):
        return Token("command", "\\" + plain, glued)
    if (
        (command.startswith("operatorname") and plain not in UNITS)
        or (command == "text" and plain in _SPELT)
        or (command == "mathrm" and plain in WORDS and plain not in ("min", "sec"))
    ):
        return Token("command", WORDS.get(plain, "\\" + plain), glued)
    if plain == ":":
        return Token("sign", ":", glued)
    if plain.lower() in ("%", r"\%", "percent", "pct", "per cent"):
        return Token("command", r"\%", glued)
    if (
        len(plain) == 1
        and plain.isalpha()
        and plain not in UNIT_LETTERS
        and plain < "\u3040"  # no kana, Han or Hangul
        and not (command == "text" and plain.isupper())
    ):
        return Token("letter", plain, glued)
    if command in ("mathbf", "mathit", "boldsymbol", "bm", "bold", "mathcal", "mathsf"):
        if len(plain) == 1 and plain.isalpha():
            return Token("letter", plain, glued)
        if plain.startswith("\\") and plain[1:].isalpha():
            return Token("command", _COMMANDS.get(plain, plain), glued)
    return Token("text", plain, glued)


UNIT_LETTERS = "msghlLNJWVKCAT"  # in roman type or as text; any other letter is a name


def _units() -> dict[str, str]:
    """Every spelling of a unit that is dropped without being marked as text, and its own name.

    No single letters: ``5m`` may be a product.
    """
    spellings = (
        "mm mms millimeter millimeters millimetre millimetres, cm cms centimeter centimeters centimetre centimetres, "
        "dm, km kms kilometer kilometers kilometre kilometres, meter meters metre metres, inch inches, ft foot feet, "
        "yd yard yards, mile miles, kg kgs kilogram kilograms, gram grams, mg milligram milligrams, lb lbs pound "
        "pounds, oz ounce "
        "ounces, ton tons, ml mL milliliter milliliters, liter liters litre litres, gallon gallons, "
        "second seconds sec secs, minute minutes mins, hr hrs hour hours, day days, week weeks, month months, "
        "year years, mph, kph, cent cents, dollar dollars usd USD, euro euros EUR, "
        "rupee rupees INR, yuan CNY RMB, degree degrees deg, radian radians rad, unit units, "
        "square squares sq, cubic, people persons person, student students, way ways, point points pts, times, bucks, "
        "Hz hertz, kJ, eV, Pa, mol, joule joules, watt watts, newton newtons, volt volts, dozen, hundred, thousand, "
        "million, billion, trillion, per"
    )
    return {word: group.split()[0] for group in spellings.split(",") for word in group.split()}


UNITS = _units()
