"""Values of expressions: exact where they are rational, else at 50 and at 120 digits.

Two expressions with symbols are the same when they have the same value at all of a few points. A
difference is zero when it is small beside its sides, or shrinks with the rounding errors as the
digits grow; there is no absolute tolerance, so 1/20! and 1/21! differ.
"""

# mpmath has no stubs.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
import math
import re
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import mpmath

from retool_mcore.reward.decimals import DECIMAL, PRINTED_DIGITS, is_float, written
from retool_mcore.reward.evaluate import MAX_EXPONENT, Evaluator, NoValue
from retool_mcore.reward.node import Term, number
from retool_mcore.reward.points import folds, largest, names, points, steps

MAX_BITS = 4000  # of an exact number
SAME = mpmath.mpf("1e-60")  # relative
ROUNDED_DIGITS = 6  # a decimal with so many digits equals an irrational value that rounds to it
Pair = tuple[Any, Any]
_NOTHING = Fraction(1, 10**40)  # between a part as written and as computed
_DIGITS = (50, 120)
_APART = 20  # values at few digits that differ before this one do differ
_HIDDEN_BITS = 80  # of which these digits have enough
_MORE_DIGITS = (12_000, 2500)  # the most that huge parts add to them, without and with symbols


def exact(node: Term) -> Fraction | None:
    """The value of a rational expression; None for others, and for absurdly long numbers."""
    if node.op == "number":
        return node.value
    if node.op in ("unit", "group", "degree"):
        return exact(node.args[0])
    if node.op == "root":
        return _exact_root(node)
    if node.op not in ("neg", "add", "mul", "div", "pow", "factorial", "binomial", "abs"):
        return None
    values = [exact(each) for each in node.args]
    known = [value for value in values if value is not None]
    if len(known) < len(values) or any(_bits(value) > MAX_BITS for value in known):
        return None
    return _exact_of(node.op, known)


def _exact_of(op: str, known: list[Fraction]) -> Fraction | None:
    a, b = known[0], known[-1]
    if op == "neg":
        return -a
    if op == "abs":
        return abs(a)
    if op == "add":
        return sum(known, Fraction(0)) if sum(map(_bits, known)) <= 2 * MAX_BITS else None
    if op == "mul":
        return math.prod(known, start=Fraction(1)) if sum(map(_bits, known)) <= 2 * MAX_BITS else None
    if op == "div":
        return a / b if b else None
    if op == "pow":
        if b.denominator != 1 or (a == 0 and b <= 0) or _bits(a) * abs(b) > MAX_BITS:
            return None
        return Fraction(a ** int(b))
    if op == "factorial":
        return Fraction(math.factorial(int(a))) if a.denominator == 1 and 0 <= a <= 300 else None
    if b.denominator != 1 or a.denominator != 1 or not 0 <= b <= 60 or not 0 <= a <= 10**6:
        return None
    product = Fraction(1)
    for index in range(int(b)):
        product = product * (a - index) / (index + 1)
    return product


def _exact_root(node: Term) -> Fraction | None:
    inner = exact(node.args[0])
    if inner is None or inner < 0 or _bits(inner) > MAX_BITS or exact(node.args[1]) != 2:
        return None
    over, under = math.isqrt(inner.numerator), math.isqrt(inner.denominator)
    return Fraction(over, under) if over**2 == inner.numerator and under**2 == inner.denominator else None


def _bits(value: Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())


def same_value(a: Term, b: Term) -> bool:
    """Whether two expressions have the same value wherever they have one.

    Raises NoValue where that cannot be told.
    """
    return any(_all_same(a, b, ten) for ten in _logs(a, b))


def _all_same(a: Term, b: Term, ten: bool) -> bool:
    agreed = 0
    for coarse, fine, more in _values(a, b, ten):
        if fine is None or not _close(coarse, fine, mpmath.mpf(10) ** -more):
            return False
        agreed += 1
    if agreed < (2 if names(a) | names(b) else 1):
        raise NoValue
    return True


