"""Values of expressions: exact where they are rational, else at 40 and at 80 digits.

Two expressions with symbols are the same when they have the same value at all of a few points. A
difference is zero when it is small beside its sides, or shrinks with the rounding errors as the
digits grow; there is no absolute tolerance, so 1/20! and 1/21! differ.
"""

# mpmath has no stubs.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from functools import lru_cache
from typing import Any

import mpmath
from mpmath.ctx_mp import MPContext

from retool_mcore.reward.decimals import DECIMAL, PRINTED_DIGITS
from retool_mcore.reward.node import Term
from retool_mcore.reward.points import folds, names, points, steps

MAX_BITS = 4000  # of an exact number
MAX_EXPONENT = 10**6  # base-2 exponent of a value; greater ones are compared as text only
SAME = mpmath.mpf("1e-60")  # relative
ROUNDED_DIGITS = 6  # a decimal with so many digits equals an irrational value that rounds to it
_DIGITS = (50, 120)
_MORE_DIGITS = 2500  # the most that huge exact parts of a value without symbols add to them


class NoValue(Exception):
    """An expression has no finite value, or one beyond all limits."""


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
    more = 0 if names(a) | names(b) else min(_MORE_DIGITS, _hidden_digits(a) + _hidden_digits(b))
    for coarse, fine in _values(a, b, ten, more):
        if not _close(coarse, fine, mpmath.mpf(10) ** -more):
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
        ratios = [x / y for _, (x, y) in _values(a, b, ten) if x and y]
        if len(ratios) < 3:
            raise NoValue
        first = ratios[0]
        if all(abs(ratio - first) <= SAME * abs(first) for ratio in ratios):
            return not positive or (abs(first.imag) <= SAME * abs(first) and first.real > 0)
    return False


def constant(node: Term) -> Any:
    """The value of an expression without symbols, at 40 digits. Raises NoValue."""
    try:
        return _Evaluator(_DIGITS[0], {}, False).value(node)
    except (ArithmeticError, ValueError, TypeError) as error:
        raise NoValue from error


def rounds_to(decimal: Term, node: Term) -> bool:
    """Whether a decimal as written is the value of ``node``, rounded to the decimal's digits."""
    digits = _significant(decimal)
    known = exact(decimal)
    if digits is None or digits < ROUNDED_DIGITS or not known or names(node):
        return False
    value = constant(node)
    if value.imag or not value.real or not -MAX_EXPONENT < mpmath.log(abs(value.real), 10) < MAX_EXPONENT:
        return False
    if digits >= PRINTED_DIGITS and _nearest_float(decimal, value.real):
        return True
    slack = Fraction(1 if digits >= PRINTED_DIGITS else "0.5000001")
    unit = Fraction(10) ** (int(mpmath.floor(mpmath.log10(abs(value.real)))) + 1 - digits)
    return abs(_fraction(value.real) - known) <= unit * slack


def close_to(node: Term, decimal: Term) -> bool:
    """Whether a number is within one unit of the last digit of a decimal or whole number."""
    written = decimal.args[0] if decimal.op in ("neg", "group", "unit") else decimal
    digits = DECIMAL.fullmatch(written.text) or re.fullmatch(r"(\d+)()()", written.text)
    known = exact(decimal)
    if written.op != "number" or digits is None or known is None or names(node):
        return False
    value = constant(node)
    return not value.imag and abs(_fraction(value.real) - known) <= Fraction(10) ** (
        int(digits[3] or 0) - len(digits[2])
    )


def _fraction(value: Any) -> Fraction:
    """The exact value of a number of mpmath."""
    sign, mantissa, exponent = value._mpf_[:3]
    if abs(exponent) > MAX_EXPONENT // 10:
        raise NoValue
    return Fraction(-int(mantissa) if sign else int(mantissa)) * Fraction(2) ** int(exponent)


def _nearest_float(decimal: Term, value: Any) -> bool:
    """Whether a decimal is the float nearest to the value, or one beside it, as Python prints it.

    31 * math.pi is one step beside the nearest float: each operation rounds.
    """
    while decimal.op in ("neg", "group", "unit"):
        decimal = decimal.args[0]
    nearest = float(abs(value))
    return math.isfinite(nearest) and decimal.text in (
        repr(nearest),
        repr(math.nextafter(nearest, 0.0)),
        repr(math.nextafter(nearest, math.inf)),
    )


