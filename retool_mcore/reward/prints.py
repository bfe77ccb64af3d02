r"""Read what Python, NumPy and SymPy print: ``Fraction(3, 4)``, ``2*I``, ``Matrix([[1], [2]])``.

It becomes the LaTeX that says the same, before anything else reads an answer. At most
``_MAX_CALLS`` calls are read, each in linear time.
"""

from __future__ import annotations

import re
from collections.abc import Callable

_MAX_CALLS = 60
_MODULE = re.compile(r"(?<![\w\\.])(?:math|cmath|np|numpy|sympy|sp|mp|mpmath|fractions|decimal)\.(?=[A-Za-z])")
_NUMBERS = "Decimal|mpf|Integer|Float|float|int|float16|float32|float64|int32|int64|uint64|longdouble"
_CALL = re.compile(
    rf"(?<![\w\\])(?:(?P<name>{_NUMBERS}|Fraction|Rational|mpq|complex|Poly|binomial|comb|nCr|nPr|perm|factorial|floor|ceiling|ceil|cbrt|root|Matrix"
    r"|ImmutableMatrix|ImmutableDenseMatrix|MutableDenseMatrix|array|matrix|FiniteSet|Union|Intersection|Eq|set"
    r"|frozenset|Interval(?:\.open|\.Lopen|\.Ropen)?))\("
)
_NAMES = {"EmptySet": r"\emptyset", "Reals": r"\mathbb{R}", "S.Reals": r"\mathbb{R}", "S.EmptySet": r"\emptyset",
          "GoldenRatio": r"\frac{1+\sqrt{5}}{2}"}  # fmt: skip
_NAMED = re.compile(r"(?<![\w\\.])(?:S\.Reals|S\.EmptySet|EmptySet|Reals|GoldenRatio)(?!\w)")
_REAL = r"[-+]?\s{0,2}[\d.]{1,40}+(?:e[-+]?\d{1,4})?+"
_COMPLEX = re.compile(rf"\(?(?:{_REAL}\s{{0,2}}(?=[-+]))?{_REAL}j\)?")
_UNDERSCORED = re.compile(r"[-+]?\d{1,3}(?:_\d{3}){1,30}(?:\.\d{1,40})?")
_BASED = re.compile(r"([-+]?)0(?:[xX]([0-9a-fA-F]{1,40})|[bB]([01]{1,160})|[oO]([0-7]{1,60}))")
_LETTER = re.compile(r"(?<![A-Za-z\\])([A-Za-z])(?![A-Za-z(])")
_ROWS = re.compile(r"\[\s*+(?:\[[^][]{1,400}\][\s,]*+){1,40}\]")
_WITH_I = re.compile(r"(?:-|[-+]?\d[\d./]{0,20} [-+] )I")  # 3 - I
_STRINGS = re.compile(r"""(?<=[\[{(,\s])(['"])([^'"]{1,80})\1(?=[\]}),])""")  # ['B', 'C']
_DICTS = re.compile(r"\[\{([^{}<>|]{1,300})\}\]")  # [{x: 1, y: 2}]
_ROW = re.compile(r"\[([^][]{1,400})\]")


def printed(text: str) -> str:
    """The text with what Python prints as LaTeX; any other text as it is."""
    if match := _BASED.fullmatch(text):
        value = int(match[2], 16) if match[2] else int(match[3], 2) if match[3] else int(match[4], 8)
        return f"{match[1]}{value}"
    if "_" in text and _UNDERSCORED.fullmatch(text):
        return text.replace("_", "")
    if "j" in text and _COMPLEX.fullmatch(text):
        return text.replace("j", "i")
    if "(" in text or "." in text:
        text = _MODULE.sub("", text)
    if _NAMED.search(text):
        text = _NAMED.sub(lambda match: _NAMES[match[0]], text)
    for _ in range(_MAX_CALLS if "(" in text else 0):
        turned = _one_call(text)
        if turned is None:
            break
        text = turned
    if text[:1] in "[{(" and (text[1:2] in ("'", '"', "{")):
        text = _STRINGS.sub(r"\2", text)
        text = match[1].replace(":", " =") if (match := _DICTS.fullmatch(text)) else text
    if "[[" in text and (rows := _rows(text.strip())):
        return rows
    return _constants(text) if "*" in text or _WITH_I.fullmatch(text) else text


