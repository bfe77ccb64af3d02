"""Letters that are constants: of integration, SymPy's E and I, of a class of remainders."""

from retool_mcore.reward.node import Term, name, number, put
from retool_mcore.reward.points import names

_BIG_C = name("C")
_BIG_K = name("K")
_CONSTANTS = tuple(map(name, ("c", "C", "C_1", "c_1", "C_0", "c_0", "K", "k", "D", "A", "B")))
_SURE = 7  # the first ones are hardly anything else
_CONSTANT_NAMES = frozenset(f"{letter}{index}" for letter in "cC" for index in ("", "_1", "_2", "_3")) | {"K", "k"}
_ADDED = _CONSTANT_NAMES | {"C_0", "c_0", "D", "A", "B"}
_HOLD = ("add", "mul", "name", "relation")  # what a constant may stand in
_NUMBERED = [(name(f"c_{index}"), name(f"C_{index}")) for index in (1, 2, 3)]


def of_integration(node: Term, other: Term, is_truth: bool) -> Term:
    """``+ c`` and ``+ C_1`` as the ``+ C`` of the other side, ``c_1`` as its ``C_1``.

    A truth's own ``k`` may be given, and so may its ``A``.
    """
    if node.op == other.op == "relation" and node.text == other.text == "=" and len(node.args) == len(other.args) == 2:
        right = of_integration(node.args[1], other.args[1], is_truth)
        if right is node.args[1] and _is_y(node.args[0]) and _is_y(other.args[0]):
            right = _of_solution(right, other.args[1])
        return node if right is node.args[1] else Term("relation", (node.args[0], right), "=")
    if node.op == "relation" and other.op == "add" and node.text == "=" and len(node.args) == 2:
        right = of_integration(node.args[1], other, is_truth)
        return node if right is node.args[1] else Term("relation", (node.args[0], right), "=")
    if other.op == "relation" and other.text == "=" and len(other.args) == 2 and node.op == "add":
        return of_integration(node, other.args[1], is_truth)
    if node.op not in _HOLD or other.op not in _HOLD or node is other:
        return node
    mine, theirs = names(node), names(other)
    if mine.isdisjoint(_ADDED) or theirs.isdisjoint(_CONSTANT_NAMES):
        return node
    if node.op == other.op == "add":
        added = _BIG_C if _BIG_C in other.args else _BIG_K if _BIG_K in other.args and "C" not in mine else None
        own = frozenset(mine & _ADDED) - theirs
        for constant in _CONSTANTS[: _SURE if is_truth else None]:
            if added and added.text not in mine and constant in node.args and own == frozenset((constant.text,)):
                return put(node, constant, added)
    for small, big in _NUMBERED:
        if small.text in mine and big.text in theirs and big.text not in mine and small.text not in theirs:
            node = put(node, small, big)
    return node


def _is_y(node: Term) -> bool:
    return node == name("y") or (node.op == "mul" and node.args[0] == name("y"))


def _of_solution(node: Term, other: Term) -> Term:
    """``y = ce^x`` beside ``y = C_1e^x``, each with its one constant as C."""
    mine, theirs = names(node), names(other)
    said, told = mine & _CONSTANT_NAMES, theirs & _CONSTANT_NAMES
    if len(said) != 1 or len(told) != 1 or said == told or len(mine) < 2 or mine - said != theirs - told:
        return node
    return put(node, name(*said), _BIG_C)


_SYMPYS = {"E": Term("constant", text="e"), "I": Term("constant", text="i")}


def of_sympy(node: Term, other: Term, is_truth: bool) -> Term:
    """``-1 + E`` and ``4·I`` beside a value of ``e`` or ``i``, if no other name is there.

    An answer may be ``I`` alone; a truth that is a letter may be a matrix or a choice.
    """
    if not is_truth and node == name("I") and other == _SYMPYS["I"]:
        return other
    if node.op == "relation" and node.text == "=" and len(node.args) == 2 and other.op != "relation":
        right = of_sympy(node.args[1], other, is_truth)
        return node if right is node.args[1] else Term("relation", (node.args[0], right), "=")
    held = names(node)
    if node.op == "name" or not held or not held <= _SYMPYS.keys() or names(other):
        return node
    if any(not _holds(other, _SYMPYS[each]) for each in held):
        return node
    for each in held:
        node = put(node, name(each), _SYMPYS[each])
    return node


def _holds(node: Term, constant: Term) -> bool:
    return node == constant or any(_holds(each, constant) for each in node.args)


def of_classes(node: Term, other: Term) -> Term:
    r"""``x = 7k + 3`` beside ``x \equiv 3 \pmod 7`` as such a class, where 7 and 3 are numbers."""
    first = node.args[0] if node.op == "list" and len(node.args) == 2 and node.args[1].text == r"\in" else node
    classes = other.op == "relation" and other.text == r"\equiv" and other.args[-1].op == "mod"
    if classes and first.op in ("add", "mul") and len(names(first)) == 1 and other.args[0].op == "name":
        first = Term("relation", (other.args[0], first), "=")  # 4k + 1
    if not classes or first.op != "relation" or first.text != "=" or first.args[0] != other.args[0]:
        return node
    total = first.args[1]
    parts = total.args if total.op == "add" else (total,)
    held = [each for each in parts if names(each)]
    rest = [each for each in parts if not names(each)]
    times = held[0].args if len(held) == 1 and held[0].op == "mul" else ()
    if len(rest) > 1 or len(times) != 2 or times[0].op != "number" or times[1].op != "name":
        return node
    return Term("relation", (first.args[0], Term("mod", (rest[0] if rest else number(0), times[0]))), r"\equiv")
