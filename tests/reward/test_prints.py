r"""What Python, NumPy and SymPy print is read as the mathematics that it says."""

import math
import random
from fractions import Fraction

import pytest

from retool_mcore.reward.equivalence import equivalent

PRINTED = [
    ("Fraction(3, 4)", r"\frac34", r"\frac43"),
    ("Fraction(-3, 4)", r"-\frac34", r"\frac34"),
    ("Rational(3, 4)", "0.75", "3"),
    ("Decimal('0.5')", "0.5", "5"),
    ("np.float64(3.5)", "3.5", "64"),
    ("np.int64(3)", "3", "64"),
    ("mpf('1.5')", "1.5", "1"),
    ("1 + 2*I", "1+2i", "1-2i"),
    ("(1+2j)", "1+2i", "2+i"),
    ("1.0-2.5j", "1-2.5i", "1+2.5i"),
    ("2*E", "2e", "2"),
    ("E**2", "e^2", "e"),
    ("2*sqrt(3)/3", r"\frac{2}{\sqrt3}", r"2\sqrt3"),
    ("2**Rational(1, 3)", r"\sqrt[3]2", r"\sqrt2"),
    ("math.sqrt(2)", r"\sqrt2", "2"),
    ("np.pi", r"\pi", r"2\pi"),
    ("binomial(10, 3)", "120", "30"),
    ("math.comb(n + 1, 2)", r"\frac{n(n+1)}{2}", r"\frac{n(n-1)}{2}"),
    ("factorial(5)", "120", "5"),
    ("floor(x/2)", r"\lfloor\frac x2\rfloor", r"\lceil\frac x2\rceil"),
    ("ceiling(x)", r"\lceil x\rceil", r"\lfloor x\rfloor"),
    ("cbrt(2)", r"\sqrt[3]{2}", r"\sqrt2"),
    ("root(2, 5)", r"\sqrt[5]{2}", r"\sqrt[2]{5}"),
    ("Eq(y, 2*x + 1)", "y=2x+1", "y=2x"),
    ("FiniteSet(1, 2)", r"\{2,1\}", "(1,2)"),
    ("set()", r"\emptyset", "0"),
    ("Interval(1, 2)", "[1,2]", "(1,2)"),
    ("Interval.open(1, 2)", "(1,2)", "[1,2]"),
    ("Interval(-oo, 2)", r"(-\infty,2]", r"(-\infty,2)"),
    ("Union(Interval.open(-oo, 1), Interval.Ropen(3, oo))", r"x<1\text{ or }x\ge3", r"x<1\text{ or }x>3"),
    ("Matrix([[1, 2], [3, 4]])", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix}1&3\\2&4\end{pmatrix}"),
    ("Matrix([1, 2])", r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1&2\end{pmatrix}"),
    ("[[1, 2], [3, 4]]", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix}1&2\\4&3\end{pmatrix}"),
    ("array([[1, 2],\n       [3, 4]])", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", "1,2,3,4"),
    ("[[1 2]\n [3 4]]", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix}12\\34\end{pmatrix}"),
    ("1_000_000", "1000000", "1"),
    ("0xff", "255", "0"),
    ("0b1011", "11", "0"),
    ("x1 = 2, x2 = 3", "x_1=2, x_2=3", "x_1=3, x_2=2"),
    ("[-2, 2]", "2, -2", "(-2, 2)"),
]


@pytest.mark.parametrize("printed, same, other", PRINTED, ids=[row[0] for row in PRINTED])
def test_what_is_printed_is_what_it_says_and_nothing_else(printed, same, other):
    assert equivalent(printed, same)
    assert not equivalent(printed, other) and not equivalent(other, printed)


@pytest.mark.parametrize("text", ["I*m", "2*E*m", "Union", "floor", "set(", "Matrix([[1, 2], [3]])"])
def test_letters_and_broken_calls_are_no_constants(text):
    assert not any(equivalent(text, other) for other in ("i", "e", "i+e", "2em", "2e", "0", "1", "3"))


def test_a_list_of_two_numbers_is_an_interval_where_the_truth_is_one():
    assert equivalent("[-2, 2]", r"-2\le x\le 2")
    assert not equivalent("-2, 2", "[-2, 2]")


FLOATS = {
    "sum": lambda a, b, c: ((a + math.sqrt(b)) / 7, rf"\frac{{{a}+\sqrt{{{b}}}}}{{7}}"),
    "difference": lambda a, b, c: ((a - math.sqrt(b)) / 7, rf"\frac{{{a}-\sqrt{{{b}}}}}{{7}}"),
    "pi": lambda a, b, c: (a * math.pi / c, rf"\frac{{{a}\pi}}{{{c}}}"),
    "root": lambda a, b, c: (
        (-a + math.sqrt(a * a + 4 * b * c)) / (2 * c),
        rf"\frac{{-{a}+\sqrt{{{a * a + 4 * b * c}}}}}{{{2 * c}}}",
    ),
    "sine": lambda a, b, c: (math.sin(a), rf"\sin {a}"),
    "logarithm": lambda a, b, c: (a * math.log(b) / c, rf"\frac{{{a}\ln {b}}}{{{c}}}"),
    "fraction": lambda a, b, c: (a / b + c / 7, rf"\frac{{{7 * a + b * c}}}{{{7 * b}}}"),
}


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("kind", FLOATS)
def test_floats_that_were_computed_are_their_value_and_near_ones_are_not(kind, seed):
    draw = random.Random(seed)
    for _ in range(8):
        value, truth = FLOATS[kind](draw.randint(1, 40), draw.randint(2, 60), draw.randint(2, 30))
        if value != int(value) and len(repr(value).lstrip("-0.")) > 15:
            assert equivalent(repr(value), truth), (value, truth)
            assert not equivalent(repr(-value), truth), (value, truth)
            if abs(value) > 0.1:
                assert not equivalent(repr(value * (1 + 1e-13)), truth), (value, truth)


@pytest.mark.parametrize("seed", range(20))
def test_what_python_prints_of_one_value_is_one_answer(seed):
    draw = random.Random(seed)
    for _ in range(10):
        value = Fraction(draw.randint(-99, 99), draw.randint(2, 40))
        rows = [[draw.randint(-9, 9) for _ in range(3)] for _ in range(2)]
        other = [[*rows[0][:2], rows[0][2] + 1], rows[1]]
        latex = r"\begin{pmatrix}" + r"\\".join("&".join(map(str, row)) for row in rows) + r"\end{pmatrix}"
        assert equivalent(repr(value), rf"\frac{{{value.numerator}}}{{{value.denominator}}}")
        assert not equivalent(repr(value + 1), str(value))
        assert equivalent(str(rows), latex) and equivalent(f"Matrix({rows})", latex)
        assert not equivalent(str(other), latex)
        assert equivalent(hex(rows[0][0]), str(rows[0][0])) and equivalent(bin(rows[0][0]), str(rows[0][0]))
