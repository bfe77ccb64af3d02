r"""Finite sums and products: ``\sum_{k=1}^{20} k^2`` is its value, where its ends are numbers."""

from fractions import Fraction
from itertools import pairwise

from retool_mcore.reward.node import Term, number, put
from retool_mcore.reward.points import names
from retool_mcore.reward.tokens import Unreadable
from retool_mcore.reward.value import exact

MAX_NODES = 20_000  # of all terms together: reading is outside of the checkers' limits
MAX_TERMS = 60  # of terms that are no rational numbers
MAX_BITS = 4000  # of a value
_INDEX_I = Term("constant", text="i")  # of a sum around it


def series(op: str, bound: Term, high: Term, body: Term) -> Term:
    """A sum ("add") or product ("mul"): its value where its ends are numbers, else itself.

    Raises Unreadable for all but finite ones.
    """
    named = (
        bound.op == "relation"
        and bound.text == "="
        and len(bound.args) == 2
        and bound.args[0].op in ("name", "constant")
    )
    low, high_at = exact(bound.args[1]) if named else None, exact(high)
    in_letters = named and high_at is None and (names(high) - names(bound.args[0]) or high == _INDEX_I)
    if low is not None and low.denominator == 1 and in_letters:
        index = Term("index", text=str(_levels(body)))  # no symbol: its name is free
        return Term("series", (bound.args[1], high, index, put(body, bound.args[0], index)), op)
    if low is None or high_at is None or low.denominator != 1 or high_at.denominator != 1 or low > high_at:
        raise Unreadable("a sum or product without whole numbers as its ends is not known to the reward")
    count = int(high_at - low) + 1
    if count > MAX_TERMS and op == "add" and (told := _geometric(bound.args[0], body, int(low), int(high_at))):
        return told
    if count * _size(body) > MAX_NODES:
        raise Unreadable(f"a sum or product of {count} terms is too long")
    terms = [put(body, bound.args[0], _signed(int(low) + step)) for step in range(count)]
    values = [exact(each) for each in terms]
    known = [value for value in values if value is not None]
    if len(known) == count:
        return _value(op, known)
    if count > MAX_TERMS:
        raise Unreadable(f"a sum or product of {count} terms that are no rational numbers is too long")
    return Term("group", (Term(op, tuple(terms)) if count > 1 else terms[0],))


def _geometric(index: Term, body: Term, low: int, high: int) -> Term | None:
    """The sum of ``c r^k`` by its formula, with a rational ``r``; None for anything else."""
    parts = _factors(body)
    held = [each for each in parts if _holds(each, index)]
    if len(held) != 1 or held[0].op != "pow" or _holds(held[0].args[0], index):
        return None
    ratio, power = exact(held[0].args[0]), held[0].args[1]
    terms = power.args if power.op == "add" else (power,)
    if (
        ratio is None
        or ratio in (0, 1)
        or terms.count(index) != 1
        or any(_holds(x, index) for x in terms if x != index)
    ):
        return None
    ends = [Term("pow", (held[0].args[0], put(power, index, _signed(at)))) for at in (high + 1, low)]
    total = Term("group", (Term("add", (ends[0], Term("neg", (ends[1],)))),))
    rest = [each for each in parts if each is not held[0]]
    return Term("group", (Term("mul", (*rest, total, _fraction(1 / (ratio - 1)))),))


def _factors(node: Term) -> list[Term]:
    """What a product or quotient is the product of."""
    if node.op in ("mul", "group"):
        return [factor for each in node.args for factor in _factors(each)]
    if node.op != "div":
        return [node]
    return _factors(node.args[0]) + [_inverse(each) for each in _factors(node.args[1])]


def _inverse(node: Term) -> Term:
    base, *power = node.args if node.op == "pow" else (node,)
    over = Term("group", (Term("div", (number(1), base)),))
    return Term("pow", (over, *power)) if power else over


def _holds(node: Term, index: Term) -> bool:
    return node == index or any(_holds(each, index) for each in node.args)


def _levels(node: Term) -> int:
    """How many sums stand in each other."""
    return (node.op == "series") + max(map(_levels, node.args), default=0)


def _value(op: str, known: list[Fraction]) -> Term:
    total = Fraction(op == "mul")
    for each in known:
        total = total * each if op == "mul" else total + each
        if max(total.numerator.bit_length(), total.denominator.bit_length()) > MAX_BITS:
            raise Unreadable("the value of a sum or product is too long")
    whole = _signed(total.numerator)
    return Term("group", (whole if total.denominator == 1 else Term("div", (whole, number(total.denominator))),))


def _signed(value: int) -> Term:
    return number(value) if value >= 0 else Term("group", (Term("neg", (number(-value),)),))


def _size(node: Term) -> int:
    return 1 + sum(map(_size, node.args))


def progression(head: list[Term], last: Term) -> Term:
    r"""The sum of ``1+2+\cdots+100``, ``1+2+4+\cdots+512`` or ``1+2+\cdots+n``.

    Raises Unreadable where the first terms do not tell how it goes on.
    """
    values = [exact(each) for each in head]
    known = [each for each in values if each is not None]
    if len(known) == len(values) > 1:
        first, step, end = known[0], known[1] - known[0], exact(last)
        even = all(after - before == step for before, after in pairwise(known))
        if even and known[:2] == [1, 2] and last.op == "name":
            return Term("div", (Term("mul", (last, Term("add", (last, number(1))))), number(2)))
        if even and end is not None and step and (count := (end - first) / step + 1).denominator == 1 and count > 0:
            return _fraction((first + end) * count / 2)
        ratio = known[1] / first if first else Fraction(0)
        geometric = len(known) > 2 and all(after == before * ratio for before, after in pairwise(known))
        if geometric and end is not None and ratio >= 2 and _is_power(end / first, ratio):
            return _fraction((end * ratio - first) / (ratio - 1))
    raise Unreadable("how a sum goes on is not told by its first terms")


def _is_power(value: Fraction, base: Fraction) -> bool:
    while value > 1:
        value /= base
    return value == 1


def _fraction(value: Fraction) -> Term:
    found = Term("div", (number(abs(value.numerator)), number(value.denominator)))
    return Term("group", (Term("neg", (found,)) if value < 0 else found,))
