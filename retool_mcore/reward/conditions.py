r"""Conditions behind an answer: ``x \ne 1``, ``k \in \mathbb{Z}``, ``n \ge 1``.

They count only where both sides state them.
"""

from fractions import Fraction

from retool_mcore.reward.node import Term, number, put
from retool_mcore.reward.points import names


def without_notes(node: Term, other: Term, is_truth: bool) -> Term:
    r"""``\frac{x+1}{x-1}, x \ne 1`` without its note, where the other has none."""
    if node.op != "list" or _excludes(other):
        return node
    first, *notes = node.args
    if node.text == "or" or (members(node) and not all(map(is_membership, notes))):
        return _of_members(node, other, is_truth)
    if first.op == "relation" and first.text != "=":
        return node  # x > 1, x \ne 3 is a set
    symbols = names(first)
    if len(_starts(node) | _starts(other)) > 1:
        return node  # k >= 0 and k >= 2
    if all((_is_exclusion(each) or _start(each) is not None) and names(each) <= symbols for each in notes):
        return first
    if all(_is_positive(each) and names(each) <= symbols for each in notes) and not any(map(_is_positive, other.args)):
        return first  # v = f\lambda, f > 0
    if not all(map(is_membership, notes)):
        return node
    theirs = members(other)
    if not theirs:
        return first
    mine = members(node)
    if not is_truth and len(mine) == len(theirs) == 1 and theirs[0].text not in names(node):
        return put(node, mine[0], theirs[0])  # n \in \mathbb{Z} beside k \in \mathbb{Z}
    return node


def _of_members(node: Term, other: Term, is_truth: bool) -> Term:
    """Several families with one note, ``k \\in \\mathbb{Z}``, in the letter of the other side."""
    mine, theirs = members(node), members(other)
    if not mine or len(mine) > 1:
        return node
    if not theirs:
        return Term("list", tuple(each for each in node.args if not is_membership(each)), node.text)
    alone = not is_truth and len(theirs) == 1 and theirs[0].text not in names(node)
    return put(node, mine[0], theirs[0]) if alone else node


def is_membership(node: Term) -> bool:
    r"""``k \in \mathbb{Z}``, a note of what a letter stands for."""
    return node.op == "relation" and node.text == r"\in" and node.args[1].op == "space" and node.args[0].op == "name"


def members(node: Term) -> list[Term]:
    return [each.args[0] for each in node.args if node.op == "list" and is_membership(each)]


def _is_exclusion(node: Term) -> bool:
    return node.op == "relation" and set(node.text.split()) == {r"\ne"}


def _start(node: Term) -> Fraction | None:
    r"""1 of ``n \ge 1`` and ``n > 0``, a note that n counts from there; None for any other."""
    if node.op != "relation" or node.text not in (r"\ge", ">") or node.args[1].op != "number":
        return None
    start = node.args[1].value + (node.text == ">")
    return start if node.args[0].text in ("n", "k", "m") and start in (0, 1, 2) else None


def _is_positive(node: Term) -> bool:
    r"""``a > 0``, a note of what a letter may be; of x, y, z it is a part of the curve."""
    return (
        node.op == "relation"
        and node.text in (">", r"\ge")
        and node.args[1] == number(0)
        and node.args[0].op == "name"
        and node.args[0].text not in ("x", "y", "z", "t", r"\theta")
    )


def is_start(node: Term) -> bool:
    return _start(node) is not None


def _starts(node: Term) -> set[Fraction]:
    return {start for each in node.args if node.op == "list" and (start := _start(each)) is not None}


def _excludes(node: Term) -> bool:
    return _is_exclusion(node) or any(map(_excludes, node.args))
