r"""Vectors in their spellings: a row, a column, a tuple, and sums such as ``2\vec{i}-3\vec{j}``."""

from __future__ import annotations

from retool_mcore.reward.node import Term, name, put

_FAMILIES = ((Term("constant", text="i"), name("j"), name("k")),
             *(tuple(name(f"\\{sign}{letter}") for letter in "ijk") for sign in ("hat", "vec")))  # fmt: skip
_SUMS = ("add", "mul", "neg", "relation")


def vector(node: Term, other: Term, is_truth: bool) -> Term:
    """A row or column beside a tuple as one; a tuple beside ``2i-3j`` as such a sum."""
    if node.op == "matrix" and other.op == "tuple" and node.text in ("matrix 1", f"matrix {len(node.args)}"):
        return Term("tuple", node.args, other.text) if len(node.args) > 1 and other.text in ("()", "[]") else node
    told = node.op == "tuple" and (node.text == "()" or (node.text == "[]" and not is_truth))
    if told or (node.op == "matrix" and node.text == f"matrix {len(node.args)}"):
        for family in _FAMILIES if len(node.args) in (2, 3) else ():
            if other.op in ("add", "mul", "neg") and _held(other, family[1:]):
                return Term("add", tuple(Term("mul", pair) for pair in zip(node.args, family, strict=False)))
    return node


def by_unit_vectors(node: Term, other: Term) -> Term:
    r"""``2\hat{i}-3\hat{j}`` and ``2i-3j`` beside ``\vec{i}``, by the other's names."""
    if node.op not in _SUMS or other.op not in _SUMS:
        return node
    theirs = next((family for family in _FAMILIES if _held(other, family[1:])), None)
    mine = next((family for family in _FAMILIES if _held(node, family[1:])), None)
    if mine is None or theirs is None or mine is theirs:
        return node
    for letter, named in zip(mine, theirs, strict=True):
        node = put(node, letter, named)
    return node


def _held(node: Term, some: tuple[Term, ...]) -> bool:
    return node in some or any(_held(each, some) for each in node.args)