def proportional(a: Term, b: Term, *, positive: bool) -> bool:
    """Whether ``a`` is a constant multiple of ``b``, not 0 (if ``positive``, more than 0).

    Raises NoValue where that cannot be told.
    """
    for ten in _logs(a, b):
        ratios = [x / y for _, (x, y), _ in _values(a, b, ten, apart=False) if x and y]
        if len(ratios) < 3:
            raise NoValue
        first = ratios[0]
        if all(abs(ratio - first) <= SAME * abs(first) for ratio in ratios):
            return not positive or (abs(first.imag) <= SAME * abs(first) and first.real > 0)
    return False


def constant(node: Term) -> Any:
    """The value of an expression without symbols, at 50 digits. Raises NoValue."""
    try:
        return Evaluator(_DIGITS[0], {}, False).value(node)
    except (ArithmeticError, ValueError, TypeError) as error:
        raise NoValue from error


def rounds_to(decimal: Term, node: Term) -> bool:
    """Whether a decimal as written is the value of ``node``, rounded to the decimal's digits.

    Of ``1+1.732051i`` both parts are.
    """
    if names(node):
        return False
    if (parts := _parts(decimal)) is not None:
        value = constant(node)
        pairs = tuple(zip(parts, (value.real, value.imag), strict=True))
        rounded = [_rounds(part, of, node) for part, of in pairs]
        return any(rounded) and all(
            told or abs((exact(part) or 0) - _fraction(of)) < _NOTHING
            for told, (part, of) in zip(rounded, pairs, strict=True)
        )
    if (_significant(decimal) or 0) < ROUNDED_DIGITS:
        return False
    value = constant(node)
    return not value.imag and _rounds(decimal, value.real, node)


def _parts(node: Term) -> tuple[Term, Term] | None:
    """The real and the imaginary part of a complex number as written; None for anything else."""
    while node.op == "group":
        node = node.args[0]
    if node.op in ("mul", "neg"):
        node = Term("add", (number(0), node))  # 1.732j
    if node.op != "add" or len(node.args) != 2:
        return None
    real, other = node.args
    negative = other.op == "neg"
    other = other.args[0] if negative else other
    if other.op != "mul" or len(other.args) != 2 or other.args[1] != Term("constant", text="i"):
        return None
    imaginary = other.args[0]
    if not written(real) or not written(imaginary):
        return None
    return real, Term("neg", (imaginary,)) if negative else imaginary


def _rounds(decimal: Term, value: Any, node: Term) -> bool:
    """``rounds_to`` for a part of a value that is real; ``node`` is what the value is of."""
    digits = _significant(decimal)
    known = exact(decimal)
    if digits is None or digits < ROUNDED_DIGITS or not known or not value or (value < 0) != (known < 0):
        return False
    if not -MAX_EXPONENT < mpmath.log(abs(value), 10) < MAX_EXPONENT:
        return False
    if digits >= PRINTED_DIGITS and is_float(decimal, value, node):
        return True
    slack = Fraction(1 if digits >= PRINTED_DIGITS else "0.5000001")
    unit = Fraction(10) ** (int(mpmath.floor(mpmath.log10(abs(value)))) + 1 - digits)
    return abs(_fraction(value) - known) <= unit * slack


def close_to(node: Term, decimal: Term) -> bool:
    """Whether a number is within one unit of the last digit of a decimal or whole number."""
    said = written(decimal)
    digits = DECIMAL.fullmatch(said) or re.fullmatch(r"(\d+)()()", said)
    known = exact(decimal)
    if digits is None or known is None or names(node):
        return False
    value = constant(node)
    if value.imag:
        return False
    if "." in said and len(digits[1] + digits[2]) >= PRINTED_DIGITS and is_float(decimal, value.real, node):
        return (value.real < 0) == (known < 0)
    return abs(_fraction(value.real) - known) <= Fraction(10) ** (int(digits[3] or 0) - len(digits[2]))


