"""What floats tell apart at once is what all digits tell apart; near values are left to these."""

import pytest

from retool_mcore.reward.floats import apart
from retool_mcore.reward.normalise import normalise
from retool_mcore.reward.quick import measured, tree_of


def _apart(answer: str, truth: str) -> bool:
    mine, theirs = measured(normalise(answer), normalise(truth))
    return all(each.tree or each.number is not None for each in (mine, theirs)) and apart(
        tree_of(mine), tree_of(theirs)
    )


@pytest.mark.parametrize(
    ("answer", "truth"),
    [
        (r"\sqrt2", r"\sqrt3"),
        ("25%", "26"),
        ("x = 5", "6"),
        (r"2\pi ab", r"2\pi a"),
        (r"\log x", r"\log y"),
        ("5 cm", "6"),
        ("(1, 2)", r"\sqrt5"),
        (r"\mathbb{R}", r"\pi"),
        ("1, 2", r"\pi"),
        ("x < 3", "3"),
        ("e^{i\\pi/3}", "e^{i\\pi/4}"),
    ],
)
def test_what_clearly_differs_needs_no_digits(answer, truth):
    assert _apart(answer, truth) and _apart(truth, answer)


@pytest.mark.parametrize(
    ("answer", "truth"),
    [
        ("1.41421", r"\sqrt2"),  # told by all digits
        (r"\log 100", "2"),  # to base 10 they are one
        ("25%", r"\frac14"),
        (r"45^\circ", r"\frac{\pi}{4}"),
        (r"2^{200}-2^{200}+1", "5"),  # all digits of the sum are lost
        (r"(1+10^{-9})^{10^{12}}", "1"),
        ("x = 3", r"\{x \mid x = 3\}"),
        (r"\tan\frac{\pi}{2}", "1"),
        ("50 mm", "5 cm"),
        ("3/4 or 0.75", "0.75"),
        (r"\infty", "5"),
    ],
)
def test_what_floats_cannot_tell_is_left_to_the_digits(answer, truth):
    assert not _apart(answer, truth)
