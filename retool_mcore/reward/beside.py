r"""Forms that are read by what stands on the other side: ``P(3,4)`` beside a pair is a point.

Each function gives the form as the other side has it, or the form as it is. The answer and the
truth are each read beside the other as it was written.
"""

from retool_mcore.reward.decimals import written
from retool_mcore.reward.node import Term, name, number
from retool_mcore.reward.points import names
from retool_mcore.reward.signs import holds
from retool_mcore.reward.value import exact
from retool_mcore.reward.vectors import rows, vector

_OF_SETS = ("union", "intersection", "without")
_PLACES = ("tuple", "matrix")
_SUMS = ("add", "mul", "neg")
SUMS = frozenset(("number", "name", "constant", "neg", "add", "div", "pow", "root", "function"))
_INVERSE = Term("pow", (name("f"), Term("neg", (number(1),))))


def beside(node: Term, other: Term, *, is_truth: bool) -> Term:
    """``node`` as it is read where ``other`` is on the other side."""
    node, other = _alike(node), _alike(other)
    if _are_eigenvalues(node):
        return _of_one_letter(node)
    node = _only_element(node, other)
    if node.op == "list" and node.text == "and" and other.op not in ("list", "set"):
        node = _mixed(node)
    node = _only_pair(node, other) if not is_truth else node
    other = _only_pair(other, node) if is_truth else other
    if other.op == "relation" and other.text == r"\in" and other.args[0].op == "name" and other.args[-1].op == "set":
        other = other.args[-1] if node.op == "tuple" else other  # [1, 2] beside x \in \{1, 2\}
    if node.op in _PLACES:
        node, other = _unnamed(node, other, is_truth)
    if node.op == "binomial" and other.op == "matrix" and other.text == "matrix 2" and len(other.args) == 2:
        return Term("matrix", node.args, "matrix 2")  # a column
    if node == name("R") and (other.op in ("space", "union", "without") or _is_line(other)):
        return Term("space", text="R")
    if not is_truth and (pairs := _pairs(node, other)):
        return Term("list" if other.op == "tuple" else other.op, pairs)
    if node.op == "set" and len(node.args) == 1 and _is_value(other):
        return node.args[0]
    node = _by_names(node, other)
    if node.op == "relation":
        return _stated(node, other, is_truth)
    if node.op in _PLACES:
        return _listed(vector(rows(node, other), other, is_truth), other, is_truth)
    if other.op in _PLACES:
        return _placed(node, other, is_truth)
    return _of_one_letter(node) if node.op == "list" and _lists_roots(other) else node


def _only_pair(node: Term, other: Term) -> Term:
    """``{(1, 2)}``, the one solution that a solver prints, as the pair."""
    only = node.op == "set" and len(node.args) == 1 and node.args[0].op == "tuple"
    return node.args[0] if only and _is_one(other) else node


def _unnamed(node: Term, other: Term, is_truth: bool) -> tuple[Term, Term]:
    """A pair beside that of ``v = (1, 2)``, or of ``(x, y) = (1, 2)``, which is no interval."""
    both = _is_named_tuple(other)
    if not both and (other.op != "relation" or other.text != "=" or other.args[0].op != "name"):
        return node, other
    listed = both and not is_truth and node.op == "tuple" and node.text == "[]"
    return Term("tuple", node.args, "()") if listed else node, other.args[-1]


def _only_element(node: Term, other: Term) -> Term:
    r"""``(x, y) \in \{(1, 2)\}`` as the pair."""
    told = node.op == "relation" and node.text == r"\in" and node.args[0].op == "tuple" and _is_one(other)
    return node.args[1].args[0] if told and node.args[1].op == "set" and len(node.args[1].args) == 1 else node


def _alike(node: Term) -> Term:
    r"""``a = b \in \{1, 2\}`` as the pairs (1, 1), (2, 2)."""
    if node.op != "relation" or not node.text.startswith("=") or not node.text.endswith(r"\in"):
        return node
    *letters, values = node.args
    alike = len(set(letters)) == len(letters) and all(each.op == "name" for each in letters)
    if not alike or values.op != "set" or set(node.text.split()) != {"=", r"\in"} or node.text.count(r"\in") > 1:
        return node
    pairs = tuple(Term("tuple", (each,) * len(letters), "()") for each in values.args)
    return pairs[0] if len(pairs) == 1 else Term("list", pairs)


