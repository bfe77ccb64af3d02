"""Inequalities of the first and second degree, with the numbers where their sides are equal."""

from __future__ import annotations

from fractions import Fraction

from retool_mcore.reward.node import Term, number
from retool_mcore.reward.points import names

_MAX_BITS = 60
Coefficients = tuple[Fraction, Fraction, Fraction]  # of 1, x and x^2


def turning_points(left: Term, right: Term) -> tuple[list[Term], int] | None:
    """Where ``left - right`` is zero, in order, and its sign beyond the last; None for others."""
    mine, theirs = _coefficients(left), _coefficients(right)
    if mine is None or theirs is None or not names(left) | names(right):
        return None
    free, once, twice = (x - y for x, y in zip(mine, theirs, strict=True))
    if any(max(abs(each.numerator), each.denominator).bit_length() > _MAX_BITS for each in (free, once, twice)):
        return None
    if not twice:
        return ([_fraction(-free / once)], 1 if once > 0 else -1) if once else None
    sign = 1 if twice > 0 else -1
    inside = once * once - 4 * twice * free
    middle = _fraction(-once / (2 * twice))
    if inside < 0:
        return [], sign
    if not inside:
        return [middle, middle], sign
    way = Term("root", (_fraction(inside / (4 * twice * twice)), number(2)))
    return [Term("add", (middle, Term("neg", (way,)))), Term("add", (middle, way))], sign


def _fraction(value: Fraction) -> Term:
    found = Term("div", (number(abs(value.numerator)), number(value.denominator)))
    return Term("neg", (found,)) if value < 0 else found


def _coefficients(node: Term) -> Coefficients | None:
    zero = Fraction(0)
    if node.op == "number":
        return node.value, zero, zero
    if node.op == "name":
        return zero, Fraction(1), zero
    if node.op == "pow" and node.args[1] == number(2):
        inner = _coefficients(node.args[0])
        return None if inner is None else _times(inner, inner)
    if node.op not in ("neg", "add", "mul", "div", "group"):
        return None
    parts = [_coefficients(each) for each in node.args]
    known = [part for part in parts if part is not None]
    if len(known) < len(parts):
        return None
    found: Coefficients | None = known[0]
    if node.op == "neg":
        return -known[0][0], -known[0][1], -known[0][2]
    for each in known[1:]:
        if found is None:
            return None
        if node.op == "add":
            found = found[0] + each[0], found[1] + each[1], found[2] + each[2]
        elif node.op == "mul":
            found = _times(found, each)
        elif each[0] and not each[1] and not each[2]:
            found = found[0] / each[0], found[1] / each[0], found[2] / each[0]
        else:
            return None
    return found


def _times(a: Coefficients, b: Coefficients) -> Coefficients | None:
    if a[1] * b[2] or a[2] * b[1] or a[2] * b[2]:
        return None
    return a[0] * b[0], a[0] * b[1] + a[1] * b[0], a[0] * b[2] + a[1] * b[1] + a[2] * b[0]