def _constants(text: str) -> str:
    """SymPy's ``I`` and ``E`` in a product or power, where no other letter is a name."""
    letters = set(_LETTER.findall(text))
    if letters and letters <= {"I", "E"}:
        return _LETTER.sub(lambda match: {"I": "i", "E": "e"}[match[0]], text)
    return text


def _one_call(text: str) -> str | None:
    """The text with its last call turned, whose arguments then hold no other; None without one."""
    calls = list(_CALL.finditer(text))
    if not calls:
        return None
    call = calls[-1]
    args, end = _arguments(text, call.end())
    turned = None if args is None else _turned(call["name"], args)
    return None if turned is None else text[: call.start()] + turned + text[end:]


def _arguments(text: str, start: int) -> tuple[list[str] | None, int]:
    """The arguments of a call and where it ends; None where it has no end."""
    depth, args, at = 0, list[str](), start
    for position in range(start, len(text)):
        sign = text[position]
        if sign == ")" and not depth:
            last = text[at:position].strip()
            return [*args, last] if last or not args else args, position + 1
        depth += {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}.get(sign, 0)
        if sign == "," and not depth:
            args.append(text[at:position].strip())
            at = position + 1
    return None, start


_FORMS: dict[tuple[str, int], Callable[..., str]] = {
    ("Fraction", 2): r"\frac{{{}}}{{{}}}".format,
    ("Rational", 2): r"\frac{{{}}}{{{}}}".format,
    ("binomial", 2): r"\binom{{{}}}{{{}}}".format,
    ("comb", 2): r"\binom{{{}}}{{{}}}".format,
    ("nCr", 2): r"\binom{{{}}}{{{}}}".format,
    ("nPr", 2): "P({},{})".format,
    ("perm", 2): "P({},{})".format,
    ("mpq", 2): r"\frac{{{}}}{{{}}}".format,
    ("complex", 2): "({}+({})i)".format,
    ("factorial", 1): "(({})!)".format,
    ("floor", 1): r"\lfloor {} \rfloor".format,
    ("ceiling", 1): r"\lceil {} \rceil".format,
    ("ceil", 1): r"\lceil {} \rceil".format,
    ("cbrt", 1): r"\sqrt[3]{{{}}}".format,
    ("root", 2): r"\sqrt[{1}]{{{0}}}".format,
    ("Eq", 2): "{} = {}".format,
    ("Interval", 2): "[{}, {}]".format,
    ("Interval.open", 2): "({}, {})".format,
    ("Interval.Lopen", 2): "({}, {}]".format,
    ("Interval.Ropen", 2): "[{}, {})".format,
}


def _turned(name: str, args: list[str]) -> str | None:
    if name.startswith("Interval") and len(args) == 2 and "oo" in (args[0].strip("-"), args[1]):
        low = "(" if args[0] == "-oo" or name.endswith((".open", ".Lopen")) else "["
        high = ")" if args[1] == "oo" or name.endswith((".open", ".Ropen")) else "]"
        return f"{low}{args[0]}, {args[1]}{high}"
    if (name, len(args)) in _FORMS:
        return _FORMS[name, len(args)](*args)
    if name in (*_NUMBERS.split("|"), "Fraction", "Rational") and len(args) == 1:
        return args[0].strip("'\"")
    if name == "Poly" and args:
        return args[0]
    if name in ("Union", "Intersection"):
        return (r" \cup " if name == "Union" else r" \cap ").join(args)
    if name == "FiniteSet":
        return rf"\{{{', '.join(args)}\}}"
    if name in ("set", "frozenset") and len(args) == 1:
        return r"\emptyset" if not args[0] else rf"\{{{args[0][1:-1]}\}}" if args[0][0] in "[{" else None
    if name.lower().endswith("matrix") or name == "array":
        return _rows(args[0]) or (args[0] if name == "array" else _column(args[0]))
    return None


def _column(text: str) -> str | None:
    row = _ROW.fullmatch(text.strip())
    return None if row is None else r"\begin{pmatrix}" + r"\\".join(row[1].split(",")) + r"\end{pmatrix}"


def _rows(text: str) -> str | None:
    """``[[1, 2], [3, 4]]``, and without commas as NumPy prints it, as a matrix; else None."""
    if _ROWS.fullmatch(text) is None:
        return None
    rows = [(row.split(",") if "," in row else row.split()) for row in _ROW.findall(text)]
    if len({len(row) for row in rows}) != 1:
        return None
    return r"\begin{pmatrix}" + r"\\".join("&".join(row) for row in rows) + r"\end{pmatrix}"
