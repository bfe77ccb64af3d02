"""Decimals as they are written, beside the values that they stand for."""

import math
import re
from fractions import Fraction
from typing import Any

from retool_mcore.reward.node import Term

PRINTED_DIGITS = 15  # with so many it may be a float as Python prints it, off by one in the last digit
DECIMAL = re.compile(r"(?<!\d)(\d*+)\.(\d++)(?:[eE]([-+]?\d{1,4}))?")  # (?<!\d): a search takes linear time
_STEPS = 2  # floats beside the one that Python computes: its order of operations is not the truth's
_CLOSE = 1e-12  # relative; what Python computes may have lost all digits, and then says nothing


def written(node: Term) -> str:
    """A number as it was written, without its sign; "" for anything else."""
    while node.op in ("neg", "group", "unit"):
        node = node.args[0]
    return node.text.lstrip("+-") if node.op == "number" else ""


def printed(decimal: str, value: Fraction, node: Term) -> bool:
    """Whether a decimal of 15 digits or more is a fraction, as Python prints it.

    Within one unit of its last digit, or the float that Python computes. Only where the fraction
    has no decimal of so many digits: 1/3 has none, and 3 has one.
    """
    decimal = decimal.lstrip("+-")
    digits = DECIMAL.fullmatch(decimal)
    if digits is None or len((digits[1] + digits[2]).lstrip("0")) < PRINTED_DIGITS or value.denominator == 1:
        return False
    unit = Fraction(10) ** (int(digits[3] or 0) - len(digits[2]))
    if (value / unit).denominator == 1:
        return False
    if abs(abs(value) - int(digits[1] + digits[2]) * unit) <= unit:
        return True
    return _is_float(decimal, float(abs(value)), node)


def is_float(decimal: Term, value: Any, node: Term) -> bool:
    """Whether a decimal is the float that Python prints for a value, or computes for an expression.

    31 * math.pi is one step beside the nearest float, and (3 - math.sqrt(38)) / 7 two: each
    operation rounds.
    """
    return _is_float(written(decimal), float(abs(value)), node)


def _is_float(said: str, nearest: float, node: Term) -> bool:
    found = float(said)
    if said not in (repr(found), f"{found:.17g}", f"{found:.16g}") or not math.isfinite(nearest):
        return False
    if abs(found - nearest) <= math.ulp(nearest) * 1.01:
        return True
    return any(_is_computed(found, nearest, node, by_exp) for by_exp in (False, True))


def _is_computed(found: float, nearest: float, node: Term, by_exp: bool) -> bool:
    try:
        value = _computed(node, by_exp)
        computed = abs(value) if isinstance(value, float) else math.nan
    except (ArithmeticError, ValueError, TypeError):
        return False
    return abs(computed - nearest) <= _CLOSE * nearest and abs(found - computed) <= _STEPS * math.ulp(computed) * 1.01


def _computed(node: Term, by_exp: bool) -> Any:
    """What Python computes for an expression in floats; ``by_exp``: powers of e with ``math.exp``.

    Raises ValueError where it has none.
    """
    if node.op == "number":
        return float(node.value)
    if node.op == "constant" and node.text in ("pi", "e"):
        return math.pi if node.text == "pi" else math.e
    args = [_computed(each, by_exp) for each in node.args]
    if node.op in ("group", "unit"):
        return args[0]
    if node.op == "neg":
        return -args[0]
    if node.op == "add":
        return sum(args[1:], args[0])
    if node.op == "mul":
        return math.prod(args[1:], start=args[0])
    if node.op == "div":
        return args[0] / args[1]
    if node.op == "pow":
        if by_exp and node.args[0].text == "e":
            return math.exp(args[1])
        return args[0] ** args[1]
    if node.op == "root":
        return math.sqrt(args[0]) if args[1] == 2 else args[0] ** (1 / args[1])
    if node.op == "function" and node.text in _FUNCTIONS and len(args) == 1:
        return _FUNCTIONS[node.text](args[0])
    raise ValueError(f"no float of {node.op}")


_FUNCTIONS = {
    "sin": math.sin, "cos": math.cos, "tan": math.tan, "arcsin": math.asin, "arccos": math.acos, "arctan": math.atan,
    "ln": math.log, "lg": math.log10, "Gamma": math.gamma,
    "exp": math.exp, "sinh": math.sinh, "cosh": math.cosh, "tanh": math.tanh,
}  # fmt: skip
