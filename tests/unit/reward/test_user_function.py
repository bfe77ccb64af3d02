"""What a user's own reward function may return, and the errors of other results."""

from typing import Any

import pytest

from retool_mcore.errors import ConfigError, RewardError
from retool_mcore.reward.response import Response, read_response
from retool_mcore.reward.user_function import UserReward

RIGHT = Response(data_source="math", truth="1/2", answer="0.5", text="\\boxed{0.5}")
NONE = Response(data_source="math", truth="1/2", answer=None, text="no")


def own(function: Any) -> UserReward:
    return UserReward("mine:score", function)


def test_a_number_is_the_score_and_the_answer_is_judged_as_by_default():
    scored = own(lambda response: 2)(RIGHT)
    assert scored == {
        "score": 2.0, "acc": 1.0, "pred": "1/2", "extracted": "0.5", "has_answer": 1.0, "check_failed": 0.0,
    }  # fmt: skip
    scored = own(lambda response: -0.5)(NONE)
    assert (scored["score"], scored["acc"], scored["extracted"], scored["has_answer"]) == (-0.5, 0.0, "", 0.0)


def test_parts_are_named_and_acc_is_the_functions_own():
    scored = own(lambda response: {"score": 0.3, "length": -0.1, "acc": False})(RIGHT)
    assert (scored["score"], scored["acc"], scored["reward_length"]) == (0.3, 0.0, -0.1)


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ({"length": 1.0}, 'the result has no "score". It has length.'),
        ({}, 'the result has no "score". It has no entries.'),
        ("1.0", "the result has score = '1.0'. Every part must be a finite number"),
        (float("nan"), "the result has score = nan"),
        (None, "the result has score = None"),
        ({"score": 1.0, "pred": 1.0}, "a part named pred"),
        ({"score": 1.0, "acc": 0.5}, "acc = 0.5"),
    ],
)
def test_a_result_that_cannot_be_used_is_one_error(result: Any, message: str):
    with pytest.raises(RewardError, match=r"mine:score.*truth '1/2'") as error:
        own(lambda response: result)(RIGHT)
    assert message in str(error.value)


def test_what_the_function_raises_is_shown_with_the_row():
    with pytest.raises(RewardError, match=r"data source 'math'.* the function raised KeyError: 'hints'"):
        own(lambda response: response.extra_info["hints"])(RIGHT)


def test_every_response_has_the_same_parts():
    reward = own(lambda response: {"score": 1.0, **({"bonus": 1.0} if response.right else {})})
    reward(RIGHT)
    with pytest.raises(RewardError, match="the result has score, but that of another response has bonus, score"):
        reward(NONE)


async def _waits(response: Response) -> float:
    return 1.0


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (3, "is of type int. Name a function"),
        (_waits, "is an async function"),
        (lambda: 1.0, "cannot be called with one response"),
        (lambda response, scale: 1.0, "cannot be called with one response"),
    ],
)
def test_other_objects_than_functions_of_one_response_are_refused(function: Any, message: str):
    with pytest.raises(ConfigError, match=message):
        own(function)


def test_it_sees_the_rows_columns_and_the_loops_counts():
    extra = {"answer": "7", "behavior": {"calls": 2}, "level": 5, "index": 3}
    response = read_response("aime", "text \\boxed{8}", 7, extra)
    assert (response.answer, response.truth, response.behavior["calls"]) == ("7", "7", 2)
    assert response.extra_info["level"] == 5
    assert read_response("aime", "text \\boxed{8}", 7, {"answer": "7"}).answer == "8"
