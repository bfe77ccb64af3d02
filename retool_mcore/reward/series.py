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
    in_letters = high_at is None and (names(high) - names(bound.args[0]) or high == _INDEX_I)
    if low is not None and low.denominator == 1 and in_letters:
        index = Term("index", text=str(_levels(body)))  # no symbol: its name is free
        return Term("series", (bound.args[1], high, index, put(body, bound.args[0], index)), op)
    if low is None or high_at is None or low.denominator != 1 or high_at.denominator != 1 or low > high_at:
        raise Unreadable("a sum or product without whole numbers as its ends is not known to the reward")
    count = int(high_at - low) + 1
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
