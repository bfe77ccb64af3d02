r"""Exact algebra says what decimals of 120 digits say, of expressions drawn at random."""

import random
from fractions import Fraction

import pytest

from retool_mcore.reward.evaluate import NoValue
from retool_mcore.reward.node import Term, number
from retool_mcore.reward.radicals import same_radicals
from retool_mcore.reward.reader import read
from retool_mcore.reward.residues import proportional_rational, same_rational
from retool_mcore.reward.value import proportional, same_value

Draw = random.Random


def expression(draw: Draw, atoms: list[str], depth: int = 3) -> str:
    if depth == 0 or draw.random() < 0.15:
        return draw.choice(atoms)
    a, b = (expression(draw, atoms, depth - 1) for _ in range(2))
    forms = (rf"({a}+{b})", rf"({a}-{b})", rf"{a}\cdot {b}", rf"\frac{{{a}}}{{{b}}}", rf"({a})^2", rf"({a})^{{-1}}")
    return draw.choice(forms)


def respelt(text: str, draw: Draw) -> str:
    """Another expression of the same value."""
    one = draw.choice((r"\sqrt2\cdot\sqrt2-1", r"\frac{\pi}{\pi}", r"(1+i)(1-i)-1", "3-2"))
    return rf"\frac{{({text})\cdot({one})+{text}}}{{2}}"


def decimals(a: Term, b: Term) -> bool | None:
    try:
        return same_value(a, b)
    except (NoValue, ArithmeticError):
        return None


@pytest.mark.parametrize("seed", range(8))
def test_roots_pi_and_i_are_compared_as_their_decimals(seed):
    draw, told = Draw(seed), 0
    atoms = ["1", "2", "3", "7", r"\sqrt2", r"\sqrt{12}", r"\sqrt{\frac{3}{8}}", r"\pi", "i", r"\sqrt{-3}"]
    for _ in range(12):
        text = expression(draw, atoms)
        for other in (respelt(text, draw), expression(draw, atoms), rf"{text}+\sqrt2", rf"({text})\cdot\pi"):
            a, b = read(text), read(other)
            exactly = same_radicals(a, b)
            if exactly is not None and (roughly := decimals(a, b)) is not None:
                assert exactly == roughly, (text, other)
                told += 1
    assert told > 5


@pytest.mark.parametrize("seed", range(8))
def test_rational_expressions_in_letters_are_compared_as_their_decimals(seed):
    draw, told = Draw(seed), 0
    for _ in range(12):
        text, another = (expression(draw, ["1", "2", "3", "x", "y", r"\pi"]) for _ in range(2))
        for other in (rf"\frac{{2\cdot({text})+{text}}}{{3}}", another, rf"{text}+x", rf"({text})\cdot x"):
            a, b = read(text), read(other)
            exactly = same_rational(a, b)
            if exactly is not None and (roughly := decimals(a, b)) is not None:
                assert exactly == roughly, (text, other)
                told += 1
    assert told > 10


@pytest.mark.parametrize("seed", range(3))
def test_multiples_are_found_as_by_decimals(seed):
    draw, told = Draw(seed), 0
    for _ in range(10):
        text = expression(draw, ["1", "2", "x", "y"])
        times = Fraction(draw.randint(-9, 9) or 1, draw.randint(1, 9))
        for b in (Term("mul", (number(times.denominator), read(text))), read(f"{text}+x"), read(f"({text})y")):
            a = Term("mul", (Term("number", value=times), read(text)))
            exactly = proportional_rational(a, b)
            try:
                roughly = proportional(a, b, positive=False)
            except NoValue:
                continue
            if exactly is not None:
                assert exactly == roughly, (text, b)
                told += 1
    assert told > 3
