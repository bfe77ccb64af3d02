r"""Decide whether two answers are the same mathematics.

Both are read whole (``reader``) and compared by their form: values, tuples, sets, lists, matrices,
relations, and sets of real numbers, which have several spellings of their own (``regions``). What
cannot be read is compared as text. Nothing is equal that was not shown to be.

This runs in a checker process: values of hostile answers may take long.
"""

from itertools import pairwise
from math import gcd

from retool_mcore.reward.beside import is_clock
from retool_mcore.reward.decimals import printed, written
from retool_mcore.reward.evaluate import NoValue
from retool_mcore.reward.named import are_chances, directed, has_constant_term, is_name, same_letter
from retool_mcore.reward.node import CUT_OFF, Term, number, put
from retool_mcore.reward.normalise import Normal, normalise
from retool_mcore.reward.points import names
from retool_mcore.reward.quick import FORMS, measured, quick_verdict, tree_of
from retool_mcore.reward.radicals import same_radicals
from retool_mcore.reward.regions import same_sets
from retool_mcore.reward.residues import proportional_rational, same_rational
from retool_mcore.reward.signs import as_product, equations, holds, signed, solves
from retool_mcore.reward.units import same_unit, scale
from retool_mcore.reward.value import (
    close_to,
    exact,
    proportional,
    rounds_to,
    same_value,
)

MAX_ELEMENTS = 24  # of a set or list without order: each is compared with each
DEGREE = Term("div", (Term("constant", text="pi"), number(180)))


def equivalent(answer: str, truth: str) -> bool:
    """True when both are shown to be equal."""
    mine, theirs = normalise(answer), normalise(truth)
    known = quick_verdict(mine, theirs)
    return compared(mine, theirs) if known is None else known


def compared(answer: Normal, truth: Normal) -> bool:
    """``equivalent`` for two answers that ``quick_verdict`` leaves open."""
    mine, theirs = map(tree_of, measured(answer, truth))
    try:
        return _says(mine, theirs) or same(mine, theirs)
    except NoValue:
        return False


def same(a: Term, b: Term) -> bool:
    """Whether two trees are equal. Raises NoValue where values cannot be told."""
    a, b = _bare(a), _bare(b)
    if a == b:
        return True
    if "or" in (a.text, b.text):
        a, b = as_product(a, b), as_product(b, a)
        a, b = (_spread(each) if each.op == "list" and each.text == "or" else each for each in (a, b))
    if (a.op == "degree") != (b.op == "degree"):
        return _same_angle(*(a, b) if a.op == "degree" else (b, a))
    if (a.op in ("unit", "percent") or b.op in ("unit", "percent")) and "relation" not in (a.op, b.op):
        return _same_measured(a, b)
    if (told := same_sets(a, b)) is not None:
        return told
    if (both := equations(a, b)) is not None:
        return _same_elements(*both)
    if a.op == "relation" or b.op == "relation":
        return _same_relations(a, b)
    if (_list_name(a) or _list_name(b)) != (_list_name(b) or _list_name(a)):
        return False  # x = 1, 2 and y = 1, 2
    a, b = _spread(a), _spread(b)
    if a.op in ("list", "set") and b.op in ("list", "set"):
        return _same_elements(a, b)
    if a.op == b.op == "mod" and not same(a.args[1], b.args[1]):
        return False  # 5 mod 7 and 5 mod 8
    if a.op in FORMS or b.op in FORMS:
        return _same_forms(a, b)
    if _same_expressions(a, b):
        return True
    if holds(a, "degree") == holds(b, "degree"):
        return False
    return _same_expressions(_in_radians(a), _in_radians(b))  # 180^\circ - 2x and \pi - 2x


def _same_angle(angle: Term, other: Term) -> bool:
    """Degrees beside a number, which may be radians."""
    if other.op == "unit" and not other.text.startswith("?"):
        return other.text == "radian^1" and same(Term("mul", (angle.args[0], DEGREE)), other.args[0])
    if other.op == "percent":
        return False
    return same(angle.args[0], other) or same(Term("mul", (angle.args[0], DEGREE)), other)


def _in_radians(node: Term) -> Term:
    args = tuple(map(_in_radians, node.args))
    return Term("mul", (args[0], DEGREE)) if node.op == "degree" else Term(node.op, args, node.text, node.value)


def _bare(node: Term) -> Term:
    while node.op == "group":
        node = node.args[0]
    return node


