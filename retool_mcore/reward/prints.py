r"""Read what Python, NumPy and SymPy print: ``Fraction(3, 4)``, ``2*I``, ``Matrix([[1], [2]])``.

It becomes the LaTeX that says the same, before anything else reads an answer. At most
``_MAX_CALLS`` calls are read, each in linear time.
"""

import re
from collections.abc import Callable
from functools import partial

from retool_mcore.reward.generators import comprehended, turned
from retool_mcore.reward.literals import ROW, circle, images, moment, polynomial, with_constants
from retool_mcore.reward.logic import joined
from retool_mcore.reward.piecewise import as_set, conditional

_MAX_CALLS = 60
MAX_COUNTED = 100  # of a range
MAX_DIAGONAL = 8  # of a matrix that is given by its diagonal
_MODULE = re.compile(
    r"(?<![\w\\.])(?:math|cmath|np|numpy|sympy|sp|mp|mpmath|fractions|decimal|torch|scipy\.special)\.(?=[A-Za-z])"
)
_HELD = re.compile(r"(?:dict_keys|dict_values|odict_keys|odict_values|deque|list|sorted)\(\[(.*)\]\)", re.DOTALL)
_RANGE = re.compile(r"(?:list\()?[Rr]ange\((?:(-?\d{1,4}), )?(-?\d{1,4})(?:, 1)?\)\)?")
_SPECIAL_FUNCTION = re.compile(r"(?<![\w\\])(gamma|zeta)(?=\()")
_TRUE = re.compile(r"(?:np\.|numpy\.)?(?:bool_?\()?(True|False)_?\)?")
_NUMBERS = (
    "Decimal|mpf|mpc|Integer|Float|float|int|float16|float32|float64|int32|int64|uint64|longdouble|complex128|tensor"
)
_SEQUENCES = ("array", "tensor", "asarray")
_PLACES = ("Point", "Point2D", "Point3D", "Vector", "Tuple", "tuple")
_CALL = re.compile(
    rf"(?<![\w\\])(?:(?P<name>{_NUMBERS}|Fraction|Rational|mpq|complex|Poly|print|binomial|comb|nCr|nPr|perm|factorial"
    r"|floor|ceiling|ceil|cbrt|root|real_root|Matrix|(?:Mutable|Immutable)?SparseMatrix|ImmutableMatrix|ImmutableDenseMatrix|MutableDenseMatrix|array"
    r"|asarray|matrix|FiniteSet|Union|Intersection|Complement|(?:Une|E)quality|(?:Strict)?(?:Less|Greater)Than|Eq|Ne|Lt|Le|Gt|Ge|Piecewise|And|Or|Pow|pow|hypot|atan2|Add|Mul|set|frozenset|dict"
    r"|Point(?:[23]D)?|Circle|Vector|Tuple|tuple|radians|Symbol|Dummy|n?simplify|sympify|expand|factor|str|round|diag|eye|poly1d|datetime\.(?:date|time)|sum|prod|Sum|Product|len|Interval(?:\.open|\.Lopen|\.Ropen)?|S(?=\(-?\d+\))))\("
)
_REAL = r"[-+]?\s{0,2}[\d.]{1,40}+(?:e[-+]?\d{1,4})?+"
_COMPLEX = re.compile(rf"\(?(?:{_REAL}\s{{0,2}}(?=[-+]))?{_REAL}j\)?")
_J = re.compile(r"(?<=[\d.])j(?![A-Za-z])")
_BETWEEN = re.compile(r",|;|\band\b|\bor\b")
_UNIT_I = re.compile(rf"({_REAL}\s?[-+]\s?)(?:[ij]\s?(\d[\d.]{{0,40}})|(\d[\d.]{{0,40}})\s?\*\s?j)")  # 2+i3, 2+3*j
_UNDERSCORED = re.compile(r"[-+]?\d{1,3}(?:(?:_\d{3}){1,30}|(?:'\d{3}){1,30})(?:\.\d{1,40})?")
_READ_IN_BASE = re.compile(r"int\(['\"]([\dA-Za-z]{1,160})['\"], (?:base=)?(\d{1,2})\)")
_REMAINDER = re.compile(r"(\d{1,40}) ?% ?(\d{1,40})")
_PLAIN = re.compile(r"-?\d{1,12}(?:\.\d{1,12})?")
_METHOD = re.compile(r"(?<=[\w)\]])\.(?:doit|simplify|tolist|item|expand|factor)\(\)$")  # Sum(k, (k, 1, 5)).doit()
_LAMBDA = re.compile(r"lambda \w{1,9}(?:, \w{1,9}){0,4}: |Lambda\((?:\w{1,9}|\([\w, ]{1,40}\)), (?=.*\)$)")
_BASED = re.compile(r"([-+]?)0(?:[xX]([0-9a-fA-F]{1,40})|[bB]([01]{1,160})|[oO]([0-7]{1,60}))")
_LETTER = re.compile(r"(?<![A-Za-z\\])([A-Za-z])(?![A-Za-z(])")
_ASSIGNED = re.compile(r"[A-Za-z]\w{0,9}\s?[=:]")  # x = 2*I
_ROWS = re.compile(r"\[\s*+(?:\[[^][]{1,400}\][\s,]*+){1,40}\]")
_WITH_I = re.compile(r"(?:-|[-+]?\d[\d./]{0,20} [-+] )I")  # 3 - I
_OPERATOR = re.compile(
    r"\\(?:operatorname|mathrm|text)\s?\{(floor|ceil|ceiling|diag|sqrt|Fraction|Rational|binomial|factorial)\}(?=\()"
)
_STRINGS = re.compile(r"""(?<=[\[{(,\s:])(['"])([^'"]{1,80})\1(?=[\]}),:])""")  # ['B', 'C']
_PAIR = r"[A-Za-z]\w{0,9}:\s?(?:[^(),:{}<>|]|\([^(){}]{0,40}\)){1,60}"
_DICT = rf"\{{{_PAIR}(?:,\s?{_PAIR}){{0,9}}\}}"
_DICTS = re.compile(rf"\[{_DICT}(?:,\s?{_DICT}){{0,19}}\]")  # [{x: 1, y: 2}, {x: 3, y: 4}]
_ITEM = re.compile(r"([A-Za-z]\w{0,9}):\s?((?:[^(),:{}]|\([^(){}]{0,40}\))+)")
_VALUE = rf"{_REAL}(?:[-+][\d.]{{1,40}}+(?:e[-+]?\d{{1,4}})?+i)?+"
_SPACED = re.compile(rf"\[\s*{_VALUE}(?:\s+{_VALUE})+\s*\]")  # [ 1 -2  3], as NumPy prints it
_SEMICOLONS = re.compile(r"[\[(]([^][(){};]{3,200}(?:;[^][(){};]{3,200}){1,9})[\])]")  # [1 2; 3 4]
_NAMED_ROWS = re.compile(r"([A-Za-z]\w{0,3}\s?=\s?)(?=\[\s*\[)")
_NAMED_VALUE = re.compile(r"\A[^()=<>!:,;{}\[\]]{1,30}(?:\([^()=,]{1,20}\))?\s?=\s?(?=[^=\s][^=<>]*$)")
_OVER = re.compile(r"(\w{1,20}(?:\*\w{1,20}){0,3}|\([^()]{1,60}\)|\(\(\w{1,20}\)!\)) ?// ?(\w{1,20}|\([^()]{1,60}\))")
_EQUATIONS = re.compile(
    r"\[([^][=<>,]{1,40}=[^][=<>,]{1,60}(?:,[^][=<>,]{1,40}=[^][=<>,]{1,60}){1,9})\]"
)  # [x = 2, y = 3]
_WITHOUT = re.compile(r"([(\[][^][(){}]{1,60}[)\]])\s?(?:\\|-\s|∖)\s?\\?\{([^{}\\]{1,40})\}")  # (-3, oo) - {1}
_EULER = re.compile(r"(?<![A-Za-z])E\*\*")


