"""What is equal: real outputs and the rules that they stand for, each a row of cases.jsonl."""

import itertools
import math
import random
import tomllib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retool_mcore.data.files import read_jsonl
from retool_mcore.reward.answer import judge, truth_problem
from retool_mcore.reward.forms import equivalent
from retool_mcore.reward.statement import statement_of, vote

CASES = [case for _, case in read_jsonl(Path(__file__).with_name("cases.jsonl"))]
PARTS = tomllib.loads(Path(__file__).with_name("pieces.toml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['answer']} | {case['truth']}")
def test_an_answer_is_judged_as_its_row_says(case):
    assert judge(case["answer"], case["truth"], timeout_s=60).equivalent == case["equal"], case["why"]


def test_no_answer_equals_two_truths_that_differ():
    draw = random.Random(0)
    pairs = [pair for pair in itertools.permutations(PARTS["truths"], 2) if not equivalent(*pair)]
    for hedge in PARTS["hedges"]:
        for one, other in draw.sample(pairs, 30):
            answer = hedge.format(one, other)
            assert not (equivalent(answer, one) and equivalent(answer, other)), (answer, one, other)
        named = hedge == "x = {} = {}"  # A may be a name of the value B
        for pair in (("5", "7"), ("5", "7") if named else ("A", "B")):
            assert not any(equivalent(hedge.format(*pair), each) for each in pair), (hedge, pair)


@given(st.text(alphabet=r"0123456789abcix+-*/^_=<>(){}[]|,.;:!%$\ ~" + "'\n", max_size=60))
@settings(max_examples=200, deadline=None)
def test_no_text_raises_and_every_text_equals_itself(text: str):
    assert equivalent(text, f" {text} ") == bool(statement_of(text).text)
    assert isinstance(vote(text), str)
    truth_problem(text)


@given(st.lists(st.sampled_from(PARTS["pieces"]), max_size=14).map("".join))
@settings(max_examples=300, deadline=None)
def test_no_mathematics_raises_or_equals_another_number(text: str):
    assert equivalent(text, f"{text} ") == bool(statement_of(text).text)
    assert not equivalent(text, "7919") and not equivalent("7919", text)


@pytest.mark.parametrize("times", range(2, 40))
def test_floats_that_were_computed_are_their_value_and_near_ones_are_not(times):
    for value, truth in (
        (times * math.sqrt(3), rf"{times}\sqrt{{3}}"),
        (times / 7 + 3, rf"\frac{{{times + 21}}}{{7}}"),
        (times * math.pi, rf"{times}\pi"),
    ):
        if value != int(value) and len(repr(value)) > 16:
            assert equivalent(repr(value), truth), (value, truth)
            assert not equivalent(repr(value * (1 + 4e-14)), truth), (value, truth)


def test_huge_values_are_compared_with_the_digits_that_they_need():
    draw = random.Random(1)
    for _ in range(15):
        base, power, more = draw.randint(2, 9), draw.randint(200, 9000), draw.randint(1, 99)
        assert equivalent(rf"{base}^{{{power}}}+{more}", rf"{more}+{base}\cdot {base}^{{{power - 1}}}")
        assert not equivalent(rf"{base}^{{{power}}}+{more}", rf"{base}^{{{power}}}-{more}")
        assert not equivalent(rf"1-\frac{{1}}{{{base}^{{{power}}}}}", "1")
        assert equivalent(rf"{base}^{{{power}}}+\sqrt{{2}}", rf"\sqrt{{2}}+{base}^{{{power}}}")
        assert not equivalent(rf"{base}^{{{power}}}+\sqrt{{2}}", rf"{base}^{{{power}}}+\sqrt{{3}}")


@pytest.mark.parametrize("amounts", PARTS["amounts"])
def test_amounts_in_units_of_one_kind_are_equal(amounts: str):
    first, *others = amounts.split(" = ")
    for other in others:
        assert equivalent(first, other) and equivalent(other, first), other
        assert not equivalent(f"9{first}", other), other


def test_the_truth_of_every_right_case_can_be_judged():
    assert [case["truth"] for case in CASES if case["equal"] and truth_problem(case["truth"])] == []