def _same_measured(a: Term, b: Term) -> bool:
    """Values with a unit or percent sign on one or both sides."""
    units = [each.text if each.op == "unit" else "" for each in (a, b)]
    percents = [each.op == "percent" for each in (a, b)]
    first, second = (each.args[0] if each.op in ("unit", "percent") else each for each in (a, b))
    if (times := scale(*units)) is not None:
        return same(Term("mul", (first, number(times.numerator))), Term("mul", (second, number(times.denominator))))
    if not same_unit(*units) or (any(units) and any(percents)):
        return False
    if same(first, second):
        return True
    if percents[0] == percents[1] or first.op in FORMS or second.op in FORMS:
        return False
    hundredth = [
        Term("div", (each, number(100))) if sign else each
        for each, sign in ((first, percents[0]), (second, percents[1]))
    ]
    return same(*hundredth)


def _same_expressions(a: Term, b: Term) -> bool:
    known = exact(a), exact(b)
    if known[0] is not None and known[1] is not None:
        if known[0] == known[1] or known[0] * known[1] <= 0:
            return known[0] == known[1]
        return printed(written(a), known[1], b) or printed(written(b), known[0], a)
    told = same_radicals(a, b)
    told = same_rational(a, b) if told is None else told
    if told is not None:
        return told or (known[0] is None and rounds_to(b, a)) or (known[1] is None and rounds_to(a, b))
    try:
        if same_value(a, b):
            return True
    except NoValue:
        return _infinite(a) is not None and _infinite(a) == _infinite(b)
    return (known[0] is None and rounds_to(b, a)) or (known[1] is None and rounds_to(a, b))


def _infinite(node: Term) -> int | None:
    if node.op == "neg" and (inner := _infinite(node.args[0])):
        return -inner
    return 1 if node.op == "constant" and node.text == "infinity" else None


def _spread(node: Term) -> Term:
    """``1 \\pm 2`` as the list of its two values; ``x=1, x=2`` as the list ``1, 2``."""
    if node.op == "list":
        stated = [each for each in node.args if not _is_membership(each)] or [node]
        notes = filter(_is_membership, node.args)
        sides = [_named_value(each) for each in stated]
        known = [side for side in sides if side is not None]
        if sides[0] is not None and not any(each.op == "relation" for each in stated[1:]):
            return _spread(Term("list", (sides[0][1], *stated[1:], *notes)))  # x = 1, 2
        if len(known) == len(sides) and len({side[0] for side in known}) == 1:
            return _spread(Term("list", (*(side[1] for side in known), *notes)))
        if node.text == "or" and all(_told_same(node.args[0], each) for each in node.args[1:]):
            return node.args[0]  # 3/4 or 0.75
    if (holds(node, "pm") and node.op not in FORMS[:-1]) or _is_double_pair(node):
        return Term("list", (signed(node, 1), signed(node, -1)))
    if node.op in ("list", "set") and any(map(_is_double, node.args)):
        both = [(signed(each, 1), signed(each, -1)) if _is_double(each) else (each,) for each in node.args]
        return Term(node.op, tuple(each for pair in both for each in pair), node.text)
    return node


def _is_double(node: Term) -> bool:
    """An element with a sign of both: ``\\pm 2`` in a list."""
    return (node.op not in FORMS[:-1] and holds(node, "pm")) or _is_double_pair(node)


def _is_double_pair(node: Term) -> bool:
    """``(\\pm 2, 3)``, two pairs; ``(\\pm 1, \\pm 1)`` may be two or four."""
    return (
        node.op == "tuple"
        and node.text == "()"
        and (sum(holds(each, "pm") for each in node.args) == 1 or _has_both(node))
    )


def _has_both(node: Term) -> bool:
    r"""``(\pm 1, \mp 1)``, whose signs go together."""
    signs = {each.text for each in node.args if each.op == "pm"}
    return signs == {r"\pm", r"\mp"}


def _is_membership(node: Term) -> bool:
    r"""``k \in \mathbb{Z}``, a note of what a letter stands for."""
    return node.op == "relation" and node.text == r"\in" and node.args[1].op == "space" and node.args[0].op == "name"


def _list_name(node: Term) -> Term | None:
    """``x`` of ``x = 1, 2``."""
    if node.op != "list" or any(each.op == "relation" and not _is_membership(each) for each in node.args[1:]):
        return None
    named = _named_value(node.args[0])
    return named[0] if named else None


