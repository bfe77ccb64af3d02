r"""What a policy writes as an answer, and what it would write to be paid for a wrong one."""

import math
import random
from fractions import Fraction

import pytest

from retool_mcore.reward.equivalence import equivalent
from tests.reward.generated import pairs, product

# fmt: off
EQUAL = [
    (r"1+2^{2024}", r"2^{2024}+1"),
    ("5-x", "5-x"),
    (r"|5-x|", r"|x-5|"),
    (r"\sqrt{(5-x)^2}", "|x-5|"),
    ("1.4142135623730951", r"\sqrt2"),
    (r"|AB|^2=34", "34"),
    ("m + n = 25 + 9 = 34", "34"),
    ("m+n=33", "33"),
    ("AB=5", "5"),
    ("|z|=33", "33"),
    (r"\text{Area}=33", "33"),
    (r"\frac{13}{4} \approx 3.25", "13/4"),
    (r"\frac{13}{4} \approx 3.25", "3.25"),
    (r"2\sqrt3 \approx 3.46", r"2\sqrt3"),
    (r"{3 \over 4}", "0.75"),
    (r"{10 \choose 3}", "120"),
    ("C_{10}^3", "120"),
    ("(1011)_2", "11"),
    (r"1011_{\text{two}}", "1011_2"),
    (r"0.\dot3\dot6", "4/11"),
    ("0.(36)", "4/11"),
    (r"12\frac{\text{m}}{\text{s}}", "12"),
    ("(B) 12", "B"),
    ("(B) 12", "12"),
    ("A,B,D", "ABD"),
    ("A, B, and D", "ABD"),
    ("b", "B"),
    ("(g)", "G"),
    ("6:8", "3:4"),
    ("2:4:6", "1:2:3"),
    ("'34'", "34"),
    ("\u200b34", "34"),
    ("The function is Even at x=0", "the function is even at x=0"),
    (r"3a^2cm\pi", r"a^2 \cdot c \cdot \pi \cdot 3 \cdot m"),
    ("0.3333333333333333", r"\frac13"),
    (r"\frac{2024!}{2023!}", "2024"),
    (r"2\cdot 2^{9999}", "2^{10000}"),
    (r"\frac{3^{2021}-1}{2}", r"\frac{3^{2021}}{2}-\frac12"),
    (r"x \approx 3.464102", r"2\sqrt3"),
    (r"\{1,\sqrt2\}", r"\{\sqrt2,1\}"),
    ("E_{16}", "14"),
    (r"\mathrm{FF}_{16}", "255"),
    (r"2B3_{\text{sixteen}}", "691"),
    (r"\boxed 34", "34"),
    (r"\boxed{\Large 34}", "34"),
    (r"\underline{34}", "34"),
    ("**34**", "34"),
    (r"\displaystyle\text{(B)}", "B"),
    (r"(\mathrm{B})", "B"),
    ("Option B", "B"),
    ("b)", "B"),
    (r"\{A,B,D\}", "ABD"),
    (r"\begin{pmatrix}1&2\\[4pt]3&4\end{pmatrix}", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}"),
    (r"12\,\frac{m}{s}", r"12\text{ m/s}"),
    (r"12\frac{\text{km}}{\text{h}}", "12 km/h"),
    ("3920 N-m", r"3920 \mathrm{~N}-\mathrm{m}"),
    (r"32^\circ F", r"32^{\circ} \mathrm{F}"),
    ("42 m^3", r"42\text{ m}^3"),
    ("5:30 pm", r"5:30\text{ p.m.}"),
    ("12平方厘米", r"12\text{ cm}^2"),
    ("1.5万", "15000"),
    ("５", "5"),
    ("12公顷", "12"),
    ("5个苹果", "5"),
    ("12㎏", r"12\text{ kg}"),
    ("12㎢", r"12\text{ km}^2"),
    (r"\begin{pmatrix}1&2\cr3&4\end{pmatrix}", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}"),
    ("1011 (base 2)", "11"),
    (r"\mathrm{C}_{10}^3", "120"),
    ("10C3", "120"),
    (r"P(A\mid B)=\frac14", "0.25"),
    (r"\text{Area of } \triangle ABC = 33", "33"),
    (r"\operatorname{Var}(X)=2", "2"),
    (r"2\sqrt{3}\ (\approx 3.46)", r"2\sqrt3"),
    ("USD 50", "50"),
    ("[1.4142135623730951, -1.4142135623730951]", r"\pm\sqrt2"),
    ("5", "AB=5"),
    (r"2^{2024}+\sqrt2", r"\sqrt2+2\cdot 2^{2023}"),
    (r"\sqrt{2^{4000}+2^{2001}+1}", r"2^{2000}+1"),
    ("5 km", "5000 m"),
    ("90 min", "1 h 30 min"),
    ("1 hour 30 minutes", r"90\text{ minutes}"),
    ("2*sqrt(3)/3", r"\frac{2}{\sqrt3}"),
    ("[[1, 2], [3, 4]]", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}"),
    ("x1 = 2, x2 = 3", "x_1=2, x_2=3"),
    ("[-2, 2]", "2, -2"),
    ("7/16 (0.4375)", r"\frac{7}{16}"),
    ("0.4375 (7/16)", r"\frac{7}{16}"),
]
UNEQUAL = [
    (r"2^{2024}+1", r"2^{2024}-1"),
    ("1", r"1-\frac{1}{2023!}"),
    (r"\frac{3^{2021}-1}{2}", r"\frac{3^{2021}+1}{2}"),
    ("5-x", "|x-5|"),
    ("5-x", r"\sqrt{(x-5)^2}"),
    ("2023-x", "|x-2023|"),
    ("x-y", "|x-y|"),
    ("42 squared", "42"),
    ("42 thirds", "42"),
    ("42 base five", "42"),
    (r"42\text{ incorrect}", "42"),
    (r"42\text{, 43, 44}", "42"),
    ("A0B0C", "0"),
    ("m+n=35-1=33", "33"),
    ("34=35", "35"),
    ("n=5", "(5,6)"),
    ("n=5", "5,6"),
    (r"x \approx 3.5", r"2\sqrt3"),
    ("x^2-4=0", "0"),
    ("(x-2)(x+2)=0", "0"),
    ("1.4142135623730961", r"\sqrt2"),
    ("(C) 12", "B"),
    ("(B) 13", "12"),
    ("(B) 12", "(C) 12"),
    ("(B) 12", "(B) 13"),
    ("A,B", "ABD"),
    ("AB", "BA"),
    ("6:8", "4:3"),
    (r"2\sqrt3 \approx 99", r"2\sqrt3"),
    ("0.(36)", "0.36"),
    ("2x+3y=12 ", "13"),
    ("12", "2x+3y=12"),
    (r"2^{200}+\sqrt2", r"2^{200}+\sqrt3"),
    (r"2^{2000}+\sqrt2", r"2^{2000}+\sqrt3"),
    (r"\sqrt2+\frac{1}{50!}", r"\sqrt2"),
    ("0.33333333333333333", "0.3333333333333333"),
    ("3.0000000000000001", "3"),
    ("x", "X"),
    ("g", "G"),
    ("B", "12"),
    ("E_{16}", "16"),
    ("E_{16}", "e"),
    ("A_{16}+B_{16}", "21"),  # names with an index
    ("12公斤", r"12\text{ g}"),
    ("5个或6个", "5"),
    ("1011 (base 3)", "11"),
    ("10C3", "103"),
    (r"P(A\mid B)=\frac14", "0.5"),
    (r"\text{not } x = 33", "33"),
    (r"x \text{ or } y\mid = 33", "33"),
    (r"2\sqrt{3}\ (\approx 3.56)", r"2\sqrt3"),
    ("42 prime", "42"),
    ("42 reduced", "42"),
    ("42 twenty-fifths", "42"),
    ("42 dozens", "42"),
    ("6 cm", "6 m"),
    (r"6\text{ m}", "6 m^2"),
    (r"6\text{ s}", "6 m"),
    ("6 x", "6"),
    ("6 m n", "6"),
    (r"6m", r"6m\text{ m}"),
    (r"32^\circ F", r"32^{\circ} \mathrm{C}"),
    ("5:30 pm", "5:30 am"),
    ("a=-7,-2", "p=-7,-2"),
    ("CD=5", "AB=5"),
    (r"2^{2024}+\sqrt2", r"2^{2024}+\sqrt3"),
    (r"\sqrt{2^{4000}+1}", r"2^{2000}"),
    (r"\ln(2^{9000}+1)", r"\ln(2^{9000})"),
    ("e^{9000}+1", "e^{9000}"),
    (r"x+2^{2024}", r"x+2^{2024}+1"),
    (r"\lfloor 10^{150}\sqrt2\rfloor", r"\lfloor 10^{150}\sqrt2\rfloor+1"),
    (r"(2^{2024},\infty)", r"(2^{2024}+1,\infty)"),
    ("100000-x", "|x-100000|"),
    (r"\max(x,100000)", "100000"),
    ("5 km", "500 m"),
    ("90 min", "1 h 20 min"),
    ("90 min", "130 min"),
    ("17:00", "05:00"),
    ("17:00", "5:00"),
    ("[[1, 2], [3, 4]]", r"\begin{pmatrix}1&2\\4&3\end{pmatrix}"),
    ("x1 = 2, x2 = 3", "x_1=3, x_2=2"),
    ("[-2, 2]", "(-2, 2)"),
    ("7/16 (0.4375)", "49/256"),
    ("0.4375 (7/16)", "49/256"),
    ("0 (or 5)", "0"),
    ("3 out of 8", "8 out of 3"),
    ("17 R 3", "3 R 17"),
    ("(x < 1) & (x > 3)", r"x < 1 \text{ or } x > 3"),
    (r"A. Alice B. n = 2^k, k \ge 0", r"n = 2^k, k \ge 0"),
]
# fmt: on


