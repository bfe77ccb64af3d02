r"""Signs of both, ``\pm``, and what stands on the left of several equations."""

from retool_mcore.reward.node import Term, number
from retool_mcore.reward.points import names


def holds(node: Term, op: str) -> bool:
    return node.op == op or any(holds(each, op) for each in node.args)


def signed(node: Term, sign: int) -> Term:
    args = tuple(signed(each, sign) for each in node.args)
    if node.op != "pm":
        return Term(node.op, args, node.text, node.value)
    plus = (sign > 0) == (node.text == r"\pm")
    if args[1].op == "tuple" and args[0] == number(0):  # \pm (2, -1)
        each = args[1].args if plus else tuple(Term("neg", (one,)) for one in args[1].args)
        return Term("tuple", each, args[1].text)
    return Term("add", (args[0], args[1] if plus else Term("neg", (args[1],))))


def equations(a: Term, b: Term) -> list[Term] | None:
    """``3x \\pm 4y = 0`` beside ``y = \\pm 2x`` as two lists of equations; None for others."""
    found = list[Term]()
    for side in (a, b):
        each = side
        if side.op == "relation" and side.text == "=" and holds(side, "pm"):
            each = Term("list", (signed(side, 1), signed(side, -1)))
        if each.op != "list" or any(one.op != "relation" or one.text != "=" for one in each.args):
            return None
        found.append(each)
    return found if any(one.args[0].op != "name" for each in found for one in each.args) else None


def as_product(node: Term, other: Term) -> Term:
    """``x = 0 or y = 0`` beside one equation as ``xy = 0``; any other node as it is.

    Of several letters: ``x = 1 or x = 2`` solves an equation, and is more than that.
    """
    if node.op != "list" or node.text != "or" or other.op != "relation" or other.text != "=" or holds(other, "pm"):
        return node
    equations = all(each.op == "relation" and each.text == "=" and len(each.args) == 2 for each in node.args)
    if len(names(other)) < 2 or not equations:
        return node
    factors = (Term("add", (each.args[0], Term("neg", (each.args[1],)))) for each in node.args)
    return Term("relation", (Term("mul", tuple(factors)), number(0)), "=")


def _is_choice(node: Term) -> bool:
    node = node.args[0] if node.op == "group" else node
    return node.op == "name" and node.text in tuple("ABCDEFGH")


def solves(node: Term) -> bool:
    """Whether it gives values of several names, ``x=1, y=2``, or letters of choices."""
    if all(each.op in ("name", "group") for each in node.args):
        return all(_is_choice(each) for each in node.args)
    left = [each.args[0] for each in node.args if each.op == "relation" and each.text == "="]
    return len(left) == len(node.args) == len(set(left)) and all(each.op == "name" for each in left)