def _mixed(node: Term) -> Term:
    """``13 and 1/3`` as the mixed number."""
    whole, *rest = node.args
    part = rest[0].args[0] if len(rest) == 1 and rest[0].op == "group" else rest[0]
    proper = part.op == "div" and all(each.op == "number" for each in part.args)
    if len(rest) > 1 or whole.op != "number" or not whole.text.isdigit() or not proper:
        return node
    return Term("group", (Term("add", (whole, part)),)) if part.args[0].value < part.args[1].value else node


def _is_line(node: Term) -> bool:
    return node.op == "tuple" and bool(node.args) and all(map(_endless, node.args))


def _endless(node: Term) -> bool:
    return node == Term("constant", text="infinity") or (node.op in ("neg", "group") and _endless(node.args[0]))


def _is_one(node: Term) -> bool:
    """A pair, or the equations that name it: ``x = 1, y = 2``."""
    return node.op in ("tuple", "relation") or (node.op == "list" and all(each.op == "relation" for each in node.args))


def _is_value(node: Term) -> bool:
    """Whether it is no collection: ``\\{3\\}`` beside 3 and ``x = 3`` is 3."""
    if node.op == "relation":
        return node.text == "=" and len(node.args) == 2 and node.args[0].op == "name" and _is_value(node.args[1])
    return node.op not in ("list", "set", "builder", "union", "intersection", "without", "space", "pm", *_PLACES)


def _pairs(node: Term, other: Term) -> tuple[Term, ...]:
    """The rows of ``[[1, 2], [3, 4]]`` beside a list of pairs, as Python prints them; points."""
    if (
        node.text == "[]"
        and other.op == "tuple"
        and holds(other, "pm")
        and all(each.op == "tuple" for each in node.args)
    ):
        return node.args
    if other.op not in ("list", "set") or not other.args or any(each.op != "tuple" for each in other.args):
        return ()
    if node.op == "tuple" and node.args and all(each.op == "tuple" for each in node.args):
        return node.args
    if node.op == "list" and all(map(is_point, node.args)):
        return _points(node)
    return ()


def _by_names(node: Term, other: Term) -> Term:
    """``(x,y) = (1,2), (3,4)`` as its pairs; beside ``x=1, y=2`` the pair as such a list."""
    if _is_named_tuple(node) and other.op == "list" and other.text != "or" and _named(other):
        left, right = node.args
        return Term("list", tuple(Term("relation", pair, "=") for pair in zip(left.args, right.args, strict=True)))
    if node.op != "list" or not _is_named_tuple(node.args[0]) or _is_named_tuple(other):
        return node
    left = node.args[0].args[0]
    told = [each.args[1] if _is_named_tuple(each) and each.args[0] == left else each for each in node.args]
    return Term("list", tuple(told)) if all(each.op == "tuple" for each in told) else node


def _is_named_tuple(node: Term) -> bool:
    if node.op != "relation" or node.text != "=" or len(node.args) != 2:
        return False
    left, right = node.args
    same = left.op == right.op == "tuple" and len(left.args) == len(right.args)
    return same and all(each.op == "name" for each in left.args)


def _lists_values(node: Term) -> bool:
    return node.op in ("list", "set", "pm") and not any(each.op == "relation" for each in node.args)


def _lists_roots(node: Term) -> bool:
    return _lists_values(node) or _is_of_one(node) or (node.op != "list" and holds(node, "pm"))


def _is_of_one(node: Term) -> bool:
    """``x = 1, 2``, or ``x = 1, x = 2``."""
    if node.op != "list" or node.args[0].op != "relation":
        return False
    said = [each for each in node.args if each.op == "relation"]
    named = len(said) in (1, len(node.args)) and all(each.text == "=" and len(each.args) == 2 for each in said)
    return named and said[0].args[0].op == "name" and len({each.args[0] for each in said}) == 1


def is_point(node: Term) -> bool:
    """Whether it is a letter with a pair behind it, ``P(3,4)``: a point, a count or a value."""
    return node.op == "mul" and len(node.args) == 2 and node.args[0].op == "name" and node.args[1].op == "tuple"


def _points(node: Term) -> tuple[Term, ...]:
    """The pairs of ``A(0,-4), B(3,5)``."""
    letters = {each.args[0].text for each in node.args}
    named = len(letters) == len(node.args) and all(len(each) == 1 and each.isupper() for each in letters)
    return tuple(each.args[1] for each in node.args) if named else ()


