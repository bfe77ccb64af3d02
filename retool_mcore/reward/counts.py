r"""Numbers of choices and arrangements: ``C(10,3)``, ``P(10,3)``, ``A_5^2``, ``{}_{10}P_3``.

``C(10,3)`` may also be a point or a function's value, and ``A_5^2`` a square. They are read as
counts only beside a value that has no such letter: C(10,3) is 120, and no ``(10,3)``.
"""

import re

from retool_mcore.reward.node import Term, name, number
from retool_mcore.reward.tokens import Unreadable

COUNT_LETTERS = ("C", "P", "A")
_NUMBER = r"(?:\{(\d{1,4}|[a-z])\}|([\da-z]))"
_LETTER = r"(?:\\(?:mathrm|text|operatorname)\{([CPA])\}|([CPA]))"
_BEFORE = re.compile(rf"(?:\{{\}}|(?<![\w)}}\]]))[_^]{_NUMBER}\s{{0,2}}{_LETTER}_{_NUMBER}")  # {}_{10}P_3
_RAISED = re.compile(rf"(?<![A-Za-z]){_LETTER}\^{_NUMBER}_{_NUMBER}")  # A^2_5
_INSIDE = re.compile(r"(?<![\w.\\{}])(\d{1,4})([CP])(\d{1,4})(?![\w.])")  # 8C3 = 56
_BESIDE = re.compile(r"(\d{1,4})\s?(?:\\(?:text|mathrm)\{)?([CP])\}?\s?_?(\d{1,4})")  # 10C3
_ROMAN = re.compile(r"(?<![\d\s~}A-Za-z\\])\\(?:mathrm|text|operatorname)\{([CPA])\}\s{0,2}(?=[(_^])")
_INDEX = re.compile(r"[CPA]_(?:(\d{1,4})|([a-z]))")


def chosen(text: str) -> str:
    """The text with counts in the spellings of schools as LaTeX: ``{}_{10}C_3``, ``A^2_5``."""
    if match := _BESIDE.fullmatch(text):
        return _latex(match[2], match[1], match[3])
    text = _INSIDE.sub(lambda each: _latex(each[2], each[1], each[3]), text)
    if "_" in text:
        text = _BEFORE.sub(lambda each: _latex(each[3] or each[4], each[1] or each[2], each[5] or each[6]), text)
        text = _RAISED.sub(lambda each: _swapped(each[1] or each[2], each[3] or each[4], each[5] or each[6]), text)
    return _ROMAN.sub(r"\1", text)


def _swapped(letter: str, under: str, over: str) -> str:
    return _latex(letter, over, under) if letter == "C" else f"{letter}_{{{over}}}^{{{under}}}"


def _latex(letter: str, over: str, under: str) -> str:
    if letter == "C":
        return rf"\binom{{{over}}}{{{under}}}"
    return rf"P({over},{under})"


def counted(node: Term, taken: frozenset[str]) -> Term:
    """A tree with its counts as values, but for letters that the other answer has as names."""
    if node.op == "pow" and (told := _indexed(node)) is not None and node.args[0].text not in taken:
        return told
    args = tuple(counted(each, taken) for each in node.args)
    if node.op == "relation" and _called(node.args[0], taken) is not None and len(node.args[0].args) == 2:
        args = (node.args[0], *args[1:])  # C(10,3) = 5 may be a function's value
    if node.op != "mul":
        return node if args == node.args else Term(node.op, args, node.text, node.value)
    parts: list[Term] = []
    for each in args:
        pair = Term("mul", (parts[-1], each)) if parts else each
        told = _called(pair, taken)
        if told is not None:
            parts[-1] = told
        else:
            parts.append(each)
    if len(parts) == len(node.args):
        return node if args == node.args else Term("mul", args)
    return parts[0] if len(parts) == 1 else Term("mul", tuple(parts))


def _called(node: Term, taken: frozenset[str]) -> Term | None:
    """``C(n, k)`` as its value; None for anything else."""
    if node.op != "mul" or len(node.args) != 2:
        return None
    letter, inner = node.args
    pair = inner.op == "tuple" and inner.text == "()" and len(inner.args) == 2
    if not pair or letter.op != "name" or letter.text not in COUNT_LETTERS or letter.text in taken:
        return None
    return _count(letter.text, *inner.args)


def _indexed(node: Term) -> Term | None:
    """``A_5^2``: the letter's index is what is chosen from, the power how many are."""
    base, under = node.args
    if base.op != "name" or under.op not in ("number", "name") or (match := _INDEX.fullmatch(base.text)) is None:
        return None
    try:
        return _count(base.text[0], number(match[1]) if match[1] else name(match[2]), under)
    except Unreadable:  # pragma: no cover  an index has four digits at most
        return None


def _count(letter: str, over: Term, under: Term) -> Term | None:
    if over.op == under.op == "number":
        whole = over.value.denominator == under.value.denominator == 1
        if not whole or not 0 <= under.value <= over.value:
            return None
    chosen = Term("binomial", (over, under))
    return chosen if letter == "C" else Term("mul", (chosen, Term("factorial", (under,))))
