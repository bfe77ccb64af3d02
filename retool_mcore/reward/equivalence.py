r"""Decide whether two answers are the same mathematics: math-verify, with sound short cuts.

math-verify spends most of its time on reading tuples and sets (its grammar backtracks) and on
simplifying differences that are plainly not zero. So:
- tuples, intervals and sets in the same brackets are compared element by element;
- for ``y = f`` and ``y = g``, f and g are compared;
- a difference that expands to 0 is 0, and two expressions with clearly different values at two
  points are not equal.
math-verify decides everything else. This code runs in a checker process only, because sympy may
hang or use up memory here.
"""

# sympy and math-verify have no stubs, and types for some of their parameters only.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any, cast

from retool_mcore.reward.normalise import plain_number

if TYPE_CHECKING:
    from sympy import Expr

MAX_ELEMENTS = 8  # of a set; each element is compared with each
MAX_OPERATIONS = 150  # of each expression, to expand and evaluate their difference
MAX_EXPANDED_POWER = 12
POINTS = ("0.7312", "37.19")  # where symbols are evaluated, each a little off its neighbour
CLEARLY = 1e-3  # relative; math-verify rounds to 6 digits
TINY = 1e-9  # a smaller value may be zero with rounding errors

_BRACKETS = re.compile(
    r"(?:\\left)?\s*(?P<open>\(|\[|\\\{)(?P<inner>.*?)(?:\\right)?\s*(?P<close>\)|\]|\\\})", re.DOTALL
)
_DEPTH = re.compile(r"\\[{}]|[(\[{]|[)\]}]|,|\\.", re.DOTALL)
# Products without a sign: "2(3)", "(2)(3)", "(2)3". math-verify takes them for mixed numbers,
# 2 + 3.
_PRODUCT = re.compile(r"(?<=[\d)])(?<!_\d)\s*(?=\(\s*[-+]?\d)|(?<=\))\s*(?=\d)")
_ASSIGNMENT = re.compile(r"([a-zA-Z])\s*=([^=<>]+)")


def equivalent(answer: str, truth: str) -> bool:
    """True when both are shown to be equal. May raise anything that sympy raises, and may hang."""
    if answer.strip() == truth.strip():
        return True
    numbers = plain_number(answer.strip()), plain_number(truth.strip())
    if None not in numbers:
        return numbers[0] == numbers[1]
    mine, theirs = collection(answer), collection(truth)
    if mine and theirs:
        if (mine[0] == SET) != (theirs[0] == SET):
            return False  # math-verify takes \{1,2\} for (1,2)
        if mine[0] == theirs[0]:
            return _same_elements(mine[0], mine[1], theirs[1])
    sides = _ASSIGNMENT.fullmatch(answer.strip()), _ASSIGNMENT.fullmatch(truth.strip())
    if sides[0] and sides[1] and sides[0][1] == sides[1][1] and not any(side[1] in side[2] for side in sides if side):
        return equivalent(sides[0][2], sides[1][2])
    gold = parse_truth(truth)
    return bool(gold) and _verify(gold, _parse(answer))


@lru_cache(maxsize=256)
def parse_truth(truth: str) -> list[Any]:
    """math-verify's readings of a truth: sympy objects and the plain text; empty if unreadable."""
    return _parse(truth)


def _parse(text: str) -> list[Any]:
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    targets = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())
    text = _PRODUCT.sub(lambda _: "\\cdot ", text)
    # No parsing_timeout: a signal-based limit inside our limit would cancel ours. Its type leaves
    # None out, which it takes as verify does.
    read = cast("Callable[..., list[Any]]", parse)
    return read(f"\\boxed{{{text}}}", extraction_config=targets, parsing_timeout=None)


SET = "\\{\\}"


def collection(text: str) -> tuple[str, list[str]] | None:
    """Brackets and elements of a tuple, interval or set: ("(]", ["1", "x"]); else None."""
    match = _BRACKETS.fullmatch(text.strip())
    if match is None or (match["open"] == "\\{") != (match["close"] == "\\}"):
        return None
    elements: list[str] = []
    depth, start = 0, 0
    for token in _DEPTH.finditer(match["inner"]):
        if token[0] in ("(", "[", "{", "\\{"):
            depth += 1
        elif token[0] in (")", "]", "}", "\\}"):
            depth -= 1
        elif token[0] == "," and depth == 0:
            elements.append(match["inner"][start : token.start()].strip())
            start = token.end()
        if depth < 0:
            return None  # "(1,2)\cup(3,4)" is not a single pair of brackets
    elements.append(match["inner"][start:].strip())
    if depth or len(elements) < 2 or not all(elements) or any("\\pm" in element for element in elements):
        return None
    return match["open"] + match["close"], elements


def _same_elements(brackets: str, mine: list[str], theirs: list[str]) -> bool:
    if brackets != SET:
        return len(mine) == len(theirs) and all(map(equivalent, mine, theirs))
    if max(len(mine), len(theirs)) > MAX_ELEMENTS:
        return _verify(parse_truth(_set(theirs)), _parse(_set(mine)))
    return all(any(equivalent(a, b) for b in theirs) for a in mine) and all(
        any(equivalent(a, b) for a in mine) for b in theirs
    )


def _set(elements: list[str]) -> str:
    return f"\\{{{','.join(elements)}\\}}"


def _verify(gold: list[Any], target: list[Any]) -> bool:
    from math_verify import verify

    try:
        known = _known(gold, target)
    except Exception:  # noqa: BLE001  sympy may raise anything; math-verify has its own ways around it
        known = None
    if known is not None:
        return known
    return verify(gold, target, allow_set_relation_comp=True, timeout_seconds=None)


def _known(gold: list[Any], target: list[Any]) -> bool | None:
    """Whether two readings, each of one plain expression, are equal; None if not cheap to tell."""
    from sympy import Expr

    mine, theirs = ([each for each in readings if not isinstance(each, str)] for readings in (target, gold))
    if len(mine) != 1 or len(theirs) != 1 or not isinstance(mine[0], Expr) or not isinstance(theirs[0], Expr):
        return None
    operations: list[int] = [each.count_ops() for each in (mine[0], theirs[0])]
    if max(operations) > MAX_OPERATIONS:
        return None
    if _expands_to_zero(mine[0], theirs[0]):
        return True
    if _differ(mine[0], theirs[0]):
        texts = [{each for each in readings if isinstance(each, str)} for readings in (target, gold)]
        return bool(texts[0] & texts[1])
    return None


def _expands_to_zero(a: Expr, b: Expr) -> bool:
    import sympy

    for power in (a - b).atoms(sympy.Pow):
        if isinstance(power.base, sympy.Add) and not (power.exp.is_Number and abs(power.exp) <= MAX_EXPANDED_POWER):
            return False
    return cast("bool", sympy.expand(a - b) == 0)


def _differ(a: Expr, b: Expr) -> bool:
    """Whether the values differ clearly at both points.

    One point is not enough: branches of roots and logarithms may differ there.
    """
    from sympy import Float

    symbols = sorted(a.free_symbols | b.free_symbols, key=str)
    for point in POINTS if symbols else POINTS[:1]:
        at: list[tuple[Any, Any]] = [
            (symbol, Float(point, 20) * (10 + index) / 10) for index, symbol in enumerate(symbols)
        ]
        x, y = (complex(each.subs(at).evalf(20)) for each in (a, b))  # TypeError if it has no value
        size = max(abs(x), abs(y))
        if not TINY < size < float("inf") or not abs(x - y) > CLEARLY * size:
            return False
    return True
