"""What can be told of two answers without values of expressions: numbers, words, choices, texts.

Which tokens are a unit is told here too: it depends on both answers.
"""

import re
from fractions import Fraction

from retool_mcore.reward.beside import SUMS, beside, is_point
from retool_mcore.reward.choices import lists_choices, same_choice
from retool_mcore.reward.counts import COUNT_LETTERS, counted
from retool_mcore.reward.decimals import printed, written
from retool_mcore.reward.floats import apart
from retool_mcore.reward.node import Term, name, nary
from retool_mcore.reward.normalise import Normal, equal_numbers
from retool_mcore.reward.points import names
from retool_mcore.reward.radicals import same_radicals
from retool_mcore.reward.reader import read_measured
from retool_mcore.reward.regions import is_written, same_sets
from retool_mcore.reward.residues import proportional_rational, same_rational
from retool_mcore.reward.spelling import spelling
from retool_mcore.reward.spoken import same_day, same_time
from retool_mcore.reward.units import same_unit, scale
from retool_mcore.reward.value import exact
from retool_mcore.reward.vectors import by_accents, by_unit_vectors, plain

MAX_ELEMENTS = 6  # of a set that is compared here
MAX_CHARS = 200  # of two expressions that are compared here
_THOUSANDS = re.compile(r"(\d{1,6}(?:\.\d{1,3})?)[kK]|(\d{1,60})L")  # 70k and 70L, a long, beside a number
_LOWER_DIGITS = re.compile(r"\(?(?=\d{0,20}[a-f])([\da-f]{2,40})\)?_\{?(1[1-6])\}?")  # ab_{16}, beside a number
_CROSS = re.compile(r"\\vec\s?\{?\s?\w\s?\}?\s?\\times")
_COUNTS = frozenset(COUNT_LETTERS)
_FLOAT = re.compile(r"\.\d{13}")
_OTHER_MONEY = frozenset(("euro^1", "lb^1", "yuan^1", "yen^1", "rupee^1"))
CHEAP = ("number", "name", "constant", "neg", "add", "mul", "div", "pow", "root", "group")
FORMS = ("list", "tuple", "set", "builder", "matrix", "relation", "union", "intersection", "without", "space", "pm")


def measured(answer: Normal, truth: Normal) -> tuple[Normal, Normal]:
    """Both with the letters that are a unit read as one: ``6 m``, where the other has metres.

    Letters of an answer are so, too, behind a number and a space, where the truth is one number. A
    truth that has them bare is in letters: 6 is not ``6 m``.
    """
    mine, theirs = _measured(answer, truth), _measured(truth, answer, is_truth=True)
    mine, theirs = _beside(mine, theirs), _beside(theirs, mine, is_truth=True)
    return _counted(mine, theirs), _counted(theirs, mine)


def _beside(normal: Normal, other: Normal, *, is_truth: bool = False) -> Normal:
    if normal.tree is None or normal.tree.op == "number" or (other.tree is None and other.number is None):
        return normal
    node, beside_it = plain(normal.tree), plain(tree_of(other))
    plain_sums = node.op in SUMS and beside_it.op in SUMS and "vec" not in other.text
    if plain_sums and "j" not in normal.text and "k" not in normal.text:
        return normal if node is normal.tree else normal._replace(tree=node, number=exact(node))
    vectors = ("j" in normal.text and "j" in other.text) or ("k" in normal.text and "k" in other.text)
    if vectors and not is_truth:
        node = by_unit_vectors(node, beside_it)
    if "vec" in other.text and not is_truth:
        node = by_accents(node, beside_it)
    tree = beside(node, beside_it, is_truth=is_truth)
    return normal if tree is normal.tree else normal._replace(tree=tree, number=exact(tree))


