r"""Sets of real numbers in their spellings: ``1 < x \le 2``, ``(1, 2]``, ``x > 1 or x < 0``,
``\{x \mid x \ge 1\}``, ``\mathbb{R} \setminus \{2\}``.

A region is its intervals in order, none touching the next. Ends are numbers; a set whose ends hold
symbols has no region and is compared by its form.
"""

from fractions import Fraction
from typing import Any

from retool_mcore.reward.evaluate import NoValue
from retool_mcore.reward.node import Term, number
from retool_mcore.reward.points import names
from retool_mcore.reward.signs import signed
from retool_mcore.reward.value import constant, exact

# Low end, is it in, high end, is it in. Infinite ends are floats and never in.
Interval = tuple[Any, bool, Any, bool]
Region = list[Interval]
_INFINITE = float("inf")
_LINE: Interval = (-_INFINITE, False, _INFINITE, False)
SAME = 1e-25
_TURNED = {"<": ">", ">": "<", r"\le": r"\ge", r"\ge": r"\le"}
_WRITTEN = ("number", "neg", "div", "group", "constant", "name", "tuple", "set", "union", "intersection", "without",
            "relation", "list", "builder", "space", "pm")  # fmt: skip
_END_BITS = 60  # of an end; ends of more may differ by less than SAME
Coefficients = tuple[Fraction, Fraction, Fraction]  # of 1, x and x^2


def same_region(a: Region, b: Region) -> bool:
    """Whether two regions have the same intervals."""
    return len(a) == len(b) and all(
        x[1] == y[1] and x[3] == y[3] and _same_end(x[0], y[0]) and _same_end(x[2], y[2])
        for x, y in zip(a, b, strict=True)
    )


def region(node: Term) -> Region | None:
    """The real numbers that a node describes; None where it describes something else."""
    try:
        found = _region(node)
    except NoValue:
        return None
    return None if found is None else merged(found)


def same_sets(a: Term, b: Term) -> bool | None:
    """Whether two sets of numbers are one; None where one is no such set.

    Both are about one symbol, or one of them is a set, whose symbol is bound.
    """
    if not (_is_region(a) or _is_region(b)):
        return None
    mine, theirs = region(a), region(b)
    if mine is None or theirs is None:
        return None
    return same_region(mine, theirs) and (_subject(a) == _subject(b) or None in (_subject(a), _subject(b)))


def _subject(node: Term) -> frozenset[str] | None:
    """The symbol that inequalities are about; None for sets, whose symbols are bound."""
    return names(node) if node.op in ("relation", "list") else None


def _is_region(node: Term) -> bool:
    if node.op == "relation":
        return node.text != "="
    return node.op in ("union", "intersection", "without", "builder", "space") or (
        node.op == "list" and any(each.op == "relation" and each.text != "=" for each in node.args)
    )


def is_written(node: Term) -> bool:
    """Whether a set has only numbers as they are written, so that its ends cost nothing."""
    return node.op in _WRITTEN and all(map(is_written, node.args))


def _region(node: Term) -> Region | None:
    if node.op == "space":
        return [_LINE] if node.text == "R" else None
    if node.op == "tuple":
        return _interval(node)
    if node.op == "set":
        points = [_end(each) for one in node.args for each in _both(one)]
        return [(point, True, point, True) for point in points]
    if node.op in ("union", "intersection", "without"):
        return _joined(node)
    if node.op == "relation":
        return _condition(node)
    if node.op == "list":
        return _several(node)
    if node.op == "builder":
        element, condition = node.args
        known = _builder(element, condition)
        return known if known is None or len(names(condition)) == 1 else None
    return None


def _both(node: Term) -> tuple[Term, ...]:
    r"""``\pm 3`` as its two values."""
    return (signed(node, 1), signed(node, -1)) if node.op == "pm" else (node,)


def _builder(element: Term, condition: Term) -> Region | None:
    if element.op == "relation" and element.text == r"\in" and element.args[1].op == "space":
        if element.args[1].text != "R":
            return None
        element = element.args[0]
    if element.op != "name" or element.text not in names(condition):
        return None
    if condition.op == "list" and condition.text != "or":
        parts = [_region(each) for each in _excluding(condition.args)]
        known = [part for part in parts if part is not None]
        return _intersected(known) if len(known) == len(parts) else None
    return _region(condition)


def _interval(node: Term) -> Region | None:
    if len(node.args) != 2:
        return None
    low, high = map(_end, node.args)
    if not low < high and not (low == high and node.text == "[]"):
        return None
    return [(low, node.text[0] == "[" and low != -_INFINITE, high, node.text[1] == "]" and high != _INFINITE)]


