r"""Parses an answer into a tree: splits it at the signs outside its brackets.

The tree has lists, relations, unions, tuples, intervals, sets and matrices. Any other text is one
value. This runs in a checker process.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from retool_mcore.reward.clean import split_unit
from retool_mcore.reward.expression import Unreadable

Kind = Literal["value", "list", "set", "tuple", "union", "difference", "matrix", "relation"]


@dataclass(frozen=True)
class AnswerForm:
    """A parsed answer.

    ``text`` is a value's text, the two brackets of a set or tuple, the signs of a relation, "or"
    for a list of alternatives, or the shape of a matrix ("2x3").
    """

    kind: Kind
    text: str = ""
    parts: tuple["AnswerForm", ...] = ()


_SEPARATORS = r",|;|\\text ?\{ ?(?:and|or|,) ?\}|\\(?:lor|vee) |(?<![A-Za-z])(?:and|or)(?![A-Za-z])"
_RELATIONS = (
    r"\\(?:approx|simeq|le|leq|leqslant|ge|geq|geqslant|ne|neq|lt|gt|in|equiv|to)(?![a-z])"
    r"|<=|>=|==|=|<|>|(?<=\d) ?: ?(?=\d)"
)
_SIGNS = {
    "==": "=", "<=": r"\le", ">=": r"\ge", r"\leq": r"\le", r"\geq": r"\ge", r"\lt": "<", r"\gt": ">", r"\neq": r"\ne",
    r"\simeq": r"\approx", r"\leqslant": r"\le", r"\geqslant": r"\ge",
}  # fmt: skip
_MATRIX = re.compile(r"\A(.*?)\\begin ?\{([bpB]?matrix|array)\}(?:\{[lcr|]*\})?(.*?)\\end ?\{\2\}", re.DOTALL)
_CONDITION = re.compile(rf"[A-Za-z](?: ?\\in ?(?:\\mathbb\{{)?R\}}?)? ?(?:\\mid|\||:) ?(.*(?:{_RELATIONS}).*)")
_BRACKET = re.compile(r"\\begin|\\end|\\[{}]|\\[lr]angle|\\.|[()\[\]{}]")
_OPENING, _CLOSING = {"(", "[", "{", r"\{", r"\langle"}, {")", "]", "}", r"\}", r"\rangle"}


_LOOSEST_FIRST: tuple[tuple[Kind, str], ...] = (
    ("list", _SEPARATORS),
    ("relation", _RELATIONS),
    ("union", r"\\cup(?![a-z])"),
    ("difference", r"\\setminus(?![a-z])"),
)


@lru_cache(maxsize=4096)
def parse(text: str) -> AnswerForm:
    """Parse a cleaned text. Raises Unreadable for an empty part, or rows of different lengths."""
    text = text.strip()
    for kind, pattern in _LOOSEST_FIRST:
        parts, signs = _split(text, pattern)
        if kind == "list":
            parts = [part for at, part in enumerate(parts) if part or at == 0 or at == len(parts) - 1]
        if len(parts) > 1:
            if kind == "list":
                return AnswerForm("list", "or" if any("or" in sign for sign in signs) else "", _parse_all(parts))
            normal_signs = " ".join(_SIGNS.get(sign.strip(), sign.strip()) for sign in signs)
            return AnswerForm(kind, normal_signs, _parse_all(parts))
    return _parse_brackets(text)


def _parse_all(parts: Sequence[str]) -> tuple[AnswerForm, ...]:
    if not all(part.strip() for part in parts):
        raise Unreadable("one of its parts is empty")
    return tuple(parse(part.strip()) for part in parts)


def _split(text: str, pattern: str) -> tuple[list[str], list[str]]:
    """Split at the separators outside brackets. Returns the parts and the separators."""
    parts, signs = list[str](), list[str]()
    depth = start = 0
    for match in re.finditer(rf"({pattern})|{_BRACKET.pattern}", text):
        token = match[0]
        if match[1] and not depth:
            parts.append(text[start : match.start()].strip())
            signs.append(token)
            start = match.end()
        elif token in _OPENING or token == r"\begin":
            depth += 1
        elif token in _CLOSING or token == r"\end":
            depth -= 1
    return [*parts, text[start:].strip()], signs


def _parse_brackets(text: str) -> AnswerForm:
    """Parse a tuple, interval, set or matrix. Parentheses around one value are dropped."""
    if match := _MATRIX.fullmatch(text):
        return _matrix(match)
    opening = next((sign for sign in (r"\{", r"\langle", "(", "[", "{") if text.startswith(sign)), "")
    closing = next((sign for sign in (r"\}", r"\rangle", ")", "]", "}") if text.endswith(sign)), "")
    if opening and closing and _closes_at_end(text):
        inside = text[len(opening) : -len(closing)].strip()
        kind = "set" if opening in (r"\{", "{") else "tuple"
        if kind == "set" and (condition := _CONDITION.fullmatch(inside)):
            return parse(condition[1])
        parts, _ = _split(inside, ",|;")
        if kind == "set" or len(parts) > 1 or opening == "[":
            brackets = "()" if opening == r"\langle" else opening[-1] + closing[-1]
            return AnswerForm(kind, brackets, _parse_all([part for part in parts if part]))
        if opening == "(" and closing == ")" and inside:
            return parse(inside) if not split_unit(text)[1] else AnswerForm("value", text)
    return AnswerForm("set") if text in (r"\emptyset", r"\varnothing") else AnswerForm("value", text)


def _closes_at_end(text: str) -> bool:
    depth = 0
    for match in _BRACKET.finditer(text):
        depth += (match[0] in _OPENING) - (match[0] in _CLOSING)
        if depth <= 0:
            return match.end() == len(text)
    return False


def _matrix(match: re.Match[str]) -> AnswerForm:
    """Parse a matrix row by row. A factor before it multiplies every entry."""
    factor = match[1].strip().removesuffix(r"\cdot").strip()
    rows = [
        _split(row, "&")[0]
        for row in re.split(r"\\\\(?:\[\w+\])?|\\cr|\\ ?(?= |$)|\\(?=-?\d)", match[3])
        if row.strip()
    ]
    if len({len(row) for row in rows}) != 1:
        raise Unreadable("the rows of a matrix differ in length")
    entries = [entry if not factor else f"({factor})({entry})" for row in rows for entry in row]
    return AnswerForm("matrix", f"{len(rows)}x{len(rows[0])}", _parse_all(entries))
