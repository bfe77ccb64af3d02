r"""Forms that are read by what stands on the other side: ``P(3,4)`` beside a pair is a point.

Each function gives the form as the other side has it, or the form as it is. The answer and the
truth are each read beside the other as it was written.
"""

from __future__ import annotations

from retool_mcore.reward.node import Term, name
from retool_mcore.reward.points import names

_PLACES = ("tuple", "matrix")
_FAMILIES = ((Term("constant", text="i"), name("j"), name("k")),
             *(tuple(name(f"\\{sign}{letter}") for letter in "ijk") for sign in ("hat", "vec")))  # fmt: skip


def beside(node: Term, other: Term, *, is_truth: bool) -> Term:
    """``node`` as it is read where ``other`` is on the other side."""
    node = _without_notes(node, other)
    if node.op == "relation":
        return _stated(node, other)
    if node.op in _PLACES:
        return _listed(_vector(node, other), other, is_truth)
    if other.op in _PLACES:
        return _placed(node, other)
    return _of_one_letter(node) if node.op == "list" and _lists_values(other) else node


def _lists_values(node: Term) -> bool:
    return node.op in ("list", "set") and not any(each.op == "relation" for each in node.args)


def _without_notes(node: Term, other: Term) -> Term:
    r"""``\frac{x+1}{x-1}, x \ne 1`` without its note, where the other has none."""
    if node.op != "list" or node.text == "or" or _excludes(other):
        return node
    first, *notes = node.args
    symbols = names(first)
    return first if all(_is_exclusion(each) and names(each) <= symbols for each in notes) else node


def _is_exclusion(node: Term) -> bool:
    return node.op == "relation" and set(node.text.split()) == {r"\ne"}


def _excludes(node: Term) -> bool:
    return _is_exclusion(node) or any(map(_excludes, node.args))


def is_point(node: Term) -> bool:
    """Whether it is a letter with a pair behind it, ``P(3,4)``: a point, a count or a value."""
    return node.op == "mul" and len(node.args) == 2 and node.args[0].op == "name" and node.args[1].op == "tuple"


def plain(node: Term) -> Term:
    """A matrix or tuple without brackets around it, and transposed where the sign says so."""
    while node.op == "group" and node.args[0].op in _PLACES:
        node = node.args[0]
    if node.op != "pow" or node.args[1] != name("T") or node.args[0].op not in _PLACES:
        return node
    inner = node.args[0]
    if inner.op == "tuple" or not inner.text.startswith("matrix "):
        return inner if inner.op == "tuple" else node
    rows = int(inner.text.split()[1])
    columns = len(inner.args) // rows
    turned = tuple(inner.args[row * columns + column] for column in range(columns) for row in range(rows))
    return Term("matrix", turned, f"matrix {columns}")


def _stated(node: Term, other: Term) -> Term:
    r"""``5 = x`` as ``x = 5``; beside a value ``2:3`` as 2/3, ``x \equiv 5 \pmod 7`` as 5 mod 7."""
    if node.text == "=" and len(node.args) == 2 and node.args[1].op == "name" and not names(node.args[0]):
        return Term("relation", node.args[::-1], "=")
    node = _ratio_behind_names(node)
    if other.op in ("relation", "list", "set", *_PLACES) or len(node.args) != 2:
        return node
    if node.text == ":" and not is_clock(node):
        return Term("div", node.args)
    return node.args[1] if node.text == r"\equiv" and node.args[1].op == "mod" and node.args[0].op == "name" else node


def _ratio_behind_names(node: Term) -> Term:
    """``AB:BC = 3:2`` as ``3:2``."""
    signs = node.text.split()
    half = len(signs) // 2
    if len(signs) < 3 or signs != [":"] * half + ["="] + [":"] * half:
        return node
    left, right = node.args[: half + 1], node.args[half + 1 :]
    named = all(map(names, left)) and not any(map(names, right))
    return Term("relation", right, " ".join(signs[half + 1 :])) if named else node


def is_clock(node: Term) -> bool:
    """Whether a part of a ratio is 0 or begins with 0: ``9:00`` and ``9:05`` are times of day."""
    texts = [each.text for each in node.args if each.op == "number"]
    return any(text.isdigit() and (text.startswith("0") or not int(text)) for text in texts)


def _vector(node: Term, other: Term) -> Term:
    """A row or column beside a tuple as one; a tuple beside ``2i-3j`` as such a sum."""
    if node.op == "matrix" and other.op == "tuple" and node.text in ("matrix 1", f"matrix {len(node.args)}"):
        return Term("tuple", node.args, other.text) if len(node.args) > 1 and other.text in ("()", "[]") else node
    if (node.op == "tuple" and node.text == "()") or (node.op == "matrix" and node.text == f"matrix {len(node.args)}"):
        for family in _FAMILIES if len(node.args) in (2, 3) else ():
            if other.op in ("add", "mul", "neg") and _held(other, family[1:]):
                return Term("add", tuple(Term("mul", pair) for pair in zip(node.args, family, strict=False)))
    return node


def _held(node: Term, some: tuple[Term, ...]) -> bool:
    return node in some or any(_held(each, some) for each in node.args)


def _listed(node: Term, other: Term, is_truth: bool) -> Term:
    """The list that Python prints, ``[1, 2]``, as a set or list where the truth is one."""
    if is_truth or node.op != "tuple" or node.text != "[]" or not _lists_values(other):
        return node
    return Term(other.op, node.args)


def _placed(node: Term, other: Term) -> Term:
    """``P(3,4)`` and ``x=3, y=4`` as the pair that they give."""
    if is_point(node):
        letter = node.args[0].text
        return node.args[1] if letter.isupper() and len(letter) == 1 else node
    if node.op == "list" and node.text != "or" and len(node.args) == len(other.args) and other.text != "[]":
        said = _named(node)
        alone = all(len(each.text) == 1 for each in said)
        if len(said) == len(node.args) and alone and len({each.text for each in said}) == len(said):
            return Term("tuple", tuple(said[each] for each in sorted(said, key=lambda one: one.text)), "()")
    return node


def _named(node: Term) -> dict[Term, Term]:
    """The values of ``x=3, y=4`` by name; others are left out."""
    parts = [each.args for each in node.args if each.op == "relation" and each.text == "="]
    return {pair[0]: pair[1] for pair in parts if len(pair) == 2 and pair[0].op == "name"}


def _of_one_letter(node: Term) -> Term:
    """``x_1 = 1, x_2 = 2`` as the list of these roots."""
    said = _named(node)
    indexed = len(said) == len(node.args) and all("_" in each.text for each in said)
    alike = {each.text.partition("_")[0] for each in said}
    return Term("list", tuple(said.values())) if indexed and len(alike) == 1 else node
