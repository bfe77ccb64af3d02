r"""Whether a right answer is worked out, or could be a copy of the problem's own expression.

``e^{\ln 42}``, ``42+0x`` and ``\frac{84}{2}`` are 42, and say nothing that a problem may not have
said. "simplified" in reward.require pays none of them.
"""

from retool_mcore.reward.node import Term
from retool_mcore.reward.normalise import Normal, normalise
from retool_mcore.reward.units import SCALES

TIMES, MORE = 2, 1  # an answer may have so many times the truth's numbers and letters, and so many more
_AROUND = ("neg", "group", "unit", "degree", "percent")


def simplified(answer: str, truth: str) -> bool:
    """Whether a right answer is written as simply as its truth asks for.

    Where the truth is a rational number, the answer is one as written: digits, a decimal, a power
    of ten times one, a mixed number, or, of a value that is not whole, a fraction of whole numbers.
    Else it has at most ``TIMES`` the numbers and letters of the truth, and ``MORE``.
    """
    mine, theirs = normalise(answer), normalise(truth)
    if mine.tree is None:
        return "/" not in mine.text or mine.number is None or mine.number.denominator != 1
    said = _said(mine.tree) if theirs.tree is None or theirs.tree.op != "relation" else mine.tree
    if _asks_for_a_number(theirs, mine):
        return _written(said)
    return theirs.tree is None or _leaves(said) <= TIMES * _leaves(theirs.tree) + MORE


def _asks_for_a_number(truth: Normal, answer: Normal) -> bool:
    """Not where the truth is an angle, or a decimal that an irrational answer rounds to."""
    if truth.number is None or (truth.tree is not None and truth.tree.op == "degree"):
        return False
    return ("." not in truth.text or answer.number is not None) and (truth.tree is None or _written(truth.tree))


def _said(node: Term) -> Term:
    """What ``x = 40 + 2 = 42`` says in the end; of a value and its decimal the value."""
    if node.op != "relation":
        return node
    signs = node.text.split()
    cut = signs.index(r"\approx") if r"\approx" in signs[1:] else len(signs)
    return node.args[cut] if set(signs[:cut]) <= {"=", r"\approx"} else node


def _written(node: Term) -> bool:
    while node.op in _AROUND:
        node = node.args[0]
    args = [each.args[0] if each.op == "neg" else each for each in node.args]
    kinds = [each.op for each in args]
    if node.op == "div" and kinds == ["number", "number"]:
        return bool(args[1].value) and (args[0].value / args[1].value).denominator != 1
    if node.op == "add" and kinds == ["number", "div"]:  # a mixed number
        return _written(args[1])
    if node.op == "mul" and kinds == ["number", "number"]:
        return args[1].value in SCALES.values()  # 2 million
    if node.op == "mul" and kinds == ["number", "pow"]:
        return _written(args[1])
    return node.op == "number" or (node.op == "pow" and node.args[0].text == "10" and _written(node.args[1]))


def _leaves(node: Term) -> int:
    """How many numbers, letters and functions stand in a tree; the 2 of a square root does not."""
    args = node.args[:1] if node.op == "root" and node.args[1].text == "2" else node.args
    return sum(map(_leaves, args)) + (node.op == "function") if args else 1