@pytest.mark.parametrize("pair", EQUAL, ids=" | ".join)
def test_what_a_policy_writes_is_right(pair):
    assert equivalent(*pair)


@pytest.mark.parametrize("pair", UNEQUAL, ids=" | ".join)
def test_what_it_would_write_to_be_paid_is_wrong(pair):
    assert not equivalent(*pair)


@pytest.mark.parametrize("answer", ["6 m", r"6\,m", "6 m/s", "6 m^2", r"\frac{12}{2} m", "6 s"])
def test_a_bare_letter_behind_a_space_is_a_unit_where_the_truth_is_one_number(answer):
    assert equivalent(answer, "6")
    assert not equivalent("6", answer)  # a truth in letters is in letters
    assert not equivalent(answer, "7") and not equivalent(answer, "6x") and not equivalent(answer, r"6\text{ kg}")


@pytest.mark.parametrize("seed", range(20))
def test_letters_are_the_unit_that_the_other_answer_marks(seed):
    draw = random.Random(seed)
    for _ in range(10):
        value, unit = (
            draw.choice(["6", "2.5", r"\sqrt2", r"\frac{3}{4}"]),
            draw.choice(["m", "s", "g", "N", "m/s", "kg"]),
        )
        other = draw.choice([each for each in ("m", "s", "g", "N", "m/s", "kg") if each != unit])
        bare = f"{value} {unit}" if draw.random() < 0.5 else f"{value}~{unit}"
        assert equivalent(bare, rf"{value}\text{{ {unit}}}") and equivalent(rf"{value} \mathrm{{~{unit}}}", bare)
        assert not equivalent(bare, rf"{value}\text{{ {other}}}") and not equivalent(rf"{value}\text{{ {other}}}", bare)


