"""The function verl calls, and a user's own in its place: what it may return, and the errors."""

from typing import Any

import pytest

from retool_mcore.config.rl import Reward
from retool_mcore.errors import ConfigError, RewardError
from retool_mcore.reward.answer import Verdict
from retool_mcore.reward.response import Response, read_response
from retool_mcore.reward.score import compute_score
from retool_mcore.reward.statement import vote
from retool_mcore.reward.user_function import UserReward


def test_the_papers_reward_is_plus_or_minus_one():
    right = compute_score("math", r"\boxed{034}", "34", {"index": 0})
    assert right == {"score": 1.0, "acc": 1.0, "pred": "34", "extracted": "034", "has_answer": 1.0, "check_failed": 0.0}
    wrong = compute_score("math", r"\boxed{35}", "34", {"index": 0})
    assert wrong == {"score": -1.0, "acc": 0.0, "pred": "35", "extracted": "35", "has_answer": 1.0, "check_failed": 0.0}
    none = compute_score("math", "I give up", "34", None)
    assert none == {"score": -1.0, "acc": 0.0, "pred": "", "extracted": "", "has_answer": 0.0, "check_failed": 0.0}


def test_answers_that_are_written_differently_only_are_one_vote():
    assert [vote(each) for each in ("034", "34.0", "$34$", "34%", "x+1")] == ["34", "34", "34", "34%", "x+1"]
    halves = (r"\frac{1}{2}", r"\dfrac{1}{2}", r"\frac12", "1/2", "0.5", r"\left(\frac{1}{2}\right)")
    assert {vote(half) for half in halves} == {"1/2"}
    roots = (r"\frac{\sqrt{2}}{2}", r"\dfrac{\sqrt 2}2", r"\frac{ \sqrt2 }{ 2 }")
    assert len({vote(root) for root in roots}) == 1
    assert len({vote(each) for each in (r"\frac{1}{23}x", r"\frac{12}{3}x", r"\sqrt{2}3", r"\sqrt{23}")}) == 4


def test_the_values_come_from_the_configuration(monkeypatch: pytest.MonkeyPatch):
    assert compute_score("math", r"\boxed{1}", "1", None, reward=Reward(answer=[2.0, 0.5]))["score"] == 2.0
    assert compute_score("math", r"\boxed{2}", "1", None, reward=Reward(answer=[2.0, 0.5]))["score"] == 0.5
    limits: list[float] = []
    verdicts = [Verdict(False, how) for how in ("timeout", "crash", "too long", "values")]
    judged = iter(verdicts)
    judge = "retool_mcore.reward.response.judge"
    monkeypatch.setattr(judge, lambda *_, timeout_s: limits.append(timeout_s) or next(judged))
    made = [compute_score("math", r"\boxed{2}", "1", None, reward=Reward(timeout_s=0.5)) for _ in verdicts]
    assert [each["check_failed"] for each in made] == [1.0, 1.0, 0.0, 0.0]
    assert limits == [0.5] * 4


def test_the_agent_loops_answer_counts_and_a_data_column_of_that_name_does_not():
    ours = {"answer": "34", "behavior": {}}
    assert compute_score("math", r"\boxed{35}", 34, ours)["acc"] == 1.0
    assert compute_score("math", r"\boxed{34}", "34", {"answer": None, "behavior": {}})["has_answer"] == 0.0
    assert compute_score("math", r"\boxed{35}", "34", {"answer": "34"})["pred"] == "35"


@pytest.mark.parametrize("truth", [None, "  ", True, ["34"]])
def test_a_row_without_truth_is_an_error_that_names_it(truth):
    with pytest.raises(RewardError, match="row 7 of data source 'math' has no usable truth: reward_model"):
        compute_score("math", r"\boxed{34}", truth, {"index": 7})


RIGHT = Response(data_source="math", truth="1/2", answer="0.5", text="\\boxed{0.5}")
NONE = Response(data_source="math", truth="1/2", answer=None, text="no")


def own(function: Any) -> UserReward:
    return UserReward("mine:score", function)


def test_a_number_is_the_score_and_the_answer_is_judged_as_by_default():
    common = {"pred": "1/2", "extracted": "0.5", "has_answer": 1.0, "check_failed": 0.0}
    assert own(lambda response: 2)(RIGHT) == {"score": 2.0, "acc": 1.0, **common}
    scored = own(lambda response: -0.5)(NONE)
    assert (scored["score"], scored["acc"], scored["extracted"], scored["has_answer"]) == (-0.5, 0.0, "", 0.0)
    scored = own(lambda response: {"score": 0.3, "length": -0.1, "acc": False})(RIGHT)
    assert scored == {"score": 0.3, "acc": 0.0, "reward_length": -0.1, **common}


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ({"length": 1.0}, 'the result has no "score". It has length.'),
        ("1.0", "the result has score = '1.0'. Every part must be a finite number"),
        (float("nan"), "the result has score = nan"),
        ({"score": 1.0, "pred": 1.0}, "a part named pred"),
        ({"score": 1.0, "acc": 0.5}, "acc = 0.5"),
    ],
)
def test_a_result_that_cannot_be_used_is_one_error(result: Any, message: str):
    with pytest.raises(RewardError, match=r"mine:score.*truth '1/2'") as error:
        own(lambda response: result)(RIGHT)
    assert message in str(error.value)


def test_what_the_function_raises_and_other_parts_than_before_are_errors():
    with pytest.raises(RewardError, match=r"data source 'math'.* the function raised KeyError: 'hints'"):
        own(lambda response: response.extra_info["hints"])(RIGHT)
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
        (lambda response, scale: 1.0, "cannot be called with one response"),
    ],
)
def test_other_objects_than_functions_of_one_response_are_refused(function: Any, message: str):
    with pytest.raises(ConfigError, match=message):
        own(function)


def test_it_sees_the_rows_columns_and_the_loops_counts():
    extra = {"answer": "7", "behavior": {"calls": 2}, "level": 5}
    response = read_response("aime", "text \\boxed{8}", 7, extra)
    assert (response.answer, response.truth, response.behavior["calls"]) == ("7", "7", 2)
    assert response.extra_info["level"] == 5
