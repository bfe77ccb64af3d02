"""Where expressions with symbols are compared: values of the symbols, drawn the same each time."""

import random
from functools import lru_cache

from retool_mcore.reward.node import Term

_NO_NAMES: frozenset[str] = frozenset()


def names(node: Term) -> frozenset[str]:
    """The symbols of an expression."""
    if not node.args:
        return frozenset((node.text,)) if node.op == "name" else _NO_NAMES
    found, waiting = set[str](), [node]
    while waiting:
        for each in waiting.pop().args:
            if each.args:
                waiting.append(each)
            elif each.op == "name":
                found.add(each.text)
    return frozenset(found)


@lru_cache(maxsize=64)
def points(symbols: tuple[str, ...], many: bool, both: bool, far: int) -> list[tuple[dict[str, str], bool]]:
    """Values of the symbols, as decimals, and whether some are negative.

    ``many``: many more, whole and large ones, since a step function is the same between its steps.
    ``both``: values of all sizes and signs, on both sides of where |x - 5| folds. ``far``: some
    beyond so many digits, where |x - 1000000| has folded.
    """
    if not symbols:
        return [({}, False)]
    drawn: list[tuple[dict[str, str], bool]] = []
    for index, (low, high) in enumerate(((0.05, 0.95), (0.3, 3.0), (1.1, 7.0), (-3.0, 3.0), (-4.0, -0.3), (-0.9, 0.9))):
        draw = random.Random(f"{index}{len(symbols)}")
        values = {symbol: f"{draw.uniform(low, high):.15f}{draw.randrange(10**12)}" for symbol in symbols}
        drawn.append((values, low < 0))
    for index in range(60 if many else 0):
        draw = random.Random(f"{index}steps{len(symbols)}")
        high = 10 ** (2 + index % 4)
        drawn.append(({symbol: str(draw.randint(1, high) + index % 2 * draw.random()) for symbol in symbols}, False))
    for index in range(12 if both else 0):
        draw = random.Random(f"{index}folds{len(symbols)}")
        sign = (-1) ** (index // 2)
        values = {
            symbol: f"{sign * 10 ** draw.uniform(-2 + index % 2 * 4, 2 + index % 2 * 4):.9f}" for symbol in symbols
        }
        drawn.append((values, sign < 0))
    for index in range(4 if far else 0):
        draw = random.Random(f"{index}far{len(symbols)}")
        sign = (-1) ** index
        values = {symbol: f"{sign * 10 ** draw.uniform(far, far + 1):.6f}" for symbol in symbols}
        drawn.append((values, sign < 0))
    return drawn


def largest(node: Term) -> int:
    """Digits of the largest whole number in a tree; 0 where all are small, or one is huge."""
    if node.op == "number":
        digits = len(str(abs(int(node.value)))) if abs(node.value) < 10**40 else 0
        return digits if digits > 3 else 0
    return max(map(largest, node.args), default=0)


def folds(node: Term) -> bool:
    if node.op in ("abs", "root") or (node.op == "function" and node.text in ("abs", "max", "min")):
        return bool(names(node))
    if node.op == "pow" and node.args[1].op != "number":
        return bool(names(node))
    return any(map(folds, node.args))


def steps(node: Term) -> bool:
    if node.op in ("floor", "ceil", "mod", "series") or (
        node.op == "function" and node.text in ("gcd", "lcm", "max", "min")
    ):
        return True
    return any(map(steps, node.args))
