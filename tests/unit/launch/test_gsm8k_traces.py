"""`launch/gsm8k/traces.py`: solutions as one program that runs, and without the tool."""

from decimal import Decimal

import pytest

import tests.unit.launch.gsm8k  # noqa: F401  it knows where the scripts are
from retool_mcore.data.verify import Rejected

# isort: split
from solutions import link, parse, program_of
from traces import matches


def test_values_are_compared_to_their_last_stated_digit():
    assert matches("24.0", Decimal("24"))
    assert matches("0.3333333333333333", Decimal("0.33"))
    assert matches("16.666666666666668", Decimal("17"))
    assert matches("16.666666666666668", Decimal("16"))
    assert not matches("16.666666666666668", Decimal("18"))
    assert not matches("0.3333333333333333", Decimal("0.35"))
    assert not matches("Traceback", Decimal("1"))


def test_leading_zeros_of_numbers_are_no_syntax_error():
    assert parse("<<05+1.05=6.05>>6.05\n#### 6.05").steps[0].expression == "5+1.05"


def test_an_operand_is_a_step_only_where_it_can_be_nothing_else():
    given_ = {48}
    assert link("48+24", given_, [24]) == "48+step1"
    assert link("48+24", {48, 24}, [24]) == "48+24"  # the question states 24, too
    assert link("1.50*124-24", given_, [124, 24]) == "1.50*step1-step2"
    with pytest.raises(Rejected, match="may be step1 or step2"):
        link("48+24", given_, [24, 24])


def test_comments_state_nothing_that_the_program_computes():
    answer = (
        "If he babysits he earns 2*7 = $<<2*7=14>>14.\n"
        "He has $14 and his $65, a total of 14 + 65 = $<<14+65=79>>79, and $79 is enough.\n#### 79"
    )
    code = program_of("He has 65 and works 2 hours for 7.", parse(answer))
    comments = " ".join(line for line in code.splitlines() if line.startswith("#"))
    assert "14" not in comments and "79" not in comments
    assert "$65" in comments and "has step1 and" in comments


def test_a_step_that_only_states_a_number_is_no_calculation():
    solution = parse("So x is <<1440=1440>>1440.\n<<1440-1200=240>>240\n#### 240")
    with pytest.raises(Rejected, match="step 1 states 1440 and calculates nothing"):
        program_of("It weighs 1200 grams.", solution)