def _significant(node: Term) -> int | None:
    """How many digits a decimal was written with; None for what is no decimal."""
    if node.op in ("neg", "group", "unit"):
        return _significant(node.args[0])
    if node.op != "number" or "." not in node.text:
        return None
    return len(node.text.lower().partition("e")[0].replace(".", "").lstrip("0"))


def _logs(a: Term, b: Term) -> tuple[bool, ...]:
    """The bases that ``\\log`` without one may have: 10 or e, the same on both sides."""
    return (False, True) if _has_log(a) or _has_log(b) else (False,)


def _has_log(node: Term) -> bool:
    return (node.op == "function" and node.text == "log") or any(map(_has_log, node.args))


def _close(coarse: tuple[Any, Any], fine: tuple[Any, Any], times: Any) -> bool:
    x, y = fine
    difference = abs(x - y)
    if difference <= SAME * times * max(abs(x), abs(y)):
        return True
    # Both may be zero but for rounding errors, which then shrink with the digits.
    return bool(difference <= 1e-40 * abs(coarse[0] - coarse[1])) and bool(max(abs(x), abs(y)) < 1e-45 * times)


def _values(a: Term, b: Term, ten: bool, more: int = 0) -> Iterator[tuple[tuple[Any, Any], tuple[Any, Any]]]:
    """Values of both at each point where they have some, at few and at many digits.

    With negative values of symbols only what stays real counts: sqrt(ab) is sqrt(a) sqrt(b) for
    the quantities that answers are about, and sqrt(x^2) is x for no negative x.
    """
    symbols = tuple(sorted(names(a) | names(b)))
    both = bool(symbols) and (folds(a) or folds(b))
    for point, signed in points(symbols, steps(a) or steps(b), both):
        try:
            coarse, fine = (_Evaluator(digits + more, point, ten) for digits in _DIGITS)
            values = (coarse.value(a), coarse.value(b)), (fine.value(a), fine.value(b))
        except (NoValue, ArithmeticError, ValueError, TypeError):
            continue
        if not (signed and fine.left_reals):
            yield values


