r"""Functions by cases as the set of their values with conditions.

``\{(x+1, x \ge 0), (-x, x < 0)\}`` stands for one of two cases.

So they are read by the reader and compared without order, their conditions as sets of numbers.
"otherwise" is read behind one simple condition, whose opposite it is.
"""

import re

MAX_CASES = 8
_CASES = re.compile(r"\\begin\{cases\}(.{1,600}?)\\end\{cases\}", re.DOTALL)
_ROW = re.compile(r"\\\\(?:\s*\[[^][]{1,8}\])?")
_GAP = r"(?:&|,|;|\\quad|\\[ ,;]|\s){0,6}"
_TEXT = r"\\(?:text|mathrm|textrm|mbox)\s?\{\s*,?\s*"
_SIGN = r"<=|>=|!=|[<>=≤≥≠]|\\(?:leqslant|geqslant|leq|geq|neq|le|ge|ne|lt|gt)(?![a-z])"
_ANY_SIGN = re.compile(_SIGN)
_IF = re.compile(
    rf"{_GAP}(?:{_TEXT}(?:if|for|when|where|as)\s*\}}|(?<![A-Za-z\\])(?:if|for|when)\s"
    rf"|&){_GAP}|,\s{{0,3}}(?=[^,&]{{1,20}}?(?:{_SIGN}))"
)
_OTHERWISE = re.compile(rf"{_GAP}(?:{_TEXT}(?:otherwise|else)\.?\s*\}}|otherwise)\.?\s*")
_MAX_CONDITIONAL = 300
_BETWEEN = re.compile(r"[;,]\s{1,3}(?:and )?|\n")
_CONDITIONAL = re.compile(rf"\A\s{{0,3}}([^,;]{{1,80}}?),? (?:if|for|when) ([^,;]{{0,60}}(?:{_SIGN})[^,;]{{1,40}})")
_SIMPLE = re.compile(rf"([^<>=≤≥≠\\\s]{{1,6}})\s?({_SIGN})\s?([^<>=≤≥≠]{{1,40}})")
_OPPOSITE = {"<": r"\ge", ">": r"\le", "<=": ">", ">=": "<", "≤": ">", "≥": "<", "=": r"\ne", "≠": "=", "!=": "=",
             r"\leq": ">", r"\geq": "<", r"\le": ">", r"\ge": "<", r"\leqslant": ">", r"\geqslant": "<",
             r"\neq": "=", r"\ne": "=", r"\lt": r"\ge", r"\gt": r"\le"}  # fmt: skip


def conditional(text: str) -> str:
    """``a if c else b`` of Python, and ``a if c, b if d``, as a set; any other text as it is."""
    if len(text) > _MAX_CONDITIONAL:
        return text
    parts = text.split(" else ") if " else " in text else _BETWEEN.split(text.strip("{}"))
    if not 1 < len(parts) <= MAX_CASES:
        return text
    said = [_CONDITIONAL.fullmatch(part) for part in parts]
    pairs = [(match[1], match[2]) for match in said if match]
    if " else " in text and said[-1] is None and len(pairs) == len(parts) - 1:
        pairs.append((parts[-1].strip(), ""))
    if len(pairs) < len(parts) or any(_ANY_SIGN.search(value) for value, _ in pairs):
        return text
    return as_set(pairs) or text


def by_cases(text: str) -> str:
    """The text with each function by cases as a set; what is no such function as it is."""
    return _CASES.sub(lambda match: _rows(match[1]) or match[0], text)


def _rows(inner: str) -> str | None:
    rows = [row.strip().rstrip(",;.").strip() for row in _ROW.split(inner) if row.strip()]
    pairs: list[tuple[str, str]] = []
    for row in rows:
        if match := _OTHERWISE.search(row):
            pairs.append((row[: match.start()], ""))
            continue
        match = _IF.search(row)
        if match is None or not match.start() or match.end() == len(row) or _ANY_SIGN.search(row, 0, match.start()):
            return None
        pairs.append((row[: match.start()], row[match.end() :].strip("& ")))
    return as_set(pairs)


def as_set(pairs: list[tuple[str, str]]) -> str | None:
    """Values and their conditions, "" for otherwise, as a set; None where it cannot be told."""
    if not 1 < len(pairs) <= MAX_CASES or any(not condition for _, condition in pairs[:-1]):
        return None
    if not pairs[-1][1]:
        simple = _SIMPLE.fullmatch(pairs[0][1]) if len(pairs) == 2 else None
        if simple is None:
            return None
        pairs = [pairs[0], (pairs[1][0], f"{simple[1]} {_OPPOSITE[simple[2]]} {simple[3]}")]
    said = [f"({value.strip().rstrip(',; ')}, {condition})" for value, condition in pairs]
    return rf"\{{{', '.join(said)}\}}" if all("," not in each for pair in pairs for each in pair) else None
