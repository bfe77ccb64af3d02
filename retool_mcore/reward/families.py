r"""Values that a whole number counts through: ``2^k, k \ge 0``, ``\{k\pi \mid k \in \mathbb{Z}\}``.

Two such families are one where their formulas are, under any name of the number and from any first
number: ``2^{k-1}, k \ge 1`` is ``2^k, k \ge 0``. A family of few numbers is the set of its values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from fractions import Fraction
from itertools import pairwise
from typing import NamedTuple

from retool_mcore.reward.conditions import is_membership
from retool_mcore.reward.named import directed
from retool_mcore.reward.node import CUT_OFF, Term, name, number, put
from retool_mcore.reward.periods import ANY, INDEX, MAX_VALUES, cycles, said_of, same_cycles, turning, undeclared
from retool_mcore.reward.points import names
from retool_mcore.reward.regions import region
from retool_mcore.reward.signs import holds, signed
from retool_mcore.reward.value import exact

Same = Callable[[Term, Term], bool]
_COUNTING = frozenset("knmijlrst")  # letters that count where nothing says what they are
_WHOLE = frozenset("knmij")  # and that do so between two ends, too
_STARTS = {"Z": None, "N": None, "N0": 0, "N1": 1}
_SHIFTS = (0, 1, -1, 2, -2)
_COUNTED = ("list", "set", "builder")


class _Bounds(NamedTuple):
    """What the notes say of a letter: the first and last number, or each of them."""

    letter: Term
    low: int | None = None
    high: int | None = None
    values: tuple[Term, ...] = ()
    space: str = ""


def as_family(node: Term) -> Term:
    r"""A family as ``family``, or as the set of its values; what is none as it is.

    Its first part is the name that it is said of, ``x`` of ``x = k\pi``.
    """
    if node.op == "union":
        return _joined(node)
    told = _parts(node)
    if told is None:
        return _endless(node)
    first, notes = told
    bounds = _bounds(notes, first)
    if bounds is None:
        return node
    if (told := said_of(first)) is None:
        return node
    subject, elements = told
    if bounds.letter.text in subject.text.split("_") or any(bounds.letter.text not in names(each) for each in elements):
        return node
    values = bounds.values or _counted(bounds)
    if values and not bounds.space and bounds.letter.text not in _WHOLE:
        return node
    if values:
        found = tuple(put(each, bounds.letter, value) for value in values for each in elements)
        listed = Term("set", found)
        return listed if subject == ANY else Term("relation", (subject, listed), r"\in")
    if bounds.high is not None or all(each == bounds.letter for each in elements):
        return node
    low = bounds.low
    index = Term("group", (Term("add", (INDEX, _whole(low))),)) if low else INDEX
    said = tuple(put(each, bounds.letter, index) for each in _each_sign(elements))
    kind = "Z" if low is None and bounds.space in ("Z", "") else "N?" if low is None else "N"
    return Term("family", (subject, *said), kind)


def counted(node: Term, other: Term, *, turns: bool) -> tuple[Term, Term]:
    """Both as families where both are some; a family of few numbers as the set of its values."""
    if not (_may_count(node) or _may_count(other)):
        return turning(node, other) if turns else (node, other)
    mine, theirs = as_family(node), as_family(other)
    if mine.op == theirs.op == "family":
        return mine, theirs
    if mine.op == "family" and mine.text == "Z" and (told := undeclared(other)) is not None:
        return mine, told.family("Z")
    if theirs.op == "family" and theirs.text == "Z" and (told := undeclared(node)) is not None:
        return told.family("Z"), theirs
    if turns and "family" not in (mine.op, theirs.op) and mine is node and theirs is other:
        return turning(node, other)
    return node if mine.op == "family" else mine, other if theirs.op == "family" else theirs


def _joined(node: Term) -> Term:
    """A union of families as one; of others as it is."""
    parts = [as_family(each) for each in node.args]
    alike = all(each.op == "family" and (each.text, each.args[0]) == ("Z", parts[0].args[0]) for each in parts)
    return Term("family", (ANY, *(said for each in parts for said in each.args[1:])), "Z") if alike else node


def _may_count(node: Term) -> bool:
    """Whether it may be a family: most lists and sets are told by a look."""
    if node.op not in _COUNTED:
        return node.op == "union" and any(each.op in ("builder", "union") for each in node.args)
    if node.op == "builder" or node.args[-1:] == (CUT_OFF,):
        return True
    return node.op == "list" and any(each.op == "relation" and each.text != "=" for each in node.args)


def _each_sign(elements: tuple[Term, ...]) -> Iterator[Term]:
    for each in elements:
        yield from (signed(each, 1), signed(each, -1)) if holds(each, "pm") else (each,)


def _parts(node: Term) -> tuple[tuple[Term, ...], list[Term]] | None:
    """The elements of a family and the notes about what it counts."""
    if node.op == "builder":
        element, condition = node.args
        notes = list(condition.args) if condition.op == "list" and condition.text != "or" else [condition]
        if is_membership(element):
            return ((element.args[0],), [element, *notes]) if element.args[1].text in _STARTS else None
        named = [each for each in notes if each.op == "relation" and each.text == "=" and each.args[0] == element]
        if element.op == "name" and len(named) == 1 and len(named[0].args) == 2 and names(named[0].args[1]):
            element = named[0].args[1]
            notes = [each for each in notes if each is not named[0]]
        return None if element.op == "name" else ((element,), notes)  # a set of numbers x
    if node.op != "list":
        return None
    notes = [each for each in node.args if _is_note(each)]
    first = [each for each in node.args if not _is_note(each)]
    if not notes or not first:
        return None
    return tuple(first), notes


def _is_note(node: Term) -> bool:
    if is_membership(node):
        return node.args[1].text in _STARTS
    if node.op != "relation" or node.text == "=":
        return False
    held = names(node)
    return len(held) == 1 and held <= _COUNTING and any(each.op == "name" for each in node.args)


def _bounds(notes: list[Term], elements: tuple[Term, ...]) -> _Bounds | None:
    """What all notes say, if they are about one letter; None where they say anything else."""
    letters = {letter for each in notes for letter in names(each)}
    if len(letters) != 1:
        return None
    letter = name(*letters)
    found = _Bounds(letter)
    bare = letter in elements or any(each.op == "relation" and each.args[0] == letter for each in elements)
    for at, each in enumerate(notes):
        if is_membership(each):
            if each.args[1].text not in _STARTS:
                return None
            start = _STARTS[each.args[1].text]
            found = found._replace(space=each.args[1].text, low=_later(found.low, start))
        elif each.op == "relation" and each.text in ("=", r"\in") and each.args[0] == letter:
            last = each.args[-1]
            values = (*(last.args if last.op == "set" else (last,)), *notes[at + 1 :])
            if each.text == r"\in" and last.op != "set":
                return None
            known = [exact(value) for value in values]
            if not values or any(value is None or value.denominator != 1 for value in known):
                return None
            return found._replace(values=values) if len(values) <= MAX_VALUES else None
        elif (told := _between(each, letter)) is not None:
            low, high = told
            ends = [end for end in (found.high, high) if end is not None]
            found = found._replace(low=_later(found.low, low), high=min(ends) if ends else None)
        else:
            return None
    if not found.space and (letter.text not in _COUNTING or bare):
        return None
    return found


def _later(first: int | None, second: int | None) -> int | None:
    said = [each for each in (first, second) if each is not None]
    return max(said) if said else None


def _between(node: Term, letter: Term) -> tuple[int | None, int | None] | None:
    """The first and the last whole number of an inequality about one letter; None for others."""
    if node.op != "relation" or set(node.text.split()) & {"=", r"\ne", r"\in"}:
        return None
    node = directed(node)
    where = region(node)
    if where is None or len(where) != 1 or letter.text not in names(node):
        return None
    low, low_in, high, high_in = where[0]
    infinite = float("inf")
    first = None if low == -infinite else _next(low, low_in)
    last = None if high == infinite else -_next(-high, high_in)
    return first, last


def _next(end: int | float, inside: bool) -> int:
    step = math.ceil(end)
    return step + 1 if step == end and not inside else step


def _counted(bounds: _Bounds) -> tuple[Term, ...]:
    if bounds.low is None or bounds.high is None or not 0 <= bounds.high - bounds.low < MAX_VALUES:
        return ()
    return tuple(map(_whole, range(bounds.low, bounds.high + 1)))


def _whole(value: int) -> Term:
    return number(value) if value >= 0 else Term("group", (Term("neg", (number(-value),)),))


def _endless(node: Term) -> Term:
    r"""``1, 2, 4, 8, \ldots`` and ``\{3, 7, 11, \ldots\}``, of three terms or more, by formula."""
    if node.op not in ("list", "set") or len(node.args) < 4 or node.args[-1] != CUT_OFF:
        return node
    values = [exact(each) for each in node.args[:-1]]
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return node
    step = known[1] - known[0]
    if step and all(after - before == step for before, after in pairwise(known)):
        said = Term("add", (_fraction(known[0]), Term("mul", (_fraction(step), INDEX))))
    elif known[0] and known[1] and all(after * known[0] == before * known[1] for before, after in pairwise(known)):
        said = Term("mul", (_fraction(known[0]), Term("pow", (_fraction(known[1] / known[0]), INDEX))))
    else:
        return node
    return Term("family", (ANY, said), "N")


def _fraction(value: Fraction) -> Term:
    found = Term("div", (number(abs(value.numerator)), number(value.denominator)))
    return Term("group", (Term("neg", (found,)) if value < 0 else found,))


def same_families(a: Term, b: Term, same: Same) -> bool:
    """Whether two families have the same values, each of one among those of the other."""
    (mine, *first), (theirs, *second) = a.args, b.args
    if mine != theirs and ANY not in (mine, theirs):
        return False
    if a.text == "Z" == b.text:
        if paired(first, second, lambda x, y: _same_cycle(x, y, same)):
            return True
        mine, theirs = cycles(first), cycles(second)
        return mine is not None and theirs is not None and same_cycles(mine, theirs)
    if "N?" in (a.text, b.text):  # which number is first is not said
        if a.text == b.text:
            return paired(first, second, same)
        told, open_at = (first, second) if b.text == "N?" else (second, first)
        return {a.text, b.text} == {"N", "N?"} and any(
            paired(told, [_shifted(each, start, 1) for each in open_at], same) for start in (0, 1)
        )
    return a.text == b.text and paired(first, second, same)


def paired(first: list[Term], second: list[Term], same: Same) -> bool:
    """Whether each of ``first`` has one of its own among as many of ``second``."""
    if len(first) != len(second):
        return False
    left = list(second)
    for each in first:
        found = next((at for at, other in enumerate(left) if same(each, other)), None)
        if found is None:
            return False
        left.pop(found)
    return True


def _same_cycle(a: Term, b: Term, same: Same) -> bool:
    return any(same(a, _shifted(b, shift, sign)) for sign in (1, -1) for shift in _SHIFTS)


def _shifted(node: Term, shift: int, sign: int) -> Term:
    if sign == 1 and not shift:
        return node
    index = Term("neg", (INDEX,)) if sign < 0 else INDEX
    return put(node, INDEX, Term("group", (Term("add", (index, _whole(shift))),)))
