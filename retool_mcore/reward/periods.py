r"""Formulas that rise by one step with a whole number: ``\frac{\pi}{4} + k\pi``, ``90^\circ n``.

Nothing need say that the number is whole, if it is a k, n or m beside pi or a degree. Two groups of
such formulas are one where they have the same values: ``2k\pi`` and ``2k\pi + \pi`` are ``k\pi``.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import NamedTuple

from retool_mcore.reward.node import Term, name, number, put
from retool_mcore.reward.points import names
from retool_mcore.reward.signs import holds, signed
from retool_mcore.reward.value import exact

MAX_VALUES = 40
INDEX = name("?n")
ANY = Term("")
_UNDECLARED = frozenset("knm")  # letters that count though nothing says so
_UNKNOWNS = frozenset(("x", "y", "z", "t", r"\theta", r"\alpha", r"\phi", r"\varphi"))
_FORMULAS = ("add", "mul", "neg", "div", "group", "degree", "pow", "pm")
_PI = Term("constant", text="pi")


def said_of(first: tuple[Term, ...]) -> tuple[Term, tuple[Term, ...]] | None:
    """The name that elements are said of, or any, and they: of ``x = 1, x = 2`` x and 1, 2."""
    if not any(each.op == "relation" for each in first):
        return ANY, first
    named = all(each.op == "relation" and each.text == "=" and len(each.args) == 2 for each in first)
    if not named or first[0].args[0].op != "name" or len({each.args[0] for each in first}) > 1:
        return None
    values = tuple(each.args[1] for each in first)
    return first[0].args[0], values[0].args if len(values) == 1 and values[0].op == "set" else values


class Undeclared(NamedTuple):
    """A formula with one letter that nothing says to be whole: ``x = \\frac{\\pi}{4} + k\\pi``."""

    subject: Term
    elements: tuple[Term, ...]
    letter: Term

    def family(self, kind: str) -> Term:
        return Term("family", (self.subject, *(put(each, self.letter, INDEX) for each in self.elements)), kind)

    def turns(self) -> bool:
        """Whether each element rises by one step, in which pi or a degree stands."""
        steps = [self._step(each) for each in self.elements]
        return all(_is_linear(each, self.letter) for each in self.elements) and all(
            holds(step, "degree") or (exact(step) is None and _holds_pi(step)) for step in steps
        )

    def begins_with_a_step(self) -> bool:
        """Whether one is a multiple of its step: ``(n-2)\\pi``, which may be of a given n."""
        ends = [Term("div", (put(each, self.letter, number(0)), self._step(each))) for each in self.elements]
        first = [exact(put(each, _PI, number(1))) for each in ends]
        return any(each is None or each.denominator == 1 for each in first)

    def _step(self, element: Term) -> Term:
        ends = [Term("group", (put(element, self.letter, number(each)),)) for each in (0, 1)]
        return Term("group", (Term("add", (ends[1], Term("neg", (ends[0],)))),))


def undeclared(node: Term) -> Undeclared | None:
    """The formula of a family without a note about its letter; None for anything else."""
    if node.op not in ("list", "relation") and node.op not in _FORMULAS:
        return None
    told = said_of(node.args if node.op == "list" else (node,))
    if told is None or any(each.op not in _FORMULAS for each in told[1]):
        return None
    letters = {letter for each in told[1] for letter in names(each)}
    if len(letters) != 1 or not letters <= _UNDECLARED or not all(map(names, told[1])):
        return None
    letter = name(*letters)
    elements = tuple(signed(each, sign) for each in told[1] for sign in ((1, -1) if holds(each, "pm") else (1,)))
    return None if letter.text in told[0].text.split("_") else Undeclared(told[0], elements, letter)


def turning(node: Term, other: Term) -> tuple[Term, Term]:
    r"""``\frac{\pi}{4} + k\pi`` and ``n\pi - \frac{3\pi}{4}``, without notes, as families.

    One letter on both sides is a given number, if no unknown is named: ``n\pi`` is no ``(n-2)\pi``.
    """
    mine = undeclared(node)
    theirs = None if mine is None else undeclared(other)
    if mine is None or theirs is None or not (mine.turns() and theirs.turns()):
        return node, other
    unknown = any(each.subject.text in _UNKNOWNS for each in (mine, theirs))
    if mine.letter == theirs.letter and not unknown:
        return node, other
    anywhere = unknown or not (mine.begins_with_a_step() or theirs.begins_with_a_step())
    kind = "Z" if anywhere else "of one step"
    return mine.family(kind), theirs.family(kind)


def _is_linear(node: Term, letter: Term) -> bool:
    if letter.text not in names(node) or node == letter:
        return True
    held = [each for each in node.args if letter.text in names(each)]
    if node.op == "div" and letter.text in names(node.args[1]):
        return False
    linear = node.op in ("add", "neg", "group", "degree", "div") or (node.op == "mul" and len(held) == 1)
    return linear and all(_is_linear(each, letter) for each in held)


def _holds_pi(node: Term) -> bool:
    return node == _PI or any(map(_holds_pi, node.args))


class _Cycle(NamedTuple):
    """Where a formula begins and its step, both in multiples of pi, of a degree or of 1."""

    first: Fraction
    step: Fraction
    of: str


def cycles(elements: list[Term]) -> list[_Cycle] | None:
    """Formulas that rise by one step, whose numbers are rational but for a factor of pi."""
    found: list[_Cycle] = []
    for each in elements:
        if not _is_linear(each, INDEX):
            return None
        ends = [put(each, INDEX, number(at)) for at in (0, 1)]
        told = [[exact(put(end, _PI, number(pi))) for end in ends] for pi in (1, 2)]
        first, second = told[0]
        if first is None or second is None or first == second:
            return None
        of = "" if told[1] == told[0] else "pi" if told[1] == [2 * first, 2 * second] else None
        if of is None:
            return None
        found.append(_Cycle(first, abs(second - first), "degree" if holds(each, "degree") else of))
    return found


def same_cycles(a: list[_Cycle], b: list[_Cycle]) -> bool:
    """``2k\\pi, 2k\\pi + \\pi`` is ``k\\pi``: the same values within a step that all have."""
    if len({each.of for each in (*a, *b)}) != 1:
        return False
    under = math.lcm(*(each.step.denominator for each in (*a, *b)))
    whole = Fraction(math.lcm(*(int(each.step * under) for each in (*a, *b))), under)
    if any(whole / each.step > MAX_VALUES for each in (*a, *b)):
        return False
    said = [
        {(each.first + at * each.step) % whole for each in some for at in range(int(whole / each.step))}
        for some in (a, b)
    ]
    return said[0] == said[1]
