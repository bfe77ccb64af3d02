"""What stands on the left of an equation: a name, a function of a letter, a segment."""

from retool_mcore.reward.node import Term, number, put
from retool_mcore.reward.points import names

_ECCENTRICITY = Term("constant", text="e")
FLIPPED = {"<": ">", r"\le": r"\ge", ">": "<", r"\ge": r"\le"}


def is_name(node: Term) -> bool:
    """A symbol, or a symbol applied to others: ``x``, ``f(x)``, ``P(n, k)``; a segment ``AB``."""
    if node.op == "call":
        return True
    if node.op == "mul" and len(node.args) == 2 and node.args[0].text == r"\nabla" and node.args[1].op == "name":
        return True  # the gradient of f
    if _is_segment(node) or _is_inverse(node):
        return True
    if node.op == "mul" and len(node.args) == 2 and all(each.text.startswith(r"\vec") for each in node.args):
        return True  # \vec{a} \cdot \vec{b}
    if node.op == "mul" and _is_inverse(node.args[0]):
        return len(node.args) == 2 and node.args[1].op == "group"
    if node.op == "mul" and node.args[0].op == "name":
        return node.args[1].op == "tuple" or (
            node.args[1].op == "group" and node.args[1].args[0].op in ("name", "number")
        )
    return node.op == "name" or node == _ECCENTRICITY


def _is_inverse(node: Term) -> bool:
    """``A^{-1}``, and the name in ``f^{-1}(x)``."""
    return node.op == "pow" and node.args[0].op == "name" and node.args[1] == Term("neg", (number(1),))


def _is_segment(node: Term) -> bool:
    """``AB``: two or three capital letters."""
    capitals = [each.op == "name" and len(each.text) == 1 and each.text.isupper() for each in node.args]
    return node.op == "mul" and len(capitals) < 4 and all(capitals)


def same_letter(a: Term, b: Term) -> Term:
    r"""``f(t) = 2t`` with the letter of ``f(x) = 2x``; polar ``r`` beside ``\rho``."""
    polar = {each.text for side in (a, b) for each in side.args[:1]} == {"r", r"\rho"}
    if polar and all(r"\theta" in names(each) for each in (a, b)) and not names(b) >= {"r", r"\rho"}:
        return put(b, b.args[0], a.args[0])
    mine, theirs = _applied(a.args[0]), _applied(b.args[0])
    if mine is None or theirs is None or mine[0] != theirs[0] or mine[1].text in names(b):
        return b
    return put(b, theirs[1], mine[1])


def _applied(node: Term) -> tuple[str, Term] | None:
    """A function of one letter, ``P(x)``: its name and the letter."""
    if node.op == "call" and len(node.args) == 1 and node.args[0].op == "name":
        return node.text, node.args[0]
    group = node.args[1] if node.op == "mul" and len(node.args) == 2 and node.args[0].op == "name" else node
    held = node.op == "mul" and group.op == "group" and group.args[0].op == "name"
    return (node.args[0].text, group.args[0]) if held else None


def directed(relation: Term) -> Term:
    """With less on the left."""
    signs = relation.text.split()
    if any(sign in (">", r"\ge") for sign in signs):
        return Term("relation", relation.args[::-1], " ".join(FLIPPED.get(sign, sign) for sign in reversed(signs)))
    return relation


def has_constant_term(node: Term) -> bool:
    """Whether a sum, multiplied out, has a number among its terms: ``(x-2)(x+2)`` has -4."""
    if node.op == "add":
        return any(map(has_constant_term, node.args))
    if node.op in ("mul", "div"):
        return all(map(has_constant_term, node.args))
    if node.op in ("neg", "group", "pow"):
        return has_constant_term(node.args[0])
    return node.op != "call" and not names(node)  # f(1) is no number that is told


def are_chances(a: Term, b: Term) -> bool:
    """Whether both name a probability and one has no event: ``P`` or ``p`` beside ``P(A)``."""
    letters = [_chance(each) for each in (a, b)]
    return all(letters) and any(each.op == "name" and each.text in "Pp" for each in (a, b))


def _chance(node: Term) -> bool:
    head = node.args[0] if node.op == "mul" else node
    return head.op in ("name", "call") and (head.text in ("P", "p") or head.text.startswith(("p(", "P(")))
