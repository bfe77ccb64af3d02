"""Constants of integration, whose names are free."""

from retool_mcore.reward.node import Term, name, put
from retool_mcore.reward.points import names

_BIG_C = name("C")
_CONSTANTS = name("c"), name("C_1"), name("c_1")
_CONSTANT_NAMES = frozenset(f"{letter}{index}" for letter in "cC" for index in ("", "_1", "_2", "_3"))
_HOLD = ("add", "mul", "name", "relation")  # what a constant may stand in
_NUMBERED = [(name(f"c_{index}"), name(f"C_{index}")) for index in (1, 2, 3)]


def of_integration(node: Term, other: Term) -> Term:
    """``+ c`` and ``+ C_1`` as the ``+ C`` of the other side, ``c_1`` as its ``C_1``."""
    if node.op == other.op == "relation" and node.text == other.text == "=" and len(node.args) == len(other.args) == 2:
        right = of_integration(node.args[1], other.args[1])
        if right is node.args[1] and _is_y(node.args[0]) and _is_y(other.args[0]):
            right = _of_solution(right, other.args[1])
        return node if right is node.args[1] else Term("relation", (node.args[0], right), "=")
    if node.op not in _HOLD or other.op not in _HOLD:
        return node
    mine, theirs = names(node), names(other)
    if mine.isdisjoint(_CONSTANT_NAMES) or theirs.isdisjoint(_CONSTANT_NAMES):
        return node
    if node.op == other.op == "add" and _BIG_C in other.args and "C" not in mine:
        for constant in _CONSTANTS:
            if constant in node.args and not theirs & {constant.text} and len(mine & _CONSTANT_NAMES) == 1:
                return put(node, constant, _BIG_C)
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