_MODULO = re.compile(r"([A-Za-z]) ?% ?(\d{1,9}) ?==? ?(\d{1,9})")


def printed(text: str) -> str:
    """The text with what Python prints as LaTeX; any other text as it is."""
    if "0" in text[:2] and (match := _BASED.fullmatch(text)):
        value = int(match[2], 16) if match[2] else int(match[3], 2) if match[3] else int(match[4], 8)
        return f"{match[1]}{value}"
    if ("_" in text or "'" in text) and _UNDERSCORED.fullmatch(text):
        return text.replace("_", "").replace("'", "")
    if ("i" in text or "j" in text) and (match := _UNIT_I.fullmatch(text)):
        return f"{match[1]}{match[2] or match[3]}i"
    if "j" in text and _is_complex(text):
        text = _J.sub("i", text)
    if (text[:4] == "int(" and (match := _READ_IN_BASE.fullmatch(text))) and 1 < int(match[2]) < 37:
        return rf"{match[1].upper()}_{{{match[2]}}}"
    if "%" in text and (match := _REMAINDER.fullmatch(text)):
        return rf"{match[1]} \bmod {match[2]}"
    if "%" in text and (match := _MODULO.fullmatch(text)):
        return rf"{match[1]} \equiv {match[3]} \pmod{{{match[2]}}}"
    if "=" in text and "==" not in text and (match := _NAMED_VALUE.match(text)):
        return match[0] + printed(text[match.end() :])  # x = (3+4j)
    text = _unheld(_METHOD.sub("", text) if text[-1:] == ")" else text)
    text = comprehended(text) if " for " in text else text
    text = conditional(text) if " if " in text or " for " in text else text
    if text[:6] in ("lambda", "Lambda") and (match := _LAMBDA.match(text)):
        text = text[match.end() : -1 if text[0] == "L" else None]
    if "(" in text or "." in text:
        text = _MODULE.sub("", text)
        text = _OPERATOR.sub(r"\1", text) if "\\" in text else text
        if "gamma(" in text or "zeta(" in text:
            text = _SPECIAL_FUNCTION.sub(lambda match: rf"\{match[1].replace('g', 'G')}", text)
    text = with_constants(text)
    if "ImageSet(" in text[:15] and (said := images(text)) is not None:
        return said
    return _laid_out(_called(text))


