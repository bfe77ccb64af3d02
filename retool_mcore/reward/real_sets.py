r"""Sets of real numbers: ``(1,2] \cup [3,\infty)``, ``1 < x \le 2``, ``x < 1 or x > 3``."""

# SymPy has no type hints, so its results are annotated here.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false, reportUnknownParameterType=false
from typing import Any

import sympy

from retool_mcore.reward.expression import Unreadable, value
from retool_mcore.reward.parse import AnswerForm

_ORDER = {"<": sympy.Lt, ">": sympy.Gt, r"\le": sympy.Le, r"\ge": sympy.Ge, r"\ne": sympy.Ne}


def same_sets(answer: AnswerForm, truth: AnswerForm) -> bool | None:
    """Whether two sets of real numbers are equal; None if this cannot be decided."""
    if not (_is_real_set(answer) or _is_real_set(truth)):
        return None
    try:
        letters = {_letter(each) for each in (answer, truth)} - {""}
        mine, theirs = _real_set(answer), _real_set(truth)
    except Unreadable:
        return None
    if mine is None or theirs is None or len(letters) > 1:
        return None
    return mine == theirs or sympy.SymmetricDifference(mine, theirs).simplify() == sympy.S.EmptySet


def _is_real_set(form: AnswerForm) -> bool:
    if form.kind == "list":
        return all(map(_is_real_set, form.parts))
    if form.kind == "relation":
        return set(form.text.split()) <= set(_ORDER)
    return form.kind in ("union", "difference") or form.text == r"\mathbb{R}"


def _letter(form: AnswerForm) -> str:
    """The variable of an inequality; "" for other forms."""
    if form.kind == "list":
        return _letter(form.parts[0])
    if form.kind != "relation" or not _is_real_set(form):
        return ""
    return min((str(letter) for part in form.parts for letter in value(part.text).free_symbols), default="")


def _real_set(form: AnswerForm) -> Any:
    """The form as a SymPy set; None if it is not a set of real numbers."""
    if form.text == r"\mathbb{R}":
        return sympy.S.Reals
    if form.kind == "tuple" and len(form.parts) == 2:
        low, high = (value(part.text) for part in form.parts)
        return sympy.Interval(low, high, form.text[0] == "(", form.text[1] == ")")
    if form.kind == "set":
        return sympy.FiniteSet(*(value(part.text) for part in form.parts))
    if form.kind == "relation":
        return _real_set(form.parts[1]) if form.text == r"\in" else _chain(form)
    if form.kind not in ("list", "union", "difference"):
        return None
    parts = [_real_set(part) for part in form.parts]
    if None in parts or (form.kind == "list" and len({_letter(part) for part in form.parts}) > 1):
        return None
    if form.kind == "difference":
        return sympy.Complement(*parts) if len(parts) == 2 else None
    return sympy.Intersection(*parts) if form.kind == "list" and form.text != "or" else sympy.Union(*parts)


def _chain(form: AnswerForm) -> Any:
    """The solutions of a chain of inequalities such as ``1 < x \\le 2``; None if unsolvable."""
    region: Any = sympy.S.Reals
    for left, sign, right in zip(form.parts, form.text.split(), form.parts[1:], strict=False):
        sides: tuple[Any, Any] = value(left.text), value(right.text)
        letters = sides[0].free_symbols | sides[1].free_symbols
        if sign not in _ORDER or len(letters) != 1:
            return None
        real = {letters.pop(): sympy.Symbol("x", real=True)}
        try:
            relation: Any = _ORDER[sign](*(side.subs(real) for side in sides))
            region = region.intersect(relation.as_set())
        except NotImplementedError:
            return None
    return region