def _counted(normal: Normal, other: Normal) -> Normal:
    """With ``C(10,3)`` and ``A_5^2`` as numbers, where the other is a value without C or A."""
    if normal.tree is None or _COUNTS.isdisjoint(normal.text):
        return normal
    if other.tree is not None and other.tree.op in FORMS and other.tree.op != "relation":
        return normal
    if is_point(normal.tree) and other.tree is not None and is_point(other.tree):
        return normal
    tree = counted(normal.tree, names(counted(other.tree, frozenset())) if other.tree is not None else frozenset())
    return normal if tree is normal.tree else normal._replace(tree=tree, number=exact(tree))


def _measured(normal: Normal, other: Normal, *, is_truth: bool = False) -> Normal:
    if normal.number is not None or normal.words is not None or (normal.tree and not names(normal.tree)):
        return normal
    unit = other.tree.text if other.tree is not None and other.tree.op == "unit" else ""
    if not unit and "_" in normal.text and other.number is not None and (said := _LOWER_DIGITS.fullmatch(normal.text)):
        return _based(normal, said[1].upper(), int(said[2]))
    if unit.startswith("?") or (not unit and (is_truth or not _is_plain(other))):
        return normal
    if not unit and not is_truth and (said := _THOUSANDS.fullmatch(normal.text)):
        return normal._replace(tree=None, number=Fraction(said[2] or said[1]) * (1 if said[2] else 1000))
    tree = read_measured(normal.text, unit)
    value = tree.args[-1] if tree is not None and tree.op == "relation" else tree
    return normal if tree is None or value is None or names(value) else normal._replace(tree=tree, number=exact(tree))


def _based(normal: Normal, digits: str, base: int) -> Normal:
    """A number in small letters as its value, where its digits are of that base."""
    if max(int(digit, 16) for digit in digits) >= base:
        return normal
    return normal._replace(tree=None, number=Fraction(int(digits, base)))


def _is_plain(normal: Normal) -> bool:
    """Whether an answer is one value without letters and unit."""
    if normal.tree is None:
        return normal.number is not None
    return normal.tree.op not in (*FORMS, "unit", "percent") and not names(normal.tree)


def tree_of(normal: Normal) -> Term:
    if normal.tree is not None:
        return normal.tree
    assert normal.number is not None, "what could not be read was compared as text"
    return Term("number", text=normal.text, value=normal.number)


def quick_verdict(answer: Normal, truth: Normal) -> bool | None:
    """Whether two answers are equal, where that takes no values of expressions; else None."""
    if not answer.text or not truth.text:
        return False
    if answer.label or truth.label:
        return _told_labels(answer, truth)
    if answer.text == truth.text or _same_choices(answer, truth):
        return True
    if answer.words is not None or truth.words is not None:
        answer, truth = _spelt(answer, truth), _spelt(truth, answer)
        if (told := _same_words(answer, truth)) is not None:
            return told
    if "vec" in answer.text and "vec" in truth.text and _is_cross(answer) != _is_cross(truth):
        return False
    answer, truth = measured(answer, truth)
    if (answer.tree is None and answer.number is None) or (truth.tree is None and truth.number is None):
        return spelling(answer.text) == spelling(truth.text)
    if answer.number is not None and truth.number is not None:
        return _same_numbers(answer, truth)
    mine, theirs = _numbers(answer.tree), _numbers(truth.tree)
    if mine is not None and theirs is not None and (mine == theirs or not _holds_floats(answer, truth)):
        return mine == theirs
    mine, theirs = _listed(answer.tree), _listed(truth.tree)
    if mine is not None and theirs is not None and _other_names(answer.tree, truth.tree):
        return False
    if mine is not None and theirs is not None and not _holds_floats(answer, truth):
        sets = "set" in (answer.tree.op if answer.tree else "", truth.tree.op if truth.tree else "")
        return set(mine) == set(theirs) if sets else mine == theirs
    return False if apart(tree_of(answer), tree_of(truth)) else _told_exactly(answer, truth)


