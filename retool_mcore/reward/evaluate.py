"""The value of an expression at one point, at a number of digits, with mpmath."""

# mpmath has no stubs.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
import math
from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import lru_cache
from typing import Any
from zlib import crc32

from mpmath.ctx_mp import MPContext

from retool_mcore.reward.node import TRIGONOMETRIC, Term

PLAIN_BITS = 60  # a number of more needs more digits than a value has by itself
MAX_EXPONENT = 10**6  # base-2 exponent of a value; greater ones are compared as text only


_LEAVES = frozenset(("number", "name"))
MAX_TERMS, MAX_ALL_TERMS = 40, 600  # of one sum, and of all at one point: each is evaluated


class NoValue(Exception):
    """An expression has no finite value, or one beyond all limits."""


def _is_beyond(value: Any) -> bool:
    """Whether a value is not finite, or beyond all limits. It is asked often."""
    sizes = [part[2] + part[3] for part in value._mpc_ if part[1]]
    if any(part[2] for part in value._mpc_ if not part[1]):
        return True  # infinite, or no number
    return bool(sizes) and abs(max(sizes)) > MAX_EXPONENT


@lru_cache(maxsize=64)
def _context(digits: int) -> Any:
    context: Any = MPContext()
    context.dps = digits
    return context


class Evaluator:
    """Values at one point. ``ten``: ``log`` without a base is to base 10.

    ``hidden_bits`` says how much more precision the values need: what stands beside 2^2024 in a sum
    is 2024 bits below it.
    """

    def __init__(self, digits: int, point: Mapping[str, str], ten: bool) -> None:
        self._mp = _context(digits)
        self._point = point
        self._ten = ten
        self._angle = False
        self._indices: dict[str, Any] = {}
        self._left = MAX_ALL_TERMS
        self.left_reals = False
        self.hidden_bits = 0

    def value(self, node: Term) -> Any:
        """A complex value. Raises NoValue, or what mpmath raises."""
        result = self._mp.mpc(self._of(node))
        if node.op not in _LEAVES and _is_beyond(result):
            raise NoValue
        return result

    def _of(self, node: Term) -> Any:
        mp = self._mp
        if node.op == "number":
            return self._number(node.value)
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
        if node.op == "series":
            return self._series(node)
        if node.op == "index":
            return self._indices[node.text]
        if node.op == "call":
            return sum(
                mp.sin(self.value(each) * (index + 2) / 3 + crc32(node.text.encode()) % 997)
                for index, each in enumerate(node.args)
            )
        operation = getattr(self, f"_{node.op}", None)
        if operation is None:
            raise NoValue
        return operation(*map(self.value, node.args))

    def _series(self, node: Term) -> Any:
        """A sum or product up to a whole number that symbols give."""
        low, high = (self.value(each) for each in node.args[:2])
        if high.imag or high.real != int(high.real) or low.imag or low.real != int(low.real):
            raise NoValue
        index = node.args[2].text
        start, end = int(low.real), int(high.real)
        self._left -= max(end - start, 0) + 1
        if not start - 1 <= end < start + MAX_TERMS or self._left < 0:
            raise NoValue
        values: list[Any] = []
        for at in range(start, end + 1):
            self._indices[index] = self._mp.mpf(at)
            values.append(self.value(node.args[3]))
        return self._mul(*values) if node.text == "mul" else self._add(*values)

    def _number(self, value: Fraction) -> Any:
        bits = max(value.numerator.bit_length(), value.denominator.bit_length())
        self.hidden_bits += bits if bits > PLAIN_BITS else 0
        return self._mp.mpf(value.numerator) / value.denominator

    def _constant(self, said: str) -> Any:
        if said == "infinity":
            raise NoValue
        return {"pi": self._mp.pi, "e": self._mp.e, "i": self._mp.mpc(0, 1)}[said] * 1

    def _neg(self, a: Any) -> Any:
        return -a

    def _add(self, *parts: Any) -> Any:
        sizes = [self._mp.mag(each) for each in parts if each]
        self.hidden_bits += max(sizes) - min(sizes) if sizes else 0
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
        self.hidden_bits += max(self._mp.mag(a), 0) if a else 0
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
        if function in ("ln", "log", "lg"):
            self.left_reals |= argument.real < 0
            ten = function == "lg" or (function == "log" and self._ten)
            return mp.log(argument) / (mp.log(10) if ten else 1)
        self._small(argument, MAX_EXPONENT)
        if function == "arg" and argument:
            return mp.arg(argument)
        if function in ("Gamma", "zeta"):
            self._small(argument, 1e4)
            return (mp.gamma if function == "Gamma" else mp.zeta)(argument)
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


_NAMES = {each: each for each in ("sin", "cos", "tan", "cot", "sec", "csc", "sinh", "cosh", "tanh", "coth")} | {
    **{"arc" + each: "a" + each for each in ("sin", "cos", "tan", "cot", "sec", "csc", "sinh", "cosh", "tanh")},
    "asinh": "asinh",
    "abs": "fabs",
}
