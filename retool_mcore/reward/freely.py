r"""Equal under another name or in several cases: free constants, segments, functions by cases.

``y = Ae^x + Be^{-x}`` is ``y = C_1e^x + C_2e^{-x}``; ``\overline{AB}`` and ``|AB|`` are the segment
``AB``; a function by cases is an expression that has its value in each case.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from fractions import Fraction
from itertools import permutations

from retool_mcore.reward.node import Term, name, number, put
from retool_mcore.reward.points import names
from retool_mcore.reward.regions import Region, merged, region

Same = Callable[[Term, Term], bool]
_CONSTANT = re.compile(r"[Cc]_\d|C")
_FREE = re.compile(r"[CcABDKkabm]|[Cc]_\d")
_MAX_CONSTANTS = 3
_SEGMENT = re.compile(r"(\\overline|\\vec|)([A-Z]{2,3})")
_STEPS = (Fraction(1, 7), Fraction(9, 17), Fraction(14, 15))  # between the ends of a case
_FAR = (Fraction(1, 3), Fraction(29, 7), Fraction(211, 3))  # beyond its one end


def renamed(a: Term, b: Term) -> Iterator[Term]:
    """``b`` with its free constants under the names of those of ``a``, in every order."""
    if not (a.op == b.op == "relation" and a.text == b.text == "=" and len(a.args) == len(b.args) == 2):
        return
    mine, theirs = names(a.args[1]), names(b.args[1])
    known = {each for side in (mine, theirs) for each in side if _CONSTANT.fullmatch(each)}
    free = [sorted(each for each in side if each in known or each not in other)
            for side, other in ((mine, theirs), (theirs, mine))]  # fmt: skip
    if _counts(a, free[0]) and _counts(b, free[1]):
        yield put(b, name(free[1][0]), name(free[0][0]))  # n = 2^k
        return
    applied = a.args[0] == b.args[0] and a.args[0].op in ("call", "mul")
    told = 0 < len(free[0]) == len(free[1]) <= _MAX_CONSTANTS and all(map(_FREE.fullmatch, free[0] + free[1]))
    told = told and all(len({each.casefold() for each in side}) == len(side) for side in free)  # no C_1 and c_1
    if not told or not any(all(map(_CONSTANT.fullmatch, each)) or (applied and each == ["c"]) for each in free):
        return  # f(x) = cx
    for order in permutations(free[0]):
        turned = b
        for at, each in enumerate(free[1]):
            turned = put(turned, name(each), name(f"?{at}"))
        for at, each in enumerate(order):
            turned = put(turned, name(f"?{at}"), name(each))
        yield turned


def _counts(relation: Term, free: list[str]) -> bool:
    """``n = 2^k``: whether one letter of a whole number stands in exponents of numbers alone."""
    letter = free[0] if len(free) == 1 == len(names(relation.args[1])) else ""
    return relation.args[0] == name("n") and letter in tuple("kmtrs") and _raises(relation.args[1], letter)


def _raises(node: Term, letter: str) -> bool:
    if node.op == "pow" and not names(node.args[0]):
        return True
    return node.op != "name" and all(_raises(each, letter) for each in node.args if names(each))


def same_segment(a: Term, b: Term) -> bool:
    r"""``\overline{AB}``, ``|AB|``, ``BA``: names of one segment."""
    mine, theirs = _segment(a), _segment(b)
    if mine is None or theirs is None:
        return False
    if r"\vec" in (mine[0], theirs[0]):  # a vector has a direction
        return mine[1] == theirs[1]
    return sorted(mine[1]) == sorted(theirs[1])


def _segment(node: Term) -> tuple[str, str] | None:
    """Its accent and its letters."""
    while node.op in ("abs", "group"):
        node = node.args[0]
    said = "".join(each.text for each in node.args) if node.op == "mul" else node.text if node.op == "name" else ""
    return (match[1], match[2]) if (match := _SEGMENT.fullmatch(said)) else None


def same_by_cases(a: Term, b: Term, same: Same) -> bool | None:
    """Whether a function by cases is an expression; None where neither is one by cases.

    The cases must leave no number out. In each the two are compared at several points.
    """
    cases, other = (a, b) if _by_cases(a) else (b, a)
    if not _by_cases(cases) or other.op in ("set", "list", "tuple", "relation", "matrix"):
        return None
    letters = names(cases)
    if len(letters) != 1 or names(other) != letters:
        return None
    letter, whole = name(*letters), list[tuple[float, bool, float, bool]]()
    for value, condition in (each.args for each in cases.args):
        where = region(condition)
        if where is None:
            return None
        whole += where
        for point in _points(where):
            if not same(put(value, letter, point), put(other, letter, point)):
                return False
    infinite = float("inf")
    return [(each[0], each[2]) for each in merged(whole)] == [(-infinite, infinite)]


def _by_cases(node: Term) -> bool:
    pairs = node.op == "set" and len(node.args) > 1 and all(each.op == "tuple" for each in node.args)
    return pairs and all(len(each.args) == 2 and each.args[1].op == "relation" for each in node.args)


def _points(where: Region) -> Iterator[Term]:
    for low, low_in, high, high_in in where:
        ends = [None if abs(each) == float("inf") else Fraction(str(each)) for each in (low, high)]
        if ends[0] is None and ends[1] is None:
            found = [Fraction(0), *_FAR, *(-each for each in _FAR)]
        elif ends[0] is None:
            found = [(ends[1] or Fraction(0)) - each for each in _FAR]
        elif ends[1] is None:
            found = [ends[0] + each for each in _FAR]
        else:
            found = [ends[0] + (ends[1] - ends[0]) * each for each in _STEPS]
        found += [end for end, inside in zip(ends, (low_in, high_in), strict=True) if inside and end is not None]
        yield from (Term("div", (_whole(each.numerator), number(each.denominator))) for each in found)


def _whole(value: int) -> Term:
    return Term("neg", (number(-value),)) if value < 0 else number(value)