def _same_numbers(answer: Normal, truth: Normal) -> bool:
    """Whether two rational values with their units, percent signs and currencies are one."""
    assert answer.number is not None and truth.number is not None, "both were read as numbers"
    if (answer.percent and truth.dollars) or (answer.dollars and truth.percent):
        return False
    units = [_unit(normal.tree) for normal in (answer, truth)]
    if (answer.percent and units[1]) or (truth.percent and units[0]):
        return False
    if (answer.dollars or truth.dollars) and _OTHER_MONEY.intersection(units):
        return False
    if "cent^1" in units:  # beside others a sign of currency is dropped
        units = [
            unit or ("dollar^1" if each.dollars else "") for unit, each in zip(units, (answer, truth), strict=True)
        ]
    if (times := scale(*units)) is not None:
        return answer.number * times == truth.number
    return (equal_numbers(answer, truth) or _printed(answer, truth)) and same_unit(*units)


def _holds_floats(answer: Normal, truth: Normal) -> bool:
    """Whether one holds a decimal that may be a float: ``[0.3333333333333333, 2]``."""
    return "." in answer.text + truth.text and _FLOAT.search(f"{answer.text} {truth.text}") is not None


def _spelt(normal: Normal, other: Normal) -> Normal:
    """``abc`` as a product, where the other is an expression in the same letters."""
    said = normal.words or ""
    if len(said) != 3 or normal.text != said or not said.isalpha() or other.tree is None or other.words is not None:
        return normal
    if names(other.tree) != frozenset(said):
        return normal
    return normal._replace(words=None, tree=nary("mul", [name(letter) for letter in said]))


def _same_words(answer: Normal, truth: Normal) -> bool | None:
    """Whether words are the same; None where both also say something as mathematics."""
    words = [each.words for each in (answer, truth) if each.words is not None]
    if len(words) == 2 and (words[0] == words[1] or any(map(str.isdigit, "".join(words)))):
        return words[0] == words[1] or same_day(*words)  # with digits they are dates and times
    if len(words) == 1 and any(same_time(words[0], each.text) for each in (answer, truth)):
        return True
    return None if all(each.number is not None or each.tree is not None for each in (answer, truth)) else False


def _unit(node: Term | None) -> str:
    if node is None or node.op not in ("unit", "degree"):
        return ""
    return node.text if node.op == "unit" else "degree^1"


def _listed(node: Term | None) -> list[Fraction] | None:
    """The rational numbers of ``1, 2``, ``x=1, x=2`` or a set, sorted; None for anything else."""
    if node is None or node.op not in ("list", "set"):
        return None
    named = [each.args for each in node.args if each.op == "relation" and each.text == "=" and len(each.args) == 2]
    parts = node.args
    if named and node.op == "list":  # all of one name
        alike = len(named) == len(parts) and len({name for name, _ in named}) == 1 and named[0][0].op == "name"
        parts = tuple(value for _, value in named) if alike else parts
    values = [exact(each) if each.op in ("number", "neg", "div", "group") else None for each in parts]
    known = [value for value in values if value is not None]
    return sorted(known) if len(known) == len(values) else None


def _is_cross(normal: Normal) -> bool:
    """Whether it is about a cross product, not a dot product."""
    return "\\times" in normal.text and _CROSS.search(normal.text) is not None


def _other_names(a: Term | None, b: Term | None) -> bool:
    """Whether two lists are said of two names: ``x=1, x=2`` and ``y=1, y=2``."""
    said = [[each.args[0] for each in node.args if each.op == "relation"] if node else [] for node in (a, b)]
    return all(said) and set(said[0]) != set(said[1])


def _told_exactly(answer: Normal, truth: Normal) -> bool | None:
    """Whether two short expressions are one by exact algebra; None where it takes decimals.

    What takes long, such as the remainder of a great factorial, is for a checker.
    """
    if len(answer.text) + len(truth.text) > MAX_CHARS:
        return None
    mine, theirs = tree_of(answer), tree_of(truth)
    if is_written(mine) and is_written(theirs) and (told := same_sets(mine, theirs)) is not None:
        return told
    if mine.op == theirs.op == "relation":
        return _same_equations(mine, theirs)
    if (said := _said(mine, theirs)) is not None:
        mine, theirs = said
    told = _told(mine, theirs)
    return None if told is False and "." in answer.text + truth.text else told  # it may round to it