@pytest.mark.parametrize("seed", [309, 1294793, *range(60)])
def test_letters_that_spell_a_unit_or_a_function_are_a_product(seed):
    for answer, truth, equal in pairs(product, random.Random(seed)):
        assert equivalent(answer, truth) == equal, (answer, truth)


@pytest.mark.parametrize("number", [2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31])
def test_floats_as_python_prints_them_are_their_value_and_others_are_not(number):
    for times in range(1, 8):
        printed, truth = repr(math.sqrt(times**2 * number)), rf"{times}\sqrt{{{number}}}"
        assert equivalent(printed, truth), (printed, truth)
        off = repr(float(printed) * (1 + 4e-14))
        assert not equivalent(off, truth), (off, truth)


def test_huge_values_beside_roots_are_compared_with_the_digits_that_they_need():
    draw = random.Random(1)
    for _ in range(25):
        power, under = draw.randint(200, 9000), draw.choice((2, 3, 5, 7))
        huge = rf"{draw.choice((2, 3, 10))}^{{{power}}}"
        assert equivalent(rf"{huge}+\sqrt{{{under}}}", rf"\sqrt{{{under}}}+{huge}")
        assert not equivalent(rf"{huge}+\sqrt{{{under}}}", rf"{huge}+\sqrt{{{under + 1}}}")
        assert not equivalent(rf"\sqrt{{{under}}}+\frac{{1}}{{{huge}}}", rf"\sqrt{{{under}}}")


def test_huge_values_are_compared_exactly():
    draw = random.Random(0)
    for _ in range(60):
        base, power, more = draw.randint(2, 9), draw.randint(1300, 20000), draw.randint(1, 99)
        assert equivalent(rf"{base}^{{{power}}}+{more}", rf"{more}+{base}\cdot {base}^{{{power - 1}}}")
        assert not equivalent(rf"{base}^{{{power}}}+{more}", rf"{base}^{{{power}}}-{more}")
        assert not equivalent(rf"1-\frac{{1}}{{{power}!}}", "1")


def test_a_fraction_is_a_float_only_where_it_has_no_decimal_of_so_many_digits():
    assert equivalent(repr(float(Fraction(22, 7))), r"\frac{22}{7}")
    assert not equivalent("0.30000000000000004", r"\frac{3}{10}")
    assert not equivalent("0.333333333", r"\frac{1}{3}")


@pytest.mark.parametrize("times", range(2, 60))
def test_floats_that_were_multiplied_are_their_value(times):
    assert equivalent(repr(times * math.pi), rf"{times}\pi")
    assert not equivalent(repr(times * math.pi * (1 + 4e-14)), rf"{times}\pi")


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
