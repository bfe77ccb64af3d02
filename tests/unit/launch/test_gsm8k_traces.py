"""`launch/gsm8k/traces.py`: solutions as one program that runs, and without the tool."""

from decimal import Decimal

import pytest

import tests.unit.launch.gsm8k  # noqa: F401  it knows where the scripts are
from retool_mcore.data.verify import Rejected

# isort: split
from solutions import link, parse, program_of
from traces import _result, matches


def test_values_are_compared_to_their_last_stated_digit():
    assert matches("24.0", Decimal("24"))
    assert matches("0.3333333333333333", Decimal("0.33"))
    assert matches("16.666666666666668", Decimal("17"))
    assert matches("16.666666666666668", Decimal("16"))
    assert not matches("16.666666666666668", Decimal("18"))
    assert not matches("0.3333333333333333", Decimal("0.35"))
    assert not matches("Traceback", Decimal("1"))


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