def _said(a: Term, b: Term) -> tuple[Term, Term] | None:
    """``x = 5`` and 6 as 5 and 6: a name's value beside a value, without units both have."""
    relation, other = (a, b) if a.op == "relation" else (b, a)
    if relation.op != "relation" or relation.text != "=" or len(relation.args) != 2 or other.op in FORMS:
        return None
    value = relation.args[1]
    if relation.args[0].op != "name" or names(value) or names(other) or not _is_cheap(other):
        return None
    return value.args[0] if value.op == "unit" else value, other


def _told(a: Term, b: Term) -> bool | None:
    if a == b:
        return True
    if a.op == b.op and a.op in ("tuple", "matrix"):  # in order, with their brackets or shape
        if a.text != b.text or len(a.args) != len(b.args):
            return False
        parts = {_told(x, y) for x, y in zip(a.args, b.args, strict=True)}
        return False if False in parts else None if None in parts else True
    if a.op == b.op == "set" and len(a.args) <= MAX_ELEMENTS >= len(b.args):
        table = [[_told(x, y) for y in b.args] for x in a.args]
        if any(None in row for row in table):
            return None
        return all(map(any, table)) and all(map(any, zip(*table, strict=True)))
    if not (_is_cheap(a) and _is_cheap(b)):
        return None
    told = same_radicals(a, b)
    return same_rational(a, b) if told is None else told


def _same_equations(a: Term, b: Term) -> bool | None:
    """Whether two equations in letters are one but for a factor: y = 2x and 4x - 2y = 0."""
    both = a.text == b.text == "=" and len(a.args) == len(b.args) == 2 and names(a) == names(b) != frozenset()
    if not both or not all(map(_is_cheap, (*a.args, *b.args))):
        return None
    return proportional_rational(*(Term("add", (each.args[0], Term("neg", (each.args[1],)))) for each in (a, b)))


def _is_cheap(node: Term) -> bool:
    return node.op in CHEAP and all(map(_is_cheap, node.args))


def _same_choices(answer: Normal, truth: Normal) -> bool:
    """Whether both are the same letters, one of which can only be a choice: ``(g)`` and G."""
    if answer.words is None and truth.words is None and not lists_choices(truth.text):
        return False
    said = [each.words if each.words and len(each.words) == 1 else each.text for each in (answer, truth)]
    return same_choice(*said)


def _told_labels(answer: Normal, truth: Normal) -> bool | None:
    """``(B) 12`` is B, and it is 12; another ``(B) 12`` has both."""
    if answer.label and truth.label:
        behind = quick_verdict(answer._replace(label=""), truth._replace(label=""))
        return behind if answer.label == truth.label else False
    labelled, other = (answer, truth) if answer.label else (truth, answer)
    said = other.words if other.words and len(other.words) == 1 else other.text
    if len(said) == 1 and said.isalpha():
        return said.upper() == labelled.label
    return quick_verdict(answer._replace(label=""), truth._replace(label=""))


def _printed(answer: Normal, truth: Normal) -> bool:
    """Whether one is a float as Python prints it and the other the fraction that it stands for."""
    for decimal, other in ((answer, truth), (truth, answer)):
        if "." not in written(tree_of(other)) and decimal.number and other.number and decimal.number * other.number > 0:
            return printed(written(tree_of(decimal)), other.number, tree_of(other))
    return False


def _numbers(node: Term | None) -> tuple[str, tuple[Fraction, ...]] | None:
    """Brackets and values of a tuple, interval or set of rational numbers; else None.

    Those of a set, "{}", are sorted and without repeats.
    """
    if node is None or node.op not in ("tuple", "set"):
        return None
    values = [exact(each) if each.op not in ("unit", "degree") else None for each in node.args]
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return None
    return ("{}", tuple(sorted(set(known)))) if node.op == "set" else (node.text, tuple(known))
