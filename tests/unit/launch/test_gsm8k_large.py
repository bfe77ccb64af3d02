"""`launch/gsm8k/large.py`: what is replaced, what stays, and that all is right."""

import re
import tomllib
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from retool_mcore.data.verify import Rejected
from tests.unit.launch.gsm8k import ANSWER, QUESTION

# isort: split
from large import MAX_FACTOR, MIN_FACTOR, find_sources, recalculate, variant
from solutions import evaluate, parse
from texts import numbers_in

TABLES = tomllib.loads(Path(__file__).with_name("large.toml").read_text(encoding="utf-8"))


def values_of(question: str) -> list[int]:
    return [int(number.value) for number in numbers_in(question)]


def test_question_text_and_marks_change_together():
    row = variant(QUESTION, ANSWER, 0)
    (new,) = values_of(row["question"])
    assert 48_000 <= new <= 4_800_000 and new % 2 == 0
    half = new // 2
    assert row == {
        "question": QUESTION.replace("48", str(new)),
        "answer": (
            f"Natalia sold {new}/2 = <<{new}/2={half}>>{half} clips in May.\n"
            f"Natalia sold {new}+{half} = <<{new}+{half}={new + half}>>{new + half} clips altogether in April "
            f"and May.\n"
            f"#### {new + half}"
        ),
        "original_question": QUESTION,
    }


def test_a_number_with_commas_keeps_them():
    row = variant("Bo has 1,200 pens. Half?", "<<1200/2=600>>600 pens of 1,200 and 1200.\n#### 600", 0)
    (new,) = values_of(row["question"])
    assert row["question"] == f"Bo has {new:,} pens. Half?"
    assert row["answer"] == f"<<{new}/2={new // 2}>>{new // 2} pens of {new:,} and {new}.\n#### {new // 2}"


def test_seed_and_question_decide_the_numbers():
    assert variant(QUESTION, ANSWER, 0) == variant(QUESTION, ANSWER, 0) != variant(QUESTION, ANSWER, 1)
    other = QUESTION.replace("Natalia", "Ann")
    assert values_of(variant(other, ANSWER, 0)["question"]) != values_of(variant(QUESTION, ANSWER, 0)["question"])


@pytest.mark.parametrize("row", TABLES["stays"], ids=lambda row: f"{row['before']} {row['number']}")
def test_percent_fractions_ordinals_times_dates_and_counts_of_the_named_stay(row):
    sentence = f" {row['before']} {row['number']} {row['after']}."
    question = f"Bo buys 300 pens. He{sentence} How many?"
    answer = "It is 300*20 = <<300*20=6000>>6000 pens.\n#### 6000"
    made = variant(question, answer, 3)
    assert sentence in made["question"] and "300" not in re.findall(r"\d+", made["question"])
    (step,) = parse(made["answer"]).steps
    assert step.expression.endswith("*20") and step.stated == 20 * values_of(made["question"])[0]


def test_a_division_of_two_numbers_of_the_question_stays_whole():
    row = variant(
        "Bo has 720 grams. A bag holds 60 grams. How many bags?", "He has 720/60 = <<720/60=12>>12.\n#### 12", 0
    )
    whole, bag = values_of(row["question"])
    assert whole % bag == 0 and whole // bag != 12 and row["answer"].endswith(f"#### {whole // bag}")


@pytest.mark.parametrize("row", TABLES["rejected"], ids=lambda row: row["reason"])
def test_what_is_not_certain_is_rejected(row):
    with pytest.raises(Rejected, match=row["reason"]):
        variant(row["question"], row["answer"], 0)


def test_new_numbers_are_within_bounds_and_so_is_every_part_of_a_calculation():
    problem = find_sources(
        "Bo has 300 rows of 200 pens, 500 in a box. How many boxes?", "<<300*200/500=120>>120\n#### 120"
    )
    old = [Fraction(300), Fraction(200), Fraction(500)]
    assert problem.free == tuple(old)
    assert recalculate(problem, {value: value * 10_000 for value in old}) is not None
    assert recalculate(problem, {value: value * 100_000 for value in old}) is None, "300 * 200 is 6e14 then"
    assert recalculate(problem, {value: value * 999 for value in old}) is None


@given(
    a=st.integers(2, 900), b=st.integers(2, 900), c=st.integers(2, 40), shape=st.integers(0, 4), seed=st.integers(0, 99)
)
@example(a=2, b=3, c=4, shape=2, seed=0)  # a negative step: its sign is no part of a number that is replaced
@settings(max_examples=60)
def test_every_variant_is_right_whole_and_of_the_same_relations(a, b, c, shape, seed):
    """The expected values come from the new question's numbers alone."""
    steps = [
        lambda x, y, z: [f"{x}+{y}", f"{{0}}*{z}"],
        lambda x, y, z: [f"{x}*{y}", f"{{0}}-{z}"],
        lambda x, y, z: [f"{x}-{y}", f"{{0}}*{z}"],
        lambda x, y, z: [f"{x}*25/100", f"{{0}}+{y}*{z}"],
        lambda x, y, z: [f"{x}*{y}", f"{{0}}/{z}", "{1}*2"],
    ][shape]

    def solve(x: int, y: int, z: int) -> list[Fraction]:
        found: list[Fraction] = []
        for expression in steps(x, y, z):
            found.append(evaluate(expression.format(*(f"({value})" for value in found))))
        return found

    before = solve(a, b, c)
    if any(value.denominator != 1 for value in before):
        return
    lines = []
    for expression, value in zip(steps(a, b, c), before, strict=True):
        text = expression.format(*before)
        lines.append(f"So {text} = <<{text}={value}>>{value} pens.")
    question = f"Bo has {a} pens, Al {b} and Cy {c}; 25% are red. How many are twice that?"
    try:
        row = variant(question, "\n".join([*lines, f"#### {before[-1]}"]), seed)
    except Rejected as rejected:
        assert rejected.stage in ("source", "calculation")
        return
    x, y, z, percent = values_of(row["question"])
    assert percent == 25 and (x, y, z) != (a, b, c)
    for old, new in ((a, x), (b, y), (c, z)):
        assert new == old or MIN_FACTOR * old <= new <= MAX_FACTOR * old
    changed = sorted((old, new) for old, new in ((a, x), (b, y), (c, z)) if old != new)
    assert changed == sorted(changed, key=lambda pair: pair[1])
    after = solve(x, y, z)
    solution = parse(row["answer"])
    assert [Fraction(step.stated) for step in solution.steps] == after
    assert all(evaluate(step.expression) == step.stated for step in solution.steps)
    assert all(value.denominator == 1 for value in after) and Fraction(solution.truth) == after[-1]
    assert [value > 0 for value in before] == [value > 0 for value in after]
    for line, value in zip(row["answer"].splitlines(), after, strict=False):
        assert line.endswith(f">>{value} pens.")
        said = re.search(r"So (.*) = <<(.*)=", line)
        assert said is not None
        written, marked = said.groups()
        assert written == marked, "the text says what the mark calculates"
