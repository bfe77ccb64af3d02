"""Ways to write one answer are equal, math-verify agrees, and no other pair is equal."""

import itertools

import pytest
from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

from retool_mcore.reward.equivalence import equivalent
from tests.reward.spellings import EQUAL, UNEQUAL

# One answer a line, written in several ways; ways of one line are equal, and no other pair is.
CLASSES = [
    [r"\frac{1}{\sqrt3}", r"\frac{\sqrt3}{3}"],
    [r"(x+40)(x-63)", r"x^2-23x-2520"],
    [r"(x+1)^{13}", r"(x+1)^{12}(x+1)"],
    [r"\sqrt{x-1}\sqrt{x-2}"],
    [r"\sqrt{(x-1)(x-2)}"],
    [r"\log_{3} 14", r"\frac{\ln 14}{\ln 3}"],
    [r"\frac{n(n-1)}{2}", r"\binom{n}{2}"],
    [r"10^{-7}", r"\frac{1}{10^7}"],
    [r"y=2x+1", "y = 1+2x"],
    [r"y=2x"],
    [r"z=2x"],
    [r"(1,\sqrt2)", r"\left(1, \sqrt{2}\right)", r"(\frac22,2^{1/2})"],
    [r"(\sqrt2,1)"],
    [r"(1,\sqrt2]"],
    [r"[\frac12,\infty)", r"\left[0.5, \infty\right)"],
    [r"\{1,\sqrt2\}", r"\{\sqrt{2},1\}", r"\{1, 1, \sqrt2\}"],
    [r"\{(1,x),(2,x+x)\}", r"\{(2,2x),(1,x)\}"],
    [r"(-\infty,2)\cup(3,\infty)", r"(3,\infty)\cup(-\infty,2)"],
]
PAIRS = list(itertools.combinations([(number, way) for number, ways in enumerate(CLASSES) for way in ways], 2))


def math_verify(answer: str, truth: str) -> bool:
    targets = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())
    readings = [
        parse(f"\\boxed{{{text}}}", extraction_config=targets, parsing_timeout=None) for text in (truth, answer)
    ]
    return verify(*readings, allow_set_relation_comp=True, timeout_seconds=None)


@pytest.mark.parametrize("number", range(len(CLASSES)))
def test_every_way_of_writing_an_answer_is_equal_and_no_other_is(number: int):
    for (first, answer), (second, truth) in PAIRS:
        if number in (first, second):
            assert equivalent(answer, truth) == (first == second), (answer, truth)
            assert equivalent(truth, answer) == (first == second), (truth, answer)


@pytest.mark.parametrize("text", ["2(3)", "(2)(3)", "(2)3", r"\frac{(4)(3)}{2}", r"\log_2(8)(2)", r"-2(-3)"])
def test_products_without_a_sign_are_no_mixed_numbers(text: str):
    assert equivalent(text, r"\frac{12}{2}")
    assert not equivalent(text, "5") and not equivalent(text, "7")


def test_ways_of_one_answer_are_math_verifys_too():
    for (first, answer), (second, truth) in PAIRS:
        if first == second and "\\{" not in answer:
            assert math_verify(answer, truth), (answer, truth)


@pytest.mark.parametrize("ways", EQUAL, ids=lambda ways: ways[0])
def test_every_spelling_of_public_data_is_equal_to_every_other(ways: list[str]):
    different = [(a, b) for a, b in itertools.permutations(ways, 2) if not equivalent(a, b)]
    assert different == []


def test_no_spelling_of_another_answer_is_equal():
    firsts = [ways[0] for ways in EQUAL]
    assert [(a, b) for a, b in itertools.permutations(firsts, 2) if equivalent(a, b)] == []


@pytest.mark.parametrize("pair", UNEQUAL, ids="{0[0]} | {0[1]}".format)
def test_what_differs_is_unequal_in_both_directions(pair: tuple[str, str]):
    assert not equivalent(*pair) and not equivalent(*pair[::-1])
