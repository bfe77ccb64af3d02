r"""Signs of both, ``\pm``, and what stands on the left of several equations."""

from retool_mcore.reward.node import Term, number


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


def _is_choice(node: Term) -> bool:
    node = node.args[0] if node.op == "group" else node
    return node.op == "name" and node.text in tuple("ABCDEFGH")


def solves(node: Term) -> bool:
    """Whether it gives values of several names, ``x=1, y=2``, or letters of choices."""
    if all(each.op in ("name", "group") for each in node.args):
        return all(_is_choice(each) for each in node.args)
    left = [each.args[0] for each in node.args if each.op == "relation" and each.text == "="]
    return len(left) == len(node.args) == len(set(left)) and all(each.op == "name" for each in left)
