r"""Compares two expressions: equal, or equal up to a constant factor.

Rational expressions, also with letters, are compared exactly, by their remainders modulo three
primes. Other expressions are compared at several points with at least 120 digits. The precision
grows with the numbers in an expression, so a large term cannot hide a small one. This runs in a
checker process.
"""

# SymPy has no type hints, so its results are annotated here.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false, reportUnknownParameterType=false
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import sympy
from sympy import Float, Rational, pi
from sympy.core.function import AppliedUndef

from retool_mcore.reward.numbers import ROUNDED_DIGITS, is_near, significant_digits

DIGITS = 120  # precision for values without an exact comparison
GUARD_DIGITS = 20  # of these, allowed to differ by rounding
MAX_DIGITS = 12000  # for sums of huge and small terms; values that need more are unequal
PRIMES = (2**61 - 1, 2**89 - 1, 2**107 - 1)
POINTS = tuple(map(Rational, ("7/5", "13/11", "29/8", "157/9")))  # values of the letters
# One point lies above all numbers of both sides: |x - 5| and 5 - x differ only above 5.
MAX_POINT = 10**9  # upper limit of that point


def same(a: Any, b: Any, text: str = "", other: str = "") -> bool:
    """Whether two values are equal.

    ``text`` and ``other`` are their texts: a decimal of six digits or more equals an irrational
    value that rounds to it.
    """
    if a == b:
        return True
    exactly = _same_remainders(a, b)
    if exactly or (exactly is False and a.free_symbols | b.free_symbols):
        return bool(exactly)
    if a.free_symbols | b.free_symbols:
        return all(_same_constants(*pair) for pair in _at_points(a, b))
    return (exactly is None and _same_constants(a, b)) or _rounds_to(text, b) or _rounds_to(other, a)


def proportional(a: Any, b: Any) -> bool:
    """Whether one expression is the other times a number: ``2x-4`` and ``x-2``."""
    if not a.free_symbols or a.free_symbols != b.free_symbols:
        return False
    at = dict.fromkeys(a.free_symbols, Rational(1)) | _point(a.free_symbols, POINTS[0])
    ratio = sympy.nsimplify(a.subs(at) / b.subs(at)) if b.subs(at) != 0 else sympy.S.Zero
    return ratio.is_Rational and ratio != 0 and same(sympy.expand(a), sympy.expand(ratio * b))


def is_constant(tree: Any) -> bool:
    """Whether a value has no letters and no unknown functions."""
    return not tree.free_symbols and not tree.atoms(AppliedUndef)


def _same_constants(a: Any, b: Any) -> bool:
    """Compare two constants, with ``DIGITS`` digits plus two per digit of the largest number."""
    if not all(each.is_finite for each in (a, b)):
        return a == b
    first, second = sympy.N(a, 30), sympy.N(b, 30)
    size = max(abs(first), abs(second))
    if not size.is_number or abs(first - second) > size * Float("1e-15"):
        return False
    largest = max(
        (each.p.bit_length() + each.q.bit_length() for tree in (a, b) for each in tree.atoms(Rational)), default=0
    )
    digits = DIGITS + 2 * (largest * 3 // 10 + int(sympy.log(size + 1, 10)))
    if digits > MAX_DIGITS:
        return False
    first, second = (each.evalf(digits, maxn=2 * digits) for each in (a, b))
    return bool(abs(first - second) <= size * Float(10, digits) ** (GUARD_DIGITS - digits))


def _at_points(a: Any, b: Any) -> Iterator[tuple[Any, Any]]:
    """Both values at positive points, and at those negative points where both are real."""
    letters = a.free_symbols | b.free_symbols
    numbers = [int(abs(each)) for tree in (a, b) for each in tree.atoms(Rational)]
    beyond = POINTS[0] * min(max(numbers, default=0) + 2, MAX_POINT)
    for sign in (1, -1):
        for point in (*POINTS, beyond):
            at = _point(letters, sign * point)
            pair = a.subs(at), b.subs(at)
            if sign > 0 or all(each.is_real for each in pair):
                yield pair


def _point(letters: Any, first: Any) -> dict[Any, Any]:
    return {letter: first * Rational(7 + 3 * place, 7) for place, letter in enumerate(sorted(letters, key=str))}


def _same_remainders(a: Any, b: Any) -> bool | None:
    """Whether two rational expressions agree at a point modulo three primes; None for others."""
    for prime in PRIMES:
        mine, theirs = _remainder(a, prime), _remainder(b, prime)
        if mine is None or theirs is None:
            return None
        if mine != theirs:
            return False
    return True


def _remainder(tree: Any, prime: int) -> int | None:
    if tree.is_Rational:
        return tree.p * pow(tree.q, -1, prime) % prime if tree.q % prime else None
    if tree.is_Symbol or tree is pi:
        return pow(int.from_bytes(str(tree).encode(), "big") + 7, 5, prime)  # any large number, the same everywhere
    if tree.is_Pow and tree.exp.is_Integer:
        base = _remainder(tree.base, prime)
        return pow(base, int(tree.exp), prime) if base else base
    if not (tree.is_Add or tree.is_Mul):
        return None
    total = int(tree.is_Mul)
    for each in tree.args:
        part = _remainder(each, prime)
        if part is None:
            return None
        total = (total * part if tree.is_Mul else total + part) % prime
    return total


def _rounds_to(decimal: str, exact: Any) -> bool:
    """Whether an irrational value rounds to a decimal of six digits or more."""
    if significant_digits(decimal) < ROUNDED_DIGITS or exact.is_Rational or not exact.is_real:
        return False
    return is_near(decimal, Fraction(str(sympy.N(exact, DIGITS))))