def _same_elements(a: Term, b: Term) -> bool:
    """Lists and sets without order. A list says how often each element stands in it."""
    mine, theirs = list(a.args), list(b.args)
    if any(each.op == "relation" for each in mine) != any(each.op == "relation" for each in theirs):
        return False  # x=1, y=2 says more than 1, 2
    if max(len(mine), len(theirs)) > MAX_ELEMENTS:
        return len(mine) == len(theirs) and all(map(_told_same, mine, theirs))
    if a.op == b.op == "list":
        if len(mine) != len(theirs) or ((a.text == "or") != (b.text == "or") and solves(a) and solves(b)):
            return False  # x=1 or y=2 is no x=1, y=2, and A or C is no A, C
        return _paired(mine, theirs)
    return all(any(_told_same(x, y) for y in theirs) for x in mine) and all(
        any(_told_same(x, y) for x in mine) for y in theirs
    )


def _paired(first: list[Term], second: list[Term]) -> bool:
    """Whether each of ``first`` has one of its own among as many of ``second``."""
    if len(first) != len(second):
        return False
    left = list(second)
    for each in first:
        found = next((at for at, other in enumerate(left) if _told_same(each, other)), None)
        if found is None:
            return False
        left.pop(found)
    return True


def _told_same(a: Term, b: Term) -> bool:
    try:
        return same(a, b)
    except NoValue:
        return False


def _same_forms(a: Term, b: Term) -> bool:
    """Forms with an order: the same brackets or shape, and the same elements one by one."""
    if a.op != b.op or len(a.args) != len(b.args):
        return False
    if a.op in ("union", "intersection") and same(a.args[0], b.args[1]) and same(a.args[1], b.args[0]):
        return True
    if a.op == "builder" and a.args[0].op == "name" == b.args[0].op:
        b = put(b, b.args[0], a.args[0])
    return a.text == b.text and all(map(same, a.args, b.args))


def _named_value(node: Term) -> tuple[Term, Term] | None:
    """The two sides of ``name = value``; of ``f(x) = a = b`` the first and the last, if a is b."""
    if node.op != "relation" or any(sign != "=" for sign in node.text.split()) or not is_name(node.args[0]):
        return None
    last = node.args[-1]
    return (node.args[0], last) if all(_told_same(each, last) for each in node.args[1:-1]) else None


def _same_relations(a: Term, b: Term) -> bool:
    if a.op != "relation" or b.op != "relation":
        relation, other = (a, b) if a.op == "relation" else (b, a)
        return _is_value_of(relation, other)
    b = same_letter(a, b)
    first, second = directed(a), directed(b)
    if first.text == second.text and len(first.args) == len(second.args):
        if all(map(_told_same, first.args, second.args)):
            return True
        if first.text in ("=", r"\ne", r"\parallel", r"\perp") and all(map(_told_same, first.args, second.args[::-1])):
            return True
    if set(first.text.split()) == {":"} == set(second.text.split()):
        return _same_ratio(first, second)
    named = _named_value(a), _named_value(b)
    for each, other in ((a, named[1]), (b, named[0])):
        if other is not None and not names(each) and set(each.text.split()) == {"="}:
            return _is_value_of(each, other[1])  # 3/8 = 0.375 beside P = 3/8
    if named[0] and named[1] and are_chances(named[0][0], named[1][0]):
        return same(named[0][1], named[1][1])
    if named[0] and named[1] and (len(a.args) > 2 or len(b.args) > 2):
        return same(named[0][0], named[1][0]) and same(named[0][1], named[1][1])
    return _same_difference(first, second)


def _same_ratio(a: Term, b: Term) -> bool:
    """3:4 is 6:8, and 1:2:3 is 2:4:6. A time of day is no ratio."""
    if len(a.args) != len(b.args):
        return False
    if is_clock(a) or is_clock(b) or _is_time(b):
        return all(map(same, a.args, b.args))
    return all(
        same(Term("mul", (x, b.args[0])), Term("mul", (y, a.args[0])))
        for x, y in zip(a.args[1:], b.args[1:], strict=True)
    )


def _is_time(node: Term) -> bool:
    """Whether a truth is a time of day, ``2:30``: a ratio of truth has its lowest terms."""
    texts = [each.text for each in node.args if each.op == "number"]
    if len(texts) != 2 or len(node.args) != 2 or not all(map(str.isdigit, texts)) or len(texts[1]) != 2:
        return False
    return int(texts[0]) < 24 and int(texts[1]) < 60 and gcd(int(texts[0]), int(texts[1])) > 1