def _unheld(text: str) -> str:
    """What a container of Python's holds, as a list; a truth value of NumPy."""
    if text[-2:] == "])":
        return f"[{match[1]}]" if (match := _HELD.fullmatch(text)) else text
    if "ange(" in text[:12] and (match := _RANGE.fullmatch(text)):
        counted = range(int(match[1] or 0), int(match[2]))
        return str(list(counted)) if 0 < len(counted) <= MAX_COUNTED else text
    if "True" in text or "False" in text:
        return match[1] if (match := _TRUE.fullmatch(text)) else text
    return text


def _is_complex(text: str) -> bool:
    """Whether each j in a text stands for i, as Python prints it; in ``2i+3j`` none does."""
    if _COMPLEX.fullmatch(text):
        return True
    if text[0] in "[({nca":
        return text.count("j") == len(_J.findall(text))
    return all(_COMPLEX.fullmatch(part.strip().replace("*1j", "j")) for part in _BETWEEN.split(text))


def _called(text: str) -> str:
    for _ in range(_MAX_CALLS if "(" in text else 0):
        turned = _one_call(text)
        if turned is None:
            break
        text = turned
    return text


def _laid_out(text: str) -> str:
    """What stands without calls: mappings, rows, ``//``, conditions, SymPy's constants."""
    if text[:6] == r"\left[" and _DICTS.fullmatch(plain := _as_printed(text)):
        text = plain
    if text[:1] == "{" and "}, {" in text and _DICTS.fullmatch(f"[{text}]"):
        text = f"[{text}]"  # the solutions, without the brackets of their list
    if text[:1] in "[{(" and (text[1:2] in ("'", '"', "{")):
        text = _STRINGS.sub(r"\2", text)
        text = _solutions(text) if _DICTS.fullmatch(text) else text
    if ";" in text and (match := _SEMICOLONS.fullmatch(text)):
        rows = ", ".join(f"[{row.strip()}]" for row in match[1].split(";"))
        return _rows(f"[{rows}]", least=2) or text
    if "[" in text and (match := _NAMED_ROWS.match(text)) and (rows := _rows(text[match.end() :])) is not None:
        return match[1] + rows
    if text[:1] == "[":
        if "=" in text and (match := _EQUATIONS.fullmatch(text)):
            return match[1]
        if text == "[]":
            return r"\emptyset"
        if (rows := _rows(text.strip())) is not None:
            return rows
        if _SPACED.fullmatch(text):
            return f"[{', '.join(text[1:-1].split())}]"
    if "//" in text:
        text = _OVER.sub(r"\\lfloor \\frac{\1}{\2} \\rfloor", text)
    if text[-1:] == "}" and text[:1] in "([" and (match := _WITHOUT.fullmatch(text)):
        return rf"{match[1]} \setminus \{{{match[2]}\}}"
    text = joined(text) if " | " in text or " & " in text else text
    listed = "," in text and ("-I" in text or "- I" in text or "+ I" in text)
    return _constants(text) if "*" in text or "/E" in text or listed or _WITH_I.fullmatch(text) else text