def _function_of(node: Term, other: Term) -> Term:
    """``y(x) = 2x`` and ``f(x) = 2x`` beside ``y = 2x``, ``a(n)`` beside ``a_n``, by that name."""
    if other.op != "relation" or node.text != "=" or len(node.args) != 2 or other.args[0].op != "name":
        return node
    left, right = node.args
    if left.op == "mul" and len(left.args) == 2 and other.args[0].text == "_".join(each.text for each in left.args):
        return Term("relation", (other.args[0], right), "=")  # Sn = 2n
    called = left.op == "mul" and len(left.args) == 2 and left.args[1].op == "group"
    inverse = called and left.args[0] == _INVERSE
    called = inverse or (called and left.args[0].op == "name")
    mine, of = (left.args[0].text, left.args[1].args[0]) if called else (left.text, left.args[0] if left.args else left)
    mine = "f" if inverse else mine
    if not (called or (left.op == "call" and len(left.args) == 1)) or of.op != "name" or of.text not in names(right):
        return node
    theirs = other.args[0].text
    primes = mine.removeprefix("f")
    same = theirs in (mine, f"{mine}_{of.text}") or (
        mine == f"f{primes}" and theirs == f"y{primes}" and "_" not in mine
    )
    return Term("relation", (other.args[0], right), "=") if same else node


def _stated(node: Term, other: Term, is_truth: bool) -> Term:
    r"""``5 = x`` as ``x = 5``; beside a value ``2:3`` as 2/3, ``x \equiv 5 \pmod 7`` as 5 mod 7."""
    if node.text == "=" and len(node.args) == 2 and node.args[1].op == "name" and not names(node.args[0]):
        return Term("relation", node.args[::-1], "=")
    node = _function_of(_angle(node, other), other)
    if node.text == ": =" and node.args[0].op == "name" and len(names(node)) > 1 and _is_curve(node.args[1]):
        node = Term("relation", node.args[1:], "=")  # l: x + 2y = 3
    if _names_set(node) and other.op == "relation" and other.text != "=":
        return node.args[1]  # A = [1, 3) beside 1 \le x < 3
    if node.text == "=" and len(node.args) == 2 and _names_matrix(node.args[0]) and other.op == "matrix":
        return node.args[1]  # A^T = ...
    if node.text == "=" and len(node.args) == 2 and node.args[0].op == "name" and other.op in ("list", "set"):
        listed = node.args[1].text == "[]" and not is_truth
        return Term("relation", (node.args[0], _listed(node.args[1], other, is_truth)), "=") if listed else node
    theirs = other.args[1] if _is_vector(other) else other
    if _names_value(node) and (theirs.op in _PLACES or (theirs.op in _SUMS and node.args[1].op in _PLACES)):
        return Term("relation", (node.args[0], vector(node.args[1], theirs, is_truth)), "=")
    if node.text == "=" and len(node.args) == 2 and node.args[0].op in _OF_SETS and other.op != "relation":
        return (
            node.args[1] if node.args[1].op not in _OF_SETS or not names(node.args[1]) else node
        )  # A \\cap B = (1, 2)
    if other.text == "=" and node.text in (":", r"\to"):
        return _beside_equation(node, other)
    if set(node.text.split()) == {"="} and other.op in _PLACES:
        return _all_same(node, other)
    if other.op in ("relation", "list", "set", *_PLACES) or len(node.args) != 2:
        return node
    if node.text in (":", r"\to") and node.args[0].op == "name" and not names(node.args[1]) | names(other):
        return Term("relation", node.args, "=")  # x: 7
    if node.text == ":" and not is_clock(node):
        return Term("div", node.args)
    if node.text == r"\equiv" and node.args[1].op == "mod" and node.args[0].op == "name" and not names(other):
        return node if is_truth and other.op != "mod" else node.args[1]  # 1 is no class of remainders
    return node


def _angle(node: Term, other: Term) -> Term:
    r"""``A = 60^\circ`` beside ``\angle A = 60^\circ`` by that name."""
    if other.op != "relation" or node.args[0].op != "name" or other.args[0].text != rf"\angle{node.args[0].text}":
        return node
    return Term("relation", (other.args[0], *node.args[1:]), node.text)


def _beside_equation(node: Term, other: Term) -> Term:
    """``x: 7`` beside ``x = 7`` as such; ``4:5`` beside ``AB/CD = 4/5`` as a quotient."""
    if node.args[0] == other.args[0] and node.args[0].op == "name":
        return Term("relation", node.args, "=")
    return Term("div", node.args) if node.text == ":" and not names(node) and not is_clock(node) else node


def _is_vector(node: Term) -> bool:
    """``v = (1, 2)``, also as a column."""
    return _names_value(node) and node.args[1].op in _PLACES


def _names_value(node: Term) -> bool:
    return node.op == "relation" and node.text == "=" and len(node.args) == 2 and node.args[0].op == "name"