def _same_difference(a: Term, b: Term) -> bool:
    """Whether both sides' difference is the same but for a factor: 2x = 4y and x - 2y = 0."""
    if a.text != b.text or a.text not in ("=", r"\ne", "<", r"\le") or _holds_form(a) or _holds_form(b):
        return False
    differences = [Term("add", (each.args[0], Term("neg", (each.args[1],)))) for each in (a, b)]
    symbols = [names(each) for each in differences]
    if not symbols[0] or symbols[0] != symbols[1]:
        return False
    positive = a.text in ("<", r"\le")
    told = proportional_rational(*differences)
    return told if told is not None and not (told and positive) else proportional(*differences, positive=positive)


def _holds_form(relation: Term) -> bool:
    return any(each.op in FORMS or holds(each, "unit") or holds(each, "percent") for each in relation.args)


def _says(answer: Term, truth: Term) -> bool:
    """``m+n = 25+9 = 34`` says 34 where the truth is one number; ``x^2 - 4 = 0`` says nothing."""
    if answer.op == "list" and truth.op not in FORMS and not names(truth) and (last := _summed(answer)) is not None:
        return same(last, truth)
    if answer.op == "tuple" and answer.text == "[]":
        named = _named_value(truth)  # z = 1 \pm 2
        values = _spread(named[1] if named else truth)
        if values.op == "list":
            return same(Term("list", answer.args), values)  # the list that Python prints, of 1 \pm 2
    if answer.op != "relation" or truth.op in FORMS or names(truth) or holds(answer, "matrix"):
        return False
    return _is_value_of(answer, truth, loose=True)


def _summed(node: Term) -> Term | None:
    """What ``m = 40, n = 73, m+n = 113`` says, where it is so; None for anything else."""
    sides = [each.args for each in node.args if each.op == "relation" and each.text == "=" and len(each.args) == 2]
    if len(sides) < len(node.args) or len(sides) < 2:
        return None
    if not any(map(names, node.args)):
        return _chained(sides)
    if any(each[0].op != "name" for each in sides[:-1]):
        return None
    left, value = sides[-1]
    known = frozenset(each.text for each, _ in sides[:-1])
    if left.op == "name" or names(left) != known or names(value):
        return None
    for letter, said in sides[:-1]:
        left = put(left, letter, said)
    return value if not names(left) and _told_same(left, value) else None


def _chained(sides: list[tuple[Term, ...]]) -> Term | None:
    """18 of ``16-3-4 = 9; 9*2 = 18``: each is right, and the next one goes on with its value."""
    if not all(_told_same(left, value) for left, value in sides):
        return None
    on = all(before[1] in _leaves(after[0]) for before, after in pairwise(sides))
    return sides[-1][1] if on else None


def _leaves(node: Term) -> list[Term]:
    return [found for each in node.args for found in _leaves(each)] if node.args else [node]


def _is_value_of(relation: Term, value: Term, *, loose: bool = False) -> bool:
    """``x = 5`` and ``2 + 3 = 5`` say 5; ``x^2 - 4 = 0`` does not say 0.

    ``loose``: so does any left side in letters that has no constant term. Decimals behind a sign of
    approximation must be close to what they stand for.
    """
    signs = relation.text.split()
    if signs == [r"\in"] and (relation.args[0].op == "tuple" or is_name(relation.args[0])):
        named = _named_value(value.args[0]) if value.op == "list" else None
        return (named is None or named[0] == relation.args[0]) and same(relation.args[1], value)
    if set(signs) - {"=", r"\approx"}:
        return False
    cut = signs.index(r"\approx") if r"\approx" in signs else len(signs)
    exactly, roughly = relation.args[: cut + 1], relation.args[cut + 1 :]
    first, last = exactly[0], exactly[-1]
    if first == CUT_OFF:
        return names(value) == frozenset() and value.op != "number" and _close(value, roughly[0])
    if cut == 0 and names(first):
        return is_name(first) and len(roughly) == 1 and same(roughly[0], value)
    if not all(_told_same(each, last) for each in exactly[1:-1]) or not all(_close(last, each) for each in roughly):
        return False
    if is_name(first) or first.op == "tuple":
        return same(last, value)
    if first.op in FORMS or last.op in FORMS:
        return False
    if names(first) and names(value):
        return all(_told_same(each, value) for each in exactly)  # x^2 - 1 = (x-1)(x+1)
    if names(first) or holds(first, "call"):
        return loose and not names(last) and not has_constant_term(first) and same(last, value)
    return same(first, last) and same(last, value)


def _close(value: Term, decimal: Term) -> bool:
    if decimal.op == "percent" and value.op != "percent":
        value, decimal = Term("mul", (value, number(100))), decimal.args[0]
    try:
        return close_to(value, decimal)
    except NoValue:
        return False