def _as_printed(text: str) -> str:
    r"""``\left[ \left\{ x : 0\right\}\right]``, SymPy's LaTeX of solutions, as it prints them."""
    for sign, said in ((r"\left", ""), (r"\right", ""), (r"\{", "{"), (r"\}", "}"), (r"\ ", " ")):
        text = text.replace(sign, said)
    return re.sub(r"\s{1,9}(?=[:,}\]])|(?<=[\[{])\s{1,9}", "", " ".join(text.split()))


def _solutions(text: str) -> str:
    """What ``solve`` gives: ``[{x: 1, y: 2}]`` as ``x = 1, y = 2``; of several the values alone."""
    found = [_ITEM.findall(each) for each in text.split("}")[:-1]]
    if len(found) == 1 or all(len(each) == 1 for each in found):
        return ", ".join(f"{letter} = {value}" for each in found for letter, value in each)
    if len({tuple(sorted(letter for letter, _ in each)) for each in found}) > 1:
        return text
    return ", ".join(f"({', '.join(value for _, value in sorted(each))})" for each in found)


def _constants(text: str) -> str:
    """SymPy's ``I`` and ``E`` in a product or power, where no other letter is a name."""
    text = _EULER.sub("e**", text)
    letters = set(_LETTER.findall(_ASSIGNED.sub("", text)))
    if letters and letters <= {"I", "E"}:
        return _LETTER.sub(lambda match: {"I": "i", "E": "e"}.get(match[0], match[0]), text)
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
    ("perm", 1): "(({})!)".format,
    ("mpq", 2): r"\frac{{{}}}{{{}}}".format,
    ("complex", 2): "({}+({})i)".format,
    ("factorial", 1): "(({})!)".format,
    ("floor", 1): r"\lfloor {} \rfloor".format,
    ("ceiling", 1): r"\lceil {} \rceil".format,
    ("ceil", 1): r"\lceil {} \rceil".format,
    ("cbrt", 1): r"\sqrt[3]{{{}}}".format,
    ("root", 2): r"\sqrt[{1}]{{{0}}}".format,
    ("real_root", 2): r"\sqrt[{1}]{{{0}}}".format,
    ("Pow", 2): "({})^{{{}}}".format,
    ("pow", 2): "({})^{{{}}}".format,
    ("atan2", 2): r"\arg(({1})+({0})i)".format,
    ("hypot", 2): r"\sqrt{{({})^2+({})^2}}".format,
    ("radians", 1): r"({})^\circ".format,
    ("Complement", 2): r"{} \setminus {}".format,
    ("Eq", 2): "{} = {}".format,
    ("Ne", 2): r"{} \ne {}".format,
    **{
        (name, 2): form.format
        for name, form in (
            ("Equality", "{} = {}"),
            ("Unequality", r"{} \ne {}"),
            ("StrictLessThan", "{} < {}"),
            ("LessThan", "{} <= {}"),
            ("StrictGreaterThan", "{} > {}"),
            ("GreaterThan", "{} >= {}"),
        )
    },
    ("Lt", 2): "{} < {}".format,
    ("Le", 2): "{} <= {}".format,
    ("Gt", 2): "{} > {}".format,
    ("Ge", 2): "{} >= {}".format,
}


_JOINED = {"Union": r" \cup ", "Intersection": r" \cap ", "And": ") & (", "Or": ") | (", "Add": ")+(", "Mul": ")*("}


def _turned(name: str, args: list[str]) -> str | None:
    if name.startswith("Interval"):
        return _interval(name, args)
    if (name, len(args)) in _FORMS:
        return _FORMS[name, len(args)](*args)
    if name in _SEQUENCES and args and args[0][:1] == "[":
        return _rows(args[0]) or args[0]
    plain = [each for each in args if "=" not in each or each[0] in "([{"]  # without precision=53
    if name in (*_NUMBERS.split("|"), "Fraction", "Rational", "S", "array") and len(plain) == 1:
        return plain[0].strip("'\"")
    if name in _SPECIAL:
        return _SPECIAL[name](args)
    if name in _JOINED:
        joined = _JOINED[name].join(rf"\{{{each[1:-1]}\}}" if each[:1] == "{" else each for each in args)
        return joined if name in ("Union", "Intersection") else f"({joined})"
    if name in _PLACES:
        return f"({', '.join(args)})" if len(args) > 1 else f"({args[0][1:-1]})" if args[0][:1] in ("[", "(") else None
    if name == "Piecewise":
        parts = [each.strip("()").partition(", ") for each in args]
        return as_set([(value, "" if condition == "True" else condition) for value, _, condition in parts])
    if name == "dict":
        return ", ".join(args) if args and all("=" in each for each in args) else None
    if name == "Matrix" and len(args) == 3 and args[0].isdigit() and (row := ROW.fullmatch(args[2])):
        cells, width = row[1].split(","), max(int(args[1]) if args[1].isdigit() else 0, 1)
        rows = ["[" + ",".join(cells[at : at + width]) + "]" for at in range(0, len(cells), width)]
        return _rows(f"[{','.join(rows)}]")
    if name == "FiniteSet":
        return rf"\{{{', '.join(args)}\}}"
    if name in ("set", "frozenset") and len(args) == 1:
        return r"\emptyset" if not args[0] else rf"\{{{args[0][1:-1]}\}}" if args[0][0] in "[{" else None
    if name.lower().endswith("matrix"):
        return _rows(args[0]) or _column(args[0])
    return None