def _hidden_digits(node: Term) -> int:
    """Digits of the huge exact parts of a value, in hundreds: they hide what stands beside them."""
    known = exact(node)
    if known is None:
        return min(_MORE_DIGITS, sum(map(_hidden_digits, node.args)))
    bits = _bits(known)
    return (bits * 301 // 100_000 + 1) * 100 if bits > 60 else 0


@lru_cache(maxsize=64)
def _context(digits: int) -> Any:
    context: Any = MPContext()
    context.dps = digits
    return context


class _Evaluator:
    """Values at one point. ``ten``: ``log`` without a base is to base 10."""

    def __init__(self, digits: int, point: Mapping[str, str], ten: bool) -> None:
        self._mp = _context(digits)
        self._point = point
        self._ten = ten
        self._angle = False
        self.left_reals = False

    def value(self, node: Term) -> Any:
        """A complex value. Raises NoValue, or what mpmath raises."""
        result = self._mp.mpc(self._of(node))
        if not (self._mp.isfinite(result.real) and self._mp.isfinite(result.imag)):
            raise NoValue
        if abs(self._mp.mag(result)) > MAX_EXPONENT and result:
            raise NoValue
        return result

    def _of(self, node: Term) -> Any:
        mp = self._mp
        if node.op == "number":
            return mp.mpf(node.value.numerator) / node.value.denominator
        if node.op == "name":
            return mp.mpf(self._point[node.text])
        if node.op == "constant":
            return self._constant(node.text)
        if node.op == "degree":
            return self.value(node.args[0]) * (mp.pi / 180 if self._angle else 1)
        if node.op in ("unit", "group"):
            return self.value(node.args[0])
        if node.op == "function":
            return self._function(node)
        if node.op == "call":
            return sum(
                mp.sin(self.value(each) * (index + 2) / 3 + len(node.text)) for index, each in enumerate(node.args)
            )
        operation = getattr(self, f"_{node.op}", None)
        if operation is None:
            raise NoValue
        return operation(*map(self.value, node.args))

    def _constant(self, said: str) -> Any:
        if said == "infinity":
            raise NoValue
        return {"pi": self._mp.pi, "e": self._mp.e, "i": self._mp.mpc(0, 1)}[said] * 1

    def _neg(self, a: Any) -> Any:
        return -a

    def _add(self, *parts: Any) -> Any:
        return sum(parts, self._mp.mpc(0))

    def _mul(self, *parts: Any) -> Any:
        return math.prod(parts, start=self._mp.mpc(1))

    def _div(self, a: Any, b: Any) -> Any:
        return a / b

    def _abs(self, a: Any) -> Any:
        return abs(a)

    def _pow(self, a: Any, b: Any) -> Any:
        if a == 0:
            if b.real <= 0:
                raise NoValue
            return a
        if abs(b) > 1e15 or abs(self._mp.log(a)) * abs(b) > MAX_EXPONENT:
            raise NoValue
        if not b.imag and b.real == int(b.real):
            return a ** int(b.real)
        self.left_reals |= bool(a.imag) or a.real < 0
        return a**b

    def _root(self, a: Any, degree: Any) -> Any:
        if a.imag == 0 and a.real < 0 and degree.imag == 0 and degree.real % 2 == 1:
            return -((-a) ** (1 / degree))  # the real root, as \\sqrt[3]{-8} means
        return self._mp.mpc(0) if a == 0 else self._pow(a, 1 / degree)

    def _factorial(self, a: Any) -> Any:
        self._small(a, 1e5)
        return self._mp.gamma(a + 1)

    def _binomial(self, a: Any, b: Any) -> Any:
        self._small(a, 1e4)
        self._small(b, 1e4)
        return self._mp.binomial(a, b)

    def _mod(self, a: Any, b: Any) -> Any:
        return a.real - b.real * self._floor(a.real / b.real)

    def _floor(self, a: Any) -> Any:
        return self._whole(a.real, self._mp.floor)

    def _ceil(self, a: Any) -> Any:
        return self._whole(a.real, self._mp.ceil)

    def _whole(self, a: Any, step: Callable[[Any], Any]) -> Any:
        """A step of a value, which is a whole number where only a rounding error is between."""
        nearest = self._mp.nint(a)
        return nearest if abs(a - nearest) < 1e-30 * (1 + abs(a)) else step(a)

    def _small(self, a: Any, limit: float) -> None:
        if abs(a) > limit:
            raise NoValue

    def _function(self, node: Term) -> Any:
        mp, function = self._mp, node.text
        if function in TRIGONOMETRIC:
            was, self._angle = self._angle, True
            args = [self.value(each) for each in node.args]
            self._angle = was
        else:
            args = [self.value(each) for each in node.args]
        if function in ("gcd", "lcm", "max", "min"):
            return self._several(function, args)
        if function == "log_" and len(args) == 2:
            self.left_reals |= args[0].real < 0
            return mp.log(args[0]) / mp.log(args[1])
        if len(args) != 1:
            raise NoValue
        argument = args[0]
        if function == "exp":
            return self._pow(mp.mpc(mp.e), argument)
        if function in ("ln", "log"):
            self.left_reals |= argument.real < 0
            return mp.log(argument) / (mp.log(10) if function == "log" and self._ten else 1)
        self._small(argument, MAX_EXPONENT)
        if function == "cis":
            return mp.expj(argument)
        if function not in _NAMES:
            raise NoValue
        result = getattr(mp, _NAMES[function])(argument)
        self.left_reals |= bool(mp.mpc(result).imag)
        return result

    def _several(self, function: str, args: list[Any]) -> Any:
        reals = [each.real for each in args]
        if function in ("max", "min"):
            return max(reals) if function == "max" else min(reals)
        if any(each != int(each) for each in reals):
            raise NoValue
        return self._mp.mpf((math.gcd if function == "gcd" else math.lcm)(*map(int, reals)))


TRIGONOMETRIC = {"sin", "cos", "tan", "cot", "sec", "csc", "cis"}
_NAMES = {each: each for each in ("sin", "cos", "tan", "cot", "sec", "csc", "sinh", "cosh", "tanh", "coth")} | {
    **{"arc" + each: "a" + each for each in ("sin", "cos", "tan", "cot", "sec", "csc", "sinh", "cosh", "tanh")},
    "asinh": "asinh",
    "abs": "fabs",
}
