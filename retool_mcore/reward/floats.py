"""Answers that clearly differ, told in floats: most wrong answers need no more digits.

Nothing is equal here. Values are taken at one point, where all letters are positive, and only where
no step of them loses digits. So whatever differs by more than ``_APART`` differs in truth.
"""

import cmath
import math
from functools import lru_cache
from zlib import crc32

from retool_mcore.reward.node import Term
from retool_mcore.reward.value import has_log

_APART = 1e-3  # relative; a decimal of six digits is closer to what it rounds
_LOST = 1e-6  # of the largest part of a sum: so many digits may go
_SIZES = (1e-90, 1e90)
_MAX_POWER = 150.0  # of an exponent times the logarithm of its base
_MAX_ANGLE = 1e4
# Forms that no plain value equals, whatever they hold.
_WORKED = ("add", "mul", "div", "pow", "neg")  # left of what is worked out: m = 1, n = 2, m+n = 3
_PLACES = ("tuple", "matrix")
_NO_VALUES = (*_PLACES, "set", "builder", "union", "intersection", "without", "space", "pm")


class _Unsure(Exception):
    """A value that is no number, or one of which floats say too little."""


def apart(a: Term, b: Term) -> bool:
    """Whether two answers clearly differ; False where that takes more than floats."""
    try:
        return _apart(a, b, False) and (not (has_log(a) or has_log(b)) or _apart(a, b, True))
    except (_Unsure, ArithmeticError, ValueError, TypeError):
        return False


def _apart(a: Term, b: Term, ten: bool) -> bool:
    for one, other in ((a, b), (b, a)):
        said = other.op == "relation"  # x = 3 may also be the set of such x
        if (one.op in _PLACES if said else _has_no_value(one)) and _values(other, ten):
            return True
    if a.op == b.op == "relation" or (a.op == b.op == "unit" and a.text != b.text):
        return False
    mine, theirs = _values(a, ten), _values(b, ten)
    return all(abs(x - y) > _APART * max(abs(x), abs(y)) for x in mine for y in theirs)


def _has_no_value(node: Term) -> bool:
    """Whether it is a set, a list or an inequality, which is no value."""
    if node.op == "relation":
        return not {"=", r"\approx", r"\in", ":", r"\equiv", r"\to"} & set(node.text.split())
    if node.op == "list" and node.args[-1].op == "relation" and node.args[-1].args[0].op in _WORKED:
        return False  # m = 1, n = 2, m+n = 3
    if node.op == "list":
        return node.text != "or" or any(each.op == "relation" for each in node.args)  # not 3/4 or 0.75
    return node.op in _NO_VALUES


def _values(node: Term, ten: bool) -> list[complex]:
    """What a value may stand for: 25% for 25 and a quarter, an equation for its last side."""
    if node.op == "relation" and set(node.text.split()) == {"="}:
        return _values(node.args[-1], ten)
    if node.op == "group":
        return _values(node.args[0], ten)
    if node.op not in ("unit", "percent", "degree"):
        return [_value(node, ten)]
    value = _value(node.args[0], ten)
    return [value, value / 100] if node.op == "percent" else [value, value * math.pi / 180]


def _value(node: Term, ten: bool) -> complex:
    op = node.op
    if op == "number":
        found: complex = float(node.value)
    elif op == "name":
        return _drawn(node.text)
    elif op == "constant":
        return _CONSTANTS[node.text] if node.text in _CONSTANTS else _unsure()
    elif op == "group":
        return _value(node.args[0], ten)
    else:
        args = [_value(each, ten) for each in node.args]
        found = _function(node, args, ten) if op == "function" else _operation(op, args)
    if found and not _SIZES[0] < abs(found) < _SIZES[1]:
        raise _Unsure
    return found


@lru_cache(maxsize=512)
def _drawn(said: str) -> float:
    return 0.31 + crc32(said.encode()) % 9973 / 15000


def _unsure() -> complex:
    raise _Unsure


def _operation(op: str, args: list[complex]) -> complex:
    if op == "neg":
        return -args[0]
    if op == "add":
        total = sum(args)
        if abs(total) < _LOST * max(map(abs, args)):
            raise _Unsure
        return total
    if op == "mul":
        return math.prod(args)
    if op == "div":
        return args[0] / args[1]
    if op == "pow":
        return _power(args[0], args[1])
    if op == "root" and not args[0].imag and args[0].real >= 0:
        return _power(args[0], 1 / args[1])
    if op == "abs":
        return abs(args[0])
    if op in ("floor", "ceil") and not args[0].imag and abs(args[0].real - round(args[0].real)) > _LOST:
        return (math.floor if op == "floor" else math.ceil)(args[0].real)
    raise _Unsure


def _power(base: complex, exponent: complex) -> complex:
    if not base or abs(exponent) * abs(cmath.log(base)) > _MAX_POWER:
        raise _Unsure
    return base**exponent


def _function(node: Term, args: list[complex], ten: bool) -> complex:
    if node.text == "log_" and len(args) == 2:
        return cmath.log(args[0]) / cmath.log(args[1])
    if node.text == "exp" and len(args) == 1:
        return _power(math.e, args[0])
    if len(args) != 1 or args[0].imag:
        raise _Unsure
    value = args[0].real
    if node.text in ("ln", "log", "lg"):
        found = cmath.log(value) / (math.log(10) if node.text == "lg" or (ten and node.text == "log") else 1)
        return found if abs(found) > _LOST else _unsure()
    if node.text not in _ANGLES or abs(value) > _MAX_ANGLE:
        raise _Unsure
    turned = _ANGLES[node.text](value)
    return turned if _LOST < abs(turned) < 1 / _LOST else _unsure()


_CONSTANTS: dict[str, complex] = {"pi": math.pi, "e": math.e, "i": 1j}
_ANGLES = {"sin": math.sin, "cos": math.cos, "tan": math.tan, "arctan": math.atan, "sinh": math.sinh,
           "cosh": math.cosh, "tanh": math.tanh}  # fmt: skip