def _end(node: Term) -> Any:
    if node.op in ("group", "neg") and (inner := _end(node.args[0])) in (_INFINITE, -_INFINITE):
        return -inner if node.op == "neg" else inner
    if node.op == "constant" and node.text == "infinity":
        return _INFINITE
    if names(node):
        raise NoValue
    known = exact(node)
    if known is not None and known.denominator == 1 and known.numerator.bit_length() <= _END_BITS:
        return known.numerator
    value = constant(node)
    precise = known is None or max(known.numerator.bit_length(), known.denominator.bit_length()) <= _END_BITS
    if value.imag or not precise or abs(value.real) > 2**_END_BITS:
        raise NoValue  # compared by its form, exactly
    return value.real


def _joined(node: Term) -> Region | None:
    parts = [_region(each) for each in node.args]
    if parts[0] is None or parts[1] is None:
        return None
    if node.op == "union":
        return parts[0] + parts[1]
    if node.op == "intersection":
        return _intersected([parts[0], parts[1]])
    return _intersected([parts[0], _complement(merged(parts[1]))])


def _condition(node: Term) -> Region | None:
    """A chain of inequalities about one symbol that stands alone, or ``x \\in`` a set."""
    signs = node.text.split()
    if signs == [r"\in"]:
        return _region(node.args[1]) if node.args[0].op == "name" else None
    regions: list[Region] = []
    for left, sign, right in zip(node.args, signs, node.args[1:], strict=False):
        one = _inequality(left, sign, right)
        if one is None:
            return None
        regions.append(one)
    return _intersected(regions) if len(names(node)) == 1 else None


def _inequality(left: Term, sign: str, right: Term) -> Region | None:
    if left.op != "name":
        left, right = right, left
        sign = _TURNED.get(sign, sign)
    left, right = _root_of(left, right)
    if left.op == "abs" or right.op == "abs":
        return _distance(left, sign, right)
    if left.op == "name" and sign == r"\ne" and right.op == "pm" and not names(right):
        return _apart_from([_end(each) for each in _both(right)])
    if left.op != "name" or names(right):
        return _of_second_degree(left, sign, right)
    end = _end(right)
    if sign in ("<", r"\le"):
        return [(-_INFINITE, False, end, sign == r"\le" and end != _INFINITE)]
    if sign in (">", r"\ge"):
        return [(end, sign == r"\ge" and end != -_INFINITE, _INFINITE, False)]
    if sign == r"\ne":
        return _away_from(end)
    return [(end, True, end, True)] if sign == "=" else None


def _root_of(left: Term, right: Term) -> tuple[Term, Term]:
    """``x^2 < 9`` as ``|x| < 3``."""
    square, value = (right, left) if right.op == "pow" else (left, right)
    if square.op != "pow" or square.args[1] != number(2) or square.args[0].op != "name" or names(value):
        return left, right
    distance, root = Term("abs", (square.args[0],)), Term("root", (value, number(2)))
    return (distance, root) if square is left else (root, distance)


def _distance(left: Term, sign: str, right: Term) -> Region | None:
    r"""``|x| < 3`` and ``|x-1| \ge 2``."""
    if right.op == "abs":
        left, right = right, left
        sign = _TURNED.get(sign, sign)
    inner, shift = left.args[0], number(0)
    if inner.op == "add" and len(inner.args) == 2 and inner.args[0].op == "name" and not names(inner.args[1]):
        inner, shift = inner.args[0], Term("neg", (inner.args[1],))
    if left.op != "abs" or inner.op != "name" or names(right):
        return None
    if sign == r"\ne" and _end(right) > 0:
        return _apart_from([_end(Term("add", (shift, each))) for each in (Term("neg", (right,)), right)])
    if sign not in _TURNED or _end(right) < 0:
        return None
    if not _end(right):
        return _away_from(_end(shift)) if sign == ">" else None
    ends = [_end(Term("add", (shift, each))) for each in (Term("neg", (right,)), right)]
    closed = sign in (r"\le", r"\ge")
    within: Region = [(ends[0], closed, ends[1], closed)]
    if sign in ("<", r"\le"):
        return within
    return [(-_INFINITE, False, ends[0], closed), (ends[1], closed, _INFINITE, False)]


