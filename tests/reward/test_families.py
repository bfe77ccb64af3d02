r"""Families of numbers, and sums as Python writes them, by laws that hold for any numbers."""

import random

import pytest

from retool_mcore.reward.equivalence import equivalent


@pytest.mark.parametrize("seed", range(6))
def test_a_family_is_its_formula_from_any_first_number_and_no_other(seed: int):
    draw = random.Random(seed)
    times, base, start = draw.randint(1, 9), draw.randint(2, 7), draw.randint(-2, 4)
    truth = rf"\{{{times}\cdot {base}^k : k \ge {start}\}}"
    for answer, same in (
        (rf"{times}\cdot {base}^n, n \ge {start}", True),
        (rf"\{{{times}\cdot {base}^{{m+1}} \mid m \ge {start - 1}\}}", True),
        (rf"\{{{times}\cdot {base}^k : k \ge {start + 1}\}}", False),
        (rf"\{{{times}\cdot {base + 1}^k : k \ge {start}\}}", False),
        (rf"\{{{times}\cdot {base}^k : k \le {start}\}}", False),
        (rf"\{{{times}\cdot {base}^k : {start} \le k \le {start + 9}\}}", False),
    ):
        assert equivalent(answer, truth) == equivalent(truth, answer) == same, (answer, truth)


@pytest.mark.parametrize("seed", range(6))
def test_a_family_over_all_whole_numbers_may_begin_anywhere(seed: int):
    draw = random.Random(seed)
    step, first, shift = draw.randint(2, 9), draw.randint(-9, 9), draw.choice((-2, -1, 1, 2))
    truth = rf"{step}k{first:+d}, k \in \mathbb{{Z}}"
    assert equivalent(rf"{step}n{first + shift * step:+d}, n \in \mathbb{{Z}}", truth)
    assert equivalent(rf"{first}-{step}n, n \in \mathbb{{Z}}", truth)
    assert not equivalent(rf"{step}n{first + shift * step:+d}, n \in \mathbb{{N}}", truth)
    assert not equivalent(rf"{step}n{first + 1:+d}, n \in \mathbb{{Z}}", truth)
    assert not equivalent(rf"{step + 1}n{first:+d}, n \in \mathbb{{Z}}", truth)


@pytest.mark.parametrize("seed", range(6))
def test_few_numbers_are_the_set_of_their_values(seed: int):
    draw = random.Random(seed)
    low, high, step = draw.randint(-3, 2), draw.randint(4, 8), draw.randint(2, 5)
    values = [step * k + 1 for k in range(low, high + 1)]
    said = ", ".join(map(str, values))
    for answer in (rf"\{{{step}k+1 : {low} \le k \le {high}\}}", rf"\{{{step}m+1 \mid {low - 1} < m < {high + 1}\}}"):
        assert equivalent(answer, rf"\{{{said}\}}") and equivalent(rf"\{{{said}\}}", answer)
        assert not equivalent(answer, rf"\{{{said}, {values[-1] + step}\}}")
        assert not equivalent(answer, ", ".join(map(str, values[1:])))


@pytest.mark.parametrize("seed", range(8))
def test_what_python_would_compute_is_what_the_sum_says(seed: int):
    draw = random.Random(seed)
    a, b, low, high = draw.randint(2, 9), draw.randint(1, 9), draw.randint(0, 3), draw.randint(5, 9)
    for text, value in (
        (f"sum({a}*k**2 + {b} for k in range({low}, {high}))", sum(a * k**2 + b for k in range(low, high))),
        (f"sum([{a}*k for k in range({high})])", sum(a * k for k in range(high))),
        (f"sum(k for k in range({low}, {high * a}, {a}))", sum(range(low, high * a, a))),
        (f"sum(i for i in range({high * 3}) if i % {a} == 1)", sum(i for i in range(high * 3) if i % a == 1)),
        (f"Sum(k**2, (k, {low}, {high}))", sum(k**2 for k in range(low, high + 1))),
        (f"len(range({low}, {high}))", high - low),
        (f"math.prod(k + {b} for k in range(1, 5))", (b + 1) * (b + 2) * (b + 3) * (b + 4)),
    ):
        assert equivalent(text, str(value)), (text, value)
        assert not equivalent(text, str(value + 1)), (text, value)


@pytest.mark.parametrize(
    "text", ["sum(k for k in range(n) if k > 2)", "sum(x)", "sum()", "len(x)", "len({1, 1})", "Sum(k, k)"]
)
def test_a_sum_that_is_not_told_is_no_number(text: str):
    assert not any(equivalent(text, str(value)) for value in range(12))