def _fraction(value: Any) -> Fraction:
    """The exact value of a number of mpmath."""
    sign, mantissa, exponent = value._mpf_[:3]
    if abs(exponent) > MAX_EXPONENT // 10:
        raise NoValue
    return Fraction(-int(mantissa) if sign else int(mantissa)) * Fraction(2) ** int(exponent)


def _significant(node: Term) -> int | None:
    """How many digits a decimal was written with; None for what is no decimal."""
    said = written(node)
    return len(said.lower().partition("e")[0].replace(".", "").lstrip("0")) if "." in said else None


def _logs(a: Term, b: Term) -> tuple[bool, ...]:
    """The bases that ``\\log`` without one may have: 10 or e, the same on both sides."""
    return (False, True) if has_log(a) or has_log(b) else (False,)


def has_odd_root(node: Term) -> bool:
    """Whether letters stand in a root of odd degree, which negative numbers have, too."""
    if node.op == "root" and node.args[1].op == "number" and node.args[1].value % 2 == 1 and names(node.args[0]):
        return True
    return any(map(has_odd_root, node.args))


def has_log(node: Term) -> bool:
    return (node.op == "function" and node.text == "log") or any(map(has_log, node.args))


def _close(coarse: tuple[Any, Any], fine: tuple[Any, Any], times: Any) -> bool:
    x, y = fine
    difference = abs(x - y)
    if difference <= SAME * times * max(abs(x), abs(y)):
        return True
    # Both may be zero but for rounding errors, which then shrink with the digits.
    return bool(difference <= 1e-40 * abs(coarse[0] - coarse[1])) and bool(max(abs(x), abs(y)) < 1e-45 * times)


def _values(a: Term, b: Term, ten: bool, *, apart: bool = True) -> Iterator[tuple[Pair, Any, int]]:
    """Values of both at each point where they have some, at few and many digits, and how many more.

    Where huge and small parts stand in one sum, both have as many digits more as that hides.
    ``apart``: values that clearly differ at few digits have no other ones. With negative values of
    symbols only what stays real counts: sqrt(ab) is sqrt(a) sqrt(b) for the quantities that answers
    are about, and sqrt(x^2) is x for no negative x.
    """
    symbols = tuple(sorted(names(a) | names(b)))
    both = bool(symbols) and (folds(a) or folds(b))
    stepped = steps(a) or steps(b)
    far = max(largest(a), largest(b)) if both or stepped else 0
    odd = has_odd_root(a) or has_odd_root(b)  # (x-1)^{1/3} is real on one side alone
    for point, signed in points(symbols, stepped, both, far):
        try:
            coarse = Evaluator(_DIGITS[0], point, ten)
            first, hidden = coarse.value(a), coarse.hidden_bits
            few, more = (first, coarse.value(b)), 0
            hidden = max(hidden, coarse.hidden_bits - hidden)
            if hidden > _HIDDEN_BITS:
                more = hidden * 30103 // 100_000 + 1
                if more > _MORE_DIGITS[bool(symbols)]:
                    raise NoValue
                coarse = Evaluator(_DIGITS[0] + more, point, ten)
                few = coarse.value(a), coarse.value(b)
            if coarse.left_reals and (signed or odd):
                continue
            if apart and _apart(*few, mpmath.mpf(10) ** -(_APART + more)):
                yield few, None, more
                continue
            fine = Evaluator(_DIGITS[1] + more, point, ten)
            many = fine.value(a), fine.value(b)
        except (NoValue, ArithmeticError, ValueError, TypeError):
            continue
        yield few, many, more


def _apart(x: Any, y: Any, least: Any) -> bool:
    """Whether two values differ by more than any error of few digits."""
    size = max(abs(x), abs(y))
    return bool(size > least) and bool(abs(x - y) > least * size)