def _of_second_degree(left: Term, sign: str, right: Term) -> Region | None:
    r"""``m^2 - 4 > 0`` and ``(x-1)(x-3) \le 0``."""
    told = _turning_points(left, right) if len(names(left) | names(right)) == 1 and sign in _TURNED else None
    if told is None:
        return None
    ends, beyond = [_end(each) for each in told[0]], told[1]
    closed, above = sign in (r"\le", r"\ge"), sign in (">", r"\ge")
    found: Region = []
    lows, highs = [-_INFINITE, *ends], [*ends, _INFINITE]
    for at, (low, high) in enumerate(zip(lows, highs, strict=True)):
        positive = (beyond > 0) == ((len(ends) - at) % 2 == 0)
        if positive == above and low != high:
            found.append((low, closed and low != -_INFINITE, high, closed and high != _INFINITE))
    if closed:
        found += [(end, True, end, True) for end in ends]
    return found


def _turning_points(left: Term, right: Term) -> tuple[list[Term], int] | None:
    """Where ``left - right`` is zero, in order, and its sign beyond the last; None for others."""
    mine, theirs = _coefficients(left), _coefficients(right)
    if mine is None or theirs is None or not names(left) | names(right):
        return None
    free, once, twice = (x - y for x, y in zip(mine, theirs, strict=True))
    if any(max(abs(each.numerator), each.denominator).bit_length() > _END_BITS for each in (free, once, twice)):
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


def _apart_from(points: list[Any]) -> Region:
    """The line without two points."""
    low, high = sorted(points)
    return [(-_INFINITE, False, low, False), (low, False, high, False), (high, False, _INFINITE, False)]


def _away_from(point: Any) -> Region:
    return [(-_INFINITE, False, point, False), (point, False, _INFINITE, False)]


def _several(node: Term) -> Region | None:
    """Conditions joined by "or" (a union) or "and"; ``x \\ne 1, x \\ne 2`` holds both."""
    node = Term("list", tuple(_excluding(node.args)), node.text)
    stated = all(each.op in ("relation", "list") for each in node.args) and len(names(node)) == 1
    if not stated and not (node.text == "or" and all(each.op == "tuple" for each in node.args)):
        return None
    parts = [_region(each) for each in node.args]
    known = [part for part in parts if part is not None]
    if len(known) < len(parts):
        return None
    if node.text == "or":
        return [interval for part in known for interval in part]
    if node.text == "and" or sum(each.text != r"\ne" for each in node.args) < 2:
        return _intersected(known)
    return _intersected(known) or None  # x > 1, x \le 6; but x < 1, x > 3 is no set


def _excluding(parts: tuple[Term, ...]) -> list[Term]:
    r"""``x \ne 1, 2`` as ``x \ne 1, x \ne 2``."""
    said: list[Term] = []
    for each in parts:
        last = said[-1] if said else each
        bare = each.op in ("number", "neg", "div") and last.op == "relation" and last.text == r"\ne"
        said.append(Term("relation", (last.args[0], each), r"\ne") if bare else each)
    return said


def merged(found: Region) -> Region:
    merged: Region = []
    for each in sorted(found, key=lambda one: (one[0], not one[1])):
        if merged and (each[0] < merged[-1][2] or (_same_end(each[0], merged[-1][2]) and (each[1] or merged[-1][3]))):
            low, low_in, high, high_in = merged[-1]
            if each[2] > high or (_same_end(each[2], high) and each[3]):
                high, high_in = each[2], each[3]
            merged[-1] = (low, low_in, high, high_in)
        else:
            merged.append(each)
    return merged


def _intersected(regions: list[Region]) -> Region:
    found: Region = [_LINE]
    for each in regions:
        pairs = [(x, y) for x in found for y in each]
        found = [one for x, y in pairs if (one := _overlap(x, y)) is not None]
    return found


def _overlap(x: Interval, y: Interval) -> Interval | None:
    low, low_in = max((x[0], not x[1]), (y[0], not y[1]))
    high, high_in = min((x[2], x[3]), (y[2], y[3]))
    if low < high or (low == high and not low_in and high_in):
        return low, not low_in, high, high_in
    return None


def _complement(found: Region) -> Region:
    ends: Region = []
    low, low_in = -_INFINITE, False
    for each in found:
        if low < each[0] or (low == each[0] and low_in and not each[1]):
            ends.append((low, low_in, each[0], not each[1] and each[0] != -_INFINITE))
        low, low_in = each[2], not each[3]
    if low != _INFINITE:
        ends.append((low, low_in, _INFINITE, False))
    return ends


def _same_end(a: Any, b: Any) -> bool:
    return a == b or (abs(a) != _INFINITE != abs(b) and abs(a - b) <= SAME * max(abs(a), abs(b)))
