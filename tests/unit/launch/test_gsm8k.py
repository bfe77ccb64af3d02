"""The scripts of `launch/gsm8k/`: large numbers, and solutions as one program that runs."""

import re
import tomllib
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from retool_mcore.data.verify import Rejected
from tests.unit.launch.gsm8k import ANSWER, QUESTION

# isort: split
from large import MAX_FACTOR, MIN_FACTOR, find_sources, recalculate, variant
from solutions import evaluate, link, parse, program_of
from texts import numbers_in
from traces import _result, matches

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
    assert row == variant(QUESTION, ANSWER, 0) != variant(QUESTION, ANSWER, 1), "the seed decides the numbers"


def test_a_number_with_commas_keeps_them():
    row = variant("Bo has 1,200 pens. Half?", "<<1200/2=600>>600 pens of 1,200 and 1200.\n#### 600", 0)
    (new,) = values_of(row["question"])
    assert row["question"] == f"Bo has {new:,} pens. Half?"
    assert row["answer"] == f"<<{new}/2={new // 2}>>{new // 2} pens of {new:,} and {new}.\n#### {new // 2}"


@pytest.mark.parametrize("row", TABLES["stays"], ids=lambda row: f"{row['before']} {row['number']}")
def test_percent_fractions_ordinals_times_dates_and_counts_of_the_named_stay(row):
    sentence = f" {row['before']} {row['number']} {row['after']}."
    made = variant(f"Bo buys 300 pens. He{sentence} How many?", "It is <<300*20=6000>>6000 pens.\n#### 6000", 3)
    assert sentence in made["question"] and "300" not in re.findall(r"\d+", made["question"])
    (step,) = parse(made["answer"]).steps
    assert step.expression.endswith("*20") and step.stated == 20 * values_of(made["question"])[0]


@pytest.mark.parametrize("row", TABLES["rejected"], ids=lambda row: row["reason"])
def test_what_is_not_certain_is_rejected(row):
    with pytest.raises(Rejected, match=row["reason"]):
        variant(row["question"], row["answer"], 0)


def test_new_numbers_are_within_bounds_and_so_is_every_part_of_a_calculation():
    question = "Bo has 300 rows of 200 pens, 500 in a box. How many boxes?"
    problem = find_sources(question, "<<300*200/500=120>>120\n#### 120")
    old = [Fraction(300), Fraction(200), Fraction(500)]
    assert problem.free == tuple(old)
    fits = [recalculate(problem, {value: value * by for value in old}) is not None for by in (999, 10_000, 100_000)]
    assert fits == [False, True, False], "300 * 200 is 6e14 at last"


SHAPES = [  # expressions of the question's numbers, and of the values of earlier steps
    ["{x}+{y}", "{0}*{z}"],
    ["{x}*{y}", "{0}-{z}"],
    ["{x}-{y}", "{0}*{z}"],
    ["{x}*25/100", "{0}+{y}*{z}"],
    ["{x}*{y}", "{0}/{z}", "{1}*2"],
]


def solve(shape: int, x: int, y: int, z: int) -> list[tuple[str, Fraction]]:
    """Each step's expression and value."""
    found: list[tuple[str, Fraction]] = []
    for step in SHAPES[shape]:
        values = [value for _, value in found]
        bracketed = evaluate(step.format(*(f"({value})" for value in values), x=x, y=y, z=z))
        found.append((step.format(*values, x=x, y=y, z=z), bracketed))
    return found


@given(
    a=st.integers(2, 900), b=st.integers(2, 900), c=st.integers(2, 40), shape=st.integers(0, 4), seed=st.integers(0, 99)
)
@example(a=2, b=3, c=4, shape=2, seed=0)  # a negative step: replacing its number keeps the sign
@settings(max_examples=60)
def test_every_variant_is_right_whole_and_of_the_same_relations(a: int, b: int, c: int, shape: int, seed: int):
    """The expected values come from the new question's numbers alone."""
    before = solve(shape, a, b, c)
    if any(value.denominator != 1 for _, value in before):
        return
    lines = [f"So {text} = <<{text}={value}>>{value} pens." for text, value in before]
    question = f"Bo has {a} pens, Al {b} and Cy {c}; 25% are red. How many are twice that?"
    try:
        row = variant(question, "\n".join([*lines, f"#### {before[-1][1]}"]), seed)
    except Rejected as rejected:
        assert rejected.stage in ("source", "calculation")
        return
    *new, percent = values_of(row["question"])
    assert percent == 25 and new != [a, b, c]
    changed = sorted((old, value) for old, value in zip((a, b, c), new, strict=True) if old != value)
    assert all(MIN_FACTOR * old <= value <= MAX_FACTOR * old for old, value in changed)
    assert changed == sorted(changed, key=lambda pair: pair[1])
    after = [value for _, value in solve(shape, *new)]
    solution = parse(row["answer"])
    assert [Fraction(step.stated) for step in solution.steps] == after
    assert all(evaluate(step.expression) == step.stated for step in solution.steps)
    assert all(value.denominator == 1 for value in after) and Fraction(solution.truth) == after[-1]
    assert [value > 0 for _, value in before] == [value > 0 for value in after]
    for line, value in zip(row["answer"].splitlines(), after, strict=False):
        said = re.fullmatch(rf"So (.*) = <<(.*)={value}>>{value} pens\.", line)
        assert said is not None and said[1] == said[2], "the text says what the mark calculates"


@pytest.mark.parametrize(
    ("printed", "right", "wrong"),
    [("24.0", ["24"], []), ("0.3333333333333333", ["0.33"], ["0.35"]), ("16.666666666666668", ["17", "16"], ["18"]),
     ("Traceback", [], ["1"])],
)  # fmt: skip
def test_values_are_compared_to_their_last_stated_digit(printed: str, right: list[str], wrong: list[str]):
    assert [stated for stated in [*right, *wrong] if matches(printed, Decimal(stated))] == right


def test_an_operand_is_a_step_only_where_it_can_be_nothing_else():
    given_ = {48}
    assert link("48+24", given_, [24]) == "48+step1"
    assert link("48+24", {48, 24}, [24]) == "48+24"  # the question states 24, too
    assert link("1.50*124-24", given_, [124, 24]) == "1.50*step1-step2"
    with pytest.raises(Rejected, match="may be step1 or step2"):
        link("48+24", given_, [24, 24])


def test_a_step_that_only_states_a_number_is_no_calculation():
    solution = parse("So x is <<1440=1440>>1440.\n<<1440-1200=240>>240\n#### 240")
    with pytest.raises(Rejected, match="step 1 states 1440 and calculates nothing"):
        program_of("It weighs 1200 grams.", solution)


def test_thousands_may_have_commas_and_whole_numbers_are_not_rounded():
    solution = parse("He has <<1200+034=1,234>>1,234 and <<1234*2=2468>>2,468 pens.\n#### 2,468")
    assert (solution.truth, [step.stated for step in solution.steps]) == ("2468", [1234, 2468])
    wanted = ["step1 = 1200+34", "# step1 and pens.", "step2 = step1*2", "print(step2)"]
    assert program_of("Bo has 1,200 pens and 34 more.", solution).splitlines()[1:] == wanted


def test_the_result_is_the_last_number_after_the_last_calculation_if_the_answer_is_it():
    assert _result(parse("It has <<2*3=6>>6 now. Then 4 more come, so 10 in all.\n#### 10")) == "10"
    assert _result(parse("It has <<2*3=6>>6 in its 2 rooms.\n#### 6")) == "6"