def _all_same(node: Term, other: Term) -> Term:
    """``x = y = 0`` as the pair (0, 0)."""
    letters, value = node.args[:-1], node.args[-1]
    alike = len(set(letters)) == len(letters) == len(other.args) > 1 and all(each.op == "name" for each in letters)
    return Term("tuple", (value,) * len(letters), "()") if alike and not names(value) else node


def _names_set(node: Term) -> bool:
    return (
        node.text == "="
        and len(node.args) == 2
        and node.args[0].op == "name"
        and node.args[0].text.isupper()
        and node.args[1].op in ("builder", "tuple", "union")
    )


def _names_matrix(node: Term) -> bool:
    return node.op == "pow" and node.args[0].op == "name" and node.args[0].text.isupper()


def _is_curve(node: Term) -> bool:
    """Whether the left side of an equation behind a colon is no part of a ratio."""
    return node == name("y") or (node.op == "add" and bool(names(node)))


def _listed(node: Term, other: Term, is_truth: bool) -> Term:
    """The list that Python prints, ``[1, 2]``, as a set or list where the truth is one."""
    column = node.op == "matrix" and node.text in ("matrix 1", f"matrix {len(node.args)}")
    solved = other.op == "list" and other.text != "or" and len(other.args) == len(node.args) and len(node.args) > 1
    if solved and _are_eigenvalues(other):
        return Term("list", node.args)  # in any order
    if (column or (node.text == "[]" and not is_truth)) and solved and _by_letter(other) is not None:
        return Term("tuple", node.args, "()")
    if node.op != "tuple" or node.text != "[]" or (is_truth and not _is_printed(node)):
        return node
    if other.op == "tuple" and other.text == "()" and not _is_interval(node):
        return Term("tuple", node.args, "()")
    listed = _lists_values(other) and other.op != "pm"
    return Term(other.op, node.args) if listed else node


def _is_printed(node: Term) -> bool:
    """Whether a truth in brackets is a list: not of two values, but for floats, ``[1.0, 2.0]``."""
    if len(node.args) != 2:
        return bool(node.args)
    said = [written(each) for each in node.args]
    return all("." in each for each in said) and any(each.endswith(".0") for each in said)


def _is_interval(node: Term) -> bool:
    """Whether ``[a, b]`` may be an interval: ``[8, -3]`` is none."""
    ends = [exact(each) for each in node.args]
    return len(ends) == 2 and (ends[0] is None or ends[1] is None or ends[0] <= ends[1])


def _placed(node: Term, other: Term, is_truth: bool) -> Term:
    """``P(3,4)`` and ``x=3, y=4`` as the pair that they give."""
    if is_point(node):
        letter = node.args[0].text
        return node.args[1] if letter.isupper() and len(letter) == 1 else node
    alike = node.op == "list" and node.text != "or" and len(node.args) == len(other.args)
    if alike and (is_truth or other.text != "[]") and (said := _by_letter(node)) is not None:
        return Term("tuple", said, "()")
    return node


def _by_letter(node: Term) -> tuple[Term, ...] | None:
    """The values of ``x=3, y=4`` in the alphabet's order, Greek letters last; else None."""
    said = _named(node)
    alone = all(len(each.text) == 1 or each.text[:1] == "\\" for each in said)
    if len(said) != len(node.args) or not alone or len({each.text for each in said}) != len(said):
        return None
    return tuple(said[each] for each in sorted(said, key=lambda one: (one.text[:1] == "\\", one.text)))


def _named(node: Term) -> dict[Term, Term]:
    """The values of ``x=3, y=4`` by name; others are left out."""
    parts = [each.args for each in node.args if each.op == "relation" and each.text == "="]
    return {pair[0]: pair[1] for pair in parts if len(pair) == 2 and pair[0].op == "name"}


def _are_eigenvalues(node: Term) -> bool:
    r"""``\lambda_1 = 1, \lambda_2 = 3``, which have no order."""
    said = _named(node) if node.op == "list" else {}
    return bool(said) and all(each.text.startswith(r"\lambda_") for each in said)


def _of_one_letter(node: Term) -> Term:
    """``x_1 = 1, x_2 = 2`` as the list of these roots."""
    said = _named(node)
    indexed = len(said) == len(node.args) and all("_" in each.text for each in said)
    alike = {each.text.partition("_")[0] for each in said}
    return Term("list", tuple(said.values())) if indexed and len(alike) == 1 else node


def is_clock(node: Term) -> bool:
    """Whether a part of a ratio is 0 or begins with 0: ``9:00`` and ``9:05`` are times of day."""
    texts = [each.text for each in node.args if each.op == "number"]
    return any(text.isdigit() and (text.startswith("0") or not int(text)) for text in texts)
