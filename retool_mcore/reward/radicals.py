r"""Exact values of sums of square roots, powers of pi and i with rational factors.

``\frac{3\sqrt2}{7}``, ``2\pi-1`` and ``1+2i`` each have one form: a factor for each root of a
number without square factors, power of pi and i. Two of these are equal only if their forms are:
such roots are independent, and pi is no root of anything. It costs a hundredth of their decimals.
"""

from fractions import Fraction
from functools import lru_cache

from retool_mcore.reward.node import Term

# (number under the root, power of pi, whether i stands in it) -> factor; factors are not 0.
Form = dict[tuple[int, int, bool], Fraction]
_MAX_RADICAND = 10**6
_MAX_TERMS, _MAX_POWER, _MAX_BITS = 12, 12, 400


class NoForm(Exception):
    """An expression that is no such sum, or a long one."""


def same_radicals(a: Term, b: Term) -> bool | None:
    """Whether two sums of roots are equal; None where one is no such sum."""
    try:
        return _form(a) == _form(b)
    except NoForm:
        return None


def _form(node: Term) -> Form:
    if node.op == "number":
        return _rational(node.value)
    if node.op == "constant" and node.text in ("pi", "i"):
        return {(1, 1, False) if node.text == "pi" else (1, 0, True): Fraction(1)}
    if node.op not in _OPERATIONS and node.op not in ("root", "pow", "unit", "group"):
        raise NoForm
    parts = [_form(each) for each in node.args]
    if node.op == "root":
        return _root(parts[0], parts[1])
    if node.op == "pow":
        return _power(parts[0], parts[1])
    if node.op in ("unit", "group"):
        return parts[0]
    found = parts[0] if node.op != "neg" else _times(parts[0], _rational(Fraction(-1)))
    for each in parts[1:]:
        found = _OPERATIONS[node.op](found, each)
    return found


def _rational(value: Fraction) -> Form:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > _MAX_BITS:
        raise NoForm
    return {(1, 0, False): value} if value else {}


def _plus(a: Form, b: Form) -> Form:
    found = dict(a)
    for key, factor in b.items():
        found[key] = found.get(key, Fraction(0)) + factor
    return _checked(found)


def _times(a: Form, b: Form) -> Form:
    found: Form = {}
    for (root, pis, imaginary), factor in a.items():
        for (other, powers, also), times in b.items():
            square, rest = _squares(root * other)
            key = (rest, pis + powers, imaginary != also)
            sign = -1 if imaginary and also else 1
            found[key] = found.get(key, Fraction(0)) + factor * times * square * sign
    return _checked(found)


def _over(a: Form, b: Form) -> Form:
    """a / b, where b is one product, or two of which one square root can be taken off."""
    if not 1 <= len(b) <= 2:
        raise NoForm
    if len(b) == 2:
        (first, x), (second, y) = b.items()
        return _over(_times(a, {first: x, second: -y}), _times(b, {first: x, second: -y}))
    ((root, pis, imaginary), factor) = next(iter(b.items()))
    inverse = {(root, -pis, imaginary): (-1 if imaginary else 1) / (factor * root)}
    return _times(a, inverse)


def _root(inner: Form, degree: Form) -> Form:
    if degree != _rational(Fraction(2)) or set(inner) - {(1, 0, False)}:
        raise NoForm
    value = inner.get((1, 0, False), Fraction(0))
    square, rest = _squares(abs(value.numerator) * value.denominator)
    return _checked({(rest, 0, value < 0): Fraction(square, value.denominator)})


def _power(base: Form, exponent: Form) -> Form:
    if set(exponent) - {(1, 0, False)}:
        raise NoForm
    times = exponent.get((1, 0, False), Fraction(0))
    if times == Fraction(1, 2):
        return _root(base, _rational(Fraction(2)))
    if times.denominator != 1 or not 0 < abs(times) <= _MAX_POWER:
        raise NoForm
    found = base
    for _ in range(abs(int(times)) - 1):
        found = _times(found, base)
    return found if times > 0 else _over(_rational(Fraction(1)), found)


@lru_cache(maxsize=4096)
def _squares(value: int) -> tuple[int, int]:
    """The greatest number whose square divides a value, and what is left under the root."""
    if value > _MAX_RADICAND:
        raise NoForm
    square, divisor = 1, 2
    while divisor * divisor <= value:
        while value % (divisor * divisor) == 0:
            value //= divisor * divisor
            square *= divisor
        divisor += 1
    return square, value


def _checked(found: Form) -> Form:
    if len(found) > _MAX_TERMS:
        raise NoForm
    for factor in found.values():
        _rational(factor)
    return {key: factor for key, factor in found.items() if factor}


_OPERATIONS = {"neg": _plus, "add": _plus, "mul": _times, "div": _over}
