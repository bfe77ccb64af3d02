"""Compare huge rational values exactly: by their remainders at several primes.

2^2024 + 1 and 2^2024 - 1 agree to 600 digits. Their remainders differ at any prime but 2, and cost
nothing: powers, products and factorials are reduced at every step. Two different values agree at
all of these primes only by an accident of one in 10^90.
"""

from __future__ import annotations

from fractions import Fraction

from retool_mcore.reward.node import Term

PRIMES = (10**18 + 3, 10**18 + 9, 2**61 - 1, 2**89 - 1)
MAX_FACTORIAL = 100_000  # one product of each number up to it
MAX_CHOSEN = 10_000
MAX_TOWER = 8  # powers in exponents
_OPS = ("number", "neg", "add", "mul", "div", "pow", "factorial", "binomial", "group", "unit")


class NoResidue(Exception):
    """A value that is not rational, has a prime in its denominator, or takes too long."""


def same_rational(a: Term, b: Term) -> bool | None:
    """Whether two rational expressions have one value; None where that cannot be told."""
    if not (_rational(a) and _rational(b)):
        return None
    try:
        return all(_residue(a, prime, 0) == _residue(b, prime, 0) for prime in PRIMES)
    except (NoResidue, ValueError):
        return None


def _rational(node: Term) -> bool:
    return node.op in _OPS and all(map(_rational, node.args))


def _residue(node: Term, prime: int, depth: int) -> int:
    if node.op == "number":
        return _ratio(node.value, prime)
    if node.op in ("group", "unit"):
        return _residue(node.args[0], prime, depth)
    if node.op == "pow":
        return _power(node, prime, depth)
    if node.op == "factorial":
        return _factorial(_whole(node.args[0], MAX_FACTORIAL), prime)
    if node.op == "binomial":
        return _binomial(_whole(node.args[0], 10**9), _whole(node.args[1], MAX_CHOSEN), prime)
    parts = [_residue(each, prime, depth) for each in node.args]
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


def _power(node: Term, prime: int, depth: int) -> int:
    """By Fermat, an exponent counts only by its remainder at prime - 1."""
    base = _residue(node.args[0], prime, depth)
    exponent = _exponent(node.args[1], prime - 1, depth + 1)
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
