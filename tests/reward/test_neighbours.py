"""Spellings of models' answers, and wrong answers that look like them."""

import pytest

from retool_mcore.reward.equivalence import equivalent
from retool_mcore.reward.normalise import judgeable
from tests.reward.neighbours import TRUTHS


@pytest.mark.parametrize(("truth", "same", "other"), TRUTHS, ids=[truth for truth, _, _ in TRUTHS])
def test_what_models_write_is_judged_by_what_it_says(truth: str, same: tuple[str, ...], other: tuple[str, ...]):
    assert [way for way in same if not equivalent(way, truth)] == []
    assert [way for way in other if equivalent(way, truth)] == []


@pytest.mark.parametrize(
    ("answer", "truth", "wrong"),
    [
        ("C(10,3)", "120", "720"),
        ("P(10,3)", "720", "120"),
        ("A_5^2", "20", "25"),
        (r"{}_{10}P_3", "720", "120"),
        (r"2C(5,2)A_3^3", "120", "60"),
        (r"\frac{C(4,2)}{C(10,2)}", r"\frac{2}{15}", r"\frac{2}{13}"),
        ("C(4,2)/C(10,2)", r"\frac{2}{15}", r"\frac{15}{2}"),
        ("C(10,3)", "(10,3)", "(3,10)"),  # a point with its name
        ("P(2,1)=5", "5", "2"),  # a function's value
        ("f(10,3)", "f(10,3)", "120"),
        ("C(10,3)", "C(10,3)", "C(10,7)"),  # two points, perhaps
        ("A_5^2", "A_5^2", "A_5"),
        ("C_1+x", "C_1+x", "C_1"),
        ("x^2C_1", "x^2C_1", "1"),
    ],
)
def test_counts_are_numbers_beside_a_value_alone(answer: str, truth: str, wrong: str):
    assert equivalent(answer, truth)
    assert not equivalent(answer, wrong) and not equivalent(wrong, answer)


@pytest.mark.parametrize(
    ("answer", "truth", "same"),
    [
        ("BDA", "ABD", True),
        ("DBA", "ABD", True),
        ("BA", "AB", False),  # of two letters: a product of matrices, too
        ("ABD", "BDA", False),  # a truth that is out of order is an order
        ("ABDA", "ABD", False),
        ("BDC", "ABD", False),
        ("dba", "ABD", False),
        ("(D) or (E)", "D", False),
        (r"\text{(B) and (C)}", "BC", True),
    ],
)
def test_choices_stand_in_any_order_behind_a_truth_of_three_or_more(answer: str, truth: str, same: bool):
    assert equivalent(answer, truth) == same


@pytest.mark.parametrize("truth", ["2:3", r"\frac23", "4:6", "2/3"])
@pytest.mark.parametrize(
    ("answer", "same"),
    [("2:3", True), (r"\frac{2}{3}", True), ("3:2", False), ("2:3:1", False), ("2,3", False)],
)
def test_a_ratio_of_two_is_its_fraction(answer: str, truth: str, same: bool):
    assert equivalent(answer, truth) == same


@pytest.mark.parametrize(
    ("answer", "truth"),
    [
        ("9:00", "19:00"),
        ("9:05", "18:10"),
        ("9:05", r"\frac{9}{5}"),
        ("3:30 PM", "3:30 AM"),
        ("3:30 AM", "15:30"),
        ("9 am", "9 pm"),
        ("May 5", "May 6"),
        ("5 May", "5"),
        ("2024-01-05", "2018"),
        ("2024-01-05", "2024-05-01"),
        ("five", "15"),
        ("twelfth", "12"),
        ("no", "on"),
        ("1.414...", r"\sqrt2"),
        ("0.3434...", "0.34"),
        ("log2(8)", "8"),
        ("log(2, 8)", "3"),
        ("x_1=1, x_2=3", "1,2"),
        ("x1=2, x2=3", "x1=3, x2=2"),
        ("x=3, y=4", "(4,3)"),
        ("x+1, x \\ne 1", "x+2"),
        ("5, x \\ne 5", "5"),
        ("3/4 or 0.8", "0.75"),
        (r"60^\circ", r"60\text{ cm}"),
        (r"60\text{ degrees}", r"60\text{ radians}"),
        ("3+4i", "(3,4)"),
        ("I", "-i"),
        ("5 mod 7", "5 mod 8"),
        ("[1,2]", "x_1=1, x_2=2"),
        ("|x-1|<2", "(-2,2)"),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1&2\end{pmatrix}"),
    ],
)
def test_what_looks_alike_is_not_equal(answer: str, truth: str):
    assert not equivalent(answer, truth) and not equivalent(truth, answer)


def test_a_date_is_one_in_any_order_of_its_parts():
    ways = ("January 5, 2024", "5 January 2024", "Jan. 5th 2024", "2024-01-05", r"\text{January 5, 2024}")
    assert all(equivalent(first, second) for first in ways for second in ways)


@pytest.mark.parametrize(("answer", "value"), [(r"x \bmod 7", r"x \pmod 7"), (r"12\bmod 7", "5"), (r"\bm{x}", "x")])
def test_bmod_is_no_bold_letter(answer: str, value: str):
    assert equivalent(answer, value)


def test_truths_in_these_spellings_can_be_judged():
    assert all(
        judgeable(truth) is None for truth in ("C(10,3)", "2:3", "no solution", "June 20, 2024", "9 am", "0.1666...")
    )
    assert judgeable("9 (wrong)") is not None and judgeable("9 (apples)") is None
