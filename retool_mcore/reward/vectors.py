r"""Vectors and matrices: rows, columns, tuples, sums such as ``2\vec{i}-3\vec{j}``."""

from retool_mcore.reward.node import Term, name, put
from retool_mcore.reward.points import names

_FAMILIES = ((Term("constant", text="i"), name("j"), name("k")),
             *(tuple(name(f"\\{sign}{letter}") for letter in "ijk") for sign in ("hat", "vec")))  # fmt: skip
PLACES = ("tuple", "matrix")
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


def by_accents(node: Term, other: Term) -> Term:
    r"""``3\mathbf{a} - 2\mathbf{b}`` beside ``3\vec{a} - 2\vec{b}``, by the other's names."""
    mine, theirs = names(node), names(other)
    for each in theirs - mine:
        bare = each.removeprefix(r"\vec")
        if bare != each and len(bare) == 1 and bare in mine and bare not in theirs:
            node = put(node, name(bare), name(each))
    return node


def _held(node: Term, some: tuple[Term, ...]) -> bool:
    return node in some or any(_held(each, some) for each in node.args)


def plain(node: Term) -> Term:
    """A matrix or tuple without brackets around it, and transposed where the sign says so."""
    while node.op == "group" and node.args[0].op in PLACES:
        node = node.args[0]
    if node.op in ("mul", "neg", "div") and any(each.op == "matrix" for each in node.args):
        return _multiplied(node)
    if node.op == "neg" and node.args[0].op in ("mul", "div") and (inner := plain(node.args[0])).op == "matrix":
        return _multiplied(Term("neg", (inner,)))
    if node.op != "pow" or node.args[1] != name("T") or node.args[0].op not in PLACES:
        return node
    inner = node.args[0]
    if inner.op == "tuple" or not inner.text.startswith("matrix "):
        return inner if inner.op == "tuple" else node
    rows = int(inner.text.split()[1])
    columns = len(inner.args) // rows
    turned = tuple(inner.args[row * columns + column] for column in range(columns) for row in range(rows))
    return Term("matrix", turned, f"matrix {columns}")


def _multiplied(node: Term) -> Term:
    """A value times a matrix as the matrix of products."""
    held = [at for at, each in enumerate(node.args) if each.op == "matrix"]
    inside = any(_held_form(each) for at, each in enumerate(node.args) if at not in held)
    if (
        len(held) > 1
        or inside
        or (node.op == "div" and held != [0])
        or not node.args[held[0]].text.startswith("matrix ")
    ):
        return node
    at = held[0]
    cells = (Term(node.op, (*node.args[:at], cell, *node.args[at + 1 :])) for cell in node.args[at].args)
    return Term("matrix", tuple(cells), node.args[at].text)


def _held_form(node: Term) -> bool:
    return node.op in (*PLACES, "relation", "list", "set", "unit", "percent") or any(map(_held_form, node.args))


def rows(node: Term, other: Term) -> Term:
    """``((1, 2), (3, 4))`` beside a matrix as one."""
    if node.op != "tuple" or other.op != "matrix" or any(each.op != "tuple" for each in node.args):
        return node
    cells = tuple(cell for row in node.args for cell in row.args)
    alike = len({len(row.args) for row in node.args}) == 1
    return Term("matrix", cells, f"matrix {len(node.args)}") if alike else node