def _first(args: list[str]) -> str | None:
    return args[0].strip("'\"") if args else None


def _complex(args: list[str]) -> str | None:
    """``mpc(real='1.5', imag='2.0')``."""
    plain = [each.rpartition("=")[2].strip("'\"") for each in args]
    return "({}+({})i)".format(*plain) if len(plain) == 2 else _first(args)


def _diagonal(args: list[str]) -> str | None:
    row = ROW.fullmatch(args[0]) if len(args) == 1 else None
    values = row[1].split(",") if row else args
    if not 1 < len(values) <= MAX_DIAGONAL:
        return None
    rows = ("&".join(value if at == place else "0" for at in range(len(values))) for place, value in enumerate(values))
    return r"\begin{pmatrix}" + r"\\".join(rows) + r"\end{pmatrix}"


def _rounded(args: list[str]) -> str | None:
    """``round(12.345, 1)`` of a number; of anything else only what rounds to itself is told."""
    if not args or len(args) > 2 or not _PLAIN.fullmatch(args[0]) or (len(args) == 2 and not args[1].isdigit()):
        return None
    return repr(round(float(args[0]), int(args[1])) if len(args) == 2 else round(float(args[0])))


def _identity(args: list[str]) -> str | None:
    size = int(args[0]) if len(args) == 1 and args[0] in "23456" and args[0] else 0
    return _diagonal(["1"] * size)


_SPECIAL: dict[str, Callable[[list[str]], str | None]] = {
    **{name: partial(turned, name) for name in ("sum", "prod", "Sum", "Product", "len")},
    "Poly": _first,
    "Circle": circle,
    "print": _first,
    "Symbol": _first,
    "Dummy": _first,
    "simplify": _first,
    "nsimplify": _first,
    "sympify": _first,
    "expand": _first,
    "factor": _first,
    "str": _first,
    "round": _rounded,
    "mpc": _complex,
    "poly1d": polynomial,
    "diag": _diagonal,
    "eye": _identity,
    "datetime.date": moment,
    "datetime.time": moment,
}


def _column(text: str) -> str | None:
    row = ROW.fullmatch(text.strip())
    return None if row is None else r"\begin{pmatrix}" + r"\\".join(row[1].split(",")) + r"\end{pmatrix}"


def _rows(text: str, *, least: int = 1) -> str | None:
    """``[[1, 2], [3, 4]]``, and without commas as NumPy prints it, as a matrix; else None."""
    if _ROWS.fullmatch(text) is None:
        return None
    rows = [(row.split(",") if "," in row else row.split()) for row in ROW.findall(text)]
    if len({len(row) for row in rows}) != 1 or len(rows[0]) < least:
        return None
    return r"\begin{pmatrix}" + r"\\".join("&".join(row) for row in rows) + r"\end{pmatrix}"


def _interval(name: str, args: list[str]) -> str | None:
    opened = {each.partition("=")[0].strip(): each.endswith("True") for each in args[2:] if "=" in each}
    if opened and set(opened) <= {"left_open", "right_open"}:
        args = [*args[:2], str(opened.get("left_open", False)), str(opened.get("right_open", False))]
    if len(args) == 4:
        left, right = (each.rpartition("=")[2].strip().lower() == "true" for each in args[2:])
        name += {(True, True): ".open", (True, False): ".Lopen", (False, True): ".Ropen"}.get((left, right), "")
        args = args[:2]
    if len(args) != 2:
        return None
    low = "(" if args[0] == "-oo" or name.endswith((".open", ".Lopen")) else "["
    high = ")" if args[1] == "oo" or name.endswith((".open", ".Ropen")) else "]"
    return f"{low}{args[0]}, {args[1]}{high}"
