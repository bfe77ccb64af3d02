"""The tree of an answer."""

from __future__ import annotations

from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

from retool_mcore.reward.tokens import Unreadable

MAX_DEPTH = 60  # of nested groups; answers have fewer than ten
MAX_TREE_DEPTH = 80  # of a tree, where a chain of signs such as !!! counts too
MAX_DIGITS = 2000  # of a number that is compared exactly
MAX_POWER_OF_TEN = 999
_ZERO = Fraction(0)


class Term(NamedTuple):
    """``op`` applied to ``args``; a number's ``value``, a name's or relation's ``text``.

    A number's ``text`` is how it was written: its digits say how exact it is.
    """

    op: str
    args: tuple[Term, ...] = ()
    text: str = ""
    value: Fraction = _ZERO


@lru_cache(maxsize=2048)
def number(said: str | int) -> Term:
    """The node of a number. Raises Unreadable for one with absurdly many digits."""
    text = str(said)
    if len(text) > MAX_DIGITS:
        raise Unreadable(f"a number has {len(text)} digits; {MAX_DIGITS} are the most")
    if text.isdigit() and text.isascii():
        return Term("number", text=text, value=Fraction(int(text)))
    digits, _, exponent = text.lower().partition("e")
    if exponent and abs(int(exponent)) > MAX_POWER_OF_TEN:
        raise Unreadable(f"the power of ten of {text:.40} is beyond {MAX_POWER_OF_TEN}")
    value = Fraction(digits.rstrip(".") or "0")
    return Term("number", text=text, value=value * Fraction(10) ** int(exponent) if exponent else value)


@lru_cache(maxsize=2048)
def name(said: str) -> Term:
    """The node of a symbol."""
    return Term("name", text=said)


def put(node: Term, letter: Term, value: Term) -> Term:
    """A tree with ``value`` in place of ``letter``, which is a name or a constant."""
    if (node.op, node.text) == (letter.op, letter.text):
        return value
    if not node.args:
        return node
    return Term(node.op, tuple(put(each, letter, value) for each in node.args), node.text, node.value)


def size(node: Term) -> int:
    """How many nodes a tree has."""
    return 1 + sum(map(size, node.args))


def nary(op: str, parts: list[Term]) -> Term:
    """``op`` of all parts; of a single one, that part."""
    return parts[0] if len(parts) == 1 else Term(op, tuple(parts))


FUNCTIONS = {
    "\\" + word
    for word in [
        "sin",
        "cos",
        "tan",
        "cot",
        "sec",
        "csc",
        "arcsin",
        "arccos",
        "arctan",
        "arccot",
        "arcsec",
        "arccsc",
        "sinh",
        "cosh",
        "tanh",
        "coth",
        "asinh",
        "arcsinh",
        "arccosh",
        "arctanh",
        "ln",
        "log",
        "lg",
        "arg",
        "exp",
        "abs",
        "gcd",
        "lcm",
        "max",
        "min",
        "cis",
    ]
}
TRIGONOMETRIC = {"sin", "cos", "tan", "cot", "sec", "csc", "cis"}
CONSTANTS = {r"\pi": "pi", r"\infty": "infinity", "e": "e", "i": "i"}
GREEK = {
    "\\" + word
    for word in [
        "alpha",
        "beta",
        "gamma",
        "delta",
        "epsilon",
        "zeta",
        "eta",
        "theta",
        "iota",
        "kappa",
        "lambda",
        "mu",
        "nu",
        "xi",
        "rho",
        "sigma",
        "tau",
        "upsilon",
        "phi",
        "chi",
        "psi",
        "omega",
        "Gamma",
        "Delta",
        "Theta",
        "Lambda",
        "Xi",
        "Pi",
        "Sigma",
        "Phi",
        "Psi",
        "Omega",
        "ell",
        "hbar",
        "nabla",
        "partial",
        "circ",
    ]
}


CUT_OFF = name("…")  # what 0.6180339887... is about: its digits go on


@lru_cache(maxsize=512)
def constant_or_name(letter: str) -> Term:
    """The node of a letter that stands alone."""
    return Term("constant", text=CONSTANTS[letter]) if letter in CONSTANTS else name(letter)
