"""Compare rational expressions exactly: by their remainders at several primes.

2^2024 + 1 and 2^2024 - 1 agree to 600 digits. Their remainders differ at any prime but 2, and cost
nothing: powers, products and factorials are reduced at every step. Two different values agree at
all of these primes only by an accident of one in 10^90. Letters, and pi, stand for remainders that
are drawn: different expressions agree there by an accident of one in 10^40.
"""

import random
from fractions import Fraction
from functools import lru_cache

from retool_mcore.reward.node import Term
from retool_mcore.reward.points import names

PRIMES = (10**18 + 3, 10**18 + 9, 2**61 - 1, 2**89 - 1)
MAX_FACTORIAL = 100_000  # one product of each number up to it
MAX_CHOSEN = 10_000
MAX_TOWER = 8  # powers in exponents
_LETTER_PRIMES = PRIMES[-2:]
_OPS = ("number", "name", "constant", "neg", "add", "mul", "div", "pow", "factorial", "binomial", "group", "unit")


class NoResidue(Exception):
    """A value that is not rational, has a prime in its denominator, or takes too long."""


def same_rational(a: Term, b: Term) -> bool | None:
    """Whether two rational expressions have one value; None where that cannot be told."""
    if not (_rational(a) and _rational(b)):
        return None
    primes = _LETTER_PRIMES if names(a) | names(b) else PRIMES
    try:
        return all(_residue(a, prime, 0) == _residue(b, prime, 0) for prime in primes)
    except (NoResidue, ValueError):
        return None


def proportional_rational(a: Term, b: Term) -> bool | None:
    """Whether a rational expression is a constant multiple, not 0, of another in the letters."""
    if not (_rational(a) and _rational(b)):
        return None
    prime = _LETTER_PRIMES[-1]
    try:
        ratios = [_residue(a, prime, draw) * _inverse(_residue(b, prime, draw), prime) % prime for draw in range(3)]
    except (NoResidue, ValueError):
        return None
    return len(set(ratios)) == 1 and ratios[0] != 0


def _rational(node: Term) -> bool:
    if node.op == "constant":
        return node.text == "pi"
    return node.op in _OPS and all(map(_rational, node.args))


@lru_cache(maxsize=512)
def _drawn(said: str, prime: int, draw: int) -> int:
    return random.Random(f"{said} {draw}").randrange(1, prime)


def _residue(node: Term, prime: int, draw: int) -> int:
    if node.op == "number":
        return _ratio(node.value, prime)
    if node.op in ("name", "constant"):
        return _drawn(node.text, prime, draw)
    if node.op in ("group", "unit"):
        return _residue(node.args[0], prime, draw)
    if node.op == "pow":
        return _power(node, prime, draw)
    if node.op == "factorial":
        return _factorial(_whole(node.args[0], MAX_FACTORIAL), prime)
    if node.op == "binomial":
        return _binomial(_whole(node.args[0], 10**9), _whole(node.args[1], MAX_CHOSEN), prime)
    parts = [_residue(each, prime, draw) for each in node.args]
    if node.op == "neg":
        return -parts[0] % prime
    if node.op == "add":
        return sum(parts) % prime
    if node.op == "div":
        return parts[0] * _inverse(parts[1], prime) % prime
    product = 1
    for each in parts:
        product = product * each % prime
    return product


def _power(node: Term, prime: int, draw: int) -> int:
    """By Fermat, an exponent counts only by its remainder at prime - 1."""
    base = _residue(node.args[0], prime, draw)
    exponent = _exponent(node.args[1], prime - 1, 1)
    if base == 0:
        raise NoResidue
    return pow(base, exponent, prime)


def _exponent(node: Term, modulus: int, depth: int) -> int:
    if depth > MAX_TOWER:
        raise NoResidue
    if node.op == "number" and node.value.denominator == 1:
        return int(node.value) % modulus
    if node.op in ("group", "neg", "add", "mul"):
        parts = [_exponent(each, modulus, depth) for each in node.args]
        if node.op == "mul":
            product = 1
            for each in parts:
                product = product * each % modulus
            return product
        return (-parts[0] if node.op == "neg" else sum(parts)) % modulus
    if node.op == "pow":  # a whole number to a whole power of 0 or more
        power = _whole(node.args[1], 10**400)
        return pow(_exponent(node.args[0], modulus, depth + 1), power, modulus)
    raise NoResidue


def _whole(node: Term, most: int) -> int:
    while node.op == "group":
        node = node.args[0]
    if node.op == "number" and node.value.denominator == 1 and 0 <= node.value <= most:
        return int(node.value)
    if node.op in ("add", "mul", "neg") and all(each.op in ("number", "neg") for each in node.args):
        value = _small(node)
        if value.denominator == 1 and 0 <= value <= most:
            return int(value)
    raise NoResidue


def _small(node: Term) -> Fraction:
    if node.op == "number":
        return node.value
    parts = [_small(each) for each in node.args]
    if node.op == "mul":
        product = Fraction(1)
        for each in parts:
            product *= each
        return product
    if node.op not in ("neg", "add"):
        raise NoResidue
    return -parts[0] if node.op == "neg" else sum(parts, Fraction(0))


def _ratio(value: Fraction, prime: int) -> int:
    return value.numerator * _inverse(value.denominator, prime) % prime


def _inverse(value: int, prime: int) -> int:
    if value % prime == 0:
        raise NoResidue
    return pow(value, -1, prime)


def _factorial(value: int, prime: int) -> int:
    product = 1
    for each in range(2, value + 1):
        product = product * each % prime
    return product


def _binomial(over: int, under: int, prime: int) -> int:
    if under > over:
        return 0
    above = below = 1
    for index in range(min(under, over - under)):
        above = above * (over - index) % prime
        below = below * (index + 1) % prime
    return above * _inverse(below, prime) % prime
